"""The stages of a plan by the devices that they are on: interleaved, a device has several."""

import math
from collections.abc import Sequence

from alpa_strategy.ir.plan import Plan, StagePlan, stages_by_devices


def group_sizes(plan: Plan) -> list[int]:
    """Return the number of devices of each group, in the order of `stages_by_devices`."""
    return [math.prod(plan.stages[group[0]].submesh) for group in stages_by_devices(plan)]


def devices_text(sizes: Sequence[int]) -> str:
    """Return numbers of devices as text: `one device`, `4 devices`, `1 to 4 devices`."""
    least, most = min(sizes), max(sizes)
    if least < most:
        return f"{least} to {most} devices"
    return "one device" if most == 1 else f"{most} devices"


def stages_name(indices: Sequence[int]) -> str:
    """Return stages as text: `stage 1`, `stages 0, 3`."""
    return f"stage{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def idle_seconds(plan: Plan) -> list[float]:
    """Return the seconds of a step in which the devices of each group are idle, in the order of
    `stages_by_devices`: the devices' step, less the work of all stages that they have.

    The step is the simulated one, with all micro-batches, the collectives and the update. What the
    host adds to it is left out.
    """
    step = plan.predicted.device_seconds
    idle = []
    for group in stages_by_devices(plan):
        work = sum(plan.stages[index].predicted.device_seconds for index in group)
        idle.append(max(0.0, step - work))
    return idle


def idle_shares(plan: Plan) -> list[float]:
    """Return `idle_seconds` as shares of the devices' step, 0 to 1."""
    idle = idle_seconds(plan)
    step = plan.predicted.device_seconds
    if step <= 0:
        return [0.0] * len(idle)
    return [seconds / step for seconds in idle]


def busiest_stage(plan: Plan) -> int:
    """Return the index of the stage whose work in a step takes longest."""
    seconds = [stage.predicted.step_seconds for stage in plan.stages]
    return seconds.index(max(seconds))


def longest_stage(plan: Plan) -> StagePlan:
    """Return the stage whose work in a step takes longest."""
    return plan.stages[busiest_stage(plan)]


def busiest_stages(plan: Plan) -> list[int]:
    """Return the indices of the stages on the devices whose seconds stand for the plan's step: the
    devices of the stage that works longest.
    """
    longest = busiest_stage(plan)
    return next(group for group in stages_by_devices(plan) if longest in group)
