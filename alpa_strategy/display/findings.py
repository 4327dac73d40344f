"""What limits a plan's step, in sentences with numbers: the page's and the terminal's."""

from alpa_strategy.display.stage_groups import busiest_stages
from alpa_strategy.display.table import step_parts
from alpa_strategy.display.timeline import device_range
from alpa_strategy.ir.plan import Collective, Plan, stages_by_devices
from alpa_strategy.units import format_bytes, format_seconds

# A part of the step from this share on is worth a sentence.
WORTH_SAYING = 0.05
# A boundary is slow if its messages take at least this share of the forward of the stage before it.
SLOW_BOUNDARY = 0.5

_WORDS = {
    "compute": "Computation",
    "communication": "Communication",
    "optimizer": "The optimizer's update",
    "host": "The host",
    "waiting": "Waiting of the busiest stage's devices",
}


def findings(plan: Plan) -> list[str]:
    """Return what takes a step's time, the largest part first, which boundaries are slow, and the
    collective that takes longest.
    """
    lines = [*_parts(plan), *_slow_boundaries(plan), *_imbalance(plan)]
    collective = _largest_collective(plan)
    if step_parts(plan) and not any(collective in line for line in lines):
        lines.append(collective.strip())
    return lines


def _parts(plan: Plan) -> list[str]:
    """Return a sentence for each component that takes a noticeable share of the step, largest
    first.
    """
    parts = step_parts(plan)
    total = sum(parts.values())
    lines = []
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        share = seconds / total
        if share < WORTH_SAYING:
            continue
        line = f"{_WORDS[name]} takes {share:.0%} of the step ({format_seconds(seconds)})."
        if name == "communication":
            line += _largest_collective(plan)
        lines.append(line)
    return lines


def _largest_collective(plan: Plan) -> str:
    """Return a sentence on the collective that takes longest on the devices whose seconds the
    step's parts are, "" if they have none.
    """
    pairs: list[tuple[int, Collective]] = []
    for stage_index in busiest_stages(plan):
        pairs += [(stage_index, c) for c in plan.stages[stage_index].collectives]
    if not pairs:
        return ""
    index, largest = max(pairs, key=lambda pair: pair[1].seconds)
    stage = plan.stages[index]
    devices = of_stage = ""
    if len(plan.stages) > 1:
        devices = f" on the busiest devices ({device_range(stage)})"
        of_stage = f" of stage {index}"
    when = {"step": "once per step"}.get(largest.phase, f"in the {largest.phase}")
    hidden = ""
    if largest.seconds > plan.predicted.communication_seconds > 0:
        hidden = ", in part while they compute" if devices else ", in part during computation"
    on_device = ""
    size = stage.logical_mesh[largest.axis]
    # An all-reduce is of tensors that every device has.
    if largest.kind != "all_reduce" and size > 1:
        num_bytes = format_bytes(largest.num_bytes / size)
        on_device = f" These are the bytes of all devices of the axis: one has {num_bytes}."
    tensor = f" Its largest call moves {largest.largest}." if largest.largest else ""
    return (
        f" The collective that takes longest{devices} is {largest.kind} on mesh axis"
        f" {largest.axis}{of_stage}, {when}: {format_bytes(largest.num_bytes)} in"
        f" {format_seconds(largest.seconds)}{hidden}.{tensor}{on_device}"
    )


def slow_boundaries(plan: Plan) -> list[tuple[float, int]]:
    """Return seconds of a message each way and the index of the stage before it, of each boundary
    that is slow.
    """
    slow = []
    for index, stage in enumerate(plan.stages[:-1]):
        one_way = stage.boundary_seconds / 2
        if stage.forward_seconds and one_way >= SLOW_BOUNDARY * stage.forward_seconds:
            slow.append((one_way, index))
    return slow


def _slow_boundaries(plan: Plan) -> list[str]:
    """Return a line about the slowest boundary if it is slow, and how many others are."""
    slow = slow_boundaries(plan)
    if not slow:
        return []
    seconds, index = max(slow)
    stage = plan.stages[index]
    line = (
        f"Messages from stage {index} to {index + 1} take {format_seconds(seconds)} each way,"
        f" against {format_seconds(stage.forward_seconds)} of forward: this boundary is slow."
    )
    if len(slow) > 1:
        line += f" {len(slow)} of {len(plan.stages) - 1} boundaries are."
    return [line]


def slowest_stage(plan: Plan) -> int:
    """Return the index of the stage whose micro-batch takes longest by the plan."""

    def seconds(index: int) -> float:
        stage = plan.stages[index]
        return stage.forward_seconds + stage.backward_seconds

    return max(range(len(plan.stages)), key=seconds)


def _imbalance(plan: Plan) -> list[str]:
    """Return a line if the slowest devices work clearly longer than the mean."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    groups = stages_by_devices(plan)
    if len(groups) < 2 or not all(seconds):
        return []
    by_group = []
    for indices in groups:
        by_group.append(sum(seconds[index] for index in indices))
    most = max(by_group)
    excess = most * len(groups) / sum(by_group) - 1
    if excess < WORTH_SAYING:
        return []
    group = groups[by_group.index(most)]
    if len(groups) == len(plan.stages):
        return [
            f"Stage {group[0]} is the slowest: a micro-batch takes {format_seconds(most)},"
            f" {excess:.0%} more than the mean of all stages."
        ]
    devices = device_range(plan.stages[group[0]])
    return [
        f"Devices {devices} are the slowest: a micro-batch takes {format_seconds(most)} in their"
        f" stages {', '.join(map(str, group))}, {excess:.0%} more than the mean of all devices."
    ]
