"""Lower bounds of the seconds of stages that fit into memory: Lagrangian bounds of runs of layers.

A stage has two limits of memory: with its activations, and while the optimizer updates. For any
layouts that fit, seconds plus a price of their bytes are at most seconds plus that price of the
limit. So the least of `seconds + price * bytes` over all layouts, less `price * limit`, is a lower
bound of the seconds, for every price. The least is computed layer by layer, by the elimination that
prices layers for the stage DP (layer_matrix.py): a sum over layers is below the minimum of all
together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from alpa_strategy.inter_op.layer_elimination import plan_elimination
from alpa_strategy.inter_op.layer_matrix import LayerProblem, priced_problem
from alpa_strategy.inter_op.stage_problem import PER_STEP, CostBreakdown
from alpa_strategy.intra_op.problem import Problem
from alpa_strategy.intra_op.solver.elimination import eliminate

if TYPE_CHECKING:
    from alpa_strategy.inter_op.layer_pricing import PricedLayers, UnpricedLayers
    from alpa_strategy.inter_op.stage_costs import LayerRangeCosts, StageCostTask


class FloorPrice(NamedTuple):
    """A price of memory, and the bytes that it applies to.

    Attributes:
        per_byte: seconds per byte (in `EXTRA_PRICES`, multiples of those of the step).
        alive: number of micro-batches whose activations count.
        share: weight of the limit with activations; the limit of the optimizer's step has the rest.
        recomputes: 1.0 for stages that recompute, which save no activations; else 0.0.
    """

    per_byte: float
    alive: float
    share: float
    recomputes: float


# Beside the prices that the stage DP has already, all of which are of activations. Stages that
# recompute are held by the optimizer's step alone: while they run, what is made of parameters may
# be recomputed.
EXTRA_PRICES = (
    FloorPrice(1.5, 16.0, 1.0, 0.0),
    FloorPrice(1e4, 16.0, 1.0, 0.0),
    FloorPrice(5.0, 0.0, 0.0, 0.0),
    FloorPrice(1e4, 0.0, 0.0, 0.0),
    FloorPrice(0.0, 0.0, 0.0, 1.0),
    FloorPrice(5.0, 0.0, 0.0, 1.0),
    FloorPrice(1e4, 0.0, 0.0, 1.0),
)


def layer_floors(
    joined: LayerProblem,
    prices: Sequence[FloorPrice],
    num_microbatches: int,
    passing: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return, per price, the least of a layer's seconds in a step plus the price of its bytes.

    It is 0 for a layer whose tables would be too large: nothing is known of it.

    Args:
        joined: the layer's problem.
        prices: of memory.
        passing: of `passing_seconds`.

    Returns:
        [price] seconds.
    """
    elimination = plan_elimination(_problem_at(joined, prices, num_microbatches))
    if elimination is None:
        return np.zeros(len(prices))

    # [price]
    minimum, _ = eliminate(elimination.network, elimination.order.variables)
    minimum = np.maximum(minimum - elimination.excess, 0.0)
    forward, backward = passing
    floors = np.zeros(len(prices))
    for index, price in enumerate(prices):
        crossing = (1 + price.recomputes) * forward + backward
        floors[index] = minimum[index] + num_microbatches * float(crossing.min())
    return floors


def _problem_at(
    joined: LayerProblem, prices: Sequence[FloorPrice], num_microbatches: int
) -> Problem:
    """Return the layer's problem at all prices: costs have a leading axis for them, and include the
    price of the bytes.
    """

    per_byte, alive, share, recomputes = np.array(prices).T

    def priced(costs_of: CostBreakdown) -> np.ndarray:
        axes = (-1, *[1] * costs_of.forward.ndim)
        seconds = (1 + recomputes.reshape(axes)) * costs_of.forward + costs_of.backward
        cost = num_microbatches * seconds + costs_of.once
        if costs_of.nonzero.isdisjoint(("always", "saved")):
            return cost
        # What is made once per step is gone when the optimizer updates.
        share_of_always = share.reshape(axes) if costs_of.span == PER_STEP else 1.0
        saved_weight = (share * alive).reshape(axes)
        num_bytes = share_of_always * costs_of.always + saved_weight * costs_of.saved
        return cost + per_byte.reshape(axes) * num_bytes

    intra = joined.stage.intra
    costs = [priced(costs_of) for costs_of in joined.choices]
    # [price, 1] seconds per byte of gradients, while the optimizer updates.
    of_update = (per_byte * (1 - share))[:, None]
    for index, parameter in enumerate(intra.parameters):
        scratch_bytes = intra.tables.optimizer.scratch * parameter.gradient_bytes
        at_update = scratch_bytes + joined.stage.held_copies[index]
        costs[index] = costs[index] + of_update * at_update

    tables = [priced(costs_of) for costs_of in joined.transfers]
    return priced_problem(joined, costs, tables)


def least_working(joined: LayerProblem) -> float:
    """Return the temporary bytes that a layer needs in any layouts."""
    least = (float(options.temporary_bytes.min()) for options in joined.stage.intra.ops)
    return max(least, default=0.0)


def least_always(joined: LayerProblem) -> float:
    """Return the bytes that a layer's parameters and buffers need in any layouts, whatever is in
    flight.
    """
    return sum(float(parts.always.min()) for parts in joined.choices)


# Of one shape: prices [price, field], seconds [price, layer], bytes always and temporary [layer].
Floors = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def floors_of(job: "StageCostTask", priced: "PricedLayers", is_needed: bool) -> Floors:
    """Return lower bounds of every layer under the memory limit, at the prices at which layers were
    solved: of stages whose activations count and that recompute nothing.

    Args:
        is_needed: whether memory may bind.

    Returns:
        The prices, seconds, bytes always and temporary bytes, as of `Floors`. Without prices, and
        with bytes of 0, if memory cannot bind or layers were solved at one price only.
    """
    kinds = priced.unpriced.kinds
    if not is_needed or len(priced.prices) == 1:
        nothing = np.zeros(len(kinds))
        return np.zeros((0, 4)), np.zeros((0, len(kinds))), nothing, nothing

    prices = [FloorPrice(price.per_byte, price.in_flight, 1.0, 0.0) for price in priced.prices]
    of_kinds = [matrix.floors() for matrix in priced.matrices]
    seconds = np.stack([of_kinds[kind] for kind in kinds], axis=1)
    problems = priced.unpriced.problems
    always = np.array([least_always(problem) for problem in problems])
    working = np.array([least_working(problem) for problem in problems])
    # What is temporary may take the place of gradients.
    if job.gradients_begin:
        working[:] = 0.0
    return np.array(prices), seconds, always[kinds], working[kinds]


# Of one shape: prices [price, field], seconds [price, layer].
ExtraFloors = tuple[np.ndarray, np.ndarray]


def extra_floors(job: "StageCostTask", layers: "UnpricedLayers", scale: float) -> ExtraFloors:
    """Return the `EXTRA_PRICES` that the options allow, in seconds per byte, and lower bounds of
    every layer's seconds at them, [price, layer].

    Args:
        scale: seconds per byte of a step in the fastest layouts.
    """
    prices = _extra_prices(job, scale)
    of_kinds = []
    for problem, passing in zip(layers.problems, layers.passing, strict=True):
        of_kinds.append(layer_floors(problem, prices, job.num_microbatches, passing))
    return np.array(prices), np.stack([of_kinds[kind] for kind in layers.kinds], axis=1)


def no_extra_floors(job: "StageCostTask") -> ExtraFloors:
    """Return as many bounds as `extra_floors` does, all of them at price 0."""
    count = len(_extra_prices(job, 0.0))
    return np.zeros((count, 4)), np.zeros((count, job.num_layers))


def _extra_prices(job: "StageCostTask", scale: float) -> list[FloorPrice]:
    """Return `EXTRA_PRICES` in seconds per byte, without those of stages that options rule out."""
    prices = []
    for price in EXTRA_PRICES:
        if job.remat in (None, bool(price.recomputes)):
            prices.append(price._replace(per_byte=scale * price.per_byte))
    return prices


def side_by_side(floors: Sequence[Floors], num_layers: int) -> Floors:
    """Return the bounds of several logical shapes, with a leading axis for the shapes.

    Shapes with fewer prices than others get bounds of 0 seconds at prices of 0.

    Args:
        floors: of each shape, as of `floors_of`.
    """
    most = max((len(floor[0]) for floor in floors), default=0)
    prices = np.zeros((len(floors), most, 4))
    seconds = np.zeros((len(floors), most, num_layers))
    always, working = (np.zeros((len(floors), num_layers)) for _ in range(2))
    for index, floor in enumerate(floors):
        prices[index, : len(floor[0])], seconds[index, : len(floor[0])] = floor[:2]
        always[index], working[index] = floor[2:]
    return prices, seconds, always, working


class StageFloors:
    """The floors of all stages that a job's pipelines may have."""

    def __init__(self, job: "StageCostTask", runs: Sequence["LayerRangeCosts"]) -> None:
        self._job, self._runs = job, runs
        self._sums = [_of_runs(costs.floor_seconds) for costs in runs]
        self._always = [_of_runs(costs.floor_always[:, None])[:, 0] for costs in runs]
        self._working = [_largest_of_runs(costs.floor_working) for costs in runs]
        self._known: dict[tuple[object, ...], np.ndarray] = {}

    def seconds(
        self,
        alive: float,
        stages_per_mesh: int = 1,
        may_recompute: bool = True,
        submesh: int | None = None,
    ) -> np.ndarray:
        """Return lower bounds of stages' seconds per step, [first layer, last + 1, submesh]; 0 if
        nothing is known. [first layer, last + 1] if `submesh` is given.

        Args:
            alive: the least number of (micro-batch, stage) pairs that a mesh stores at once.
            stages_per_mesh: stages that share the mesh, and its memory in equal shares.
            may_recompute: whether stages may recompute their activations.
        """
        if submesh is None:
            submeshes = range(len(self._runs))
            floors = [
                self.seconds(alive, stages_per_mesh, may_recompute, submesh_index)
                for submesh_index in submeshes
            ]
            return np.stack(floors, axis=-1)
        key = submesh, alive, stages_per_mesh, may_recompute
        if key not in self._known:
            self._known[key] = self._of_submesh(
                submesh, alive / stages_per_mesh, stages_per_mesh, may_recompute
            )
        return self._known[key]

    def _of_submesh(
        self, submesh: int, alive: float, stages_per_mesh: int, may_recompute: bool
    ) -> np.ndarray:
        """Return [first, last + 1] the least bound over logical shapes, and over whether the stage
        recomputes; 0 if there are no bounds.

        Args:
            submesh: its index.
            alive: micro-batches whose activations a stage stores at least.
            stages_per_mesh, may_recompute: as of `seconds`.
        """
        costs, remat = self._runs[submesh], self._job.remat
        num_shapes, num_prices, _ = costs.floor_prices.shape
        L = self._job.num_layers
        if num_shapes == 0 or num_prices == 0:
            return np.zeros((L, L + 1))
        kinds = [False] * (remat is not True) + [True] * (remat is not False and may_recompute)
        least = np.full((L, L + 1), np.inf)
        for shape in range(num_shapes):
            prices = costs.floor_prices[shape]
            floors = self._sums[submesh][shape] - self._paid(submesh, shape, alive, stages_per_mesh)
            for recomputes in kinds:
                used = prices[:, 3] == recomputes
                least = np.minimum(least, floors[used].max(axis=0, initial=0.0))
        return least

    def _paid(self, submesh: int, shape: int, alive: float, stages_per_mesh: int) -> np.ndarray:
        """Return [price, first, last + 1] the most seconds that the bytes of stages that fit can
        cost.

        Args:
            submesh, shape: indices of the submesh and of its logical shape.
            alive, stages_per_mesh: as of `_of_submesh`.
        """
        prices = self._runs[submesh].floor_prices[shape]
        per_byte, priced_alive, share, _ = prices.T[..., None, None]
        limit = self._job.memory_limit / stages_per_mesh
        with_activations = limit - self._working[submesh][shape]
        # Of more micro-batches than there are, the activations that fit are `more` times larger.
        more = np.maximum(priced_alive / alive, 1.0)
        stored_bytes = more * with_activations - (more - 1) * self._always[submesh][shape]
        num_bytes = share * stored_bytes + (1 - share) * limit
        # Without a price nothing is paid, though there may be no limit.
        return np.where(per_byte > 0, per_byte * num_bytes, 0.0)


def _of_runs(layers: np.ndarray) -> np.ndarray:
    """Return [shape, price, first, last + 1] sums of `layers`, [shape, price, layer]; 0 for no
    layers.
    """
    shapes, prices, count = layers.shape
    sums = np.zeros((shapes, prices, count, count + 1))
    for first in range(count):
        sums[:, :, first, first + 1 :] = np.cumsum(layers[:, :, first:], axis=2)
    return sums


def _largest_of_runs(layers: np.ndarray) -> np.ndarray:
    """Return [shape, first, last + 1] the largest of `layers`, [shape, layer], in each run; 0 for
    no layers.
    """
    shapes, count = layers.shape
    largest = np.zeros((shapes, count, count + 1))
    for first in range(count):
        largest[:, first, first + 1 :] = np.maximum.accumulate(layers[:, first:], axis=1)
    return largest
