"""What limits a plan's step, in sentences with numbers: the page's and the terminal's."""

from alpa_strategy.display.communication import boundary_messages, hidden_messages_text
from alpa_strategy.display.critical_path import critical_path_text
from alpa_strategy.display.stage_groups import busiest_stages, stages_name
from alpa_strategy.display.table import step_parts
from alpa_strategy.display.timeline import (
    ScheduleTimeline,
    device_range,
    plan_timeline,
    short_timeline,
)
from alpa_strategy.display.waits import waits, waits_text
from alpa_strategy.ir.plan import Collective, Plan, stages_by_devices
from alpa_strategy.units import format_bytes, format_seconds

# A part of the step from this share on is worth a sentence.
WORTH_SAYING = 0.05
# A boundary is slow if its messages take at least this share of the forward of the stage before it.
SLOW_BOUNDARY = 0.5

# In stages of pipelines, prices of parameters that are gathered for each use are an upper bound
# (docs/formulas.md).
_PREFETCHED = (
    " Parameters that are gathered at each use (ZeRO-3) are counted in full; the run gathers the"
    " next ones during computation, so a step may be shorter."
)
_WORDS = {
    "compute": "Computation",
    "communication": "Communication",
    "optimizer": "The optimizer's update",
    "host": "The host",
    "waiting": "Waiting of the busiest stage's devices",
}


def findings(plan: Plan, schedule: ScheduleTimeline | None = None) -> list[str]:
    """Return sentences: the parts of a step's time, the largest first, the slow boundaries between
    stages, and the collective that takes longest; [] if the parts are not known.

    Args:
        plan: the plan.
        schedule: of the plan over time; None: it is laid out if it is needed.
    """
    schedule = schedule or short_timeline(plan)
    # Messages are part of waiting, and come before it.
    largest, *others = _parts(plan, schedule) or [""]
    path = "" if schedule is None else critical_path_text(plan, schedule)
    lines = [largest, path, *_messages(plan), *others, *_imbalance(plan)]
    lines = [line for line in lines if line]
    collective = _largest_collective(plan)
    if step_parts(plan) and not any(collective in line for line in lines):
        lines.append(collective.strip())
    return lines


def _parts(plan: Plan, schedule: ScheduleTimeline | None) -> list[str]:
    """Return a sentence for each component that takes a noticeable share of the step, largest
    first. Args: as of `findings`.
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
            prefetches = any(plan.stages[index].prefetched_bytes for index in busiest_stages(plan))
            if plan.is_pipelined and prefetches:
                line += _PREFETCHED
        if name == "waiting":
            line += _waited_for(plan, schedule or plan_timeline(plan))
        lines.append(line)
    return lines


def _waited_for(plan: Plan, schedule: ScheduleTimeline | None) -> str:
    """Return a sentence, after a space, on what the busiest stage's devices wait for; "" if the
    schedule is not known (None).
    """
    if schedule is None:
        return ""
    mesh = stages_by_devices(plan).index(busiest_stages(plan))
    text = waits_text(waits(schedule)[mesh])
    return f" They wait {text}." if text else ""


def _largest_collective(plan: Plan) -> str:
    """Return a sentence, after a space, on the collective that takes longest on the devices whose
    seconds the step's parts are, "" if they have none.
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
        on_device = f" These are the bytes of all {size} devices of the axis: {num_bytes} on each."
    tensor = f" Its largest part moves {largest.largest}." if largest.largest else ""
    return (
        f" The collective that takes longest{devices} is {largest.kind} on mesh axis"
        f" {largest.axis}{of_stage}, {when}: {format_bytes(largest.num_bytes)} in"
        f" {format_seconds(largest.seconds)}{hidden}.{tensor}{on_device}"
    )


def slow_boundaries(plan: Plan) -> list[tuple[float, int]]:
    """Return seconds of a message each way and the index of the stage before it, of each boundary
    that is slow: `SLOW_BOUNDARY` of the stage's forward or more.
    """
    slow = []
    for index, stage in enumerate(plan.stages[:-1]):
        one_way = stage.boundary_seconds / 2
        if stage.forward_seconds and one_way >= SLOW_BOUNDARY * stage.forward_seconds:
            slow.append((one_way, index))
    return slow


def _messages(plan: Plan) -> list[str]:
    """Return a line about the boundary with the longest messages (of the slow ones, if there are
    any), and how many boundaries are slow.

    [] if no boundary is slow, and a step's messages there take no longer than the longest
    collective, or less than `WORTH_SAYING` of the step.
    """
    messages = boundary_messages(plan)
    if not messages:
        return []
    slow = slow_boundaries(plan)
    longest = max(messages, key=lambda of: of.seconds)
    index = max(slow)[1] if slow else longest.stage
    stage = plan.stages[index]
    of_step = stage.boundary_seconds * plan.num_microbatches
    collectives = []
    for of in plan.stages:
        collectives += [collective.seconds for collective in of.collectives]
    is_longest = of_step > max(collectives, default=0.0)
    is_noticed = is_longest and of_step >= WORTH_SAYING * plan.predicted.step_seconds
    if not slow and not is_noticed:
        return []
    num_bytes = ""
    if stage.boundary_bytes:
        num_bytes = f" ({format_bytes(stage.boundary_bytes / 2)} of a micro-batch)"
    line = (
        f"Messages from stage {index} to {index + 1}{num_bytes} take"
        f" {format_seconds(stage.boundary_seconds / 2)} each way, against"
        f" {format_seconds(stage.forward_seconds)} of forward"
    )
    line += ": this boundary is slow." if slow else "."
    if len(slow) > 1:
        line += f" {len(slow)} of {len(plan.stages) - 1} boundaries are."
    if is_longest:
        line += (
            " They are the communication that takes longest:"
            f" {2 * plan.num_microbatches} of them, {format_seconds(of_step)} of links' time a"
            " step, both ways beside each other and beside computation."
        )
    return [f"{line} {hidden_messages_text(plan)}".strip()]


def busiest_text(plan: Plan) -> str:
    """Return of which devices the parts of the step are, "" for a plan of one stage."""
    if len(plan.stages) == 1:
        return ""
    group = busiest_stages(plan)
    devices = device_range(plan.stages[group[0]])
    return f"on the devices of {stages_name(group)} ({devices}), the busiest"


def _imbalance(plan: Plan) -> list[str]:
    """Return a line if the busiest devices work clearly longer than the mean; else []."""
    groups = stages_by_devices(plan)
    if len(groups) < 2:
        return []
    seconds = []
    for indices in groups:
        seconds.append(sum(plan.stages[index].predicted.step_seconds for index in indices))
    busiest = busiest_stages(plan)
    most = seconds[groups.index(busiest)]
    excess = most * len(groups) / sum(seconds) - 1 if most > 0 else 0.0
    if excess < WORTH_SAYING:
        return []
    work = f"{format_seconds(most)} of a step, {excess:.0%} more than the mean of all"
    if len(groups) == len(plan.stages):
        return [f"Stage {busiest[0]} is the busiest: it works {work} stages."]
    devices = device_range(plan.stages[busiest[0]])
    return [
        f"Devices {devices}, of {stages_name(busiest)}, are the busiest: they work {work} devices."
    ]
