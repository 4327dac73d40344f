"""Candidates for pipelines of one number of micro-batches: the stage DP under every schedule.

They are priced by the costs of `stage_costs.py` and the schedules' closed forms, and simulated;
`planner/assembly.py` solves the best of them exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.equal_meshes import EqualMeshes, in_units
from alpa_strategy.inter_op.stage_costs import StageCostTask, free_runs
from alpa_strategy.inter_op.stage_dp import StageChoice, solve_stages
from alpa_strategy.inter_op.stage_space import Candidate, Stages, StageSpace
from alpa_strategy.inter_op.stored_costs import (
    candidate_fields,
    candidates_key,
    candidates_record,
    has_own_schedules,
)
from alpa_strategy.inter_op.subgraph import span_name
from alpa_strategy.partial_results import NOT_STORED, Key
from alpa_strategy.schedules import SCHEDULES, closed_form, in_flight, refusal

# Of the stage DP: relative distance from its optimum.
TOLERANCE = 1e-3
# With more tolerance the DP only finds where to climb from.
START_TOLERANCE = 0.1
# Ways to cut the layers of several stages a mesh that are all tried, at most.
MOST_CUTS = 1000
# Up to this many devices, stages of all sizes are combined.
EVERY_SIZE = 128
# The closed form of several stages on a mesh may be above the simulated step by this factor.
CLOSED_FORM_SLACK = 1.05
# Shares of a message's seconds that its sender is busy with, for closed forms of 1F1B
# (stage_dp.py). Simulated steps decide between the results.
SENDER_SHARES = (1.0, 0.5, 0.0)


def solve_schedules(
    space: StageSpace, known: float, schedules: Sequence[str] | None = None
) -> list[Candidate]:
    """Run the stage DP for every schedule that is allowed.

    Args:
        known: seconds of a plan that exists already: only faster candidates are searched.
        schedules: default: the one that the options pin, or all that are searched.

    Returns:
        Candidates, the fastest first.
    """
    is_large = space.job.cluster.num_devices > EVERY_SIZE
    pinned = space.job.options.schedule
    names: Sequence[str]
    if schedules:
        names = schedules
    elif pinned:
        names = [pinned]
    else:
        names = [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
    search = _CandidateSearch(space, known)

    def add_any_meshes(usual_submesh: int | None = None) -> None:
        for name in names:
            if SCHEDULES[name].has_one_stage_per_mesh:
                find = partial(_any_meshes, space, name, usual_submesh)
                search.add(("any meshes", name, usual_submesh), find)

    if not is_large:
        add_any_meshes()
    for name in names:
        slack = 1.0
        if not is_large:
            # Closed forms are above what is simulated: if there is time, every schedule is
            # searched as if no candidate of another one were known.
            slack = math.inf if SCHEDULES[name].has_one_stage_per_mesh else CLOSED_FORM_SLACK
        search.add(("equal meshes", name, slack), partial(_regular, space, name), slack)
    if is_large:
        fastest = min(search.candidates, key=lambda candidate: candidate.seconds, default=None)
        add_any_meshes(fastest.submesh_of[0] if fastest else None)
    return sorted(search.candidates, key=lambda candidate: candidate.seconds)


# Finds candidates: (returns the seconds that they have to be below) -> candidates.
FindCandidates = Callable[[Callable[[], float]], Iterable[Candidate]]


class _CandidateSearch:
    """The candidates of one number of micro-batches, found part by part.

    Args:
        space: the priced stages.
        known: seconds of a plan that exists already.
    """

    def __init__(self, space: StageSpace, known: float) -> None:
        self.candidates: list[Candidate] = []
        self._space = space
        self._known = known
        # What a user's schedule decides is not stored.
        self._results = NOT_STORED if has_own_schedules() else space.job.results

    @cached_property
    def _content(self) -> str:
        """Hash of the space and the known seconds."""
        return candidates_key(self._space, self._known).text

    def add(self, name: tuple[object, ...], find: FindCandidates, slack: float = 1.0) -> None:
        """Add the candidates of a part of the search, or those that an interrupted planning has
        stored.

        Args:
            name: of the part.
            find: finds its candidates.
            slack: candidates may be slower than the best one by this factor, but not than the known
                step.
        """
        best_before = min([self._known, *(candidate.seconds for candidate in self.candidates)])

        def compute() -> list[Candidate]:
            candidates: list[Candidate] = []

            def limit() -> float:
                best = min([best_before, *(candidate.seconds for candidate in candidates)])
                return min(self._known, slack * best)

            candidates.extend(find(limit))
            return candidates

        part: list[Candidate] = self._results.get(
            "candidates",
            key=lambda: Key(self._content, name, best_before),
            compute=compute,
            encode=candidates_record,
            decode=lambda record: [
                Candidate(**candidate_fields(row, self._space)) for row in record["candidates"]
            ],
        )
        self.candidates += part


def check_places(job: StageCostTask, meshes: Sequence[tuple[int, int]]) -> None:
    """Raise PlanError if no stages are placed as `options.device_map` pins them, whatever their
    costs.

    Args:
        meshes: (nodes, devices per node) that stages may have.
    """
    runs = [free_runs(job, mesh) for mesh in meshes]
    without_limit = replace(job, memory_limit=math.inf)
    if solve_schedules(StageSpace(without_limit, meshes, runs), math.inf):
        return

    pins: list[str] = []
    first = 0
    for places, layers in groupby(job.places):
        last = first + len(list(layers))
        devices: list[str] = []
        for place in sorted(places):
            ranks = job.cluster.ranks_of(*place) or range(place[0], sum(place))
            devices.append(f"on {ranks[0]}-{ranks[-1]}")
        where = " and ".join(devices) or "anywhere"
        pins.append(f"{span_name(job.graph, job.cuts[first], job.cuts[last])} {where}")
        first = last
    raise PlanError(
        f"device_map: no stages, one after the other on all {job.cluster.num_devices} devices, lie"
        f" so: {'; '.join(pins)}",
        "stages take devices in the order in which training_step uses their parameters: give"
        " others, fewer pins, or leave num_stages, stages and schedule to be solved",
    )


def _regular(space: StageSpace, schedule: str, known: Callable[[], float]) -> Iterable[Candidate]:
    """Yield stages on equal meshes of every size that divides the devices, with the best cuts: what
    people try by hand.

    Sizes that leave one mesh or that `refusal` rules out are skipped, and so are numbers of stages
    above that of the layers or other than the pinned one.

    Args:
        known: seconds of the best candidate so far.
    """
    job = space.job
    pinned_stages = job.options.num_stages
    for index, size in enumerate(space.sizes):
        num_meshes, rest = divmod(job.cluster.num_devices, size)
        if rest or num_meshes < 2 or refusal(schedule, num_meshes, job.num_microbatches):
            continue
        for stages_per_mesh in SCHEDULES[schedule].stages_per_mesh:
            num_stages = num_meshes * stages_per_mesh
            if num_stages > job.num_layers or pinned_stages not in (None, 0, num_stages):
                continue
            equal = EqualMeshes(space, schedule, stages_per_mesh, index)
            yield from _equal_stages(equal, num_stages, known)


def _equal_stages(
    equal: EqualMeshes, num_stages: int, known: Callable[[], float]
) -> Iterable[Candidate]:
    """Yield the stages that the DP finds on equal meshes.

    With several stages on a mesh, stages that are climbed to from these and from equal numbers of
    layers are yielded as well. With one stage on each, nothing is yielded if none is below `known`
    seconds.
    """
    job = equal.space.job
    num_layers = job.num_layers
    latency = closed_form(
        equal.schedule,
        equal.ranks,
        job.num_microbatches,
        equal.stages_per_mesh,
        splits=not job.remat,
    )
    solve = partial(
        solve_stages,
        equal.alone,
        num_stages,
        latency,
        equal.alive[::-1],
        job.memory_limit,
        [num_stages],
        steps=equal.stages_per_mesh,
    )
    equal_cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
    starts = [equal_cuts]

    choice = solve(tolerance=TOLERANCE, known=known())
    if choice is not None:
        yield from equal.candidates([choice.stages])
    elif equal.stages_per_mesh > 1:
        least_work = equal.space.runs[equal.submesh].least.sum()
        may_be_faster = least_work < equal.ranks * known()
        equal_stages_fit = not math.isinf(sum(equal.cheapest(equal_cuts)[1]))
        if may_be_faster and not equal_stages_fit:
            choice = solve(tolerance=START_TOLERANCE)
    if equal.stages_per_mesh == 1:
        return

    if choice is not None:
        starts.append([*(stage.first for stage in choice.stages), num_layers])
    for cuts in starts:
        yield from equal.climbed(cuts, known)
    if math.comb(num_layers - 1, num_stages - 1) <= MOST_CUTS:
        yield from equal.all_cuts(known)


def _any_meshes(
    space: StageSpace, schedule: str, usual_submesh: int | None, known: Callable[[], float]
) -> Iterable[Candidate]:
    """Yield stages on meshes of any sizes in order, one on each.

    On many devices only sizes around that of `usual_submesh`, which the best regular candidate
    uses, are combined, and devices are counted in the smallest of them.

    Args:
        known: seconds of the best candidate so far.
    """
    job = space.job
    num_devices = job.cluster.num_devices
    sizes = space.tables.num_devices
    tables = space.tables
    submeshes = np.arange(len(sizes))
    unit = 1
    if num_devices > EVERY_SIZE:
        submeshes = _sizes_around(space, usual_submesh)
        unit = math.gcd(num_devices, *map(int, sizes[submeshes]))
        tables = in_units(tables, submeshes, unit)

    longest = min(job.num_layers, num_devices)
    lengths = _lengths(schedule, longest, job.num_microbatches, job.options.num_stages)
    for max_stages, counts in lengths:
        alive = in_flight(schedule, max_stages, job.num_microbatches)[::-1]
        num_units = num_devices // unit
        latency = closed_form(schedule, max_stages, job.num_microbatches)
        solve = partial(
            solve_stages,
            tables,
            num_units,
            latency,
            alive,
            job.memory_limit,
            counts,
            tolerance=TOLERANCE,
        )
        for choice in _choices(solve, known):
            stages = tuple(
                replace(stage, submesh=int(submeshes[stage.submesh])) for stage in choice
            )
            alive_of_stages = tuple(alive[len(stages) - i - 1] for i in range(len(stages)))
            devices = [int(sizes[stage.submesh]) for stage in stages]
            devices_left = [sum(devices[i:]) for i in range(len(stages))]
            yield from space.candidates(
                space.tables, devices_left, schedule, 1, [stages], alive_of_stages
            )


def _choices(
    solve: Callable[..., StageChoice | None], known: Callable[[], float]
) -> Iterable[Stages]:
    """Yield the different stages that the DP finds for all `SENDER_SHARES`.

    Args:
        solve: `solve_stages` with all arguments but the share and the known seconds.
        known: seconds of the best candidate so far.
    """
    seen: set[Stages] = set()
    for share in SENDER_SHARES:
        choice = solve(known=known(), sender_share=share)
        if choice is not None and choice.stages not in seen:
            seen.add(choice.stages)
            yield choice.stages


def _sizes_around(space: StageSpace, usual_submesh: int | None) -> np.ndarray:
    """Return the indices of submeshes that are half to twice as large as the usual one, of that of
    all devices, and of those that fill the devices between pinned meshes; all if there are none.

    Args:
        usual_submesh: index of the submesh that most stages have; None: as large as equal meshes of
            all stages.
    """
    job = space.job
    num_devices = job.cluster.num_devices
    sizes = space.tables.num_devices
    if usual_submesh is None:
        num_stages = job.options.num_stages or job.num_layers
        usual_size = num_devices / min(num_stages, num_devices)
    else:
        usual_size = float(sizes[usual_submesh])

    is_near = (sizes <= 2 * usual_size) & (sizes >= usual_size / 2)
    is_near |= sizes == num_devices
    pinned_places = space.places[space.places > 0].tolist()
    is_near |= sizes % math.gcd(num_devices, *pinned_places) == 0
    if not is_near.any():
        return np.flatnonzero(sizes)
    return np.flatnonzero(is_near)


def _lengths(
    schedule: str, longest: int, num_microbatches: int, pinned: int | None
) -> list[tuple[int, Sequence[int] | None]]:
    """Return (most stages, numbers of stages) that one run of the DP decides between.

    One run decides between all numbers if memory and time of a stage depend only on how far it is
    from the end (1F1B, GPipe: the schedules with closed forms). Others are solved one number after
    the other.

    Args:
        longest: the most stages that are possible.
        pinned: the only number of stages that is allowed; None: any.

    Returns:
        A pair per run of the DP. None in place of the numbers: all up to the most.
    """
    if SCHEDULES[schedule].alive is not None:
        return [(longest, [pinned] if pinned else None)]
    numbers = [pinned] if pinned is not None else range(1, longest + 1)
    lengths: list[tuple[int, Sequence[int] | None]] = []
    for number in numbers:
        if number <= longest and refusal(schedule, number, num_microbatches) is None:
            lengths.append((number, [number]))
    return lengths
