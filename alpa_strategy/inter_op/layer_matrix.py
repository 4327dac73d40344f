"""The least cost of one layer from boundary layout to boundary layout: matrices whose min-plus
products price every run of layers.

This approximates: inside a stage, values pass from layer to layer in `R` or `S<d>` (never as
partial values). Of several values that cross a boundary the largest chooses its layout; the others
follow it dim by dim, and are resharded if that differs at the next boundary. The ILP itself solves
the stages that are chosen.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.layer_elimination import Elimination, plan_elimination
from alpa_strategy.inter_op.stage_problem import (
    PER_STEP,
    CostBreakdown,
    StageProblem,
    weigh,
    zero_costs,
)
from alpa_strategy.intra_op.build import BoundaryChoice, boundary_layouts
from alpa_strategy.intra_op.decode import read_last
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.options import gathers
from alpa_strategy.intra_op.problem import (
    Choice,
    Problem,
    Transfer,
    Use,
    evaluate,
    restrict_strategies,
)
from alpa_strategy.intra_op.solver.elimination import eliminate
from alpa_strategy.intra_op.solver.solve import solve
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.placement import INVARIANT, DualLayout, shard
from alpa_strategy.sharding.redistribute import reshard_table

# Of one table at all prices that are solved together.
TOGETHER_ENTRIES = 2_000_000
# The last axis of `parts`: seconds of a micro-batch and once per step; bytes always and per
# micro-batch in flight, boundary in, boundary out, largest temporary; where every layer is
# recomputed alone: the largest layer's graph, and what passes from layer to layer inside the run;
# of `once` and `always`: what is made of parameters alone, which can be recomputed for every
# micro-batch; temporary bytes of the optimizer's update; where gradients begin with the step, those
# that the run's backward makes; seconds of a micro-batch's sums that overlap with matmuls, which
# the others do not contain.
Part = IntEnum(
    "Part",
    "FORWARD BACKWARD ONCE ALWAYS SAVED ENTERING LEAVING WORKING AGAIN PASSING DERIVING DERIVED"
    " UPDATE MADE OVERLAPPED",
    start=0,
)
SUMMED_FIELDS = ("forward", "backward", "once", "always", "saved", "again", "overlapped")
SUMMED = {Part[name.upper()]: name for name in SUMMED_FIELDS}
PER_STEP_SUMMED = {Part.DERIVING: "once", Part.DERIVED: "always"}


class Price(NamedTuple):
    """The weights of one elimination."""

    # Seconds per byte.
    per_byte: float

    # Micro-batches in flight.
    in_flight: float

    # Whether sums over devices overlap with matmuls, where they can.
    overlaps: bool = True


@dataclass(frozen=True)
class LayerMatrix:
    """The costs of the cheapest assignment of a layer, from layout p to layout q under price k."""

    # [k, p, q] what was minimised (inf where impossible)
    objective: np.ndarray

    # [k, p, q, part] every `Part`
    parts: np.ndarray

    # [k] by how much `objective` may exceed the optimum; inf where that is not known
    excess: np.ndarray

    def floors(self) -> np.ndarray:
        """Return [k] lower bounds of the objective, for any layouts at the ends."""
        return floor_of(self.objective.min(axis=(1, 2)), self.excess)


def floor_of(seconds: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return lower bounds of seconds that exceed an optimum by at most `excess`."""
    is_known = np.isfinite(excess)
    return np.maximum(seconds - np.where(is_known, excess, 0.0), 0.0) * is_known


@dataclass(frozen=True)
class LayerBoundary:
    """The boundary values of a layer: the leader at each end, and its layouts. None: nothing
    crosses, and there is one state.
    """

    entering: int | None
    leaving: int | None
    entering_layouts: tuple[DualLayout, ...]
    leaving_layouts: tuple[DualLayout, ...]

    # Values that cross both boundaries.
    passing: tuple[int, ...] = ()


def passing_seconds(
    graph: StepGraph, ends: LayerBoundary, tables: OptionTables
) -> tuple[np.ndarray, np.ndarray]:
    """Return (forward, backward) seconds of a micro-batch, [entering layout, leaving layout], of
    the values that cross a layer: resharding from the layouts in which they enter to those in which
    they leave.

    Args:
        graph: the layer's.
        ends: its boundaries.
        tables: of the logical mesh.
    """
    shape = (len(ends.entering_layouts), len(ends.leaving_layouts))
    forward, backward = np.zeros(shape), np.zeros(shape)
    for value in ends.passing:
        meta = graph.values[value]
        layouts = boundary_layouts(meta, tables.mesh.shape)
        before = _followed(graph, value, layouts, ends.entering, ends.entering_layouts)
        after = _followed(graph, value, layouts, ends.leaving, ends.leaving_layouts)
        passed = reshard_table(layouts, layouts, meta.num_bytes, meta.requires_grad, tables.mesh)
        forward += passed[0][np.ix_(before, after)]
        backward += passed[1][np.ix_(before, after)]
    return forward, backward


def layer_matrix(
    joined: "LayerProblem",
    prices: Sequence[Price],
    num_microbatches: int,
    passing: tuple[np.ndarray, np.ndarray],
    begins: bool,
) -> LayerMatrix:
    """Solve the layer once per price, for all pairs of boundary layouts together.

    The objective is inf, and parts are 0, if pins leave a choice no strategy.

    Args:
        joined: the layer's problem.
        prices: of memory.
        passing: of `passing_seconds`.
        begins: whether gradients begin with the step, as of `decode.working_bytes`.
    """
    shape = (len(prices), len(joined.entering_bytes), len(joined.leaving_bytes))
    # [price, p, q], [price, p, q, part]
    objective = np.full(shape, np.inf)
    parts = np.zeros((*shape, len(Part)))
    live = [np.flatnonzero(np.isfinite(p.forward + p.backward + p.once)) for p in joined.choices]
    if any(len(strategies) == 0 for strategies in live):
        return LayerMatrix(objective, parts, np.zeros(len(prices)))
    problem = _problem_at(joined, prices, num_microbatches)
    if any(
        len(strategies) < len(p.forward) for strategies, p in zip(live, joined.choices, strict=True)
    ):
        # What pins forbid is not even looked at.
        problem = restrict_strategies(problem, live)
    ends = (joined.entering, joined.leaving)
    elimination = plan_elimination(problem, ends)
    if elimination is not None:
        excess = elimination.excess
        objective[:], values = _eliminated(elimination, ends, len(prices))
    else:
        pairs, bound = dense_layer_costs(_one_by_one(problem, len(prices)), ends)
        objective[:], values = _stacked(pairs)
        excess = objective.min(axis=(1, 2)) - bound
    values = [strategies[v] for strategies, v in zip(live, values, strict=False)]
    parts[:] = _sum_parts(joined, values, shape, begins)
    objective += num_microbatches * sum(passing)
    parts[..., Part.FORWARD] += passing[0]
    parts[..., Part.BACKWARD] += passing[1]
    return LayerMatrix(objective, parts, excess)


def _problem_at(joined: "LayerProblem", prices: Sequence[Price], num_microbatches: int) -> Problem:
    """Return the layer's problem at all prices: costs have a leading axis for them."""
    choices = _priced(joined.choices, prices, num_microbatches)
    tables = _priced(joined.transfers, prices, num_microbatches)
    return priced_problem(joined, choices, tables)


def priced_problem(
    joined: "LayerProblem", choices: Sequence[np.ndarray], tables: Sequence[np.ndarray]
) -> Problem:
    """Return the layer's problem with the costs of its choices and of its transfers replaced,
    memory included.
    """
    return Problem(
        tuple(Choice(str(i), cost, cost) for i, cost in enumerate(choices)),
        tuple(replace(t, cost=c, memory=c) for t, c in zip(joined.problem, tables, strict=True)),
    )


def _eliminated(elimination: Elimination, ends: tuple[int, int], num_prices: int) -> "Pairs":
    """Return the costs, [price, p, q], of the layer at all prices, with the choices' strategies.

    As many prices are eliminated together as `TOGETHER_ENTRIES` allows.

    Args:
        elimination: of the layer's problem at `num_prices` prices.
        ends: the choices p and q, of the boundaries' layouts.
    """
    network = elimination.network
    order = elimination.order
    together = max(1, int(TOGETHER_ENTRIES / max(order.most_entries, 1.0)))
    pairs = []
    for first in range(0, num_prices, together):
        at_some_prices = network.with_tables(partial(_rows, first=first, last=first + together))
        pairs.append(eliminate(at_some_prices, order.variables, ends))
    return _joined_prices(pairs)


def _rows(table: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the entries of a table for some of its prices; a table that holds for all prices
    unchanged.
    """
    return table if len(table) == 1 else table[first:last]


def _joined_prices(pairs: Sequence["Pairs"]) -> "Pairs":
    """Return pairs of tables, each for some prices, as one."""
    if len(pairs) == 1:
        return pairs[0]
    objectives, values = zip(*pairs, strict=True)
    by_choice = zip(*values, strict=True)
    return np.concatenate(objectives), [np.concatenate(of_choice) for of_choice in by_choice]


def _one_by_one(problem: Problem, num_prices: int) -> list[Problem]:
    """Return the problem at each of `num_prices` prices: the leading axis of its tables."""
    problems = []
    for k in range(num_prices):
        choices = tuple(replace(x, cost=x.cost[k], memory=x.memory[k]) for x in problem.choices)
        transfers = tuple(replace(t, cost=t.cost[k], memory=t.memory[k]) for t in problem.transfers)
        problems.append(Problem(choices, transfers))
    return problems


def _stacked(pairs: Sequence["Pairs"]) -> "Pairs":
    """Return [price, p, q] of one pair of tables per price."""
    objectives, values = zip(*pairs, strict=True)
    by_choice = zip(*values, strict=True)
    return np.stack(objectives), [np.stack(of_choice) for of_choice in by_choice]


@dataclass(frozen=True)
class LayerProblem:
    """A stage problem whose boundary values all follow two choices, `entering` and `leaving`."""

    stage: StageProblem
    choices: tuple[CostBreakdown, ...]
    transfers: tuple[CostBreakdown, ...]
    problem: tuple[Transfer, ...]
    entering: int
    leaving: int
    entering_bytes: np.ndarray
    leaving_bytes: np.ndarray
    # per transfer of `IntraOp.gathered_again`, [source, target] bytes of what is gathered; None for
    # others
    gathered: tuple[np.ndarray | None, ...]


def follow_leaders(stage: StageProblem, ends: LayerBoundary) -> LayerProblem:
    """Return the problem of a layer for `layer_matrix`: all boundary values follow the leader of
    their end.
    """
    entering = len(stage.choices)
    leaving = entering + 1
    into = _followers(stage.intra.step, stage.intra.received, ends.entering, ends.entering_layouts)
    out = _followers(stage.intra.step, stage.intra.sent, ends.leaving, ends.leaving_layouts)

    choices = list(stage.choices)
    entering_bytes = np.zeros(len(ends.entering_layouts))
    leaving_bytes = np.zeros(len(ends.leaving_layouts))
    for followers, stored_bytes in ((into, entering_bytes), (out, leaving_bytes)):
        for choice, followed in followers.items():
            stored_bytes += stage.choices[choice].saved[followed]
            choices[choice] = zero_costs(1)
    choices += [zero_costs(len(entering_bytes)), zero_costs(len(leaving_bytes))]

    transfers = []
    for transfer in stage.intra.problem.transfers:
        transfers.append(_with_leaders(transfer, (entering, into), (leaving, out)))
    transfer_costs, gathered = _transfer_costs(stage)
    return LayerProblem(
        stage=stage,
        choices=tuple(choices),
        transfers=tuple(transfer_costs),
        problem=tuple(transfers),
        entering=entering,
        leaving=leaving,
        entering_bytes=entering_bytes,
        leaving_bytes=leaving_bytes,
        gathered=tuple(gathered),
    )


def without_hidden_gathers(problem: LayerProblem, overlap: float) -> LayerProblem:
    """Return the problem of a layer of one stage on all devices, without the share of the
    communication of its parameters that may be hidden behind computation
    (`beside_compute.without_prefetched`); unchanged if `overlap`, that share, is 0.
    """
    if not overlap:
        return problem
    transfers = []
    for costs, gathered in zip(problem.transfers, problem.gathered, strict=True):
        if gathered is None:
            transfers.append(costs)
            continue
        forward = (1 - overlap) * costs.forward
        backward = (1 - overlap) * costs.backward
        transfers.append(replace(costs, forward=forward, backward=backward))
    return replace(problem, transfers=tuple(transfers))


def _followers(
    graph: StepGraph,
    values: Mapping[int, BoundaryChoice],
    leader: int | None,
    layouts: tuple[DualLayout, ...],
) -> dict[int, np.ndarray]:
    """Return the choice of each boundary value -> [leader's layout] the layout that it has then.

    Args:
        values: that cross one boundary, with their choices.
        leader: of the boundary. layouts: of the leader.
    """
    followers = {}
    for value, boundary in values.items():
        followers[boundary.choice] = _followed(graph, value, boundary.layouts, leader, layouts)
    return followers


def _with_leaders(
    transfer: Transfer,
    entering: tuple[int, Mapping[int, np.ndarray]],
    leaving: tuple[int, Mapping[int, np.ndarray]],
) -> Transfer:
    """Return a transfer with the leaders' choices in place of those of boundary values.

    Args:
        entering, leaving: the leader's choice, and `_followers` of its boundary.
    """
    producer = transfer.producer
    source = np.asarray(transfer.source)
    entering_choice, into = entering
    if producer in into:
        source = source[into[producer]]
        producer = entering_choice

    leaving_choice, out = leaving
    uses = []
    for use in transfer.uses:
        if use.choice in out:
            followed = np.asarray(use.layout)[out[use.choice]]
            uses.append(Use(leaving_choice, followed))
        else:
            uses.append(use)
    return replace(transfer, producer=producer, source=source, uses=tuple(uses))


def _transfer_costs(
    stage: StageProblem,
) -> tuple[list[CostBreakdown], list[np.ndarray | None]]:
    """Return the costs of each transfer, and [source, target] bytes of re-gathered values; None for
    other values.
    """
    intra = stage.intra
    costs = list(stage.transfers)
    gathered: list[np.ndarray | None] = []
    for index, layouts in enumerate(intra.transfers):
        meta = intra.step.values[layouts.value]
        sizes = [local_bytes(meta, target, intra.mesh.shape) for target in layouts.targets]
        saved = costs[index].saved
        # Inside a stage a received value is saved like any other.
        if layouts.value in intra.received and saved.any():
            saved_bytes = np.broadcast_to(sizes, saved.shape).astype(float)
            costs[index] = replace(costs[index], saved=saved_bytes)

        if layouts.value in intra.gathered_again:
            is_gathered = gathers(layouts.sources, layouts.targets)
            gathered.append(np.where(is_gathered, sizes, 0))
        else:
            gathered.append(None)
    return costs, gathered


def _followed(
    graph: StepGraph,
    value: int,
    value_layouts: tuple[DualLayout, ...],
    leader: int | None,
    layouts: tuple[DualLayout, ...],
) -> np.ndarray:
    """Return, per layout of the leader, the index of the layout that a value has then: unsharded
    where it cannot follow.

    Args:
        value_layouts: of the value; the result has indices of these.
        leader: the value that leads; None: there is none.
        layouts: of the leader.
    """
    if len(value_layouts) == 1:
        return np.zeros(len(layouts), dtype=int)
    if value == leader:
        return np.array([value_layouts.index(layout) for layout in layouts])
    shape = graph.values[value].shape
    leading = graph.values[leader].shape if leader is not None else ()
    indices = []
    for layout in layouts:
        followed = _followed_layout(layout, shape, leading)
        if followed not in value_layouts:
            followed = (INVARIANT,) * len(layout)
        indices.append(value_layouts.index(followed))
    return np.array(indices)


def _followed_layout(
    layout: DualLayout, shape: tuple[int, ...], leading: tuple[int, ...]
) -> DualLayout:
    """Return the layout that shards the same dims as the leader's `layout`, if they have the same
    size; other mesh axes do not shard the value.

    Args:
        shape: of the value that follows.
        leading: shape of the leader.
    """
    placements = []
    for placement in layout:
        dim = placement.shard_dim
        has_dim = dim is not None and dim < len(shape)
        if dim is not None and has_dim and shape[dim] == leading[dim]:
            placements.append(shard(dim))
        else:
            placements.append(INVARIANT)
    return tuple(placements)


def _priced(
    breakdowns: Sequence[CostBreakdown], prices: Sequence[Price], num_microbatches: int
) -> list[np.ndarray]:
    """Return, per breakdown, [price, ...] its seconds of a step plus its bytes at their price."""
    seconds, _ = weigh(breakdowns, num_microbatches, 1)
    per_byte = np.array([price.per_byte for price in prices])
    in_flight = np.array([price.in_flight for price in prices])
    is_apart = np.array([not price.overlaps for price in prices])
    costs = []
    for breakdown, without_price in zip(breakdowns, seconds, strict=True):
        axes = (-1, *[1] * without_price.ndim)
        cost = np.broadcast_to(without_price, (len(prices), *without_price.shape))
        if per_byte.any() and not breakdown.nonzero.isdisjoint(("always", "saved")):
            num_bytes = breakdown.always + in_flight.reshape(axes) * breakdown.saved
            cost = without_price + per_byte.reshape(axes) * num_bytes
        if is_apart.any() and "overlapped" in breakdown.nonzero:
            cost = cost + num_microbatches * is_apart.reshape(axes) * breakdown.overlapped
        costs.append(cost)
    return costs


def _sum_parts(
    joined: LayerProblem, values: Sequence[np.ndarray], shape: tuple[int, ...], begins: bool
) -> np.ndarray:
    """Return [price, p, q, part] of the minimising assignments.

    Args:
        values: per choice, [price, p, q] the strategy that it takes.
        shape: (prices, p, q).
        begins: see `decode.working_bytes`.
    """
    intra = joined.stage.intra
    total = np.zeros((*shape, len(Part)))
    working, gathered, gradient_bytes = (np.zeros(shape) for _ in range(3))
    read = read_last(intra) if begins else [[]] * len(intra.ops)
    offset = len(intra.parameters)
    for index, costs in enumerate(joined.choices):
        _add(total, costs, values[index])
    scratch = intra.tables.optimizer.scratch
    for index, parameter in enumerate(intra.parameters):
        total[..., Part.UPDATE] += scratch * parameter.gradient_bytes[values[index]]
        total[..., Part.DERIVED] -= joined.stage.held_copies[index][values[index]]
    for index, (options, parameters) in enumerate(zip(intra.ops, read, strict=True)):
        gradient_bytes += sum(intra.parameters[p].gradient_bytes[values[p]] for p in parameters)
        np.maximum(
            working, options.temporary_bytes[values[offset + index]] - gradient_bytes, out=working
        )
    for transfer, costs, sizes in zip(
        joined.problem, joined.transfers, joined.gathered, strict=True
    ):
        source = np.asarray(transfer.source)[values[transfer.producer]]
        # Per use, [price, p, q] target layout: what an earlier use asked for is there.
        targets: list[np.ndarray] = []
        for use in transfer.uses:
            target = np.asarray(use.layout)[values[use.choice]]
            new = np.ones(shape, dtype=bool)
            for earlier in targets:
                new &= target != earlier
            targets.append(target)
            _add(total, costs, (source, target), new)
        if sizes is not None:
            for target in targets:
                np.maximum(gathered, sizes[source, target], out=gathered)
    total[..., Part.ENTERING] = joined.entering_bytes[:, None]
    total[..., Part.LEAVING] = joined.leaving_bytes
    total[..., Part.WORKING], total[..., Part.MADE] = working + 2 * gathered, gradient_bytes
    return total


def _add(
    total: np.ndarray, costs: CostBreakdown, index: Any, where: np.ndarray | float = 1.0
) -> None:
    """Add costs to the totals [..., component] in place, at `index` of the costs, where `where` is
    1.
    """
    summed = SUMMED | PER_STEP_SUMMED if costs.span == PER_STEP else SUMMED
    for i, name in summed.items():
        if name in costs.nonzero:
            total[..., i] += np.where(where, getattr(costs, name)[index], 0.0)


# --- Layers too entangled for tables (a scan over time: every step reads the same few values),
# priced by assignments.
#
# The ILP's solver gives good assignments with both ends free (one for every layout at an end takes
# it half a minute). Each pair of ends is priced by the best of them with its ends moved there: what
# is inside stays, and the resharding at the ends is paid. As elsewhere, a run is never priced below
# its optimum.


SECONDS_PER_SOLVE = 5.0

# [p, q] objective, per choice [p, q] what it takes; with a leading axis where prices are together
Pairs = tuple[np.ndarray, list[np.ndarray]]


def dense_layer_costs(
    problems: Sequence[Problem], ends: tuple[int, int]
) -> tuple[list[Pairs], float]:
    """Return, per problem, an assignment for each pair of values of the two choices `ends`, and its
    objective; inf if there is none. And a lower bound of all objectives; 0 if the first problem is
    impossible.

    Args:
        problems: one problem at several prices of memory, the lowest first.
    """
    # At the lowest and the highest price of memory.
    starts: list[tuple[int, ...]] = []
    bound = 0.0
    for index, problem in enumerate((problems[0], problems[-1])[: len(problems)]):
        # Impossible whatever the ends.
        with suppress(PlanError):
            solution = solve(problem, SECONDS_PER_SOLVE)
            starts.append(solution.assignment)
            if index == 0:
                bound = max(solution.bound, 0.0)
    pairs = [_moved_ends(problem, ends, list(dict.fromkeys(starts))) for problem in problems]
    return pairs, bound


def _moved_ends(
    problem: Problem, ends: tuple[int, int], starts: Sequence[tuple[int, ...]]
) -> Pairs:
    """Return the cheapest solution for each pair of strategies of the two end choices.

    Args:
        problem: of the layers.
        ends: the two choices.
        starts: assignments; in each, only the ends are changed.

    Returns:
        (seconds [first, last], inf if none is allowed; for each choice its strategy [first, last]).
    """
    shape = tuple(len(problem.choices[end].cost) for end in ends)
    objective = np.full(shape, np.inf)
    values = np.zeros((len(problem.choices), *shape), dtype=int)
    for start, pair in product(starts, np.ndindex(*shape)):
        moved = list(start)
        moved[ends[0]], moved[ends[1]] = pair
        seconds, _ = evaluate(problem, moved)
        if seconds < objective[pair]:
            objective[pair], values[(slice(None), *pair)] = seconds, moved
    return objective, list(values)
