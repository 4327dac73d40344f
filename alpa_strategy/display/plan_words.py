"""A plan in words: `4 pipeline stages of 8-way tensor parallel, ZeRO-1`."""

import math
from collections import Counter
from dataclasses import dataclass

from alpa_strategy.ir.plan import Plan, StagePlan, Storage


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
