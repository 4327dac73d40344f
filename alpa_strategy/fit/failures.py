"""Why configurations do not fit, with the bytes that they need."""

import math
from collections.abc import Sequence

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.stage_fit import does_not_fit
from alpa_strategy.planner.failures import no_plan_error
from alpa_strategy.units import format_bytes, format_seconds

# (configuration in words, why it is no plan)
Failure = tuple[str, PlanError]

_FIX = "use more devices, fewer or shorter sequences, or relax the pinned options"


def needed_bytes(error: PlanError, limit: float) -> float:
    """Return the bytes that a device would need; infinity if the error does not say that they are
    more than `limit`.
    """
    if not isinstance(error, DoesNotFitError) or error.least_bytes is None:
        return math.inf
    return error.least_bytes if error.least_bytes > limit else math.inf


def with_need(error: PlanError, limit: float) -> PlanError:
    """Return a solver's error in the words of `does_not_fit`, if it says what a device needs."""
    needed = needed_bytes(error, limit)
    return does_not_fit("a stage needs", needed, limit) if math.isfinite(needed) else error


def no_faster_plan(seconds: float) -> PlanError:
    """Return the error of a search for plans that take less than `seconds` a step."""
    return PlanError(f"no plan seems to take less than {format_seconds(seconds)}")


def nothing_fits(failures: Sequence[Failure], limit: float) -> PlanError:
    """Return one error with the reasons of configurations as `no_plan_error` lists them, those that
    need least first. The first line has the least need, if one is known.

    Args:
        failures: of all configurations, at least one.
        limit: bytes that a plan may use.
    """
    ordered = sorted(failures, key=lambda failure: needed_bytes(failure[1], limit))
    problem = "no plan fits"
    label, least = ordered[0]
    needed = needed_bytes(least, limit)
    if math.isfinite(needed):
        problem += f": at least {format_bytes(needed)} of {format_bytes(limit)} a device ({label})"
    return no_plan_error(problem, ordered, _FIX)
