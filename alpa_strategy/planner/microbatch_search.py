"""Which numbers of micro-batches are priced, and in which order.

A step is slow with many micro-batches (ops too small for the device, one launch each) and slow with
few (idle stages, activations that do not fit). The search therefore starts at a middling number and
climbs to the best one. At the first number all submeshes are priced. Its neighbours are compared on
the submeshes that the best plan uses, which is a small part of the work; if another number wins,
all submeshes are priced once more for that one.

The order follows from predictions and bounds alone, never from the clock: how busy the machine is
changes no plan.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.microbatch.transform import num_split_samples
from alpa_strategy.options import PlanOptions

# Indices of the submeshes that a plan uses.
Submeshes = frozenset[int]

# Micro-batches per stage of the first number that is tried: with eight of them a pipeline over all
# devices is idle for an eighth of its step.
FIRST_MICROBATCHES_PER_STAGE = 8


@dataclass(frozen=True)
class SearchResult:
    """The best plan for one number of micro-batches."""

    # Predicted seconds of its step; inf: no plan fits.
    seconds: float = math.inf
    # Submeshes that its stages use; empty: no plan fits.
    used: Submeshes = frozenset()


# Prices one number of micro-batches, on the submeshes given or on all of them (None).
Price = Callable[[int, Submeshes | None], SearchResult]


def microbatch_counts(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> list[int]:
    """Return the numbers of micro-batches to try, in descending order.

    They are divisors of the number of samples, or of those of a rank and of the number of ranks.
    Each is at most half of the one before. `options.num_microbatches` pins a single one,
    and without samples it is 1.
    """
    if options.num_microbatches is not None:
        return [options.num_microbatches]

    divided = {num_split_samples(step)}
    if step.batch_scope == "rank":
        # A micro-batch has some samples of every rank, or all samples of some ranks.
        num_ranks = cluster.num_devices
        divided = {num_split_samples(step) // num_ranks, num_ranks}

    counts: list[int] = []
    for count in range(max(divided), 0, -1):
        is_half_of_last = not counts or 2 * count <= counts[-1]
        is_divisor = any(number % count == 0 for number in divided if number > 0)
        if is_divisor and is_half_of_last:
            counts.append(count)
    return counts or [1]


def search_microbatches(
    counts: Sequence[int],
    max_stages: int,
    bound: Callable[[int], float],
    price: Price,
    known_seconds: float = math.inf,
) -> list[int]:
    """Price `counts` until the best of them is found.

    Args:
        counts: numbers of micro-batches, descending.
        max_stages: of a pipeline; decides which number is tried first.
        bound: seconds below which no plan with that number of micro-batches can be; inf: the step
            cannot be split so.
        price: returns the best plan with that number of micro-batches.
        known_seconds: of a plan that exists already; numbers that cannot be faster are skipped.

    Returns:
        The numbers that were priced, in order.
    """
    climb = _Climb(counts, bound, price, known_seconds)
    target = FIRST_MICROBATCHES_PER_STAGE * max_stages
    first = min(range(len(counts)), key=lambda index: abs(math.log(counts[index] / target)))
    start = climb.start_from(first)
    if start is not None:
        best = climb.best_from(start)
        if best != start:
            climb.price_at(best)
    return climb.priced


class _Climb:
    """The numbers of micro-batches that are priced, and the best result so far."""

    def __init__(
        self,
        counts: Sequence[int],
        bound: Callable[[int], float],
        price: Price,
        known_seconds: float,
    ) -> None:
        self.priced: list[int] = []
        self._counts = counts
        self._bound = bound
        self._price = price
        self._known_seconds = known_seconds
        self._best = SearchResult()

    def price_at(
        self, index: int, used: Submeshes | None = None, limit: float = math.inf
    ) -> SearchResult:
        """Return the result of pricing `counts[index]` on the submeshes `used` (None: all); an
        empty one, with nothing priced, unless its bound is below `limit` and the known seconds.
        """
        count = self._counts[index]
        if self._bound(count) >= min(limit, self._known_seconds):
            return SearchResult()
        self.priced.append(count)
        return self._price(count, used)

    def start_from(self, first: int) -> int | None:
        """Return `first`, or the next index at which something fits; None: nothing does. Its price
        is the best one from then on.

        More micro-batches need less memory; fewer may be faster than the known plan.
        """
        more = range(first - 1, -1, -1)
        fewer = range(first + 1, len(self._counts))
        for index in (first, *more, *fewer):
            self._best = self.price_at(index)
            if self._best.used:
                return index
        return None

    def best_from(self, start: int) -> int:
        """Return the index of the best number, climbed to from `start` on the submeshes in use.

        More micro-batches may have to grow twice before they are so small that nothing has to be
        recomputed. If more are better, fewer are not tried.
        """
        best = self._climb(start, step=-1, patience=2)
        if best == start:
            best = self._climb(start, step=1, patience=1)
        return best

    def _climb(self, start: int, step: int, patience: int) -> int:
        """Return the index of the best number of micro-batches on the way from `start` by `step`.

        It stops after `patience` numbers in turn that are no better (one, once a better one was
        seen). It also stops at a number that was priced before. `self._best` becomes the best
        result.
        """
        best_index = start
        index = start + step
        misses = 0
        while 0 <= index < len(self._counts) and misses < patience:
            if self._counts[index] in self.priced:
                break
            result = self.price_at(index, self._best.used, self._best.seconds)
            if result.seconds < self._best.seconds:
                best_index = index
                self._best = result
                misses = 0
                patience = 1
            else:
                misses += 1
            index += step
        return best_index
