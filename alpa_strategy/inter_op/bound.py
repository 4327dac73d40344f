"""A lower bound of the seconds of a step, over all pipelines of a job's layers, meshes and
schedules.

docs/formulas.md#inter-op derives it. With one stage per mesh, the least sum for each maximum that
is tried is a shortest path over (layers, stages, devices left). With several stages per mesh it is
their mean, the longest layer's, or all splits simulated.

Every layer takes its best logical shape and layouts, and a stage the bound of those that fit into
memory with the schedule's activations in flight (floors.py): no plan that is priced can be below.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from alpa_strategy.inter_op import stage_costs
from alpa_strategy.inter_op.floors import StageFloors
from alpa_strategy.inter_op.split_bound import EqualMeshPipelines, kinds_of, least_over_splits
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_dp import StageTables
from alpa_strategy.inter_op.stage_space import StageSpace
from alpa_strategy.schedules import (
    BUILT_IN,
    SCHEDULES,
    in_flight,
    in_flight_by_stage,
    refusal,
    seconds_of_many,
    splits_backward,
)

PRECISION = 4e-3
# That devices are counted in; a mesh of less than one counts as none.
UNITS = 64
# (cuts, stage, micro-batch) that are simulated for one schedule
MAX_ENTRIES = 4_000_000


def step_bound(space: StageSpace) -> float:
    """Return a lower bound of the seconds of a step, over all stages, meshes and layouts of
    `space`; 0 if there are none that fit.
    """
    job = space.job
    costs = _costs(space)
    # Of schedules that split the backward: sums over devices then take their full time.
    work, seconds = _seconds_of_runs(space, "least_apart", "least_each_apart")
    costs_apart = replace(costs, work=work, seconds=seconds)
    pinned, D = job.options.schedule, job.cluster.num_devices
    names = (
        [pinned]
        if pinned
        else [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
    )
    # Of a schedule of the user's we know the work alone.
    if not BUILT_IN.issuperset(names):
        return _work_alone(costs)
    is_whole = costs.may_be[0, -1] & (costs.sizes == D)
    best = float(costs.fitting_work(1)[0, -1, is_whole].min(initial=math.inf))
    for name in names:
        if SCHEDULES[name].has_one_stage_per_mesh:
            best = min(best, _one_stage_per_mesh(costs, best, name))
    kinds = [
        (name, v, index)
        for name in names
        for v in SCHEDULES[name].stages_per_mesh
        for index in range(len(space.sizes))
    ]

    def costs_of(name: str, stages_per_mesh: int, index: int) -> _Costs:
        num_meshes = max(1, D // space.sizes[index])
        splits = splits_backward(name, num_meshes, job.num_microbatches, stages_per_mesh)
        return costs_apart if splits else costs

    for least, kind in sorted((_waiting(costs_of(*kind), *kind), kind) for kind in kinds):
        if least >= best:
            break
        fitting = max(least, _mean_work(costs_of(*kind), *kind))
        if fitting < best:
            best = min(best, max(fitting, _simulated(costs_of(*kind), *kind, best)))
    return best if math.isfinite(best) else 0.0


def with_extra_floors(space: StageSpace) -> StageSpace:
    """Return a copy of the space whose `runs` have all lower bounds of their seconds, which make
    `step_bound` tighter.
    """
    runs = []
    for mesh, costs in zip(space.meshes, space.runs, strict=True):
        runs.append(stage_costs.with_extra_floors(space.job, mesh, costs))
    return replace(space, runs=runs)


@dataclass(frozen=True)
class _Costs:
    """The least costs that stages may have; arrays [first layer, last + 1, submesh], inf if no
    stage is possible.
    """

    job: StageCostTask

    # [submesh] devices
    sizes: np.ndarray

    # Seconds of a step.
    work: np.ndarray

    # Of a micro-batch
    seconds: np.ndarray
    # [cut, submesh] of a micro-batch's messages there and back, from a stage on this submesh to
    # another one
    wires: np.ndarray
    # [cut, submesh, units left for later stages] of `wires`, by the place of the next stage where
    # units are devices
    wires_before: np.ndarray

    # [cut, submesh] likewise, to a stage on an equal mesh, or on the same
    near: np.ndarray
    overhead: (
        float  # seconds of a micro-batch in each stage beside its ops, in `work` and `seconds`
    )

    # Which stages pins leave; the rest holds for all.
    may_be: np.ndarray
    floors: StageFloors

    def fitting_work(
        self,
        alive: float,
        stages_per_mesh: int = 1,
        may_recompute: bool = True,
        submesh: int | None = None,
    ) -> np.ndarray:
        """Return the least seconds of a step of stages that fit into memory, [first layer, last +
        1, submesh]; without the last axis if `submesh` is not None.

        It is inf where there is no run.

        Args: as of `StageFloors.seconds`.
        """
        chosen = slice(None) if submesh is None else submesh
        floors = self.floors.seconds(alive, stages_per_mesh, may_recompute, submesh)
        # Reductions hide beside the last micro-batch's backward: at most its share of the step.
        visible = 1 - self.job.cluster.overlap / self.job.num_microbatches
        beside = self.job.num_microbatches * self.overhead
        return np.maximum(self.work[..., chosen], visible * floors + beside)


def _seconds_of_runs(
    space: StageSpace, of_step: str, of_microbatch: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return `work` and `seconds` of `_Costs`, each [first layer, last + 1, submesh]; inf for runs
    that are empty or have a layer that is impossible on the submesh.

    Args:
        of_step, of_microbatch: the fields of `LayerRangeCosts` with the least seconds of layers.
    """
    B = space.job.num_microbatches
    overlap = space.job.cluster.overlap
    # [layer, submesh]
    work = np.stack([getattr(runs, of_step) for runs in space.runs], axis=1)
    each_microbatch = np.stack([getattr(runs, of_microbatch) for runs in space.runs], axis=1)
    exists = np.isfinite(work)
    work, each_microbatch = np.where(exists, work, 0.0), np.where(exists, each_microbatch, 0.0)
    # Reductions hide beside the last micro-batch's backward.
    work = np.maximum(
        work * (1 - overlap / B), work * (1 - overlap) + overlap * B * each_microbatch
    )
    work = np.where(exists, work, np.inf)
    each_microbatch = np.where(exists, each_microbatch, np.inf)
    return _of_runs(work, B * space.overhead), _of_runs(each_microbatch, space.overhead)


def _costs(space: StageSpace) -> _Costs:
    """Return the `_Costs` of a space: the least seconds of every run of layers and of the messages
    between them, for the bound on all pipelines.
    """
    job = space.job
    tables = space.tables
    sizes = np.array(space.sizes)
    wires = np.stack(
        [tables.boundary[links, :, a].min(axis=(0, 2)) for a, links in enumerate(_links(tables))], 1
    )
    near = tables.boundary.min(axis=0).diagonal(axis1=1, axis2=2)
    # From the last mesh to the first: on links that no neighbours have.
    if not job.cluster.is_uniform:
        near = np.zeros_like(wires)
    runs = _seconds_of_runs(space, "least", "least_each")
    floors = StageFloors(job, space.runs)
    before = _wires_before(job, tables, wires)
    return _Costs(job, sizes, *runs, wires, before, near, space.overhead, space.may_be, floors)


def _links(tables: StageTables) -> list[np.ndarray]:
    """Return, per submesh, the indices of the links that a stage on it may have to the next one;
    [0] if none may follow.
    """
    links = []
    for size, fits in zip(map(int, tables.num_devices), tables.fits.T, strict=True):
        # Devices left for the next stage.
        after = np.flatnonzero(fits) - size
        links.append(
            np.unique(tables.link_at[after[after > 0]])
            if (after > 0).any()
            else np.zeros(1, dtype=int)
        )
    return links


def _wires_before(job: StageCostTask, tables: StageTables, wires: np.ndarray) -> np.ndarray:
    """Return `_Costs.wires_before`.

    Args:
        wires: `_Costs.wires`, which is the answer where units are several devices.
    """
    D = job.cluster.num_devices
    # A unit is several devices: we do not know where stages begin.
    if D > UNITS:
        return np.repeat(wires[..., None], D // (D // UNITS) + 1, axis=2)
    # [devices left, cut, submesh]
    seconds = tables.boundary.min(axis=3)[tables.link_at[: D + 1]]
    return np.moveaxis(seconds, 0, -1)


def _of_runs(layers: np.ndarray, overhead: float) -> np.ndarray:
    """Return [first layer, last + 1, submesh] sums of `layers`, plus the overhead of a stage; inf
    where there is no layer.

    Args:
        layers: [layer, submesh] seconds.
        overhead: seconds per stage.
    """
    count, width = layers.shape
    sums = np.full((count, count + 1, width), np.inf)
    for first in range(count):
        sums[first, first + 1 :] = overhead + np.cumsum(layers[first:], axis=0)
    return sums


def _one_stage_per_mesh(costs: _Costs, known: float, name: str) -> float:
    """Return a bound of the seconds of pipelines of at least two stages with one stage per mesh;
    some value of at least `known` if nothing is below that. It is searched to the relative
    `PRECISION`.

    Args:
        known: seconds.
        name: of the schedule. 1F1B waits for the first micro-batch to come back and for the last
            one; with others (GPipe) stages only fill and drain.
    """
    # A guess of the maximum.
    first = _work_alone(costs)
    stages = _stages_by_place(costs, name)
    fill = _least_fill(costs, stages, math.inf)
    # (bound, from, to, least sum for a maximum up to `to`)
    intervals = [(fill, 0.0, math.inf, fill)]
    while True:
        bound, low, high, fill = heapq.heappop(intervals)
        if high - low <= PRECISION * bound or bound >= known:
            return bound
        middle = (low + high) / 2 if math.isfinite(high) else max(first, 2 * low)
        below = _least_fill(costs, stages, middle)
        heapq.heappush(intervals, (below + low, low, middle, below))
        heapq.heappush(intervals, (fill + middle, middle, high, fill))


def _work_alone(costs: _Costs) -> float:
    """Return the seconds of a step in which all devices compute the layers' work all the time."""
    layers = np.arange(costs.job.num_layers)
    least = (costs.sizes * costs.work[layers, layers + 1]).min(axis=1)
    return float(least.sum()) / costs.job.cluster.num_devices


@dataclass(frozen=True)
class _Stages:
    """The stages with one number of stages from them to the end, one stage per mesh; arrays [first,
    last + 1, submesh], inf if no stage is possible.
    """

    # Number of stages from it to the end.
    place: int

    # Of a micro-batch
    seconds: np.ndarray

    # Of a step that the others do not share: (B - s_m) t_m + g_m of the formula.
    not_shared: np.ndarray

    # Whether the way there and back, through later stages, comes on top.
    has_trips: bool

    # And the messages to the next stage.
    has_wire: bool

    # How many times, after the first, a micro-batch waits for one to be back.
    rounds: float


def _stages_by_place(costs: _Costs, name: str) -> list[_Stages]:
    """Return the stages by the number of stages from them to the end: 1, 2, ... up to the most.

    Args:
        name: of the schedule.
    """
    B, waits = costs.job.num_microbatches, name == "1F1B"
    most = min(costs.job.num_layers, costs.job.cluster.num_devices)
    known = SCHEDULES[name].alive is not None
    alive = in_flight(name, most, B)[::-1] if known else [1] * most
    stages = []
    for s in range(1, most + 1):
        work = costs.fitting_work(alive[s - 1])
        # Of memory we know the whole step's seconds, not how much of them are once a step.
        share = 1 - min(s if waits else 1, B) / B
        # Where there is no such stage.
        with np.errstate(invalid="ignore"):
            busy = costs.work - (s if waits else 1) * costs.seconds
            if waits and s > B:
                # With fewer micro-batches than stages, its backwards alone follow one another.
                busy = costs.work - costs.seconds
                busy = busy * 2 / 3 - (B - 1) * costs.overhead / 6
            busy = np.maximum(busy, share * work)
        exists = costs.may_be & np.isfinite(busy)
        seconds, busy = (np.where(exists, array, np.inf) for array in (costs.seconds, busy))
        rounds = max(B / s - 1, 0.0) if waits else 0.0
        stages.append(_Stages(s, seconds, busy, waits and s <= B, s < B, rounds))
    return stages


def _least_fill(costs: _Costs, stages: Sequence[_Stages], most: float) -> float:
    """Return the least sum_j (t_j + w_j) of stages whose maximum (docs/formulas.md#inter-op) is at
    most `most`, over at least two stages; inf if there are none.
    """
    L = costs.job.num_layers
    unit = max(1, costs.job.cluster.num_devices // UNITS)
    total = costs.job.cluster.num_devices // unit
    # [first layer, units left] with one stage less
    after = np.zeros((L + 1, total + 1))
    after[:L] = np.inf
    best = math.inf
    for stage in stages:
        now = np.full_like(after, np.inf)
        for index, size in enumerate(costs.sizes // unit):
            rest = after[:, : total + 1 - size]
            if stage.place > 1:
                rest = rest + costs.wires_before[:, index, : total + 1 - size]
            ends = np.flatnonzero(np.isfinite(rest).any(axis=1))
            # own: [first, end]; trips, sums of t_j, w_j: [end, units left].
            busy = stage.not_shared[:, ends, index]
            firsts = np.flatnonzero((busy <= most).any(axis=1))
            if not firsts.size:
                continue
            trips = np.zeros((len(ends), 1))
            if stage.has_trips:
                trips = (rest if stage.has_wire else after[:, : total + 1 - size])[ends]
            # [first, end, units left]
            fits = busy[firsts][..., None] + trips <= most
            seconds = stage.seconds[np.ix_(firsts, ends)][..., index]
            least = np.where(fits, seconds[..., None] + rest[ends], np.inf).min(axis=1)
            now[firsts, size:] = np.minimum(now[firsts, size:], least)
        # A micro-batch goes there and back before the one after the last that is in flight begins.
        now[stage.rounds * np.where(np.isfinite(now), now, 0.0) > most] = np.inf
        if not np.isfinite(now).any():
            break
        if stage.place > 1:
            best = min(best, float(now[0, total]))
        after = now
    return best


def _waiting(costs: _Costs, name: str, v: int, index: int) -> float:
    """Return a bound of the seconds of v stages on each of equal meshes.

    It is inf for v = 1, if there are no two or more such meshes, too few layers or micro-batches,
    or if a layer is impossible on the submesh.

    It is the larger of two: the meshes' mean work, with the time that they wait at the start and at
    the end, and the work of the mesh that has the longest layer, or both ends of a folded pipeline.
    If no other mesh has more than k layers, this one has all others.

    Args:
        name: of the schedule.
        index: of the submesh.
    """
    job = costs.job
    ranks, rest = divmod(job.cluster.num_devices, int(costs.sizes[index]))
    if (
        v == 1
        or rest
        or ranks < 2
        or ranks * v > job.num_layers
        or refusal(name, ranks, job.num_microbatches)
    ):
        return math.inf
    L, layers = job.num_layers, np.arange(job.num_layers)
    # Of a stage
    beside = job.num_microbatches * costs.overhead
    layer_work = costs.work[layers, layers + 1, index] - beside
    if not np.isfinite(layer_work).all():
        return math.inf
    # Else gradients of weights fill what is left of the end.
    is_whole = SCHEDULES[name].bubble == 1.0
    seconds = float(costs.seconds[layers, layers + 1, index].min()) * (1.0 if is_whole else 1 / 3)
    message = float(np.minimum(costs.wires, costs.near)[1:-1, index].min()) * (
        1.0 if is_whole else 1 / 2
    )
    mean = layer_work.sum() / ranks + (ranks - 1) / 2 * (seconds + message)
    # Layers of another mesh.
    most = np.arange(1, L + 1)
    left = L - (ranks - 1) * most
    longest = layer_work.max() + np.maximum(0, left - 1) * layer_work.min()
    if SCHEDULES[name].is_folded:
        # One mesh has the first and the last layer.
        both_ends = layer_work[0] + layer_work[-1]
        longest = np.maximum(longest, both_ends + np.maximum(0, left - 2) * layer_work.min())
    return v * beside + max(float(mean), float(np.maximum(most * layer_work.min(), longest).min()))


def _mean_work(costs: _Costs, name: str, v: int, index: int) -> float:
    """Return the mean seconds of work of equal meshes, v stages on each, that fit into memory; inf
    if there are none.

    Args:
        name: of the schedule.
        index: of the submesh.
    """
    job, L = costs.job, costs.job.num_layers
    B, ranks = job.num_microbatches, job.cluster.num_devices // int(costs.sizes[index])
    # Where a backward is split, stages recompute only where that is asked for (`tables_for`).
    may_recompute = bool(job.remat) or SCHEDULES[name].bubble == 1.0
    # [layers done]
    least = np.full(L + 1, np.inf)
    least[0] = 0.0
    for alive in in_flight_by_stage(name, ranks, B, v):
        work = costs.fitting_work(alive, v, may_recompute, index)
        work = np.where(costs.may_be[..., index], work, np.inf)
        least = np.append(np.inf, (least[:L, None] + work).min(axis=0)[1:])
    return float(least[L]) / ranks


def _simulated(costs: _Costs, name: str, v: int, index: int, known: float) -> float:
    """Return the least simulated seconds of a step, over all ways to split the layers into v stages
    on each of equal meshes.

    A lower bound if there are too many ways to simulate; inf if none of them is possible.

    Args:
        name: of the schedule.
        index: of the submesh.
        known: seconds; a bound that is at least as large need not be better.
    """
    B, L = costs.job.num_microbatches, costs.job.num_layers
    ranks = costs.job.cluster.num_devices // int(costs.sizes[index])
    stages = ranks * v
    if math.comb(L - 1, stages - 1) * stages * B > MAX_ENTRIES:
        return _over_all_splits(costs, name, v, index, known)
    # [pipeline, stage]
    inner = np.array(list(combinations(range(1, L), stages - 1)))
    first = np.pad(inner, ((0, 0), (1, 0)))
    last = np.pad(inner, ((0, 0), (0, 1)), constant_values=L)
    is_possible = costs.may_be[first, last, index].all(axis=1)
    if not is_possible.any():
        return math.inf
    inner = inner[is_possible]
    first = first[is_possible]
    last = last[is_possible]
    seconds = costs.seconds[first, last, index]
    work = costs.work[first, last, index]
    wires = costs.wires[inner, index]
    if not costs.job.cluster.is_uniform:
        wires = costs.near[inner, index]
    elif SCHEDULES[name].is_folded:
        wires[:, ranks - 1] = costs.near[inner[:, ranks - 1], index]
    # Half of the overhead.
    forward = seconds / 3 + costs.overhead / 6
    end = seconds_of_many(name, forward, seconds - forward, B, ranks, wires / 2)
    return float((end + v * (work - B * seconds).max(axis=1)).min())


def _over_all_splits(costs: _Costs, name: str, v: int, index: int, known: float) -> float:
    """Return a lower bound of the seconds of a step over all splits of the layers into v stages on
    each of equal meshes (`least_over_splits`).

    Args: as of `_simulated`.
    """
    job = costs.job
    layers = np.arange(job.num_layers)
    seconds = costs.seconds[layers, layers + 1, index] - costs.overhead
    beside = job.num_microbatches * costs.overhead
    work = costs.work[layers, layers + 1, index] - beside
    once = np.maximum(work - job.num_microbatches * seconds, 0.0)

    ranks = job.cluster.num_devices // int(costs.sizes[index])
    # A stage may end at any cut.
    wire = float(costs.wires[1:-1, index].min())
    near = float(costs.near[1:-1, index].min())
    wires = np.full(ranks * v, wire if job.cluster.is_uniform else near)
    if SCHEDULES[name].is_folded:
        wires[ranks - 1] = near
    pipelines = EqualMeshPipelines(name, ranks, v, job.num_microbatches, costs.overhead, wires / 2)
    return least_over_splits(pipelines, kinds_of(seconds, once), known)
