"""A plan as its reader asks about it: in words, tokens per second, MFU, and memory by stage."""

import math
from collections import Counter
from dataclasses import dataclass

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_work
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import MEMORY_PARTS, Plan, StagePlan, Storage

# The part of a device's memory that plans leave to the allocator's fragments and to libraries.
FRAGMENTATION = "fragmentation"
PARTS = (*MEMORY_PARTS, FRAGMENTATION)


@dataclass(frozen=True)
class StageSummary:
    """A stage's parallelism, read from its parameters and strategies."""

    # Devices among which samples, matrices, and experts are divided.
    data: int
    tensor: int

    # 0 to 3: nothing, state, and gradients, and parameters are sharded among data-parallel devices.
    zero: int

    remat: bool

    @property
    def words(self) -> str:
        """Such as `2-way data parallel, 4-way tensor parallel, ZeRO-1`."""
        words = []
        if self.data > 1:
            words.append(f"{self.data}-way data parallel")
        if self.tensor > 1:
            words.append(f"{self.tensor}-way tensor parallel")
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        if self.remat:
            words.append("activation checkpointing")
        return ", ".join(words) or "one device"


def stage_summary(stage: StagePlan) -> StageSummary:
    """Return how most elements of a stage's parameters are stored and used, axis by axis."""
    data = tensor = 1
    zero = 0
    for axis, size in enumerate(stage.logical_mesh):
        kind, level = _axis_kind(stage, axis)
        if kind == "tensor":
            tensor *= size
        else:
            data *= size
            zero = max(zero, level)
    return StageSummary(data, tensor, zero, stage.remat)


def _axis_kind(stage: StagePlan, axis: int) -> tuple[str, int]:
    """Return `data` or `tensor` for a mesh axis, and the ZeRO level of data parallelism.

    Sharded parameters are gathered before their use (ZeRO-3) if the axis' collectives are gathers
    in the forward; they are used in shards (tensor parallelism) if partial results are summed.
    """
    elements: Counter[Storage] = Counter()
    once: Counter[bool] = Counter()
    for name, plan in stage.parameter_plans.items():
        mode = plan.modes[axis]
        size = math.prod(stage.shapes.get(name, ()))
        elements[mode.storage] += size
        once[mode.is_gathered_once] += size
    if not elements:
        return "data", 0
    if once[True] >= once[False]:
        return "data", 1
    (storage, _), *_ = elements.most_common(1)
    if storage is Storage.REPLICATE:
        return "data", 0
    reductions = 0.0
    gathers = 0.0
    for collective in stage.collectives:
        if collective.axis == axis and collective.phase == "forward":
            if collective.kind == "all_gather":
                gathers += collective.num_bytes
            else:
                reductions += collective.num_bytes
    of_parameters = sum(elements.values()) * 2.0
    is_gathered = gathers >= 0.5 * of_parameters and gathers > reductions
    return ("data", 3) if is_gathered else ("tensor", 0)


def plan_words(plan: Plan) -> str:
    """Return the plan in words, such as `4 pipeline stages of 8-way tensor parallel, ZeRO-1`."""
    middle = plan.stages[len(plan.stages) // 2]
    words = stage_summary(middle).words
    if len(plan.stages) > 1:
        words = f"{len(plan.stages)} pipeline stages of {words}"
    if plan.num_microbatches > 1:
        words += f", {plan.num_microbatches} micro-batches"
    return words


def model_flops(step: StepGraph) -> float:
    """Return the FLOPs of the ops of a step, forward and backward, without recomputation."""
    total = 0.0
    for op in step.ops:
        forward, backward = op_work(op.call)
        total += forward.flops + backward.flops
    return total


def mfu(plan: Plan, flops: float, cluster: ClusterSpec, request: FitRequest) -> float | None:
    """Return the share of the devices' peak that a step's FLOPs reach; None if it is not known."""
    peaks = dict(cluster.device.peak_flops)
    peak = peaks.get(request.compute_dtype)
    if not peak or not plan.predicted.step_seconds:
        return None
    return flops / (plan.predicted.step_seconds * cluster.num_devices * peak)


def memory_of_meshes(
    plan: Plan, cluster: ClusterSpec, usable_bytes: float
) -> dict[str, dict[str, int]]:
    """Return bytes by part (`PARTS`) for each mesh, by its stages: `0`, `1`, or `0,4`.

    Stages of one mesh share its memory; fragmentation is what the plan may not use.
    """
    reserve = max(0.0, cluster.device.memory_bytes - usable_bytes)
    meshes: dict[int, Counter[str]] = {}
    indices: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        parts = meshes.setdefault(stage.first_device, Counter())
        parts.update(stage.predicted.memory)
        indices.setdefault(stage.first_device, []).append(index)
    return {
        ",".join(map(str, indices[first])): {**parts, FRAGMENTATION: int(reserve)}
        for first, parts in meshes.items()
    }


def largest_mesh(plan: Plan) -> dict[str, int]:
    """Return the parts of the memory of the mesh that needs most."""
    meshes: dict[int, Counter[str]] = {}
    for stage in plan.stages:
        meshes.setdefault(stage.first_device, Counter()).update(stage.predicted.memory)
    largest: Counter[str] = max(list(meshes.values()), key=lambda parts: parts.total())
    return dict(largest)
