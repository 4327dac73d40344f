"""In which order variables are eliminated: the one thing that decides how large the tables of an elimination become.

Minimum fill, weighted: next is the variable whose elimination ties the fewest and smallest pairs of others together
that were not tied before (Kjaerulff, 1990). On layers with many small ops around a few values (a mixture of experts)
the tables are ten times smaller than when the smallest next table is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], kept: Collection[int] = ()
) -> list[tuple[int, float]]:
    """(variable, entries of the table that its elimination joins), in order; all but `kept`.

    Args:
        sizes: values of each variable.
        scopes: the variables of every factor.
    """
    around: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            around[v].update(scope)
    for v, others in enumerate(around):
        others.discard(v)
    weight = [math.log2(max(size, 2)) for size in sizes]

    def cost(v: int) -> tuple[float, float]:
        others = around[v]
        fill = sum(weight[a] * weight[b] for a, b in combinations(others, 2) if b not in around[a])
        return fill, weight[v] + sum(weight[u] for u in others)

    left = set(range(len(sizes))) - set(kept)
    now = {v: cost(v) for v in left}
    heap = [(now[v], v) for v in sorted(left)]
    heapq.heapify(heap)
    order: list[tuple[int, float]] = []
    while heap:
        found, v = heapq.heappop(heap)
        if v not in left or found != now[v]:
            continue
        again = cost(v)  # ties made since among its neighbours may have made it cheaper
        if again != found:
            now[v] = again
            heapq.heappush(heap, (again, v))
            continue
        left.discard(v)
        order.append((v, math.prod((float(sizes[u]) for u in around[v]), start=float(sizes[v]))))
        for u in around[v]:
            around[u] |= around[v]
            around[u] -= {u, v}
        for u in around[v] & left:
            now[u] = cost(u)
            heapq.heappush(heap, (now[u], u))
    return order
