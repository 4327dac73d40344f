"""A pipeline's step over time for the page: actions, messages, waiting and the critical path."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from alpa_strategy.display.timeline import ScheduleTimeline, plan_timeline
from alpa_strategy.ir.plan import Plan
from alpa_strategy.schedules import TimedAction

# Actions that a page draws at most; of longer steps, it has the first micro-batches.
MAX_ACTIONS = 40_000

# Times that differ by less than this share of the step are the same moment.
_SAME_MOMENT = 1e-9


@dataclass(frozen=True)
class TimedMessage:
    """A micro-batch's values, or their gradients, on the link between two stages."""

    source: int
    target: int
    microbatch: int

    # In seconds, from the first byte to the last.
    start: float
    end: float


@dataclass(frozen=True)
class DrawnSchedule:
    """A step as the page draws it."""

    timeline: ScheduleTimeline
    messages: tuple[TimedMessage, ...]

    # Indices of the actions that the end of the step depends on, in the order of time.
    critical: tuple[int, ...]


def drawn_schedule(plan: Plan) -> DrawnSchedule | None:
    """Return the step of a pipeline over time, or of its first micro-batches if it has more than
    `MAX_ACTIONS` actions; None as of `plan_timeline`.
    """
    most = max(1, MAX_ACTIONS // (2 * len(plan.stages)))
    timeline = plan_timeline(plan, most)
    if timeline is None:
        return None
    boundary = [stage.boundary_seconds / 2 for stage in plan.stages[:-1]]
    messages = messages_of(timeline.timed, boundary)
    return DrawnSchedule(timeline, messages, critical_path(timeline, messages))


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
    index_of = {(a.stage, _result(a), a.microbatch): i for i, a in enumerate(actions)}
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
        for stage, kind in _inputs(action):
            maker = index_of.get((stage, kind, action.microbatch))
            if maker is None:
                continue
            link = stage, action.stage, action.microbatch
            if arrival.get(link, actions[maker].end) >= action.start - same:
                current = maker
    return tuple(reversed(path))


def _result(action: TimedAction) -> str:
    return "B" if action.kind == "I" else action.kind


def _inputs(action: TimedAction) -> list[tuple[int, str]]:
    """Return the (stage, kind) of the results that an action may wait for."""
    stage = action.stage
    if action.kind == "F":
        return [(stage - 1, "F")]
    if action.kind == "W":
        return [(stage, "B")]
    return [(stage + 1, "B"), (stage, "F")]
