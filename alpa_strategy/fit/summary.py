"""A plan as its reader asks about it: FLOPs, MFU, and memory by stage."""

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_work
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import MEMORY_PARTS, Plan, memory_by_mesh

# The part of a device's memory that plans leave to the allocator's fragments and to libraries.
FRAGMENTATION = "fragmentation"
PARTS = (*MEMORY_PARTS, FRAGMENTATION)


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
    indices: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        indices.setdefault(stage.first_device, []).append(index)
    return {
        ",".join(map(str, indices[first])): {**parts, FRAGMENTATION: int(reserve)}
        for first, parts in memory_by_mesh(plan).items()
    }
