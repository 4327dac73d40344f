"""Exact min-sum variable elimination over a problem's factors (Bertele and Brioschi, 1972), with
dense numpy tables.

It minimises seconds; the memory limit is not seen here (solve.py puts a price on bytes).
The order is planned on sizes alone, so an instance that is too wide costs little time to decline.

Problems that differ in costs alone are solved together: every table has a leading axis with one
entry per problem (or one entry that holds for all of them).
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer

MAX_TABLE_ENTRIES = 40_000_000
# Counted without the sharing among identical layers.
MAX_TOTAL_ENTRIES = 10_000_000_000
MAX_DIRECT_ENTRIES = 50_000
# Of a sum of tables that is computed at once: a megabyte.
BLOCK_ENTRIES = 1 << 17


@dataclass(frozen=True)
class Factor:
    """A table over distinct variables: axis 0 of `table` runs over problems, axis i + 1 over the
    domain of `scope[i]`.
    """

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

    def with_tables(self, of: Callable[[np.ndarray], np.ndarray]) -> "Network":
        """Return the network with `of` applied to each distinct table. Factors that share a table
        share the result.
        """
        known: dict[int, np.ndarray] = {}
        factors = []
        for factor in self.factors:
            key = id(factor.table)
            if key not in known:
                known[key] = of(factor.table)
            factors.append(Factor(factor.scope, known[key]))
        return Network(self.sizes, tuple(factors), self.num_choices)


def network_of(problem: Problem) -> Network | None:
    """Return the factors of a problem's seconds; None if a value has too many users for a table.

    Costs with one axis more than a problem's are those of several problems.
    """
    shared: dict[int, np.ndarray] = {}

    def batched(cost: np.ndarray, num_axes: int) -> np.ndarray:
        """Return a cost with a leading axis for the problems; equal objects give equal objects."""
        if id(cost) not in shared:
            table = np.asarray(cost, dtype=float)
            shared[id(cost)] = table if table.ndim > num_axes else table[None]
        return shared[id(cost)]

    costs = [batched(choice.cost, 1) for choice in problem.choices]
    sizes = [cost.shape[1] for cost in costs]
    factors = [Factor((c,), cost) for c, cost in enumerate(costs)]
    # Tables of equal transfers, made once.
    known: dict[tuple, np.ndarray] = {}
    is_paid: dict[int, bool] = {}
    for transfer in problem.transfers:
        # [problem, source layout, target layout]
        cost = batched(transfer.cost, 2)
        if id(cost) not in is_paid:
            is_paid[id(cost)] = bool(cost.any())
        if not is_paid[id(cost)]:
            continue
        scope = tuple(dict.fromkeys(_choices_of(transfer)))
        num_entries = math.prod(sizes[v] for v in scope)
        if num_entries <= MAX_DIRECT_ENTRIES or len(transfer.uses) == 1:
            factors.append(_direct_factor(transfer, scope, cost, sizes, known))
        elif not _through_layouts(transfer, cost, sizes, factors, known):
            return None
    return Network(tuple(sizes), tuple(factors), len(problem.choices))


def _choices_of(transfer: Transfer) -> list[int]:
    """Return the producer's choice and those of all uses; one choice may occur several times."""
    return [transfer.producer, *(use.choice for use in transfer.uses)]


def _direct_factor(
    transfer: Transfer,
    scope: tuple[int, ...],
    cost: np.ndarray,
    sizes: Sequence[int],
    known: dict[tuple, np.ndarray],
) -> Factor:
    """Return a transfer's costs as one table over all its choices.

    Args:
        scope: the distinct choices.
        cost: [problem, source layout, target layout]
        sizes: of each choice, its number of strategies.
        known: tables of equal transfers; gets this one.
    """
    choices = _choices_of(transfer)
    shape = [sizes[v] for v in scope]
    key = (
        id(transfer.cost),
        id(transfer.memory),
        id(transfer.source),
        *(id(use.layout) for use in transfer.uses),
        *(scope.index(v) for v in choices),
        *shape,
    )
    if key not in known:
        # Each choice has an axis of the table.
        axes = np.ix_(*(range(size) for size in shape))
        strategies = dict(zip(scope, axes, strict=True))
        source = np.asarray(transfer.source)[strategies[transfer.producer]]
        targets = [np.asarray(use.layout)[strategies[use.choice]] for use in transfer.uses]
        known[key] = _paid_once(cost, source, targets, shape)
    return Factor(scope, known[key])


def eliminate(
    network: Network, order: Sequence[int], outer: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Minimise the sum of a network's factors by eliminating its variables one by one.

    Args:
        order: all variables but `outer`, in the order of elimination.
        outer: variables for whose values the minimum is wanted.

    Returns:
        (the minimum, the minimising value of every variable): tables over problems and the values
        of `outer`. The minimum is inf if every assignment is forbidden.
    """
    holding, _, constant = _passed_on(network, order, outer)
    joined = join([factor for v in outer for factor in holding[v]], outer, network.sizes)
    minimum = joined + constant.reshape(-1, *[1] * len(outer))
    if minimum.shape == (1,):
        assignment = _best_assignment(holding, order, len(network.sizes))
        return minimum, list(np.array(assignment)[:, None])

    indices = np.indices(minimum.shape)
    values: list[np.ndarray] = [np.zeros((), dtype=int)] * len(network.sizes)
    for axis, v in enumerate(outer, start=1):
        values[v] = indices[axis]
    for v in reversed(order):
        values[v] = _best_values(holding[v], v, values, indices[0])
    return minimum, values


def _best_assignment(
    holding: Sequence[Sequence[Factor]], order: Sequence[int], num_variables: int
) -> list[int]:
    """Return the minimising value of every variable of one problem, as `_best_values` does: numbers
    are faster than arrays of one.

    Args:
        holding: the factors of every variable's bucket.
        order: the variables in the order of elimination.
    """
    values = [0] * num_variables
    for v in reversed(order):
        total: np.ndarray | None = None
        for factor in holding[v]:
            at: list[int | slice] = [values[u] for u in factor.scope]
            at[factor.scope.index(v)] = slice(None)
            entries = factor.table[(0, *at)]
            total = entries if total is None else total + entries
        if total is not None:
            values[v] = int(total.argmin())
    return values


def _best_values(
    factors: Sequence[Factor], v: int, values: Sequence[np.ndarray], problem: np.ndarray
) -> np.ndarray:
    """Return the minimising value of `v`, for values of the other variables in its factors, per
    problem.

    This is cheaper than to store the position of the minimum for each entry of a full table: few
    entries are needed.

    Args:
        values: [...] of each variable.
        problem: [...] index of the problem.
    """
    total: np.ndarray | None = None
    for factor in factors:
        at = factor.scope.index(v) + 1
        table = factor.table
        if at != table.ndim - 1:
            axes = [*range(at), *range(at + 1, table.ndim), at]
            table = table.transpose(axes)
        row = problem if len(table) > 1 else 0
        entries = table[(row, *[values[u] for u in factor.scope if u != v])]
        total = entries if total is None else total + entries
    if total is None:
        return np.zeros_like(problem)
    best: np.ndarray = total.argmin(axis=-1)
    return best if best.shape == problem.shape else np.broadcast_to(best, problem.shape)


def min_marginals(network: Network, order: Sequence[int]) -> list[np.ndarray]:
    """Return [c][k] the minimum over all assignments in which choice c takes k, of a network of one
    problem; inf if it is not possible.

    Two passes over the bucket tree.
    """
    holding, inward, constant = _passed_on(network, order)
    total = float(constant[0])
    messages = {v: Factor(message.scope, message.table[0]) for v, message in inward.items()}
    children: dict[int, list[int]] = {v: [] for v in order}
    for v, message in messages.items():
        if message.scope:
            children[message.scope[0]].append(v)
    if not np.isfinite(total):
        return [np.full(size, np.inf) for size in network.sizes[: network.num_choices]]
    # outside[v]: what the rest of the network adds to bucket v: its parent's belief less what v
    # itself told it.
    outside = {
        v: np.array(total - float(message.table))
        for v, message in messages.items()
        if not message.scope
    }
    marginals: list[np.ndarray] = [np.zeros(0)] * len(network.sizes)
    for v in reversed(order):
        scope = (v, *messages[v].scope)
        belief = join(holding[v], scope, network.sizes)[0] + outside.pop(v)
        marginals[v] = belief.reshape(len(belief), -1).min(axis=1)
        for child in children[v]:
            finite = np.isfinite(messages[child].table)
            # Scopes are in the order of elimination: what is left has the axes of the child's
            # message.
            seen = belief.min(
                axis=tuple(i for i, u in enumerate(scope) if u not in messages[child].scope)
            )
            outside[child] = np.where(
                finite, seen - np.where(finite, messages[child].table, 0.0), 0.0
            )
        holding[v] = []
    return marginals[: network.num_choices]


def _passed_on(
    network: Network, order: Sequence[int], outer: tuple[int, ...] = ()
) -> tuple[list[list[Factor]], dict[int, Factor], np.ndarray]:
    """Run the first pass: eliminate the variables of `order`.

    A bucket's message is the minimum of its sum over its own variable: a table over the other
    variables of the bucket, and a factor of the bucket of the first of these.

    Args:
        order: the variables in the order of elimination.
        outer: variables that are left, after all of `order`.

    Returns:
        (the factors of every variable's bucket, variable -> its message, [problem] the sum of the
        messages without variables).
    """
    position = {v: i for i, v in enumerate((*order, *outer))}
    holding = _buckets(network, position)
    messages: dict[int, Factor] = {}
    constant = np.zeros(1)
    known: dict[tuple, np.ndarray] = {}
    for v in order:
        neighbours: set[int] = set()
        for factor in holding[v]:
            neighbours.update(factor.scope)
        rest = tuple(sorted(neighbours - {v}, key=position.__getitem__))

        axis = {u: i for i, u in enumerate((v, *rest))}
        tables = []
        for factor in holding[v]:
            tables.append((id(factor.table), *(axis[u] for u in factor.scope)))
        # Equal for buckets that join the same tables in the same way, as layers of one kind do:
        # their tables are computed once.
        key = tuple(sorted(tables))
        if key not in known:
            known[key] = least_of_sum(holding[v], (v, *rest), network.sizes)
        messages[v] = Factor(rest, known[key])
        if rest:
            holding[rest[0]].append(messages[v])
        else:
            constant = constant + known[key]
    return holding, messages, constant


def _buckets(network: Network, position: dict[int, int]) -> list[list[Factor]]:
    """Return the factors of each variable's bucket, indexed by variable. A factor is in the bucket
    of the variable of its scope that is eliminated first.

    Tables with equal contents become one array, so that their ids tell whether they are equal.

    Args:
        position: variable -> its position in the order of elimination.
    """
    holding: list[list[Factor]] = [[] for _ in network.sizes]
    equal: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
    # By id first: comparing contents reads the full tables.
    seen: dict[int, np.ndarray] = {}
    for factor in network.factors:
        table = seen.get(id(factor.table))
        if table is None:
            table = equal.setdefault((factor.table.shape, factor.table.tobytes()), factor.table)
            seen[id(factor.table)] = table
        holding[min(factor.scope, key=position.__getitem__)].append(Factor(factor.scope, table))
    return holding


def join(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """Return the sum of `factors` as one table over problems and `scope`.

    Small tables are added up first, then always the one that widens the sum least: each pass over
    the full table costs as much as all passes over slices of it.
    """
    total, *others = _in_join_order(factors, scope, sizes)
    for table in others:
        total = total + table
    full_shape = (len(total), *[sizes[v] for v in scope])
    return total if total.shape == full_shape else np.broadcast_to(total, full_shape).copy()


def _in_join_order(
    factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]
) -> list[np.ndarray]:
    """Return the tables of factors in the order in which they are added up: the smallest, then
    always the one that widens the sum least. They have an axis for the problems and for each
    variable of `scope`, of size 1 for those that they lack.
    """
    axis = {v: i for i, v in enumerate(scope)}
    waiting: list[np.ndarray] = []
    for factor in sorted(factors, key=lambda f: math.prod(f.table.shape[1:])):
        order = sorted(range(len(factor.scope)), key=lambda i: axis[factor.scope[i]])
        shape = [len(factor.table), *[1] * len(scope)]
        for v in factor.scope:
            shape[axis[v] + 1] = sizes[v]
        waiting.append(factor.table.transpose(0, *[i + 1 for i in order]).reshape(shape))
    if not waiting:
        return [np.zeros([1] * (len(scope) + 1))]

    ordered = [waiting.pop(0)]
    width = ordered[0].shape
    while waiting:
        widths = [math.prod(map(max, width, table.shape)) for table in waiting]
        table = waiting.pop(widths.index(min(widths)))
        width = tuple(map(max, width, table.shape))
        ordered.append(table)
    return ordered


def least_of_sum(
    factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]
) -> np.ndarray:
    """Return the minimum, over the first variable of `scope`, of the sum of `factors`: a table over
    problems and the other variables.

    A large sum is never there as a whole: its blocks stay in the processor's cache.
    """
    total, *others = _in_join_order(factors, scope, sizes)
    while others and math.prod(map(max, total.shape, others[0].shape)) <= BLOCK_ENTRIES:
        total = total + others.pop(0)
    if not others:
        return total.min(axis=1)

    order = _axes_with_long_rows(total, others)
    tables = [np.ascontiguousarray(table.transpose(order)) for table in (total, *others)]
    shape = tuple(map(max, *[table.shape for table in tables]))
    least = np.empty((shape[0], *shape[2:]))
    for block in _blocks(shape):
        parts = [_part_of(table, block) for table in tables]
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        least[(block[0], *block[2:])] = summed.min(axis=1)

    # Axis 1 is gone: its place and those before it are the same in both orders.
    place = {axis: i for i, axis in enumerate([0, *order[2:]])}
    return np.ascontiguousarray(least.transpose([place[axis] for axis in sorted(place)]))


def _axes_with_long_rows(total: np.ndarray, others: Sequence[np.ndarray]) -> list[int]:
    """Return the axes of tables that are added up, in an order in which numpy adds long rows.

    The axes of the last table alone come last: over these, the sum of the others is one number.
    """
    *before, last = (total, *others)
    shape_before = tuple(map(max, *[table.shape for table in (total, *before)]))

    def rank(axis: int) -> tuple[bool, bool]:
        return last.shape[axis] > 1, shape_before[axis] == 1

    return [0, 1, *sorted(range(2, last.ndim), key=rank)]


def _part_of(table: np.ndarray, block: tuple[slice, ...]) -> np.ndarray:
    """Return the block of a table; an axis of one entry holds for all of it."""
    at = []
    for part, size in zip(block, table.shape, strict=True):
        at.append(part if size > 1 else slice(None))
    return table[tuple(at)]


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the blocks of a table of `shape`, split along all axes but axis 1: about
    `BLOCK_ENTRIES` entries each.
    """
    steps = list(shape)
    for axis in (0, *range(2, len(shape))):
        others = math.prod(steps) // steps[axis]
        if others * steps[axis] > BLOCK_ENTRIES:
            steps[axis] = max(1, BLOCK_ENTRIES // others)
    starts = [range(0, size, step) for size, step in zip(shape, steps, strict=True)]
    for corner in product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(corner, steps, strict=True))


def _paid_once(
    cost: np.ndarray, source: np.ndarray, targets: Sequence[np.ndarray], shape: Sequence[int]
) -> np.ndarray:
    """Return [problem, *shape] the costs of the distinct ones of `targets` from `source`.

    Args:
        cost: [problem, source layout, target layout]
        source, targets: indices of layouts that broadcast to `shape`.
    """
    table = np.zeros((len(cost), *shape))
    for i, target in enumerate(targets):
        repeated = np.zeros(1, dtype=bool)
        for earlier in targets[:i]:
            repeated = repeated | (target == earlier)
        table += np.where(repeated, 0.0, cost[:, source, target])
    return table


def _through_layouts(
    transfer: Transfer,
    cost: np.ndarray,
    sizes: list[int],
    factors: list[Factor],
    known: dict[tuple, np.ndarray],
) -> bool:
    """Add variables for the distinct layouts at both ends of a transfer, tied to the choices, and
    one table over them. Return False, with nothing added, if that would be too large.

    Args:
        cost: [source, target] of the transfer.
        sizes: of all variables; gets those of the new ones.
        factors: gets the new ones.
        known: tables of earlier calls, by their content.
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
        tie = np.full((1, sizes[choice], len(values)), np.inf)
        tie[0, np.arange(sizes[choice]), inverse] = 0.0
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


class Order(NamedTuple):
    """Variables in the order of their elimination, and the entries of the largest table."""

    variables: list[int]
    most_entries: float


def plan_order(
    network: Network,
    most_a_table: float = MAX_TABLE_ENTRIES,
    most_in_all: float = MAX_TOTAL_ENTRIES,
    outer: Collection[int] = (),
) -> Order | None:
    """Return an order of elimination whose tables have at most that many entries; None if neither
    of the two that are tried is such.

    Args:
        most_a_table: entries of one table.
        most_in_all: entries of all tables.
        outer: variables that are not eliminated.
    """
    scopes = tuple([factor.scope for factor in network.factors])
    for smallest_table in (False, True):
        order = _order_of(network.sizes, scopes, tuple(outer), smallest_table)
        entries = [size for _, size in order]
        largest = max(entries, default=0.0)
        if largest <= most_a_table and sum(entries) <= most_in_all:
            return Order([v for v, _ in order], largest)
    return None


@lru_cache(maxsize=512)
def _order_of(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    outer: tuple[int, ...],
    smallest_table: bool,
) -> list[tuple[int, float]]:
    """Return `elimination_order`, cached for networks that differ only in their tables."""
    return elimination_order(sizes, scopes, outer, smallest_table)


def elimination_order(
    sizes: Sequence[int],
    scopes: Iterable[Sequence[int]],
    outer: Collection[int] = (),
    smallest_table: bool = False,
) -> list[tuple[int, float]]:
    """Return (variable, entries of the table that its elimination joins), in order, of all
    variables but `outer`.

    Args:
        sizes: values of each variable.
        scopes: the variables of every factor.
        smallest_table: next is the variable with the smallest table, and fill decides among equals;
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

    remaining = set(range(len(sizes))) - set(outer)
    now = {v: cost(v) for v in remaining}
    heap = [(now[v], v) for v in sorted(remaining)]
    heapq.heapify(heap)
    order: list[tuple[int, float]] = []
    while heap:
        queued_cost, v = heapq.heappop(heap)
        if v not in remaining or queued_cost != now[v]:
            continue
        # Ties made since among its neighbours may have made it cheaper.
        new_cost = cost(v)
        if new_cost != queued_cost:
            now[v] = new_cost
            heapq.heappush(heap, (new_cost, v))
            continue
        remaining.discard(v)
        order.append((v, math.prod((float(sizes[u]) for u in around[v]), start=float(sizes[v]))))
        for u in around[v]:
            around[u] |= around[v]
            around[u] -= {u, v}
        for u in around[v] & remaining:
            now[u] = cost(u)
            heapq.heappush(heap, (now[u], u))
    return order
