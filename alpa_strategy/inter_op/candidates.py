"""Candidates for a pipeline: what the stage DP makes of one number of micro-batches, for every
schedule.

Priced on the costs of `stage_costs.py` and the schedules' closed forms; `planner/assembly.py` solves the best
of them exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby, pairwise, product

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec, DeviceSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.pins import stage_cuts, stage_fits
from alpa_strategy.inter_op.stage_costs import LayerRangeCosts, StageCostTask, free_runs
from alpa_strategy.inter_op.stage_dp import StageRange, StageTables, solve_stages
from alpa_strategy.inter_op.stage_solve import SolvedStage
from alpa_strategy.inter_op.subgraph import span_name
from alpa_strategy.schedules import (
    SCHEDULES,
    in_flight,
    in_flight_by_stage,
    mesh_of,
    seconds_of_many,
    splits_backward,
    terms,
    why_not,
)
from alpa_strategy.sharding.cross_mesh import boundary_link

TOLERANCE = 1e-3  # of the DP: relative distance from its optimum
EVERY_SIZE = 128  # devices up to which stages of every size are set beside each other
ABOVE = 1.05  # closed forms of several stages a mesh, against what is simulated of unequal ones
SENDER_SHARES = (
    1.0,
    0.5,
    0.0,
)  # closed forms of 1F1B (stage_dp.py); simulated schedules decide between them

Stages = tuple[StageRange, ...]  # in pipeline order


@dataclass(frozen=True)
class Candidate:
    """Stages with what they were chosen for."""

    seconds: float  # simulated, from the costs of the tables
    job: StageCostTask
    schedule: str
    stages_per_mesh: int
    stages: Stages
    submesh_of: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    remat: tuple[bool, ...]
    alive: tuple[int, ...]  # per stage, in (micro-batch, stage) pairs of its mesh
    wires: tuple[float, ...]
    solved: tuple[SolvedStage, ...] = ()  # its stages, where their layouts are known already


@dataclass(frozen=True, eq=False)
class StageSpace:
    """The stages that a job's pipelines may have: runs of layers on submeshes, priced."""

    job: StageCostTask
    meshes: Sequence[tuple[int, int]]
    runs: Sequence[LayerRangeCosts]  # per submesh of `meshes`
    allowed: np.ndarray | None = (
        None  # [first layer, last + 1, submesh] which stages there may be; None: all
    )

    @cached_property
    def sizes(self) -> list[int]:
        """[submesh] devices."""
        return [math.prod(mesh) for mesh in self.meshes]

    @property
    def overhead(self) -> float:
        """Seconds of a micro-batch in each stage beside its ops."""
        return runtime_seconds(self.job.cluster.device)

    @cached_property
    def pinned(self) -> list[int]:
        """The first layer of every stage that `options.stages` names, and the end; none: the stages
        are solved.
        """
        return [
            self.job.cuts.index(cut) for cut in stage_cuts(self.job.graph, self.job.options.stages)
        ]

    @cached_property
    def places(self) -> np.ndarray:
        """[first layer, last + 1, 2] first place and number of the devices on which
        `options.device_map` wants such a
        stage: -1 where it does not say, and no devices where it says two things."""
        L = self.job.num_layers
        found = np.full((L, L + 1, 2), -1)
        for first, last in combinations(range(L + 1), 2):
            if inside := set().union(*self.job.places[first:last]):
                found[first, last] = inside.pop() if len(inside) == 1 else (-1, 0)
        return found

    @cached_property
    def may_be(self) -> np.ndarray:
        """[first layer, last + 1, submesh] which stages the user's pins leave."""
        devices = self.places[..., 1, None]
        found = (devices < 0) | (devices == self.sizes)
        if self.pinned:
            others = np.ones(found.shape[:2], dtype=bool)
            others[self.pinned[:-1], self.pinned[1:]] = False
            found[others] = False
        # A schedule that the user asks for is one of several stages (`pins.py`).
        found[0, -1] &= self.job.options.schedule is None and self.job.options.num_stages in (
            None,
            1,
        )
        return found

    @cached_property
    def tables(self) -> StageTables:
        """The runs of all submeshes side by side."""
        width = max(
            r.seconds.shape[2] for r in self.runs
        )  # of different numbers of candidates: filled up with inf

        def stack(name: str, fill: float) -> np.ndarray:
            arrays = [getattr(r, name) for r in self.runs]
            padded = [
                np.pad(a, ((0, 0), (0, 0), (0, width - a.shape[2])), constant_values=fill)
                for a in arrays
            ]
            return np.stack(padded, axis=2).astype(float)

        seconds = stack("seconds", np.inf) + self.overhead
        seconds[~self.may_be] = np.inf
        if self.allowed is not None:
            seconds[~self.allowed] = np.inf
        fits = stage_fits(self.job.cluster, tuple(self.meshes))
        once, always, in_flight, at_update = (
            stack(name, 0.0) for name in ("once", "always", "in_flight", "at_update")
        )
        seconds[at_update > self.job.memory_limit] = np.inf
        # Stages take devices in order: where one ends the next one starts.
        D, some = self.job.cluster.num_devices, range(len(self.meshes))
        starts = (self.places[..., 0], np.arange(D, -1, -1)) if any(self.job.places) else None
        joints = [(D - left, D - left) if 0 < left < D else None for left in range(D + 1)]
        boundary, link_at = _wires(self, fits, joints, list(product(some, some)))
        return StageTables(
            np.array(self.sizes), seconds, once, always, in_flight, boundary, fits, link_at, starts,
            at_update,
        )  # fmt: skip

    @cached_property
    def _without_recomputation(self) -> StageTables:
        seconds = self.tables.seconds.copy()
        for mesh, own in enumerate(self.runs):
            seconds[:, :, mesh, : own.remat.shape[2]][own.remat] = np.inf
        return replace(self.tables, seconds=seconds)

    def tables_for(self, schedule: str, ranks: int, stages_per_mesh: int) -> StageTables:
        """The tables; where a schedule splits backwards and stages need not recompute, without
        those that do.
        """
        splits = splits_backward(schedule, ranks, self.job.num_microbatches, stages_per_mesh)
        return self._without_recomputation if splits and not self.job.remat else self.tables

    def cheapest(
        self,
        tables: StageTables,
        stages: Sequence[tuple[int, int, int]],
        left: Sequence[int],
        alive: Sequence[int],
    ) -> tuple[Stages, list[float]]:
        """The cheapest candidates that fit of stages (first layer, last + 1, submesh), and the
        seconds of each in a
        step: inf where none does. `left`: per stage, devices (or stages: what `tables` count) from
        it on."""
        chosen, seconds = [], []
        for at, devices, pairs in zip(stages, left, alive, strict=True):
            need = tables.bytes_always[at] + pairs * tables.bytes_in_flight[at]
            every = self.job.num_microbatches * tables.seconds[at] + tables.once_seconds[at]
            fitting = np.where(
                (need <= self.job.memory_limit) & tables.may_begin(*at, devices), every, np.inf
            )
            chosen.append(StageRange(*at, int(fitting.argmin())))
            seconds.append(float(fitting.min()))
        return tuple(chosen), seconds

    def candidates(
        self,
        tables: StageTables,
        left: Sequence[int],
        schedule: str,
        stages_per_mesh: int,
        choices: Sequence[Stages],
        alive: tuple[int, ...],
    ) -> list[Candidate]:
        """What was chosen, simulated; all of as many stages. `left`: per stage, what
        `tables.link_at` counts by.
        """
        found, pipelines = [], []
        for choice in choices:
            own = [(self.runs[s.submesh], (s.first, s.last, s.candidate)) for s in choice]
            remat = tuple(bool(runs.remat[at]) for runs, at in own)
            joints = enumerate(pairwise(choice), start=1)
            wires = (
                *(tables.wire(a.last, a.submesh, b.submesh, left[i]) for i, (a, b) in joints),
                0.0,
            )
            stages = []
            for (runs, at), again, wire in zip(own, remat, wires, strict=True):
                # A backward takes two forwards; recomputation is one more.
                forward = float(runs.seconds[at]) / (4 if again else 3)
                stages.append((forward, (3 if again else 2) * forward, float(runs.once[at]), wire))
            pipelines.append(stages)
            shapes = tuple(runs.shapes[int(runs.shape[at])] for runs, at in own)
            on = tuple(s.submesh for s in choice)
            found.append(
                Candidate(
                    0.0,
                    self.job,
                    schedule,
                    stages_per_mesh,
                    choice,
                    on,
                    shapes,
                    remat,
                    alive,
                    wires,
                )
            )
        ranks, count = len(alive) // stages_per_mesh, self.job.num_microbatches
        seconds = simulated_seconds(schedule, ranks, count, pipelines, self.overhead)
        return [
            replace(candidate, seconds=end) for candidate, end in zip(found, seconds, strict=True)
        ]


def solve_schedules(
    space: StageSpace, known: float, schedules: Sequence[str] | None = None
) -> list[Candidate]:
    """The DP for every schedule that is allowed; candidates better than `known`, best first.

    Args:
        schedules: default: the one that the options pin, or all that are searched.
    """
    pinned, is_large = space.job.options.schedule, space.job.cluster.num_devices > EVERY_SIZE
    searched = [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
    names = schedules or ([pinned] if pinned else searched)
    found: list[Candidate] = []

    def best() -> float:
        return min([known, *(c.seconds for c in found)])

    def irregular(usual: int | None = None) -> None:
        for schedule in filter(lambda name: SCHEDULES[name].has_one_stage_per_mesh, names):
            found.extend(_any_meshes(space, schedule, best, usual))

    if not is_large:
        irregular()
    for schedule in names:
        # Closed forms are above what is simulated: where there is time, each counts as if nothing
        # else were known.
        slack = math.inf if SCHEDULES[schedule].has_one_stage_per_mesh else ABOVE
        every = best if is_large else lambda slack=slack: min(known, slack * best())
        found.extend(_regular(space, schedule, every))
    if is_large:
        irregular(min(found, key=lambda c: c.seconds).submesh_of[0] if found else None)
    return sorted(found, key=lambda c: c.seconds)


def check_places(job: StageCostTask, meshes: Sequence[tuple[int, int]]) -> None:
    """PlanError where no stages lie as `options.device_map` wants them to, whatever they take."""
    runs = [free_runs(job, mesh) for mesh in meshes]
    if solve_schedules(StageSpace(replace(job, memory_limit=math.inf), meshes, runs), math.inf):
        return
    wanted, first = [], 0
    for places, run in groupby(job.places):
        last = first + len(list(run))
        ranks = [
            job.cluster.ranks_of(*place) or range(place[0], sum(place)) for place in sorted(places)
        ]
        where = " and ".join(f"on {own[0]}-{own[-1]}" for own in ranks) or "anywhere"
        wanted.append(f"{span_name(job.graph, job.cuts[first], job.cuts[last])} {where}")
        first = last
    raise PlanError(
        f"device_map: no stages, one after the other on all {job.cluster.num_devices} devices, lie"
        " so: "
        f"{'; '.join(wanted)}",
        "stages take devices in the order in which training_step uses their parameters: give"
        " others, fewer pins, or "
        "leave num_stages, stages and schedule to be solved",
    )


def _regular(space: StageSpace, schedule: str, known: Callable[[], float]) -> Iterable[Candidate]:
    """Stages on equal meshes, in every size that divides the devices: what people try by hand, with
    the best cuts.
    """
    job = space.job
    B, D, L = job.num_microbatches, job.cluster.num_devices, job.num_layers
    wanted = job.options.num_stages
    for index, size in enumerate(space.sizes):
        ranks, rest = divmod(D, size)
        for v in SCHEDULES[schedule].stages_per_mesh:
            total = ranks * v
            if (
                rest
                or ranks < 2
                or total > L
                or (wanted and wanted != total)
                or why_not(schedule, ranks, B)
            ):
                continue
            weights = terms(schedule, ranks, B, v, splits=not job.remat)
            equal = EqualMeshes(space, schedule, v, index)
            tables, alive = equal.alone, equal.alive[::-1]
            solved = partial(
                solve_stages, tables, total, weights, alive, job.memory_limit, [total], steps=v
            )
            choice = solved(tolerance=TOLERANCE, known=known())
            starts = [[round(i * L / total) for i in range(total + 1)]]
            if choice is not None:
                yield from equal.candidates([choice.stages])
            elif (
                v > 1
                and space.runs[index].least.sum() < ranks * known()
                and math.isinf(sum(equal.cheapest(starts[0])[1]))  # equal stages do not fit
            ):
                choice = solved(tolerance=0.1)
            if choice is not None:
                starts.append([*(stage.first for stage in choice.stages), L])
            if v > 1:
                for cuts in starts:
                    yield from equal.climbed(cuts, known)


@dataclass(frozen=True, eq=False)
class EqualMeshes:
    """Stages on equal meshes, `stages_per_mesh` on each."""

    space: StageSpace
    schedule: str
    stages_per_mesh: int
    submesh: int

    @property
    def ranks(self) -> int:
        """How many meshes there are."""
        return self.space.job.cluster.num_devices // self.space.sizes[self.submesh]

    @cached_property
    def holders(self) -> list[int]:
        """The mesh of each stage."""
        return [
            mesh_of(self.schedule, self.ranks, i) for i in range(self.ranks * self.stages_per_mesh)
        ]

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Per stage, (micro-batch, stage) pairs alive on its mesh."""
        return in_flight_by_stage(
            self.schedule, self.ranks, self.space.job.num_microbatches, self.stages_per_mesh
        )

    @cached_property
    def tables(self) -> StageTables:
        """With the messages between these stages, by the stages left."""
        size = self.space.sizes[self.submesh]
        tables = self.space.tables_for(self.schedule, self.ranks, self.stages_per_mesh)
        ends = [None if a == b else (size * (a + 1), size * b) for a, b in pairwise(self.holders)]
        joints = [None, *reversed(ends), None]
        boundary, link_at = _wires(self.space, tables.fits, joints, [(self.submesh, self.submesh)])
        return replace(tables, boundary=boundary, link_at=link_at)

    @cached_property
    def alone(self) -> StageTables:
        """Only this submesh, counted as one device each; a mesh holds all of its stages' lasting
        bytes.
        """
        one = _in_units(self.tables, np.array([self.submesh]), self.space.sizes[self.submesh])
        always = self.stages_per_mesh * one.bytes_always
        # All stages of a mesh are updated together.
        at_update = self.stages_per_mesh * one.bytes_at_update
        seconds = np.where(at_update > self.space.job.memory_limit, np.inf, one.seconds)
        starts = self.tables.starts
        if starts is not None:
            starts = (
                starts[0],
                np.array([-1, *reversed(self.holders)]) * self.space.sizes[self.submesh],
            )
        anywhere = np.ones((len(self.holders) + 1, 1), dtype=bool)
        return replace(
            one,
            seconds=seconds,
            bytes_always=always,
            fits=anywhere,
            link_at=self.tables.link_at,
            starts=starts,
        )

    def cheapest(self, cuts: Sequence[int]) -> tuple[Stages, list[float]]:
        """See `StageSpace.cheapest`: stages between cuts."""
        stages = [(first, last, 0) for first, last in pairwise(cuts)]
        return self.space.cheapest(self.alone, stages, range(len(stages), 0, -1), self.alive)

    def candidates(self, choices: Sequence[Stages]) -> list[Candidate]:
        """What was chosen in tables of this submesh alone, simulated."""
        own = [
            tuple(replace(stage, submesh=self.submesh) for stage in choice) for choice in choices
        ]
        left = list(range(len(self.alive), 0, -1))
        return self.space.candidates(
            self.tables, left, self.schedule, self.stages_per_mesh, own, self.alive
        )

    def climbed(self, cuts: list[int], known: Callable[[], float]) -> Iterable[Candidate]:
        """Stages between `cuts`, and better ones: cuts are moved by a layer while that helps.

        The closed form takes the largest stage for all of its mesh's, though only what they take
        together holds the
        others up: what it says of unequal stages may be twice what is simulated.
        """

        def chosen(cuts: Sequence[int]) -> tuple[Stages, np.ndarray]:
            """The cheapest stages, and the seconds that they keep each mesh busy in a step."""
            choice, seconds = self.cheapest(cuts)
            return choice, np.bincount(self.holders, seconds)

        choice, busy = chosen(cuts)
        if sum(busy) >= len(busy) * known() or math.isinf(sum(busy)):
            return
        (best,) = self.candidates([choice])
        while True:
            if best.seconds < known():
                yield best
            inner = range(1, len(self.holders))
            moved = [
                [*cuts[:i], cut, *cuts[i + 1 :]]
                for i in inner
                for cut in (cuts[i] - 1, cuts[i] + 1)
            ]
            every = [
                (each, *chosen(each)) for each in moved if all(a < b for a, b in pairwise(each))
            ]
            tried = [(each, choice) for each, choice, busy in every if max(busy) < best.seconds]
            if not tried:
                return
            priced = zip(
                self.candidates([choice for _, choice in tried]),
                [each for each, _ in tried],
                strict=True,
            )
            found, cuts = min(priced, key=lambda entry: entry[0].seconds)
            if found.seconds >= best.seconds:
                return
            best = found


def _any_meshes(
    space: StageSpace, schedule: str, known: Callable[[], float], usual: int | None
) -> Iterable[Candidate]:
    """One stage a mesh, on meshes of any sizes in order. On many devices: sizes around `usual`, the
    best regular plan's
    submesh, and devices counted in the smallest of them."""
    job, some = space.job, space.tables
    B, D, L = job.num_microbatches, job.cluster.num_devices, job.num_layers
    sizes, near, unit = some.num_devices, np.arange(len(some.num_devices)), 1
    if D > EVERY_SIZE:
        middle = D / min(job.options.num_stages or L, D) if usual is None else float(sizes[usual])
        near = (sizes <= 2 * middle) & (sizes >= middle / 2) | (sizes == D)
        # And what fills the room beside meshes that are pinned.
        near |= sizes % math.gcd(D, *space.places[space.places > 0].tolist()) == 0
        near = np.flatnonzero(near if near.any() else sizes)
        unit = math.gcd(D, *map(int, sizes[near]))
        some = _in_units(some, near, unit)
    for most, counts in _lengths(schedule, min(L, D), B, job.options.num_stages):
        alive = in_flight(schedule, most, B)[::-1]
        weights = terms(schedule, most, B)
        seen: set[Stages] = set()
        for share in SENDER_SHARES:
            choice = solve_stages(
                some, D // unit, weights, alive, job.memory_limit, counts, tolerance=TOLERANCE, known=known(),
                sender_share=share,
            )  # fmt: skip
            if choice is None or choice.stages in seen:
                continue
            seen.add(choice.stages)
            stages = tuple(replace(s, submesh=int(near[s.submesh])) for s in choice.stages)
            own = tuple(alive[len(stages) - i - 1] for i in range(len(stages)))
            devices = [int(sizes[s.submesh]) for s in stages]
            left = [sum(devices[i:]) for i in range(len(stages))]
            yield from space.candidates(space.tables, left, schedule, 1, [stages], own)


def _in_units(tables: StageTables, kept: np.ndarray, unit: int) -> StageTables:
    """Only the submeshes `kept`, devices counted in `unit`s of which all of these sizes are
    multiples.
    """
    return StageTables(
        tables.num_devices[kept] // unit,
        tables.seconds[:, :, kept],
        tables.once_seconds[:, :, kept],
        tables.bytes_always[:, :, kept],
        tables.bytes_in_flight[:, :, kept],
        tables.boundary[:, :, kept][..., kept],
        tables.fits[::unit, kept],
        tables.link_at[::unit],
        None if tables.starts is None else (tables.starts[0], tables.starts[1][::unit]),
        tables.bytes_at_update[:, :, kept],
    )


def _lengths(
    schedule: str, most: int, num_microbatches: int, wanted: int | None
) -> list[tuple[int, Sequence[int] | None]]:
    """(most stages, numbers of stages) that one run of the DP decides between.

    All at once where memory and time of a stage depend only on how far it is from the end (1F1B,
    GPipe: the schedules with closed forms); a schedule that is known by its actions alone is taken
    length by length.
    """
    if SCHEDULES[schedule].alive is not None:
        return [(most, [wanted] if wanted else None)]
    numbers = range(1, most + 1) if wanted is None else [wanted]
    return [
        (n, [n]) for n in numbers if n <= most and why_not(schedule, n, num_microbatches) is None
    ]


def _wires(
    space: StageSpace,
    fits: np.ndarray,
    joints: Sequence[tuple[int, int] | None],
    pairs: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """`boundary` and `link_at` of `StageTables`, which has `fits` as well.

    Args:
        joints: of each number of devices, or stages, that may be left: the place after the sender's
            last device, that of the receiver's first; None: one mesh is both.
        pairs: of submeshes that are asked for.
    """
    cluster, meshes, kinds = space.job.cluster, space.meshes, list(joints)
    if cluster.is_uniform:  # it only matters whether the places are on two nodes
        nodes = [(0, 0) if joint is None else (joint[0] - 1, joint[1]) for joint in joints]
        kinds = [
            (0, int(a // cluster.devices_per_node != b // cluster.devices_per_node))
            for a, b in nodes
        ]
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    nothing = np.zeros((len(meshes), len(meshes), 2))
    every = np.stack(
        [nothing if k is None else _links(cluster, meshes, fits, k, pairs) for k in number]
    )
    worst = np.nan_to_num(
        np.fmax.reduce(every, axis=0)
    )  # where there are no such two stages, too: fewer differ
    links, link_at = np.unique(np.where(np.isnan(every), worst, every), axis=0, return_inverse=True)
    latency, each = links[:, None, ..., 0], links[:, None, ..., 1]
    sizes = space.job.crossing_bytes[:, :, None, None]
    boundary = (sizes > 0).sum(1) * latency + sizes.sum(1) * each
    return boundary, link_at.ravel()[[number[kind] for kind in kinds]]


def _links(
    cluster: ClusterSpec,
    meshes: Sequence[tuple[int, int]],
    fits: np.ndarray,
    joint: tuple[int, int],
    pairs: Sequence[tuple[int, int]],
) -> np.ndarray:
    """[submesh, submesh, 2] latency and seconds a byte at a joint; nan where there are no such two
    stages.
    """
    found = np.full((len(meshes), len(meshes), 2), np.nan)
    for a, b in pairs:
        if cluster.is_uniform:
            link = boundary_link(meshes[a], meshes[b], cluster, bool(joint[1]))
        else:
            sizes, D = (math.prod(meshes[a]), math.prod(meshes[b])), cluster.num_devices
            first, start = joint[0] - sizes[0], joint[1]
            if first < 0 or start + sizes[1] > D or not (fits[D - first, a] and fits[D - start, b]):
                continue
            link = cluster.between((first, sizes[0]), (start, sizes[1]))
        found[a, b] = link.latency, 1 / link.bandwidth
    return found


# --- How long a pipeline's step takes, simulated: its schedule's actions in order, its messages,
# its runtime.
#
# The stage DP works with closed forms (`schedules.terms`); this is the prediction for the stages
# that it chose.


# Small ops that take as long as the runtime does for a micro-batch: 0.3 to 0.8 ms on CPUs;
# accelerators work meanwhile.
RUNTIME_LAUNCHES, RUNTIME_LAUNCHES_BESIDE = 100, 10


def runtime_seconds(device: DeviceSpec) -> float:
    """Seconds that the runtime spends on a micro-batch of a stage beside its ops: messages,
    bookkeeping.
    """
    launches = RUNTIME_LAUNCHES if device.is_cpu else RUNTIME_LAUNCHES_BESIDE
    return launches * device.launch_seconds * device.slowdown


def simulated_seconds(
    schedule: str,
    num_meshes: int,
    num_microbatches: int,
    pipelines: Sequence[Sequence[tuple[float, float, float, float]]],
    overhead: float,
) -> list[float]:
    """Seconds of a step of each pipeline: micro-batches by the schedule, then what is once per
    step.

    The DP's closed form takes messages for work of their sender; here a boundary carries them
    beside the work.

    Args:
        pipelines: all of as many stages, in pipeline order; of each the seconds of a micro-batch
            forward and backward (recomputation included), those once per step, and those of a
            micro-batch's messages to and from the next.
        overhead: seconds of a micro-batch in each stage beside its ops (`runtime_seconds`).
    """
    forward, backward, once, wires = np.moveaxis(np.array(pipelines), -1, 0)  # [pipeline, stage]
    if forward.shape[1] == 1:
        works = num_microbatches * (forward + backward + overhead)[:, 0]
    else:
        busy = forward + overhead / 2, backward + overhead / 2
        works = seconds_of_many(schedule, *busy, num_microbatches, num_meshes, wires / 2)
    return (works + forward.shape[1] // num_meshes * once.max(axis=1)).tolist()
