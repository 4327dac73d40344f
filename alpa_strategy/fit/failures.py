"""Why configurations do not fit, with the bytes that they need."""

from collections.abc import Sequence

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.planner.failures import no_plan_error
from alpa_strategy.units import format_bytes

# (configuration in words, why it is no plan)
Failure = tuple[str, PlanError]

_FIX = "use more devices, fewer or shorter sequences, or relax the pinned options"


class TooLargeError(DoesNotFitError):
    """A device needs more bytes than it may use.

    Args:
        subject: what needs them, with a verb.
        num_bytes: that are needed on a device.
        limit: bytes that a plan may use.
    """

    def __init__(self, subject: str, num_bytes: float, limit: float) -> None:
        self.num_bytes = num_bytes
        self.limit = limit
        super().__init__(f"{subject} {format_bytes(num_bytes)} of {format_bytes(limit)}")

    def __reduce__(self) -> tuple:
        """Pickle the text alone."""
        return DoesNotFitError, (self.problem, self.fix)


def needed_bytes(error: PlanError) -> float:
    """Return the bytes that a device would need; infinity if the error is another one."""
    return error.num_bytes if isinstance(error, TooLargeError) else float("inf")


def with_need(error: PlanError, limit: float) -> PlanError:
    """Return a solver's error as a TooLargeError if it says how many bytes a device needs."""
    needed = error.least_bytes if isinstance(error, DoesNotFitError) else None
    if needed is None or needed <= limit:
        return error
    return TooLargeError("a stage needs", needed, limit)


def nothing_fits(failures: Sequence[Failure]) -> PlanError:
    """Return one error with the reasons of all configurations: its first line has the least need,
    and those that need least are listed first.
    """
    ordered = sorted(failures, key=lambda failure: needed_bytes(failure[1]))
    problem = "no plan fits"
    label, least = ordered[0]
    if isinstance(least, TooLargeError):
        needed = f"{format_bytes(least.num_bytes)} of {format_bytes(least.limit)}"
        problem += f": at least {needed} a device ({label})"
    return no_plan_error(problem, ordered, _FIX)
