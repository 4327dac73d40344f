"""The costs of every run of layers on every submesh and logical shape, by the strategies and costs
of the ILP.

Layers that are equal by structure are solved once per mesh, from boundary layout to boundary
layout, for several prices of memory (layer_matrix.py). The costs of all runs follow from that
(layer_runs.py).
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.inter_op.equal_layers import Layers, boundary_structure, layers_of
from alpa_strategy.inter_op.floors import (
    ExtraFloors,
    Floors,
    extra_floors,
    floors_of,
    no_extra_floors,
    side_by_side,
)
from alpa_strategy.inter_op.layer_matrix import (
    LayerBoundary,
    LayerMatrix,
    LayerProblem,
    Part,
    floor_of,
    follow_leaders,
    layer_matrix,
    passing_seconds,
)
from alpa_strategy.inter_op.layer_runs import (
    RunCandidates,
    Runs,
    by_layers,
    cheapest_candidates,
    compose_runs,
    mixed_runs,
    newly_received_shares,
    no_candidates,
    run_candidates,
    with_equal_numbers,
)
from alpa_strategy.inter_op.mesh_options import allowed_shapes, options_of_part
from alpa_strategy.inter_op.stage_problem import stage_build, take_apart
from alpa_strategy.inter_op.stored_costs import job_key, runs_arguments, runs_record
from alpa_strategy.inter_op.subgraph import span_name
from alpa_strategy.intra_op.build import OptionTables, boundary_layouts
from alpa_strategy.intra_op.memory_choices import pinned_offload, with_offload
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import INVARIANT, DualLayout
from alpa_strategy.ir.stage_graph import crossing_values
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.partial_results import NOT_STORED, Key, PartialResults
from alpa_strategy.units import format_bytes

# Prices of memory, as multiples of the seconds per byte of the whole step without a price, with
# numbers of micro-batches in flight.
PRICES = ((0.05, 1), (0.5, 1), (0.5, 16), (5.0, 1), (5.0, 16), (1e3, 4))

# Shares of a stage's layers that take the layouts of the next price.
MIXED_SHARES = (0.25, 0.5, 0.75)

# (seconds per byte, micro-batches in flight) of the layouts that are the fastest.
FREE_MEMORY = (0.0, 1)


def _empty(num_axes: int) -> np.ndarray:
    return np.zeros((0,) * num_axes)


@dataclass(frozen=True)
class LayerRangeCosts:
    """Candidates for every run of layers on one submesh.

    Arrays without another comment are [first layer, last + 1, candidate], see `RunCandidates`.
    """

    # Logical shapes of the submesh.
    shapes: tuple[tuple[int, ...], ...]

    # [layer] seconds per step that a layer takes in its fastest layouts, whatever they need of
    # memory.
    least: np.ndarray

    # [layer] likewise, seconds per micro-batch.
    least_each: np.ndarray

    seconds: np.ndarray
    once: np.ndarray
    always: np.ndarray
    in_flight: np.ndarray

    # Index in `shapes`.
    shape: np.ndarray

    remat: np.ndarray
    at_update: np.ndarray

    # Lower bounds of stages that fit into memory (floors.py): [shape, price, field of FloorPrice]
    floor_prices: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 4)))

    # [shape, price, layer] the least of a step's seconds and the price of its bytes.
    floor_seconds: np.ndarray = field(default_factory=lambda: _empty(3))

    # [shape, layer] the fewest bytes that are always stored, and the fewest temporary ones.
    floor_always: np.ndarray = field(default_factory=lambda: _empty(2))
    floor_working: np.ndarray = field(default_factory=lambda: _empty(2))

    # [shape] seconds per byte of a step in the fastest layouts.
    scale: np.ndarray = field(default_factory=lambda: _empty(1))


@dataclass(frozen=True)
class StageCostTask:
    """The step whose runs of layers are priced: a micro-batch, or (`is_whole_batch`) the full step
    on all devices.
    """

    graph: StepGraph

    # Op indices that split the graph into layers, both ends included.
    cuts: tuple[int, ...]

    num_microbatches: int
    cluster: ClusterSpec
    costs: OpCosts
    options: PlanOptions
    optimizer: OptimizerInfo

    # Bytes per device.
    memory_limit: float

    # Whether stages recompute their activations; None: both are possible.
    remat: bool | None = None

    is_whole_batch: bool = False

    # Of each layer, the meshes (first device, number of devices) that are pinned for it
    # (`pins.layers_of`); (): none.
    places: tuple[frozenset[tuple[int, int]], ...] = ()

    # Where costs and solutions are stored as they are computed.
    results: PartialResults = field(default=NOT_STORED, compare=False, repr=False)

    @cached_property
    def content(self) -> str:
        """Hash of everything that the costs of runs depend on, apart from their submesh."""
        return Key(*job_key(self)).text

    @property
    def num_layers(self) -> int:
        """Number of layers of the graph."""
        return len(self.cuts) - 1

    def layers_on(self, num_devices: int) -> Layers:
        """Return the layers as they are planned on `num_devices`. The last result is cached."""
        if self._last_layers.get("devices") != num_devices:
            layers = layers_of(self.graph, self.cuts, self.options, num_devices)
            self._last_layers.update(devices=num_devices, layers=layers)
        cached: Layers = self._last_layers["layers"]
        return cached

    @cached_property
    def _last_layers(self) -> dict[str, Any]:
        """The last result of `layers_on`, and its number of devices."""
        return {}

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """Per cut, the values that cross it."""
        return [crossing_values(self.graph, cut) for cut in self.cuts]

    @cached_property
    def crossing_bytes(self) -> np.ndarray:
        """[cut, 2] bytes of the values that cross a cut, and of their gradients."""
        rows = []
        for values in self.crossing:
            metas = [self.graph.values[value] for value in values]
            of_values = sum(meta.num_bytes for meta in metas)
            of_gradients = sum(meta.num_bytes for meta in metas if meta.requires_grad)
            rows.append([of_values, of_gradients])
        return np.array(rows)

    @property
    def gradients_begin(self) -> bool:
        """Whether no parameter has a gradient when the graph's backward begins."""
        is_one_step = self.num_microbatches == self.options.accumulate_grad_batches == 1
        return self.graph.loss >= 0 and is_one_step

    @property
    def keeps_by_tensor(self) -> bool:
        """Whether each activation is saved or recomputed by the ILP's choice.

        Compiled programs decide that themselves.
        """
        return self.is_whole_batch and self.options.remat is None and not self.options.compile


def stage_costs(
    job: StageCostTask,
    candidates: Sequence[tuple[int, int]],
    known: dict[Hashable, LayerRangeCosts] | None = None,
    unlikely: Collection[tuple[int, int]] = (),
) -> list[LayerRangeCosts]:
    """Return the costs of all runs of layers, per submesh of `candidates`.

    Args:
        candidates: (nodes, devices per node) of each submesh.
        known: gets the results, for later calls with jobs that differ only in their number of
            micro-batches.
        unlikely: submeshes for which only the fastest layouts are priced: enough for a bound.
    """
    known = {} if known is None else known
    costs = []
    for submesh in candidates:
        # Layouts that are propagated are not chosen for the memory that they save.
        has_no_prices = submesh in unlikely or job.options.solver == PROPAGATION
        prices = () if has_no_prices else PRICES
        key = job.num_microbatches, submesh, prices
        if key not in known:
            known[key] = _stored_run_costs(job, submesh, prices)
        costs.append(known[key])
    return costs


def _stored_run_costs(
    job: StageCostTask, submesh: tuple[int, int], prices: Sequence[tuple[float, int]]
) -> LayerRangeCosts:
    """Return `run_costs`, or the result that an interrupted planning has stored."""
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    return job.results.get(
        "runs",
        key=lambda: Key(job.content, submesh, tuple(prices)),
        compute=lambda: run_costs(job, submesh, prices),
        encode=runs_record,
        decode=lambda record: LayerRangeCosts(**runs_arguments(record, job, shapes)),
    )


def run_costs(
    job: StageCostTask, submesh: tuple[int, int], prices: Sequence[tuple[float, int]] = PRICES
) -> LayerRangeCosts:
    """Price all runs on one submesh, over all logical shapes that the options allow.

    Args:
        prices: of memory. Layouts are chosen under each, in addition to the fastest ones.
    """
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    num_layers = job.num_layers
    layers = np.arange(num_layers)
    of_shapes: list[Runs] = []
    floors: list[Floors] = []
    scales: list[float] = []
    least = np.full(num_layers, np.inf)
    least_each = np.full(num_layers, np.inf)
    for shape in shapes:
        priced = _priced_layers(job, submesh, shape, prices)
        runs = priced.runs()
        of_shapes.append(runs)

        # [layer, part] of single layers; memory has no price.
        single = runs.parts[0, runs.number[layers, layers + 1]]
        seconds = single[:, Part.FORWARD] + single[:, Part.BACKWARD]
        excess = priced.excess()
        of_step = job.num_microbatches * seconds + single[:, Part.ONCE]
        least = np.minimum(least, floor_of(of_step, excess))
        least_each = np.minimum(least_each, floor_of(seconds, excess / job.num_microbatches))

        always_fits = _always_fits(job, runs.parts[0, runs.number[0, num_layers]])
        floors.append(floors_of(job, priced, is_needed=not always_fits))
        scales.append(priced.scale)

    cheapest = _candidates_of_runs(job, of_shapes)
    costs = LayerRangeCosts(shapes, least, least_each, *cheapest)

    floor_prices, floor_seconds, floor_always, floor_working = side_by_side(floors, num_layers)
    return replace(
        costs,
        floor_prices=floor_prices,
        floor_seconds=floor_seconds,
        floor_always=floor_always,
        floor_working=floor_working,
        scale=np.array(scales),
    )


def with_extra_floors(
    job: StageCostTask, submesh: tuple[int, int], costs: LayerRangeCosts
) -> LayerRangeCosts:
    """Return the costs of a submesh with lower bounds at `EXTRA_PRICES` of memory as well.

    The bound of a plan alone needs them, and computing them takes as long as the costs: this is
    done for the number of micro-batches that was chosen.
    """
    if not costs.floor_prices.any():
        # Memory does not bind, or the submesh has no prices.
        return costs
    return job.results.get(
        "floors",
        key=lambda: Key(job.content, submesh),
        compute=lambda: _with_extra_floors(job, submesh, costs),
        encode=runs_record,
        decode=lambda record: LayerRangeCosts(**runs_arguments(record, job, costs.shapes)),
    )


def _with_extra_floors(
    job: StageCostTask, submesh: tuple[int, int], costs: LayerRangeCosts
) -> LayerRangeCosts:
    """Return what `with_extra_floors` does, if memory may bind on some logical shape."""
    of_shapes: list[ExtraFloors] = []
    for index, shape in enumerate(costs.shapes):
        scale = float(costs.scale[index])
        if costs.floor_prices[index].any():
            of_shapes.append(extra_floors(job, unpriced_layers(job, submesh, shape), scale))
        else:
            of_shapes.append(no_extra_floors(job))
    prices, seconds = (np.stack(arrays) for arrays in zip(*of_shapes, strict=True))
    return replace(
        costs,
        floor_prices=np.concatenate([costs.floor_prices, prices], axis=1),
        floor_seconds=np.concatenate([costs.floor_seconds, seconds], axis=1),
    )


def _candidates_of_runs(job: StageCostTask, of_shapes: Sequence[Runs]) -> RunCandidates:
    """Return the cheapest candidates of all runs, [first layer, last + 1, candidate].

    Args:
        of_shapes: the runs on each logical shape of a submesh.
    """
    if not of_shapes:
        num_layers = job.num_layers
        nothing = np.full((num_layers, num_layers + 1), -1)
        return by_layers(no_candidates(1), nothing)

    of_shapes = with_equal_numbers(of_shapes)
    candidates: list[RunCandidates] = []
    for index, runs in enumerate(of_shapes):
        parts = runs.parts
        mixed = [mixed_runs(parts[:-1], parts[1:], share) for share in MIXED_SHARES]
        all_parts = np.concatenate([parts, *mixed])
        candidates += run_candidates(all_parts, runs.num_layers, index, job.remat)
    joined = RunCandidates(*[np.concatenate(x, axis=1) for x in zip(*candidates, strict=True)])
    cheapest = cheapest_candidates(joined, job.num_microbatches, job.memory_limit)
    return by_layers(cheapest, of_shapes[0].number)


def _always_fits(job: StageCostTask, parts: np.ndarray) -> bool:
    """Whether all layers together fit on one mesh with all micro-batches in flight.

    Args:
        parts: [part] of the run of all layers.
    """
    in_flight = job.num_microbatches * (parts[Part.SAVED] + parts[Part.LEAVING])
    temporary = max(in_flight + parts[Part.WORKING], parts[Part.UPDATE])
    return bool(parts[Part.ALWAYS] + temporary <= job.memory_limit)


def free_runs(job: StageCostTask, submesh: tuple[int, int]) -> LayerRangeCosts:
    """Return all runs that the options allow on a submesh, with no time and no memory."""
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    zero = np.zeros((job.num_layers, job.num_layers + 1, 1))
    is_run = np.triu(zero[..., 0] == 0, 1)[..., None]
    seconds = np.where(is_run & bool(shapes), 0.0, np.inf)
    per_layer = zero[:, 0, 0]
    return LayerRangeCosts(
        shapes=shapes,
        least=per_layer,
        least_each=per_layer,
        seconds=seconds,
        once=zero,
        always=zero,
        in_flight=zero,
        shape=zero.astype(int),
        remat=zero > 0,
        at_update=zero,
    )


@dataclass(frozen=True)
class UnpricedLayers:
    """The layers of a job on one logical mesh. Layers that are equal by structure are one kind."""

    # The graph of each layer.
    layers: list[StepGraph]

    # Of each layer, the index of its kind in `problems` and `passing`.
    kinds: list[int]

    problems: list[LayerProblem]

    # `passing_seconds` of each kind.
    passing: list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class PricedLayers:
    """The layers of a job on one logical mesh, each kind priced once."""

    unpriced: UnpricedLayers

    # (seconds per byte, micro-batches in flight); the first is `FREE_MEMORY`.
    prices: list[tuple[float, int]]

    # Of each kind, at all prices.
    matrices: list[LayerMatrix]

    # Seconds per byte of a step in the fastest layouts.
    scale: float

    def runs(self) -> Runs:
        """Return all runs of layers, at all prices."""
        layers = self.unpriced.layers
        return compose_runs(self.matrices, self.unpriced.kinds, newly_received_shares(layers))

    def excess(self) -> np.ndarray:
        """Return [layer] by how many seconds of a step the fastest layouts may take longer than the
        optimum.
        """
        return np.array([self.matrices[kind].excess[0] for kind in self.unpriced.kinds])


def run_parts(
    job: StageCostTask,
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]] = PRICES,
) -> np.ndarray:
    """Return [price, first, last + 1, part] of all runs on one logical mesh; forward is inf if
    impossible.
    """
    return _priced_layers(job, submesh, shape, prices).runs().by_layers()


def _priced_layers(
    job: StageCostTask,
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]],
) -> PricedLayers:
    """Price every kind of layer on one logical mesh, without a price of memory and at `prices`.

    Args:
        prices: multiples of the step's seconds per byte, with micro-batches in flight.
    """
    unpriced = unpriced_layers(job, submesh, shape)

    def solve(at: Sequence[tuple[float, int]]) -> list[LayerMatrix]:
        matrices = []
        for problem, seconds in zip(unpriced.problems, unpriced.passing, strict=True):
            matrix = layer_matrix(problem, at, job.num_microbatches, seconds, job.gradients_begin)
            matrices.append(matrix)
        return matrices

    matrices = solve([FREE_MEMORY])
    scale = _seconds_per_byte([matrices[kind] for kind in unpriced.kinds])
    absolute = [(scale * factor, in_flight) for factor, in_flight in prices]
    if prices:
        pairs = zip(matrices, solve(absolute), strict=True)
        matrices = [_at_all_prices(free, priced) for free, priced in pairs]
    return PricedLayers(unpriced, [FREE_MEMORY, *absolute], matrices, scale)


def unpriced_layers(
    job: StageCostTask,
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    has_per_step_ops: bool = True,
) -> UnpricedLayers:
    """Build the problem of every kind of layer on one logical mesh.

    Args:
        has_per_step_ops: whether some ops run once for all micro-batches.
    """
    mesh = job.cluster.logical_mesh(shape, submesh)
    tables = OptionTables(mesh, job.costs, job.optimizer, job.options.accumulate_grad_batches)
    ends = [_boundary(job, layer, shape) for layer in range(job.num_layers)]
    kinds = _kinds(job, mesh, ends)
    layers = job.layers_on(mesh.num_devices).graphs

    problems = []
    passing = []
    on_host = pinned_offload(job.graph, job.options, job.cluster.host)
    for kind in range(max(kinds) + 1):
        first = kinds.index(kind)
        options = options_of_part(job.options, layers[first])
        build = stage_build(layers[first], tables, recompute_per_microbatch=not has_per_step_ops)
        intra = restrict(build, options, job.optimizer)
        if on_host:
            intra = with_offload(intra, on_host)
        problems.append(follow_leaders(take_apart(intra), ends[first]))
        passing.append(passing_seconds(job.graph, ends[first], tables))
    return UnpricedLayers(layers, kinds, problems, passing)


def _kinds(job: StageCostTask, mesh: LogicalMesh, ends: Sequence[LayerBoundary]) -> list[int]:
    """Return, per layer, the number of its kind: equal for equal layers with equal boundaries."""
    layers = job.layers_on(mesh.num_devices)
    kind_of: dict[tuple, int] = {}
    kinds = []
    for layer, end in enumerate(ends):
        boundary = boundary_structure(layers.graphs[layer], layers.positions[layer], end)
        kinds.append(kind_of.setdefault((layers.kinds[layer], boundary), len(kind_of)))
    return kinds


def _seconds_per_byte(layers: Sequence[LayerMatrix]) -> float:
    """Return the step's seconds per byte in the fastest layouts; 1.0 if a layer is impossible.

    Args:
        layers: the matrix of every layer, without a price of memory.
    """
    seconds = 0.0
    num_bytes = 0.0
    for layer in layers:
        seconds += float(layer.objective[0].min())
        stored = layer.parts[0, ..., Part.ALWAYS : Part.SAVED + 1].sum(axis=-1)
        num_bytes += float(stored.min())
    return seconds / max(num_bytes, 1.0) if np.isfinite(seconds) else 1.0


def _at_all_prices(one: LayerMatrix, other: LayerMatrix) -> LayerMatrix:
    """Return the matrix of a layer at the prices of both."""
    return LayerMatrix(
        np.concatenate([one.objective, other.objective]),
        np.concatenate([one.parts, other.parts]),
        np.concatenate([one.excess, other.excess]),
    )


def _boundary(job: StageCostTask, layer: int, shape: tuple[int, ...]) -> LayerBoundary:
    """Return the values at a layer's ends, and the layouts of the one that leads at each end."""
    before = job.crossing[layer]
    after = job.crossing[layer + 1]
    entering, entering_layouts = _leader(job, before, shape)
    leaving, leaving_layouts = _leader(job, after, shape)
    passing = tuple(value for value in before if value in after)
    return LayerBoundary(entering, leaving, entering_layouts, leaving_layouts, passing)


def _leader(
    job: StageCostTask, crossing: Sequence[int], shape: tuple[int, ...]
) -> tuple[int | None, tuple[DualLayout, ...]]:
    """Return the value whose layout the others that cross a cut follow, and its layouts.

    It is the largest of those that require a gradient, or of all; None if nothing crosses.
    """
    values = job.graph.values

    def rank(value: int) -> tuple[bool, int, int]:
        return values[value].requires_grad, values[value].num_bytes, -value

    leader = max(crossing, key=rank, default=None)
    if leader is None:
        return None, ((INVARIANT,) * len(shape),)
    return leader, boundary_layouts(values[leader], shape)


def out_of_memory(job: StageCostTask, meshes: Sequence[tuple[int, int]]) -> str | None:
    """Return a sentence that names the layer which needs the most bytes per device as a stage of
    its own, on its best submesh.

    With one micro-batch in flight: every plan needs at least that. None if pinned layouts make a
    layer impossible.
    """
    layers = np.arange(job.num_layers)
    least = np.full(job.num_layers, np.inf)
    for submesh in meshes:
        for shape in allowed_shapes(job.cluster, job.options, submesh):
            # [price, layer, part]
            single = run_parts(job, submesh, shape)[:, layers, layers + 1]
            stored = [Part.ALWAYS, Part.SAVED, Part.LEAVING, Part.WORKING]
            need = single[..., stored].sum(axis=2)
            is_possible = np.isfinite(single[..., Part.FORWARD])
            least = np.minimum(least, np.where(is_possible, need, np.inf).min(axis=0))
    if not np.isfinite(least).all():
        return None

    worst = int(least.argmax())
    name = span_name(job.graph, *job.cuts[worst : worst + 2])
    text = (
        f"of all layers, {name} needs the most: {format_bytes(least[worst])} a device on its best"
        " submesh"
    )
    if least[worst] <= job.memory_limit:
        text += (
            ", which fits; with what the schedule keeps for other micro-batches, and with other"
            " layers, it does not"
        )
    return text
