"""The critical path of a pipeline's step: the actions and messages that its end depends on."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from alpa_strategy.display.stage_groups import busiest_stages
from alpa_strategy.display.timeline import ScheduleTimeline
from alpa_strategy.ir.plan import Plan
from alpa_strategy.schedule_times import input_of, result_of
from alpa_strategy.schedules import TimedAction
from alpa_strategy.units import format_seconds

# Times that differ by less than this share of the step are the same moment.
_SAME_MOMENT = 1e-9

# Parts of the critical path that take less than this share of it are left out of a sentence.
_LEAST_SHARE = 0.05
# A sentence says where the critical path leaves the busiest devices for this share of it.
_WORTH_SAYING = 0.2


@dataclass(frozen=True)
class TimedMessage:
    """A micro-batch's values, or their gradients, on the link between two stages."""

    source: int
    target: int
    microbatch: int

    # In seconds, from the first byte to the last.
    start: float
    end: float


def boundaries_of(plan: Plan) -> list[float]:
    """Return the seconds of a message between each stage and the next one, each way."""
    return [stage.boundary_seconds / 2 for stage in plan.stages[:-1]]


def messages_of(
    actions: Sequence[TimedAction], boundary: Sequence[float]
) -> tuple[TimedMessage, ...]:
    """Return the messages between stages, by their start. A link transfers one at a time. Messages
    that take no time are left out.

    Args:
        actions: of all meshes.
        boundary: seconds of a message between stage s and s + 1, each way.
    """
    free: dict[tuple[int, int], float] = defaultdict(float)
    messages = []
    for action in sorted(actions, key=lambda action: action.end):
        target = _receiver(action)
        if target is None or not 0 <= target <= len(boundary):
            continue
        seconds = boundary[min(action.stage, target)]
        if seconds == 0.0:
            continue
        link = action.stage, target
        start = max(action.end, free[link])
        free[link] = start + seconds
        messages.append(TimedMessage(*link, action.microbatch, start, start + seconds))
    return tuple(sorted(messages, key=lambda message: message.start))


def _receiver(action: TimedAction) -> int | None:
    """Return the stage that waits for the result of an action, None if that is its own."""
    if action.kind == "W":
        return None
    return action.stage + 1 if action.kind == "F" else action.stage - 1


def critical_path(timeline: ScheduleTimeline, messages: Sequence[TimedMessage]) -> tuple[int, ...]:
    """Return the indices of the actions that the end of the step depends on, in order of time.

    Each of them starts when the one before it ends, on the same mesh or with a message between.
    """
    actions = timeline.timed
    same = _SAME_MOMENT * timeline.seconds
    arrival = {(m.source, m.target, m.microbatch): m.end for m in messages}
    index_of = {result_of(action): index for index, action in enumerate(actions)}
    num_stages = sum(map(len, timeline.stages))
    before: dict[int, int] = {}
    for index, action in enumerate(actions):
        if index and actions[index - 1].mesh == action.mesh:
            before[index] = index - 1

    current: int | None = max(range(len(actions)), key=lambda index: actions[index].end)
    path = []
    while current is not None:
        path.append(current)
        action = actions[current]
        previous = before.get(current)
        if previous is not None and actions[previous].end >= action.start - same:
            current = previous
            continue
        current = None
        source = input_of(action, num_stages)
        maker = None if source is None else index_of.get(source)
        if maker is not None:
            link = actions[maker].stage, action.stage, action.microbatch
            if arrival.get(link, actions[maker].end) >= action.start - same:
                current = maker
    return tuple(reversed(path))


def critical_path_text(plan: Plan, timeline: ScheduleTimeline) -> str:
    """Return a sentence on the critical path: seconds of work of each stage, and of messages.

    "" if almost all of it is work of the busiest devices, as the parts of the step say already.

    Args:
        plan: the plan.
        timeline: of all of its micro-batches.
    """
    seconds = _seconds_on_path(plan, timeline)
    total = sum(seconds.values())
    names_of_busiest = {_work_of(stage) for stage in busiest_stages(plan)}
    elsewhere = sum(value for name, value in seconds.items() if name not in names_of_busiest)
    if elsewhere < _WORTH_SAYING * total:
        return ""
    parts = []
    for name, value in sorted(seconds.items(), key=lambda part: -part[1]):
        if value >= _LEAST_SHARE * total:
            parts.append(f"{format_seconds(value)} {name}")
    return f"The end of the step depends on the critical path: {', '.join(parts)}."


def _seconds_on_path(plan: Plan, timeline: ScheduleTimeline) -> dict[str, float]:
    """Return the seconds of each part of the critical path by its name, waiting for messages
    included.
    """
    messages = messages_of(timeline.timed, boundaries_of(plan))
    path = [timeline.timed[index] for index in critical_path(timeline, messages)]
    seconds: dict[str, float] = defaultdict(float)
    for action in path:
        seconds[_work_of(action.stage)] += action.end - action.start
    for before, after in pairwise(path):
        gap = after.start - before.end
        if gap > 0 and before.stage != after.stage:
            first, last = sorted((before.stage, after.stage))
            seconds[f"of messages between stages {first} and {last}"] += gap
    return dict(seconds)


def _work_of(stage: int) -> str:
    return f"of work in stage {stage}"
