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

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.inter_op.equal_layers import Layers, layers_of
from alpa_strategy.inter_op.floors import (
    ExtraFloors,
    Floors,
    extra_floors,
    floors_of,
    no_extra_floors,
    side_by_side,
)
from alpa_strategy.inter_op.layer_matrix import Part, floor_of
from alpa_strategy.inter_op.layer_pricing import PRICES, priced_layers, run_parts, unpriced_layers
from alpa_strategy.inter_op.layer_runs import (
    RunCandidates,
    Runs,
    by_layers,
    cheapest_candidates,
    mixed_runs,
    no_candidates,
    run_candidates,
    with_equal_numbers,
)
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.inter_op.stored_costs import job_key, runs_arguments, runs_record
from alpa_strategy.inter_op.subgraph import span_name
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.stage_graph import crossing_values
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.partial_results import NOT_STORED, Key, PartialResults
from alpa_strategy.units import format_bytes

# Shares of a stage's layers that take the layouts of the next price.
MIXED_SHARES = (0.25, 0.5, 0.75)


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

    # [layer] as `least` and `least_each`, under schedules where sums do not overlap with matmuls.
    least_apart: np.ndarray
    least_each_apart: np.ndarray

    seconds: np.ndarray
    once: np.ndarray
    always: np.ndarray
    in_flight: np.ndarray

    # Index in `shapes`.
    shape: np.ndarray

    remat: np.ndarray
    at_update: np.ndarray
    overlapped: np.ndarray

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

    # Whether matmuls overlap with sums over devices: not under a schedule that splits the backward.
    overlaps_matmuls: bool = True

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

    def option_tables(self, submesh: tuple[int, int], shape: tuple[int, ...]) -> OptionTables:
        """Return new tables of the options of ops and parameters on one logical mesh."""
        return OptionTables(
            self.cluster.logical_mesh(shape, submesh),
            self.costs,
            self.optimizer,
            self.options.accumulate_grad_batches,
            self.overlaps_matmuls,
        )

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

    def bytes_between(self, ends: Sequence[int]) -> np.ndarray:
        """Return [stage, 2] bytes of a micro-batch's values that leave each stage, and of their
        gradients that come back.

        Args:
            ends: of each stage, the index of the op after its last.
        """
        return replace(self, cuts=(0, *ends)).crossing_bytes[1:]

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

    Raises:
        OptionError, PlanError: a pin cannot be met.
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
    """Return `run_costs` of all runs of layers on one submesh, or the result of it that an
    interrupted planning has stored.

    Args:
        prices: of memory, as of `layer_pricing.PRICES`.
    """
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

    Raises:
        OptionError, PlanError: a pin cannot be met.
    """
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    num_layers = job.num_layers
    layers = np.arange(num_layers)
    of_shapes: list[Runs] = []
    floors: list[Floors] = []
    scales: list[float] = []
    least = np.full(num_layers, np.inf)
    least_each = np.full(num_layers, np.inf)
    least_apart = np.full((num_layers, 2), np.inf)
    for shape in shapes:
        priced = priced_layers(job, submesh, shape, prices)
        runs = priced.runs()
        of_shapes.append(runs)

        # [layer, part] of single layers; memory has no price.
        single = runs.parts[0, runs.number[layers, layers + 1]]
        seconds = single[:, Part.FORWARD] + single[:, Part.BACKWARD]
        excess = priced.excess()
        of_step = job.num_microbatches * seconds + single[:, Part.ONCE]
        least = np.minimum(least, floor_of(of_step, excess))
        least_each = np.minimum(least_each, floor_of(seconds, excess / job.num_microbatches))
        least_apart = np.minimum(least_apart, priced.least_apart)

        always_fits = _always_fits(job, runs.parts[0, runs.number[0, num_layers]])
        floors.append(floors_of(job, priced, is_needed=not always_fits))
        scales.append(priced.scale)

    cheapest = _candidates_of_runs(job, of_shapes)
    of_step, of_microbatch = least_apart[:, 0], least_apart[:, 1]
    costs = LayerRangeCosts(shapes, least, least_each, of_step, of_microbatch, *cheapest)

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
    """Return the costs of a submesh with lower bounds at `EXTRA_PRICES` of memory as well;
    unchanged if it has none at other prices.

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
    """Return the costs of runs on one submesh with all lower bounds of `EXTRA_PRICES`. Logical
    shapes on which memory cannot bind get bounds at price 0.
    """
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
    """Return the cheapest candidates of all runs, [first layer, last + 1, candidate]. Without a
    shape none is possible.

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
    """Return all runs that the options allow on a submesh, with no time and no memory; inf seconds
    where there is no run.
    """
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    zero = np.zeros((job.num_layers, job.num_layers + 1, 1))
    is_run = np.triu(zero[..., 0] == 0, 1)[..., None]
    seconds = np.where(is_run & bool(shapes), 0.0, np.inf)
    per_layer = zero[:, 0, 0]
    return LayerRangeCosts(
        shapes=shapes,
        least=per_layer,
        least_each=per_layer,
        least_apart=per_layer,
        least_each_apart=per_layer,
        seconds=seconds,
        once=zero,
        always=zero,
        in_flight=zero,
        shape=zero.astype(int),
        remat=zero > 0,
        at_update=zero,
        overlapped=zero,
    )


def out_of_memory(job: StageCostTask, meshes: Sequence[tuple[int, int]]) -> str | None:
    """Return a sentence that names the layer which needs the most bytes per device as a stage of
    its own, on its best submesh.

    With one micro-batch in flight: every plan needs at least that. None if pinned layouts make a
    layer impossible.

    Args:
        meshes: (nodes, devices per node) that stages may have.
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
