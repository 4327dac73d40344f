"""Which numbers of micro-batches are looked at, and in which order: by promise and by bounds, never by the clock.

A step is slow with many micro-batches (ops too small for the device, a launch each) and slow with few (stages that
wait, activations that do not fit), so the best number is climbed to from a middling one. At the first number all
submeshes are priced; its neighbours are compared on the submeshes that the best plan uses, which is a small part of
the work; where another number wins, all submeshes are priced once more for that one. How busy the machine is cannot
change the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Submeshes = frozenset[int]
FILL = 8  # micro-batches per device of the first number tried: a pipeline over all of them waits for an eighth


@dataclass(frozen=True)
class Look:
    """The best plan found for one number of micro-batches: its seconds (inf: none fits) and submeshes in use."""

    seconds: float = math.inf
    used: Submeshes = frozenset()


def climb(
    counts: Sequence[int],
    num_devices: int,
    bound: Callable[[int], float],
    look: Callable[[int, Submeshes | None], Look],
    known: float = math.inf,
) -> list[int]:
    """Look at `counts` (descending) until their best is found; the counts that were looked at, in order.

    Args:
        bound: seconds below which no plan with so many micro-batches can be; inf: the step cannot be cut so.
        look: the best plan with so many micro-batches; on the given submeshes only, or on all of them (None).
        known: seconds of a plan that is there already: numbers of micro-batches that cannot beat it are left out.
    """
    visited: list[int] = []

    def at(index: int, used: Submeshes | None = None, limit: float = known) -> Look:
        if bound(counts[index]) >= min(limit, known):
            return Look()
        visited.append(counts[index])
        return look(counts[index], used)

    first = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / (FILL * num_devices))))
    best, found = first, at(first)
    # Where nothing fits, more micro-batches need less memory; fewer may be faster than what is known.
    for index in (*range(first - 1, -1, -1), *range(first + 1, len(counts))):
        if found.used:
            break
        best, found = index, at(index)
    if not found.used:
        return visited
    whole = best
    # More micro-batches may have to grow twice before they are so small that nothing need be recomputed.
    for step, patience in ((-1, 2), (1, 1)):
        index, misses = best + step, 0
        while 0 <= index < len(counts) and counts[index] not in visited and misses < patience:
            other = at(index, found.used, found.seconds)
            if other.seconds < found.seconds:
                best, found, misses, patience = index, other, 0, 1
            else:
                misses += 1
            index += step
        if best != whole:
            break  # where more is better, fewer is not
    if best != whole:
        at(best)
    return visited
