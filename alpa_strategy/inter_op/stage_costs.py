"""What every run of layers costs on every submesh and logical shape, by the same strategies and
costs as an ILP.

Layers that are the same by structure are solved once per mesh, from boundary layout to boundary
layout, for several prices of memory (layer_matrix.py). All runs follow by min-plus products; what
is kept of each are the cheapest candidates for growing numbers of micro-batches in flight.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.inter_op.floors import Floors, floors_of, side_by_side
from alpa_strategy.inter_op.layer_matrix import (
    LayerBoundary,
    LayerMatrix,
    LayerProblem,
    Part,
    follow_leaders,
    layer_matrix,
    passing_seconds,
)
from alpa_strategy.inter_op.stage_problem import stage_build, take_apart
from alpa_strategy.inter_op.stored_costs import job_key, runs_arguments, runs_record
from alpa_strategy.inter_op.subgraph import crossing_values, span_name, stage_on
from alpa_strategy.intra_op.build import OptionTables, boundary_layouts
from alpa_strategy.intra_op.memory_choices import pinned_offload, with_offload
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import INVARIANT
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.partial_results import NOT_STORED, Key, PartialResults
from alpa_strategy.units import format_bytes

# Prices of memory, as multiples of (seconds / bytes) of the whole step without one, with
# micro-batches in flight.
PRICES = ((0.05, 1), (0.5, 1), (0.5, 16), (5.0, 1), (5.0, 16), (1e3, 4))
BETWEEN = (0.25, 0.5, 0.75)  # shares of a stage's layers that take the next price's layouts


@dataclass(frozen=True)
class LayerRangeCosts:
    """Candidates for every run of layers on one submesh; arrays [first layer, last + 1,
    candidate].
    """

    shapes: tuple[tuple[int, ...], ...]
    least: (
        np.ndarray
    )  # [layer] seconds a step that a layer takes in the best layouts, whatever they need of memory
    least_each: np.ndarray  # [layer] likewise, seconds a micro-batch
    # seconds, once: per micro-batch and once per step; inf where there is no candidate
    seconds: np.ndarray
    once: np.ndarray
    # always, in_flight: bytes per device, whatever is in flight and per micro-batch in flight
    always: np.ndarray
    in_flight: np.ndarray
    shape: np.ndarray  # index of the logical shape in `shapes`
    remat: np.ndarray  # whether the stage recomputes its activations
    # bytes per device while the optimizer updates: nothing is in flight then
    at_update: np.ndarray
    # Below what stages take that fit into memory (floors.py): [shape, price, field of FloorPrice]
    floor_prices: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 4)))
    # [shape, price, layer] the least of a step's seconds and what its bytes cost
    floor_seconds: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0)))
    # [shape, layer] the least bytes always, and the least temporary ones
    floor_always: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    floor_working: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class StageCostTask:
    """What the runs of a graph are priced for: a micro-batch, or (`is_whole_batch`) the step itself
    on all devices.
    """

    graph: StepGraph
    cuts: tuple[int, ...]
    num_microbatches: int
    cluster: ClusterSpec
    costs: OpCosts
    options: PlanOptions
    optimizer: OptimizerInfo
    memory_limit: float
    remat: bool | None = None
    is_whole_batch: bool = False
    # of each layer, the meshes (first place, devices) that are pinned for it (`pins.layers_of`);
    # (): none
    places: tuple[frozenset[tuple[int, int]], ...] = ()
    # where costs and solutions are stored as they are computed
    results: PartialResults = field(default=NOT_STORED, compare=False, repr=False)

    @cached_property
    def content(self) -> str:
        """Hash of everything that the costs of runs depend on, apart from their submesh."""
        return Key(*job_key(self)).text

    @property
    def num_layers(self) -> int:
        return len(self.cuts) - 1

    def layers_on(self, num_devices: int) -> "Layers":
        """The layers as they are planned on a mesh of `num_devices`; the last ones are kept."""
        if self._layers.get("devices") != num_devices:
            self._layers.update(devices=num_devices, layers=_layers_on(self, num_devices))
        layers: Layers = self._layers["layers"]
        return layers

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """What `layers_on` gave last."""
        return {}

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """Per cut, the values that cross it."""
        return [crossing_values(self.graph, cut) for cut in self.cuts]

    @cached_property
    def crossing_bytes(self) -> np.ndarray:
        """[cut, 2] bytes of these values, and of their gradients."""
        every = [[self.graph.values[v] for v in values] for values in self.crossing]
        return np.array(
            [
                [sum(m.num_bytes for m in ms), sum(m.num_bytes for m in ms if m.requires_grad)]
                for ms in every
            ]
        )

    @property
    def gradients_begin(self) -> bool:
        """Whether no gradients are there when the graph's backward begins: the last are gone, if it
        has a loss.
        """
        return (
            self.graph.loss >= 0
            and self.num_microbatches == self.options.accumulate_grad_batches == 1
        )

    @property
    def keeps_by_tensor(self) -> bool:
        """Whether it is solved for each activation if it is saved or recomputed: compiled programs
        decide by themselves.
        """
        return self.is_whole_batch and self.options.remat is None and not self.options.compile


def stage_costs(
    job: StageCostTask,
    candidates: Sequence[tuple[int, int]],
    known: dict[Hashable, LayerRangeCosts] | None = None,
    unlikely: Collection[tuple[int, int]] = (),
) -> list[LayerRangeCosts]:
    """`LayerRangeCosts` per submesh of `candidates`; of `unlikely` ones those of their fastest
    layouts: enough for a bound.

    Args:
        known: is filled with what is worked out, for later calls; the jobs differ in the number of
            micro-batches alone.
    """
    known = {} if known is None else known
    found = []
    for submesh in candidates:
        # Layouts that are propagated are not chosen for the memory that they spare.
        has_no_prices = submesh in unlikely or job.options.solver == PROPAGATION
        prices = () if has_no_prices else PRICES
        key = job.num_microbatches, submesh, prices
        if key not in known:
            known[key] = _stored_run_costs(job, submesh, prices)
        found.append(known[key])
    return found


def _stored_run_costs(
    job: StageCostTask, submesh: tuple[int, int], prices: Sequence[tuple[float, int]]
) -> LayerRangeCosts:
    """As `run_costs`, or what an interrupted planning has stored of them."""
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
    """Candidates of all runs on one submesh, over all logical shapes that the options allow.

    prices: of memory, under which layouts are found beside those that are the fastest without one.
    """
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    columns: list[tuple[np.ndarray, ...]] = []
    floors: list[Floors] = []
    L = job.num_layers
    least = np.full(L, np.inf)
    each = np.full(L, np.inf)
    layers = np.arange(L)
    for index, shape in enumerate(shapes):
        priced = _priced_layers(job, submesh, shape, prices)
        parts = priced.runs()
        between = [_mixed(parts[:-1], parts[1:], share) for share in BETWEEN]
        columns += _candidates(np.concatenate([parts, *between]), index, job.remat)
        alone = parts[0, layers, layers + 1]  # [layer, part]: memory has no price
        seconds = alone[:, Part.FORWARD] + alone[:, Part.BACKWARD]
        least = np.minimum(least, job.num_microbatches * seconds + alone[:, Part.ONCE])
        each = np.minimum(each, seconds)
        floors.append(floors_of(job, priced, is_needed=not _always_fits(job, parts[0, 0, L])))
    if not columns:  # no shape is allowed: one candidate that is forbidden
        zero = np.zeros((L, L + 1, 1))
        nowhere = (zero + np.inf, zero, zero, zero, zero.astype(int), zero.astype(bool), zero)
        columns.append(nowhere)
    stacked = [np.concatenate(arrays, axis=2) for arrays in zip(*columns, strict=True)]
    runs = LayerRangeCosts(shapes, least, each, *_prune(stacked, job))
    floor_prices, floor_seconds, floor_always, floor_working = side_by_side(floors, L)
    return replace(
        runs,
        floor_prices=floor_prices,
        floor_seconds=floor_seconds,
        floor_always=floor_always,
        floor_working=floor_working,
    )


def _always_fits(job: StageCostTask, whole: np.ndarray) -> bool:
    """Whether all layers together, [part], fit on one mesh with all micro-batches in flight."""
    in_flight = job.num_microbatches * (whole[Part.SAVED] + whole[Part.LEAVING])
    need = whole[Part.ALWAYS] + max(in_flight + whole[Part.WORKING], whole[Part.UPDATE])
    return bool(need <= job.memory_limit)


def _mixed(cheap: np.ndarray, small: np.ndarray, share: float) -> np.ndarray:
    """[price, first, last + 1, part] of runs whose layers choose at one price of memory or the
    next.

    Sums are divided between the two by `share`, of layers that take the layouts of `small`. What
    is the largest of all layers is the larger of the two, whatever the share.
    """
    mixed = (1 - share) * cheap + share * small
    for largest in (Part.WORKING, Part.AGAIN):
        mixed[..., largest] = np.maximum(cheap[..., largest], small[..., largest])
    return mixed


def free_runs(job: StageCostTask, submesh: tuple[int, int]) -> LayerRangeCosts:
    """All runs that the options allow on a submesh, as if they took no time and no memory."""
    shapes = allowed_shapes(job.cluster, job.options, submesh)
    zero = np.zeros((job.num_layers, job.num_layers + 1, 1))
    seconds = np.where(np.triu(zero[..., 0] == 0, 1)[..., None] & bool(shapes), 0.0, np.inf)
    nothing = zero[:, 0, 0]
    return LayerRangeCosts(
        shapes, nothing, nothing, seconds, zero, zero, zero, zero.astype(int), zero > 0, zero
    )


def allowed_shapes(
    cluster: ClusterSpec, options: PlanOptions, submesh: tuple[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Logical shapes of a submesh (None: of all devices) that pins allow, by what they are and by
    how many axes.
    """
    counts = axis_counts(options)
    pinned = options.logical_mesh
    shapes = []
    for shape in cluster.logical_shapes(submesh):
        is_pinned_shape = pinned is None or shape == tuple(pinned)
        has_pinned_axes = not counts or counts == {len(shape)}
        if is_pinned_shape and has_pinned_axes:
            shapes.append(shape)
    return tuple(shapes)


@dataclass(frozen=True)
class PricedLayers:
    """The layers of a job on one logical mesh, those that are the same by structure priced once.

    Attributes:
        layers: graphs. kinds: of each layer, its index in what follows.
        problems, passing: what was priced, and `passing_seconds` of it.
        matrices: per price of `prices` (seconds per byte, micro-batches alive), the first without.
        scale: seconds / bytes of a step in the layouts that are the fastest.
    """

    layers: list[StepGraph]
    kinds: list[int]
    problems: list[LayerProblem]
    passing: list[tuple[np.ndarray, np.ndarray]]
    prices: list[tuple[float, int]]
    matrices: list[LayerMatrix]
    scale: float

    def runs(self) -> np.ndarray:
        """[price, first, last + 1, part] of every run; forward is inf where there is no way."""
        return _compose([self.matrices[kind] for kind in self.kinds], _new_shares(self.layers))


def run_parts(
    job: StageCostTask,
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]] = PRICES,
) -> np.ndarray:
    """[price, first, last + 1, part] of every run on one logical mesh; forward is inf where there
    is no way.
    """
    return _priced_layers(job, submesh, shape, prices).runs()


def _priced_layers(
    job: StageCostTask,
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]],
) -> PricedLayers:
    """Every kind of layer on one logical mesh, without a price of memory and at each of `prices`,
    which are multiples of the seconds per byte of the step.
    """
    mesh = job.cluster.logical_mesh(shape, submesh)
    tables = OptionTables(mesh, job.costs, job.optimizer, job.options.accumulate_grad_batches)
    given = job.layers_on(mesh.num_devices)
    layers = given.graphs
    ends = [_ends(job, layer, shape) for layer in range(job.num_layers)]
    number: dict[tuple, int] = {}
    kinds = []
    for layer, end in enumerate(ends):
        at_ends = _structure_at(layers[layer], given.numbers[layer], end)
        kinds.append(number.setdefault((given.kinds[layer], at_ends), len(number)))
    problems = []
    passing = []
    on_host = pinned_offload(job.graph, job.options, job.cluster.host)
    for first in map(kinds.index, range(len(number))):
        intra = restrict(
            stage_build(layers[first], tables), own_pins(job.options, layers[first]), job.optimizer
        )
        intra = with_offload(intra, on_host) if on_host else intra
        problems.append(follow_leaders(take_apart(intra), ends[first]))
        passing.append(passing_seconds(job.graph, ends[first], tables))

    def solve(prices: Sequence[tuple[float, int]]) -> list[LayerMatrix]:
        pairs, given = zip(problems, passing, strict=True), (prices, job.num_microbatches)
        return [layer_matrix(problem, *given, own, job.gradients_begin) for problem, own in pairs]

    free = solve([(0.0, 1)])
    seconds = sum(float(free[kind].objective[0].min()) for kind in kinds)
    num_bytes = sum(
        float(free[kind].parts[0, ..., Part.ALWAYS : Part.SAVED + 1].sum(axis=-1).min())
        for kind in kinds
    )
    scale = seconds / max(num_bytes, 1.0) if np.isfinite(seconds) else 1.0
    every, absolute = free, [(scale * factor, alive) for factor, alive in prices]
    if prices:
        priced = solve(absolute)
        every = [
            LayerMatrix(
                np.concatenate([a.objective, b.objective]), np.concatenate([a.parts, b.parts])
            )
            for a, b in zip(free, priced, strict=True)
        ]
    return PricedLayers(layers, kinds, problems, passing, [(0.0, 1), *absolute], every, scale)


def _new_shares(layers: Sequence[StepGraph]) -> list[np.ndarray]:
    """[layer][first]: which share of the bytes that a layer receives no earlier layer from `first`
    on receives too.
    """
    reader: dict[int, int] = {}  # value -> the last layer that received it
    found = []
    for number, layer in enumerate(layers):
        sizes = {v: layer.values[v].num_bytes for v in layer.received}
        known = np.zeros(number)
        for value, size in sizes.items():
            known[: reader.get(value, -1) + 1] += size
            reader[value] = number
        found.append(1 - known / max(sum(sizes.values()), 1))
    return found


def _compose(layers: Sequence[LayerMatrix], new_shares: Sequence[np.ndarray]) -> np.ndarray:
    """All runs by min-plus products along the chain, with the parts of what was chosen."""
    L, K = len(layers), layers[0].objective.shape[0]
    result = np.zeros((K, L, L + 1, len(Part)))
    result[..., Part.FORWARD] = np.inf
    for k in range(K):
        objective = np.zeros((0, layers[0].objective.shape[1]))  # [first layer, layout at the end]
        parts = np.zeros((0, objective.shape[1], len(Part)))  # of the runs behind `objective`
        for last, layer in enumerate(layers):
            cost, own = layer.objective[k], layer.parts[k]  # [p, q], [p, q, part]
            start = cost.argmin(axis=0)  # a run that begins here may enter in any layout
            columns = np.arange(cost.shape[1])
            joined = objective[:, :, None] + cost[None]  # [first, p, q]
            best = joined.argmin(axis=1)  # [first, q]
            before, after = parts[np.arange(last)[:, None], best], own[best, columns[None, :]]
            objective = np.take_along_axis(joined, best[:, None, :], axis=1)[:, 0]
            total = before + after
            total[..., Part.ENTERING], total[..., Part.LEAVING] = (
                before[..., Part.ENTERING],
                after[..., Part.LEAVING],
            )
            after[..., Part.WORKING] -= before[..., Part.MADE]
            for largest in (Part.WORKING, Part.AGAIN):  # one layer at a time: these do not add up
                total[..., largest] = np.maximum(before[..., largest], after[..., largest])
            total[..., Part.PASSING] = (
                before[..., Part.PASSING] + new_shares[last][:, None] * after[..., Part.ENTERING]
            )
            objective = np.concatenate([objective, cost[start, columns][None]])
            parts = np.concatenate([total, own[start, columns][None]])
            end = objective.argmin(axis=1)
            firsts = np.arange(last + 1)
            result[k, : last + 1, last + 1] = parts[firsts, end]
            impossible = ~np.isfinite(objective[firsts, end])
            result[k, : last + 1, last + 1, Part.FORWARD][impossible] = np.inf
    return result


def _candidates(parts: np.ndarray, shape: int, remat: bool | None) -> list[tuple[np.ndarray, ...]]:
    """(seconds, once, always, in flight, shape, remat, at update), each [first, last + 1, price].

    Without recomputation, with a stage recomputed as a whole, layer by layer, and so together with
    what is made of parameters alone.
    """
    # Each [first, last + 1, price].
    parts = np.moveaxis(parts[..., : Part.MADE], (0, -1), (-1, 0))
    (
        forward,
        backward,
        once,
        always,
        saved,
        entering,
        leaving,
        working,
        again,
        passing,
        deriving,
        derived,
        update,
    ) = parts
    recomputed = always + working + leaving
    num_layers = np.maximum(1, np.arange(once.shape[1]) - np.arange(once.shape[0])[:, None])[
        ..., None
    ]
    # (recomputes, seconds per micro-batch to derive again, bytes always, bytes per micro-batch in
    # flight)
    ways = [
        (False, 0.0, always + working, saved + leaving),
        (True, 0.0, recomputed + saved, entering),
        (True, 0.0, recomputed + again, entering + passing),
        (True, deriving, recomputed - derived * (1 - 1 / num_layers) + again, entering + passing),
    ]
    index = np.full(once.shape, shape)
    return [
        (
            (1 + twice) * (forward + derives) + backward,
            once - derives,
            base,
            each,
            index,
            np.full(once.shape, twice),
            # What is made of parameters alone is gone when the optimizer updates them.
            always - derived + update,
        )
        for twice, derives, base, each in ways
        if remat in (None, twice)
    ]


def _prune(columns: list[np.ndarray], job: StageCostTask) -> list[np.ndarray]:
    """`columns` (see `_candidates`) of each run's cheapest that fits, for growing numbers of
    micro-batches alive.
    """
    # Each [first, last + 1, candidate].
    seconds, once, always, each, _, _, at_update = columns
    B = job.num_microbatches
    alive = sorted({min(B, n) for n in (1, 2, 4, 8, 16, 32, 64, 128)} | {B})
    total = B * seconds + once  # [first, last + 1, candidate] seconds per step
    picks, fits = [], []
    for count in alive:
        need = always + count * each
        is_fitting = (need <= job.memory_limit) & (at_update <= job.memory_limit)
        fitting = np.where(is_fitting, total, np.inf)
        lowest = fitting.min(axis=2, keepdims=True)
        picks.append(
            np.where(fitting <= lowest * (1 + 1e-9), need, np.inf).argmin(axis=2)
        )  # of equals the smallest
        fits.append(lowest[..., 0] < np.inf)
    index = np.stack(picks, axis=2)  # [first, last + 1, alive]
    chosen = [np.take_along_axis(array, index, axis=2) for array in columns]
    keep: Any = np.stack(fits, axis=2)
    keep[..., 1:] &= index[..., 1:] != index[..., :-1]  # not twice
    chosen[0] = np.where(keep, chosen[0], np.inf)
    used = keep.any(axis=(0, 1))  # candidates that some run keeps; one stays where none does
    used[0] |= not used.any()
    return [array[..., used] for array in chosen]


def out_of_memory(job: StageCostTask, meshes: Sequence[tuple[int, int]]) -> str | None:
    """A sentence that names the layer which needs the most bytes a device as a stage of its own, on
    its best submesh.

    With one micro-batch in flight: every plan needs at least that. None where layouts of the user's
    stand in the way.
    """
    layers, least = np.arange(job.num_layers), np.full(job.num_layers, np.inf)
    for submesh in meshes:
        for shape in allowed_shapes(job.cluster, job.options, submesh):
            alone = run_parts(job, submesh, shape)[:, layers, layers + 1]  # [price, layer, part]
            need = alone[..., [Part.ALWAYS, Part.SAVED, Part.LEAVING, Part.WORKING]].sum(axis=2)
            least = np.minimum(
                least, np.where(np.isfinite(alone[..., Part.FORWARD]), need, np.inf).min(axis=0)
            )
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


def _ends(job: StageCostTask, layer: int, shape: tuple[int, ...]) -> LayerBoundary:
    """The values at a layer's ends. Of those that cross a cut one leads: differentiable first, then
    the largest.
    """
    values, found = job.graph.values, []
    before, after = job.crossing[layer : layer + 2]
    for crossing in (before, after):
        leader = max(
            crossing, key=lambda v: (values[v].requires_grad, values[v].num_bytes, -v), default=None
        )
        whole = ((INVARIANT,) * len(shape),)
        found.append((leader, whole if leader is None else boundary_layouts(values[leader], shape)))
    passing = tuple(v for v in before if v in after)
    return LayerBoundary(found[0][0], found[1][0], found[0][1], found[1][1], passing)


@dataclass(frozen=True)
class Layers:
    """The layers of a job on meshes of one size.

    Attributes:
        graphs: each as a graph of its own.
        kinds: equal for layers that are the same up to the numbers of their values.
        numbers: of each, the places of its values by their numbers.
    """

    graphs: list[StepGraph]
    kinds: list[int]
    numbers: list[dict[int, int]]


def _layers_on(job: StageCostTask, num_devices: int) -> Layers:
    """See `StageCostTask.layers_on`."""
    found = Layers([], [], [])
    kind_of: dict[tuple, int] = {}
    for first, last in pairwise(job.cuts):
        layer = stage_on(job.graph, first, last, num_devices)
        content, numbers = _numbered(layer, job.options)
        found.graphs.append(layer)
        found.kinds.append(kind_of.setdefault(content, len(kind_of)))
        found.numbers.append(numbers)
    return found


def structure(layer: StepGraph, options: PlanOptions) -> tuple:
    """Equal for layers (or stages) that are the same up to the numbers of their values."""
    return _numbered(layer, options)[0]


def _structure_at(layer: StepGraph, numbers: dict[int, int], ends: LayerBoundary) -> tuple:
    """Equal for equal layers whose boundary values are the same, too."""
    metas = layer.values
    leaders: list[Any] = []
    for v in (ends.entering, ends.leaving):
        leaders.append(None if v is None else (numbers.get(v), metas[v]))
    leading = tuple(leaders)
    # Which of the passing values leads where, and what the others are like.
    passing = tuple((v == ends.entering, v == ends.leaving, metas[v]) for v in ends.passing)
    return leading, ends.entering_layouts, ends.leaving_layouts, passing


def _numbered(layer: StepGraph, options: PlanOptions) -> tuple[tuple, dict[int, int]]:
    """The structure of a layer, its values numbered as they occur, and these numbers."""
    number: dict[int, int] = {}

    def of(value: int) -> int:
        return number.setdefault(value, len(number))

    ops = tuple(
        (op.call, tuple(map(of, op.operands)), tuple(map(of, op.results))) for op in layer.ops
    )
    names = options.placements or not isinstance(options.parallel, str)
    metas = layer.values
    content = (
        ops,
        tuple(
            (of(p.value), p.meta, p.module_shape, p.names if names else None)
            for p in layer.parameters
        ),
        tuple((of(b.value), b.meta, b.update is not None) for b in layer.buffers),
        tuple((of(b.value), b.meta, b.batch_dim) for b in layer.batch),
        tuple((of(c.value), c.meta) for c in layer.constants),
        tuple((of(v), metas[v]) for v in layer.received),
        tuple((of(v), metas[v]) for v in layer.sent),
        tuple(of(v) for v in layer.escaping),
        layer.batch_scope,
    )
    return content, number


def own_pins(options: PlanOptions, layer: StepGraph) -> PlanOptions:
    """The options with those pins only that name a parameter of this part of the step."""
    names = [name for p in layer.parameters for name in p.names]
    own = tuple(
        (pattern, text)
        for pattern, text in options.placements
        if any(fnmatchcase(n, pattern) for n in names)
    )
    return replace(options, placements=own)


def axis_counts(options: PlanOptions) -> set[int]:
    """The numbers of mesh axes that pins speak of."""
    counts = {len(text.split()) for _, text in options.placements}
    return counts if isinstance(options.parallel, str) else counts | {len(options.parallel)}
