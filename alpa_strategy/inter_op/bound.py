"""A bound of whole plans: seconds below which no stages of a job's layers can be, whatever cut,
meshes and schedule.

What is bounded by what: docs/formulas.md#inter-op. One stage a mesh: for each maximum that is
tried, the least sum is a shortest path over (layers, stages and devices left). Several: their mean,
the longest layer's, or all cuts simulated.

Memory is left out, and every layer takes its best logical shape and layouts: no plan that is priced
can be below.
"""

import heapq
import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from alpa_strategy.inter_op.candidates import StageSpace
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_dp import StageTables
from alpa_strategy.schedules import BUILT_IN, SCHEDULES, seconds_of_many, why_not

PRECISION = 4e-3
UNITS = 64  # that devices are counted in; a mesh of less than one counts as none
MAX_ENTRIES = 4_000_000  # (cuts, stage, micro-batch) that are simulated for one schedule


def step_bound(space: StageSpace) -> float:
    """Seconds of a step."""
    job, costs = space.job, _costs(space)
    pinned, D = job.options.schedule, job.cluster.num_devices
    names = (
        [pinned]
        if pinned
        else [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
    )
    if not BUILT_IN.issuperset(names):  # of a schedule of the user's we know the work alone
        return _work_alone(costs)
    best = float(costs.work[0, -1, costs.may_be[0, -1] & (costs.sizes == D)].min(initial=math.inf))
    for name in names:
        if SCHEDULES[name].has_one_stage_per_mesh:
            best = min(best, _one_stage_per_mesh(costs, best, waits=name == "1F1B"))
    kinds = [
        (name, v, index)
        for name in names
        for v in SCHEDULES[name].stages_per_mesh
        for index in range(len(space.sizes))
    ]
    for least, kind in sorted((_waiting(costs, *kind), kind) for kind in kinds):
        if least >= best:
            break
        best = min(best, max(least, _simulated(costs, *kind)))
    return best if math.isfinite(best) else 0.0


@dataclass(frozen=True)
class _Costs:
    """The least that stages may take; arrays [first layer, last + 1, submesh], inf where there is
    none.
    """

    job: StageCostTask
    sizes: np.ndarray  # [submesh] devices
    work: np.ndarray  # seconds of a step
    seconds: np.ndarray  # of a micro-batch
    # [cut, submesh] of a micro-batch's messages there and back, from a stage on this submesh to
    # another one
    wires: np.ndarray
    near: np.ndarray  # [cut, submesh] likewise, to a stage on an equal mesh, or on the same
    overhead: (
        float  # seconds of a micro-batch in each stage beside its ops, in `work` and `seconds`
    )
    may_be: np.ndarray  # which stages pins leave; the rest holds for all


def _costs(space: StageSpace) -> _Costs:
    job, tables, overhead = space.job, space.tables, space.overhead
    B, overlap = job.num_microbatches, job.cluster.overlap
    each = np.stack([r.least_each for r in space.runs], axis=1)  # [layer, submesh]
    work = np.stack([r.least for r in space.runs], axis=1)
    exists = np.isfinite(work)
    work, each = np.where(exists, work, 0.0), np.where(exists, each, 0.0)
    # Reductions hide beside the last micro-batch's backward.
    work = np.maximum(work * (1 - overlap / B), work * (1 - overlap) + overlap * B * each)
    work, each = np.where(exists, work, np.inf), np.where(exists, each, np.inf)
    sizes = np.array(space.sizes)
    wires = np.stack(
        [tables.boundary[links, :, a].min(axis=(0, 2)) for a, links in enumerate(_links(tables))], 1
    )
    near = tables.boundary.min(axis=0).diagonal(axis1=1, axis2=2)
    if (
        not job.cluster.is_uniform
    ):  # from the last mesh to the first: on links that no neighbours have
        near = np.zeros_like(wires)
    runs = _of_runs(work, B * overhead), _of_runs(each, overhead)
    return _Costs(job, sizes, *runs, wires, near, overhead, space.may_be)


def _links(tables: StageTables) -> list[np.ndarray]:
    """Per submesh, the links that a stage on it may have to the next one."""
    found = []
    for size, fits in zip(map(int, tables.num_devices), tables.fits.T, strict=True):
        after = np.flatnonzero(fits) - size  # devices left for the next stage
        found.append(
            np.unique(tables.link_at[after[after > 0]])
            if (after > 0).any()
            else np.zeros(1, dtype=int)
        )
    return found


def _of_runs(layers: np.ndarray, overhead: float) -> np.ndarray:
    """[first layer, last + 1, submesh] sums of [layer, submesh], and the overhead of a stage."""
    count, width = layers.shape
    found = np.full((count, count + 1, width), np.inf)
    for first in range(count):
        found[first, first + 1 :] = overhead + np.cumsum(layers[first:], axis=0)
    return found


def _one_stage_per_mesh(costs: _Costs, known: float, waits: bool) -> float:
    """Of two stages or more; at least `known` where nothing is below that.

    waits: for the first micro-batch to come back and for the last one (1F1B); else (GPipe) stages
    only fill and drain.
    """
    first = _work_alone(costs)  # a guess of the maximum
    fill = _least_fill(costs, math.inf, waits)
    intervals = [
        (fill, 0.0, math.inf, fill)
    ]  # (bound, from, to, least sum for a maximum up to `to`)
    while True:
        bound, low, high, fill = heapq.heappop(intervals)
        if high - low <= PRECISION * bound or bound >= known:
            return bound
        middle = (low + high) / 2 if math.isfinite(high) else max(first, 2 * low)
        below = _least_fill(costs, middle, waits)
        heapq.heappush(intervals, (below + low, low, middle, below))
        heapq.heappush(intervals, (fill + middle, middle, high, fill))


def _work_alone(costs: _Costs) -> float:
    """Seconds if all devices were busy with the layers' work all the time."""
    layers = np.arange(costs.job.num_layers)
    least = (costs.sizes * costs.work[layers, layers + 1]).min(axis=1)
    return float(least.sum()) / costs.job.cluster.num_devices


def _least_fill(costs: _Costs, most: float, waits: bool) -> float:
    """The least sum_j (t_j + w_j) of stages whose maximum (docs/formulas.md#inter-op) is at most
    `most`.
    """
    B, L = costs.job.num_microbatches, costs.job.num_layers
    unit = max(1, costs.job.cluster.num_devices // UNITS)
    total = costs.job.cluster.num_devices // unit
    after = np.zeros((L + 1, total + 1))  # [first layer, units left] with one stage less
    after[:L] = np.inf
    best = math.inf
    for s in range(1, min(L, costs.job.cluster.num_devices) + 1):
        now = np.full_like(after, np.inf)
        for index, size in enumerate(costs.sizes // unit):
            every = costs.seconds[..., index], costs.work[..., index]
            seconds, work = (np.where(costs.may_be[..., index], each, np.inf) for each in every)
            rest = after[:, : total + 1 - size] + (costs.wires[:, index, None] if s > 1 else 0.0)
            ends = np.flatnonzero(np.isfinite(rest).any(axis=1))
            # The formula's: own, (B - s_m) t_m + g_m, [first, end]; trips, sums of t_j, w_j, [end,
            # units left].
            with np.errstate(invalid="ignore"):  # where there is no such stage
                own = work - seconds
                # with fewer micro-batches than stages, its backwards alone are one after the other
                if waits:
                    own = (
                        work - s * seconds if s <= B else own * 2 / 3 - (B - 1) * costs.overhead / 6
                    )
            own = np.where(np.isfinite(work), own, np.inf)[:, ends]
            firsts = np.flatnonzero((own <= most).any(axis=1))
            if not firsts.size:
                continue
            trips = np.zeros((len(ends), 1))
            if waits and s <= B:
                trips = (rest if s < B else after[:, : total + 1 - size])[ends]
            fits = own[firsts][..., None] + trips <= most  # [first, end, units left]
            found = np.where(
                fits, seconds[np.ix_(firsts, ends)][..., None] + rest[ends], np.inf
            ).min(axis=1)
            now[firsts, size:] = np.minimum(now[firsts, size:], found)
        if not np.isfinite(now).any():
            break
        if s > 1:
            best = min(best, float(now[0, total]))
        after = now
    return best


def _waiting(costs: _Costs, name: str, v: int, index: int) -> float:
    """Of v stages on each of equal meshes; inf where the schedule has no such stages.

    The larger of two: their mean work, with what they wait at the start and at the end, and the
    work of the mesh that has the longest layer. If no other mesh has more than k layers, this one
    has all that are left.
    """
    job = costs.job
    ranks, rest = divmod(job.cluster.num_devices, int(costs.sizes[index]))
    if (
        v == 1
        or rest
        or ranks < 2
        or ranks * v > job.num_layers
        or why_not(name, ranks, job.num_microbatches)
    ):
        return math.inf
    L, layers = job.num_layers, np.arange(job.num_layers)
    beside = job.num_microbatches * costs.overhead  # of a stage
    each = costs.work[layers, layers + 1, index] - beside
    if not np.isfinite(each).all():
        return math.inf
    is_whole = (
        SCHEDULES[name].bubble == 1.0
    )  # else gradients of weights fill what is left of the end
    seconds = float(costs.seconds[layers, layers + 1, index].min()) * (1.0 if is_whole else 1 / 3)
    message = float(np.minimum(costs.wires, costs.near)[1:-1, index].min()) * (
        1.0 if is_whole else 1 / 2
    )
    mean = each.sum() / ranks + (ranks - 1) / 2 * (seconds + message)
    most = np.arange(1, L + 1)  # layers of another mesh
    longest = each.max() + np.maximum(0, L - 1 - (ranks - 1) * most) * each.min()
    return v * beside + max(float(mean), float(np.maximum(most * each.min(), longest).min()))


def _simulated(costs: _Costs, name: str, v: int, index: int) -> float:
    """The best of all cuts into v stages on each of equal meshes; 0 where there are too many."""
    B, L = costs.job.num_microbatches, costs.job.num_layers
    ranks = costs.job.cluster.num_devices // int(costs.sizes[index])
    stages = ranks * v
    if math.comb(L - 1, stages - 1) * stages * B > MAX_ENTRIES:
        return 0.0
    inner = np.array(list(combinations(range(1, L), stages - 1)))  # [pipeline, stage]
    first, last = (
        np.pad(inner, ((0, 0), (1, 0))),
        np.pad(inner, ((0, 0), (0, 1)), constant_values=L),
    )
    left = costs.may_be[first, last, index].all(axis=1)
    if not left.any():
        return math.inf
    inner, first, last = inner[left], first[left], last[left]
    seconds, work = costs.seconds[first, last, index], costs.work[first, last, index]
    wires = costs.wires[inner, index]
    if not costs.job.cluster.is_uniform:
        wires = costs.near[inner, index]
    elif SCHEDULES[name].is_folded:
        wires[:, ranks - 1] = costs.near[inner[:, ranks - 1], index]
    forward = seconds / 3 + costs.overhead / 6  # half of the overhead
    end = seconds_of_many(name, forward, seconds - forward, B, ranks, wires / 2)
    return float((end + v * (work - B * seconds).max(axis=1)).min())
