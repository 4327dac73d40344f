"""The batch size with the most samples a second that fits: the given one doubled and halved, on the same planner."""

from __future__ import annotations

from collections.abc import Callable

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import Plan

LEAST_GAIN = 0.01  # of samples/s: what less than that is gained by is not worth a larger batch


def tune_batch(plan_at: Callable[[int], Plan], given: int) -> dict[int, Plan | PlanError]:
    """What was planned by batch size, or why there is no plan; the best is `best_batch` of it.

    Doubled while that gains samples/s and fits; halved while it does not fit, or while that is the faster way.

    Args:
        plan_at: the best plan for a batch size.
    """
    found: dict[int, Plan | PlanError] = {}

    def rate(batch_size: int) -> float:
        """Batches of one sample a second; 0 where there is no plan."""
        if batch_size not in found:
            try:
                found[batch_size] = plan_at(batch_size)
            except PlanError as error:
                found[batch_size] = error
        plan = found[batch_size]
        return 0.0 if isinstance(plan, PlanError) else batch_size / plan.predicted.step_seconds

    up = given
    while rate(up) and rate(2 * up) > rate(up) * (1 + LEAST_GAIN):
        up *= 2
    down = given
    while up == given and down % 2 == 0 and (not rate(down) or rate(down // 2) >= rate(down)):
        down //= 2
        rate(down)
    return dict(sorted(found.items()))


def best_batch(found: dict[int, Plan | PlanError]) -> int | None:
    """The batch size with the most samples a second, of equals within `LEAST_GAIN` the smallest; None: nothing fits."""
    rates = {n: n / plan.predicted.step_seconds for n, plan in found.items() if not isinstance(plan, PlanError)}
    return next((n for n, rate in rates.items() if rate * (1 + LEAST_GAIN) >= max(rates.values())), None)
