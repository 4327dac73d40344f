"""Why candidates of the planner cannot be plans, and how long its phases took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from alpa_strategy.errors import DoesNotFitError, PlanError

# (label of the candidate, why it cannot be planned); the label may be empty.
Failures = list[tuple[str, PlanError]]

# An error lists this many reasons: a search may meet many stages that do not fit.
MAX_REASONS = 8


def no_plan_error(problem: str, failures: Failures, default_fix: str) -> PlanError:
    """Return one error that lists the reasons of all `failures`, each problem once, at most
    `MAX_REASONS`.

    Args:
        problem: the first line of the message.
        default_fix: the advice, unless all failures give the same one.

    Returns:
        A DoesNotFitError if at least one failure is of memory, else a PlanError.
    """
    is_memory = any(isinstance(error, DoesNotFitError) for _, error in failures)
    kind = DoesNotFitError if is_memory else PlanError

    label_of_problem: dict[str, str] = {}
    for label, error in failures:
        label_of_problem.setdefault(error.problem, label)

    message = f"{problem}:"
    listed = list(label_of_problem.items())
    for reason, label in listed[:MAX_REASONS]:
        prefix = f"{label}: " if label else ""
        message += f"\n    {prefix}{reason}"
    if len(listed) > MAX_REASONS:
        message += f"\n    and {len(listed) - MAX_REASONS} more"

    fixes = {error.fix for _, error in failures if error.fix}
    fix = fixes.pop() if len(fixes) == 1 else default_fix
    return kind(message, fix)


@contextmanager
def timed(spent: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds that the block takes to `spent[phase]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        spent[phase] += time.perf_counter() - started
