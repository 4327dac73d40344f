"""What limits a plan and what would help it most, worked out once for all that show it."""

import weakref
from dataclasses import dataclass

from alpa_strategy.display.advice import best_change, schedule_of_waiting
from alpa_strategy.display.findings import findings
from alpa_strategy.display.memory import memory_limit_of
from alpa_strategy.ir.plan import Plan


@dataclass(frozen=True)
class Answers:
    """The limits of a plan's step, and the change that would help it most."""

    # Of `findings`.
    findings: tuple[str, ...]

    # Of `best_change`.
    change: str | None


@dataclass(frozen=True)
class _LastAnswers:
    """The answers on the plan that was shown last."""

    # Plans cannot be keys: they have dicts, and comparing large ones takes long.
    plan: "weakref.ref[Plan]"
    memory_limit: float | None
    answers: Answers


_last: _LastAnswers | None = None


def answers_of(plan: Plan, memory_limit: float | None = None) -> Answers:
    """Return the limits of a plan's step and the change that would help it most. Those of the last
    plan are cached, as long schedules take seconds to lay out.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: that of the plan's figures.
    """
    global _last
    memory_limit = memory_limit_of(plan, memory_limit)
    last = _last
    if last is not None and last.plan() is plan and last.memory_limit == memory_limit:
        return last.answers
    schedule = schedule_of_waiting(plan)
    change = best_change(plan, memory_limit, schedule)
    answers = Answers(tuple(findings(plan, schedule)), change)
    _last = _LastAnswers(weakref.ref(plan), memory_limit, answers)
    return answers
