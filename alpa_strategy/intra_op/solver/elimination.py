"""Exact min-sum variable elimination over a problem's factors (Bertele and Brioschi, 1972), with
dense numpy tables.

It minimises seconds; the memory limit is not seen here (solve.py puts a price on bytes).
The order is planned on sizes alone, so an instance that is too wide costs little time to decline.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer

MAX_TABLE_ENTRIES = 40_000_000
MAX_TOTAL_ENTRIES = 10_000_000_000  # counted without the sharing among identical layers
MAX_DIRECT_ENTRIES = 50_000


@dataclass(frozen=True)
class Factor:
    """A table over distinct variables: axis i of `table` runs over the domain of `scope[i]`."""

    scope: tuple[int, ...]
    table: np.ndarray


@dataclass(frozen=True)
class Network:
    """Variables (choices first, then layouts of widely shared values) and the factors whose sum is
    minimised.
    """

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    num_choices: int


def network_of(problem: Problem) -> Network | None:
    """The factors of a problem's seconds; None where a value has too many users for a table."""
    sizes = [len(choice.cost) for choice in problem.choices]
    factors = [Factor((c,), np.asarray(x.cost, dtype=float)) for c, x in enumerate(problem.choices)]
    known: dict[tuple, np.ndarray] = {}  # tables of equal transfers, made once
    for transfer in problem.transfers:
        cost = np.asarray(transfer.cost, dtype=float)  # [source layout, target layout]
        if not cost.any():
            continue
        ends = [transfer.producer, *(use.choice for use in transfer.uses)]
        scope = tuple(dict.fromkeys(ends))
        if (
            np.prod([float(sizes[v]) for v in scope]) <= MAX_DIRECT_ENTRIES
            or len(transfer.uses) == 1
        ):
            key = (
                id(transfer.cost), id(transfer.memory), id(transfer.source), *(id(use.layout) for use in transfer.uses),
                *(scope.index(v) for v in ends), *(sizes[v] for v in scope),
            )  # fmt: skip
            if key not in known:
                at = dict(
                    zip(scope, np.ix_(*(range(sizes[v]) for v in scope)), strict=True)
                )  # an axis of its own each
                targets = [np.asarray(use.layout)[at[use.choice]] for use in transfer.uses]
                source = np.asarray(transfer.source)[at[transfer.producer]]
                known[key] = _paid_once(cost, source, targets, [sizes[v] for v in scope])
            factors.append(Factor(scope, known[key]))
        elif not _through_layouts(transfer, cost, sizes, factors, known):
            return None
    return Network(tuple(sizes), tuple(factors), len(problem.choices))


def eliminate(
    network: Network, order: Sequence[int], kept: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The minimum for all values of the variables `kept` (inf where every assignment is forbidden),
    and the minimising
    value of every variable there: tables over `kept`."""
    holding, _, constant = _passed_on(network, order, kept)
    minimum = join([factor for v in kept for factor in holding[v]], kept, network.sizes) + constant
    values: list[np.ndarray] = [np.zeros((), dtype=int)] * len(network.sizes)
    for axis, v in enumerate(kept):
        values[v] = np.indices(minimum.shape)[axis]
    for v in reversed(order):
        values[v] = np.broadcast_to(_best_values(holding[v], v, values), minimum.shape)
    return minimum, values


def _best_values(factors: Sequence[Factor], v: int, values: Sequence[np.ndarray]) -> np.ndarray:
    """The minimising value of `v`, given (arrays of) those of the other variables in its factors.

    Cheaper than to keep where each entry of a whole table has its minimum: few entries are asked
    for.
    """
    total = np.zeros(1)
    for factor in factors:
        at = factor.scope.index(v)
        table = factor.table.transpose(*range(at), *range(at + 1, len(factor.scope)), at)
        total = total + table[tuple(values[u] for u in factor.scope if u != v)]
    return total.argmin(axis=-1)


def min_marginals(network: Network, order: Sequence[int]) -> list[np.ndarray]:
    """[c][k]: the minimum over all assignments in which choice c takes k (two passes over the
    bucket tree).
    """
    holding, inward, total = _passed_on(network, order)
    children: dict[int, list[int]] = {v: [] for v in order}
    for v, message in inward.items():
        if message.scope:
            children[message.scope[0]].append(v)
    if not np.isfinite(total):
        return [np.full(size, np.inf) for size in network.sizes[: network.num_choices]]
    # outside[v]: what the rest of the network adds to bucket v: its parent's belief less what v
    # itself told it.
    outside = {
        v: np.array(total - float(message.table))
        for v, message in inward.items()
        if not message.scope
    }
    marginals: list[np.ndarray] = [np.zeros(0)] * len(network.sizes)
    for v in reversed(order):
        scope = (v, *inward[v].scope)
        belief = join(holding[v], scope, network.sizes) + outside.pop(v)
        marginals[v] = belief.reshape(len(belief), -1).min(axis=1)
        for child in children[v]:
            finite = np.isfinite(inward[child].table)
            # Scopes are in the order of elimination: what is left has the axes of the child's
            # message.
            seen = belief.min(
                axis=tuple(i for i, u in enumerate(scope) if u not in inward[child].scope)
            )
            outside[child] = np.where(
                finite, seen - np.where(finite, inward[child].table, 0.0), 0.0
            )
        holding[v] = []
    return marginals[: network.num_choices]


def _passed_on(
    network: Network, order: Sequence[int], kept: tuple[int, ...] = ()
) -> tuple[list[list[Factor]], dict[int, Factor], float]:
    """The first pass: the factors of every bucket, what each passes on (its minimum, over the
    variables that it shares
    with later ones), and the sum of what goes to none."""
    position = {v: i for i, v in enumerate((*order, *kept))}
    holding = _buckets(network, position)
    messages: dict[int, Factor] = {}
    constant = 0.0
    known: dict[tuple, np.ndarray] = {}
    for v in order:
        rest = tuple(
            sorted({u for f in holding[v] for u in f.scope} - {v}, key=position.__getitem__)
        )
        axis = {u: i for i, u in enumerate((v, *rest))}
        # Equal for buckets that join the same tables in the same way, as layers of one kind do:
        # worked out once.
        key = tuple(sorted((id(f.table), *(axis[u] for u in f.scope)) for f in holding[v]))
        if key not in known:
            known[key] = join(holding[v], (v, *rest), network.sizes).min(axis=0)
        messages[v] = Factor(rest, known[key])
        if rest:
            holding[rest[0]].append(messages[v])
        else:
            constant += float(known[key])
    return holding, messages, constant


def _buckets(network: Network, position: dict[int, int]) -> list[list[Factor]]:
    """Every factor in the bucket of the variable of its scope that is eliminated first."""
    holding: list[list[Factor]] = [[] for _ in network.sizes]
    equal: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
    seen: dict[
        int, np.ndarray
    ] = {}  # by identity: to compare contents costs as much as the table is large
    for factor in network.factors:
        table = seen.get(id(factor.table))
        if table is None:
            table = equal.setdefault((factor.table.shape, factor.table.tobytes()), factor.table)
            seen[id(factor.table)] = table
        holding[min(factor.scope, key=position.__getitem__)].append(Factor(factor.scope, table))
    return holding


def join(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """The sum of `factors` as one table over `scope`.

    Small tables are added up first, next always the one that widens the sum least: each pass over
    the whole table costs as much as all those over parts of it.
    """
    axis = {v: i for i, v in enumerate(scope)}
    left: list[np.ndarray] = []
    for factor in sorted(factors, key=lambda f: f.table.size):
        order = sorted(range(len(factor.scope)), key=lambda i: axis[factor.scope[i]])
        shape = [1] * len(scope)
        for v in factor.scope:
            shape[axis[v]] = sizes[v]
        left.append(factor.table.transpose(order).reshape(shape))
    total = np.zeros([1] * len(scope))
    while left:
        widths = [math.prod(map(max, total.shape, table.shape)) for table in left]
        total = total + left.pop(widths.index(min(widths)))
    whole = tuple(sizes[v] for v in scope)
    return total if total.shape == whole else np.broadcast_to(total, whole).copy()


def _paid_once(
    cost: np.ndarray, source: np.ndarray, targets: Sequence[np.ndarray], shape: Sequence[int]
) -> np.ndarray:
    """What the distinct ones of `targets` cost from `source`; the indices broadcast to `shape`."""
    table = np.zeros(shape)
    for i, target in enumerate(targets):
        repeated = np.zeros(1, dtype=bool)
        for earlier in targets[:i]:
            repeated = repeated | (target == earlier)
        table += np.where(repeated, 0.0, cost[source, target])
    return table


def _through_layouts(
    transfer: Transfer,
    cost: np.ndarray,
    sizes: list[int],
    factors: list[Factor],
    known: dict[tuple, np.ndarray],
) -> bool:
    """Variables for the distinct layouts at both ends, tied to the choices, and one table over
    them.
    """
    ends = [(transfer.producer, np.asarray(transfer.source))]
    ends += [(use.choice, np.asarray(use.layout)) for use in transfer.uses]
    distinct = [np.unique(layout, return_inverse=True) for _, layout in ends]
    if np.prod([float(len(values)) for values, _ in distinct]) > MAX_TABLE_ENTRIES / 10:
        return False
    scope = []
    for (choice, _), (values, inverse) in zip(ends, distinct, strict=True):
        variable = len(sizes)
        sizes.append(len(values))
        tie = np.full((sizes[choice], len(values)), np.inf)
        tie[np.arange(sizes[choice]), inverse] = 0.0
        factors.append(Factor((choice, variable), tie))
        scope.append(variable)
    layouts = [values for values, _ in distinct]
    key = (cost.shape, cost.tobytes(), *(values.tobytes() for values in layouts))
    if key not in known:
        source, *targets = np.ix_(*layouts)
        known[key] = _paid_once(cost, source, targets, [len(values) for values in layouts])
    factors.append(Factor(tuple(scope), known[key]))
    return True


# --- In which order variables are eliminated: the one thing that decides how large the tables
# become.
#
# Minimum fill, weighted: next is the variable whose elimination ties the fewest and smallest pairs
# of others together that were not tied before (Kjaerulff, 1990). On layers with many small ops
# around a few values (a mixture of experts) the tables are ten times smaller than when the smallest
# next table is taken; on some others (rotary positions) that one is the better, so it is the second
# try.


def plan_order(
    network: Network,
    most_a_table: float = MAX_TABLE_ENTRIES,
    most_in_all: float = MAX_TOTAL_ENTRIES,
    kept: Collection[int] = (),
) -> list[int] | None:
    """An order of elimination whose tables have no more entries than that; None where none is
    found.
    """
    for smallest_table in (False, True):
        order = elimination_order(
            network.sizes, [f.scope for f in network.factors], kept, smallest_table
        )
        entries = [size for _, size in order]
        if max(entries, default=0.0) <= most_a_table and sum(entries) <= most_in_all:
            return [v for v, _ in order]
    return None


def elimination_order(
    sizes: Sequence[int],
    scopes: Iterable[Sequence[int]],
    kept: Collection[int] = (),
    smallest_table: bool = False,
) -> list[tuple[int, float]]:
    """(variable, entries of the table that its elimination joins), in order; all but `kept`.

    Args:
        sizes: values of each variable. scopes: the variables of every factor.
        smallest_table: next is the variable with the smallest table, fill decides among equals;
            else the reverse.
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
