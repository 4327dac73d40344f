"""In which order variables are eliminated: the one thing that decides how large the tables of an elimination become.

Minimum fill, weighted: next is the variable whose elimination ties the fewest and smallest pairs of others together
that were not tied before (Kjaerulff, 1990). On layers with many small ops around a few values (a mixture of experts)
the tables are ten times smaller than when the smallest next table is taken; on some others (rotary positions) that one
is the better, so it is the second try.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations


def order_within(
    most_a_table: float,
    most_in_all: float,
    sizes: Sequence[int],
    scopes: Sequence[Sequence[int]],
    kept: Collection[int] = (),
) -> list[int] | None:
    """An order of elimination whose tables have no more entries than that; None where none is found."""
    for smallest_table in (False, True):
        order = elimination_order(sizes, scopes, kept, smallest_table)
        entries = [size for _, size in order]
        if max(entries, default=0.0) <= most_a_table and sum(entries) <= most_in_all:
            return [v for v, _ in order]
    return None


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], kept: Collection[int] = (), smallest_table: bool = False
) -> list[tuple[int, float]]:
    """(variable, entries of the table that its elimination joins), in order; all but `kept`.

    Args:
        sizes: values of each variable.
        scopes: the variables of every factor.
        smallest_table: next is the variable with the smallest table, fill decides among equals; else the reverse.
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
        table = weight[v] + sum(weight[u] for u in others)
        return (table, fill) if smallest_table else (fill, table)

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
