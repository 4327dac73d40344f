"""A pipeline's step over time for the page: actions, messages, waiting and the critical path."""

from dataclasses import dataclass

from alpa_strategy.display.critical_path import (
    TimedMessage,
    boundaries_of,
    critical_path,
    messages_of,
)
from alpa_strategy.display.timeline import ScheduleTimeline, plan_timeline
from alpa_strategy.ir.plan import Plan

# Actions that a page draws at most; of longer steps, it has the first micro-batches.
MAX_ACTIONS = 40_000


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
    messages = messages_of(timeline.timed, boundaries_of(plan))
    return DrawnSchedule(timeline, messages, critical_path(timeline, messages))
