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


def longest_stage(plan: Plan) -> StagePlan:
    """Return the stage whose work in a step takes longest."""
    return max(plan.stages, key=lambda stage: stage.predicted.step_seconds)


def busiest_stages(plan: Plan) -> list[int]:
    """Return the indices of the stages on the devices whose seconds stand for the plan's step: the
    devices of the stage that works longest.
    """
    longest = plan.stages.index(longest_stage(plan))
    return next(group for group in stages_by_devices(plan) if longest in group)
