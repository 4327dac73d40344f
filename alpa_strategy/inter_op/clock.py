"""How long a pipeline's step takes, by the clock: its schedule's actions in order, its messages, its runtime.

The stage DP works with closed forms (`schedules.terms`); this is the prediction for the stages that it chose.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa_strategy.cluster.spec import DeviceSpec
from alpa_strategy.inter_op.schedules import timeline
from alpa_strategy.inter_op.stage_problem import StageCost

# Small ops that take as long as the runtime does for a micro-batch: 0.3 to 0.8 ms on CPUs; accelerators work meanwhile.
RUNTIME_LAUNCHES, RUNTIME_LAUNCHES_BESIDE = 100, 10


def runtime_seconds(device: DeviceSpec) -> float:
    """Seconds that the runtime spends on a micro-batch of a stage beside its ops: messages, bookkeeping."""
    launches = RUNTIME_LAUNCHES if device.name.lower().startswith("cpu") else RUNTIME_LAUNCHES_BESIDE
    return launches * device.launch_seconds * device.slowdown


def seconds_on_the_clock(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    costs: Sequence[StageCost],
    remat: Sequence[bool],
    wires: Sequence[float],
    overhead: float,
) -> float:
    """Seconds of a step: micro-batches by the schedule, then what is once per step.

    The DP's closed form takes messages for work of their sender; here a boundary carries one after the other, beside
    the work.

    Args:
        num_ranks: meshes.
        costs, remat: per stage, in pipeline order.
        wires: per stage, seconds of a micro-batch's values to the next one and their gradients back.
        overhead: seconds of a micro-batch in each stage beside its ops (`runtime_seconds`).
    """
    once = len(costs) // num_ranks * max(cost.once for cost in costs)
    if len(costs) == 1:
        return num_microbatches * (costs[0].seconds(remat[0]) + overhead) + once
    forward = [cost.forward + overhead / 2 for cost in costs]
    backward = [
        cost.backward + (cost.forward if again else 0.0) + overhead / 2
        for cost, again in zip(costs, remat, strict=True)
    ]
    slots = timeline(schedule, forward, backward, num_microbatches, num_ranks, [wire / 2 for wire in wires])
    return max(slot.end for slot in slots) + once
