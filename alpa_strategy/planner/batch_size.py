"""The batch size with the most samples a second that fits: a given one is doubled and halved."""

from collections.abc import Callable

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import Plan

# A larger batch must gain at least this share of samples per second.
MIN_GAIN = 0.01


def tune_batch(plan_at: Callable[[int], Plan], start: int) -> dict[int, Plan | PlanError]:
    """Plan batch sizes around `start` and return the results by size; `best_batch` picks one.

    The size is doubled while that gains samples per second and fits. It is halved while it does
    not fit, or while the smaller one is faster.

    Args:
        plan_at: plans one batch size, or raises PlanError.
    """
    results: dict[int, Plan | PlanError] = {}

    def samples_per_second(batch_size: int) -> float:
        """Return the predicted samples/s with the plan of one batch size; 0 if there is none."""
        if batch_size not in results:
            try:
                results[batch_size] = plan_at(batch_size)
            except PlanError as error:
                results[batch_size] = error
        plan = results[batch_size]
        return 0.0 if isinstance(plan, PlanError) else batch_size / plan.iteration_seconds

    largest = start
    while True:
        rate = samples_per_second(largest)
        if not rate or samples_per_second(2 * largest) <= rate * (1 + MIN_GAIN):
            break
        largest *= 2

    smallest = start
    while largest == start and smallest % 2 == 0:
        rate = samples_per_second(smallest)
        if rate and samples_per_second(smallest // 2) < rate:
            break
        smallest //= 2
        samples_per_second(smallest)
    return dict(sorted(results.items()))


def best_batch(results: dict[int, Plan | PlanError]) -> int | None:
    """Return the batch size with the most samples per second, None if nothing fits.

    Of sizes whose rates are within `MIN_GAIN` of the best the smallest is returned.
    """
    rates = {
        batch_size: batch_size / plan.iteration_seconds
        for batch_size, plan in results.items()
        if not isinstance(plan, PlanError)
    }
    if not rates:
        return None
    best_rate = max(rates.values())
    return next(size for size, rate in rates.items() if rate * (1 + MIN_GAIN) >= best_rate)
