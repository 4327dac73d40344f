"""From a captured step and a cluster to a Plan of several stages: micro-batches, layers, stage costs, DP, then the ILP.

Everything is searched that the options leave open: the number of micro-batches, the schedule, stages, submeshes,
logical
shapes, recomputation and layouts. Stages are chosen on the costs of `stage_costs.py`; the chosen ones are then solved
by the same ILP as a single stage, and the prediction is made of their exact costs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.display.numbers import format_bytes
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.clock import runtime_seconds, seconds_on_the_clock
from alpa_strategy.inter_op.cross_mesh import boundary_seconds
from alpa_strategy.inter_op.dp import StageChoice, StageTables, solve_stages
from alpa_strategy.inter_op.explain import largest_need
from alpa_strategy.inter_op.layers import cluster_layers, default_num_layers, span_name
from alpa_strategy.inter_op.microbatch import microbatch
from alpa_strategy.inter_op.pins import check_pins
from alpa_strategy.inter_op.schedules import (
    ONE_STAGE,
    SCHEDULES,
    ZERO_BUBBLE,
    Terms,
    in_flight,
    rank_of,
    stages_per_rank,
    terms,
    why_not,
)
from alpa_strategy.inter_op.slice import crossing_values
from alpa_strategy.inter_op.stage_costs import CostJob, CostStore, RunCosts, stage_costs
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageSolver, StageWish
from alpa_strategy.inter_op.submeshes import stage_fits, submeshes
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.plan.fingerprint import fingerprint_of
from alpa_strategy.plan.plan import ParameterPlan, Plan, Predicted
from alpa_strategy.plan.replicated import replicated_notes

Progress = Callable[[str], AbstractContextManager]
TOLERANCE = 1e-3  # of the DP: relative distance from its optimum
PATIENCE = 2  # numbers of micro-batches tried without getting better
SEARCH_SECONDS = 15.0  # no further number of micro-batches is begun that would likely end later than this
# GPipe and LoopedBFS are as fast as 1F1B and Interleaved1F1B and keep more alive: only on request.
SEARCHED = tuple(s for s in SCHEDULES if s not in ("GPipe", "LoopedBFS"))


@dataclass(frozen=True)
class _Candidate:
    """A solution of the DP with what it was solved for; `alive` per stage, in (micro-batch, stage) pairs of its
    mesh."""

    seconds: float
    job: CostJob
    schedule: str
    per_rank: int
    terms: Terms
    choice: StageChoice
    submesh_of: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    remat: tuple[bool, ...]
    alive: tuple[int, ...]
    wires: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.choice.stages) // self.per_rank


def plan_pipeline(
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    costs: OpCosts | None = None,
    progress: Progress | None = None,
    store: CostStore | None = None,
    known: float = math.inf,
) -> Plan:
    """The best plan with micro-batches and stages (one stage included); op indices are those of the
    micro-batched graph.

    Args:
        costs: op costs; the roofline of `cluster.device` when None.
        store: where stage costs are kept as they come, so that interrupted planning resumes.
        known: seconds of a step that is there already: only what the DP prices below it is looked at.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    from alpa_strategy.cost.roofline import RooflineCosts

    progress = progress or (lambda name: nullcontext())
    costs = costs or RooflineCosts(cluster.device)
    limit = options.usable_bytes(cluster.device.memory_bytes)
    spent: dict[str, float] = defaultdict(float)
    check_pins(step, cluster, options)
    meshes = submeshes(cluster)
    best: list[_Candidate] = []
    failures: list[str] = []
    untried: list[int] = []
    last_job: CostJob | None = None  # of which nothing fitted
    without_gain = 0
    begun = time.perf_counter()
    counts = microbatch_counts(step, cluster, options)
    for number, count in enumerate(counts):
        started = time.perf_counter()
        if best and started + (started - begun) / number > begun + SEARCH_SECONDS:
            untried = counts[number:]
            break
        with progress(f"{count} micro-batches"):
            try:
                graph = microbatch(step, count, cluster.num_devices).graph
            except PlanError as error:
                if len(counts) == 1:
                    raise
                failures.append(f"{count} micro-batches: {error.problem}")
                continue
            job = CostJob(graph, _cuts(graph, options), count, cluster, costs, options, optimizer, limit, options.remat)
            spent["micro-batches and layers"] += time.perf_counter() - started
            started = time.perf_counter()
            runs = stage_costs(job, meshes, store)
            spent["stage costs"] += time.perf_counter() - started
            started = time.perf_counter()
            found = _solve_schedules(job, meshes, runs, min((c.seconds for c in best), default=known))
            spent["stage DP"] += time.perf_counter() - started
        if not found:
            faster = "" if known == math.inf else f" in less than {known:.3g} s"
            failures.append(f"{count} micro-batches: no stages fit into {format_bytes(limit)} a device{faster}")
            last_job = job if known == math.inf else None
        gained = bool(found) and (not best or found[0].seconds < min(c.seconds for c in best))
        without_gain = 0 if gained or not best else without_gain + 1
        best = sorted([*best, *found], key=lambda c: c.seconds)[:4]
        if without_gain >= PATIENCE:
            break
    started = time.perf_counter()
    for candidate in best:
        try:
            with progress("solve the chosen stages"):
                plan = _solved_plan(candidate, meshes)
        except PlanError as error:
            failures.append(f"{candidate.job.num_microbatches} micro-batches, {candidate.schedule}: {error.problem}")
            continue
        spent["chosen stages"] = time.perf_counter() - started
        fingerprint = fingerprint_of(step, cluster, options, optimizer)
        notes = [*step.notes, *plan.notes, *replicated_notes(step, costs)]
        if untried:
            notes.append(f"numbers of micro-batches not tried for lack of time: {', '.join(map(str, untried))}")
        return replace(plan, fingerprint=fingerprint, notes=tuple(notes), solver_seconds=dict(spent))
    if last_job is not None and (largest := largest_need(last_job, meshes)):
        failures.append(largest)
    raise PlanError(
        "no pipeline fits:\n    " + "\n    ".join(failures),
        "use more devices, a smaller batch, other num_microbatches, num_stages or schedule, or raise memory_limit",
    )


def microbatch_counts(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> list[int]:
    """Numbers of micro-batches to try, from many to few: divisors of the rows, each at most half of the one before."""
    if options.num_microbatches is not None:
        return [options.num_microbatches]
    rows = math.gcd(*(leaf.meta.shape[0] for leaf in step.batch if leaf.batch_dim == 0))
    rows //= cluster.num_devices if step.batch_scope == "rank" else 1
    counts: list[int] = []
    for divisor in range(rows, 0, -1):
        if rows % divisor == 0 and (not counts or 2 * divisor <= counts[-1]):
            counts.append(divisor)
    return counts or [1]


def _cuts(graph: StepGraph, options: PlanOptions) -> tuple[int, ...]:
    wanted = options.num_stages or 1
    return cluster_layers(graph, max(wanted, min(default_num_layers(graph), len(graph.ops))))


def _solve_schedules(
    job: CostJob, meshes: Sequence[tuple[int, int]], runs: Sequence[RunCosts], known: float
) -> list[_Candidate]:
    """The DP for every schedule that is allowed; candidates better than `known`, best first."""
    tables = stage_tables(job, meshes, runs)
    names = [job.options.schedule] if job.options.schedule else SEARCHED
    found: list[_Candidate] = []
    for schedule in names:
        for candidate in _solve_schedule(job, meshes, runs, tables, schedule, lambda: min([known, *_seconds(found)])):
            found.append(candidate)
    return sorted(found, key=lambda c: c.seconds)


def _seconds(candidates: Iterable[_Candidate]) -> list[float]:
    return [c.seconds for c in candidates]


def _solve_schedule(
    job: CostJob,
    meshes: Sequence[tuple[int, int]],
    runs: Sequence[RunCosts],
    tables: StageTables,
    schedule: str,
    known: Callable[[], float],
) -> Iterable[_Candidate]:
    """One schedule: with one stage a mesh any meshes, in order; with several, equal meshes."""
    B, D, L = job.num_microbatches, job.cluster.num_devices, job.num_layers
    wanted = job.options.num_stages
    if schedule in ONE_STAGE:
        most = min(L, D)
        counts = [wanted] if wanted else None
        alive = in_flight(schedule, most, B)[::-1]
        weights = terms(schedule, most, B)
        choice = solve_stages(tables, D, weights, alive, job.memory_limit, counts, tolerance=TOLERANCE, known=known())
        if choice is not None:
            which = tuple(s.submesh for s in choice.stages)
            own = tuple(alive[len(choice.stages) - i - 1] for i in range(len(choice.stages)))
            yield _candidate(job, runs, tables, schedule, 1, weights, choice, which, own)
        return
    for index, mesh in enumerate(meshes):
        ranks, rest = divmod(D, math.prod(mesh))
        for v in stages_per_rank(schedule):
            total = ranks * v
            if rest or ranks < 2 or total > L or (wanted and wanted != total) or why_not(schedule, ranks, B):
                continue
            weights = terms(schedule, ranks, B, v, splits=not job.remat)
            pairs = in_flight(schedule, ranks, B, v)
            own = tuple(pairs[rank_of(schedule, ranks, i)] for i in range(total))
            choice = solve_stages(
                _on_equal_meshes(tables, index, v, bool(job.remat) or schedule not in ZERO_BUBBLE, runs),
                total, weights, own[::-1], job.memory_limit, [total], steps=v, tolerance=TOLERANCE, known=known(),
            )  # fmt: skip
            if choice is not None:
                stages = tuple(replace(s, submesh=index) for s in choice.stages)
                choice = replace(choice, stages=stages)
                yield _candidate(job, runs, tables, schedule, v, weights, choice, (index,) * total, own)


def _candidate(
    job: CostJob,
    runs: Sequence[RunCosts],
    tables: StageTables,
    schedule: str,
    per_rank: int,
    weights: Terms,
    choice: StageChoice,
    which: tuple[int, ...],
    alive: tuple[int, ...],
) -> _Candidate:
    shapes, remat, wires = [], [], []
    for i, stage in enumerate(choice.stages):
        at = (stage.first, stage.last, stage.candidate)
        own = runs[stage.submesh]
        shapes.append(own.shapes[int(own.shape[at])])
        remat.append(bool(own.remat[at]))
        last = i + 1 == len(choice.stages)
        wires.append(0.0 if last else float(tables.boundary[stage.last, stage.submesh, which[i + 1]]))
    return _Candidate(
        choice.seconds, job, schedule, per_rank, weights, choice, which, tuple(shapes), tuple(remat), alive,
        tuple(wires),
    )  # fmt: skip


def stage_tables(job: CostJob, meshes: Sequence[tuple[int, int]], runs: Sequence[RunCosts]) -> StageTables:
    """The runs of all submeshes side by side."""
    width = max(r.seconds.shape[2] for r in runs)

    def stack(name: str, fill: float) -> np.ndarray:
        arrays = [getattr(r, name) for r in runs]
        padded = [
            np.pad(a, ((0, 0), (0, 0), (0, width - a.shape[2])), constant_values=fill).astype(float) for a in arrays
        ]
        return np.stack(padded, axis=2)

    return StageTables(
        np.array([math.prod(mesh) for mesh in meshes]),
        stack("seconds", np.inf) + runtime_seconds(job.cluster.device),
        stack("once", 0.0),
        stack("always", 0.0),
        stack("in_flight", 0.0),
        _boundaries(job, meshes),
        stage_fits(job.cluster, tuple(meshes)),
    )


def _boundaries(job: CostJob, meshes: Sequence[tuple[int, int]]) -> np.ndarray:
    """[cut, submesh, submesh] seconds of a micro-batch's values and their gradients.

    Where stages lie is not known to the DP: on several nodes every boundary is taken to cross nodes, as the
    slowest does.
    """
    graph, crosses = job.graph, True if job.cluster.num_nodes > 1 else None
    found = np.zeros((len(job.cuts), len(meshes), len(meshes)))
    for index, position in enumerate(job.cuts[1:-1], start=1):
        metas = [graph.values[v] for v in crossing_values(graph, position)]
        sizes = [sum(m.num_bytes for m in metas), sum(m.num_bytes for m in metas if m.requires_grad)]
        for a, source in enumerate(meshes):
            for b, target in enumerate(meshes):
                found[index, a, b] = sum(
                    boundary_seconds(size, source, target, job.cluster, crosses) for size in sizes if size
                )
    return found


def _on_equal_meshes(
    tables: StageTables, index: int, per_rank: int, keep_remat: bool, runs: Sequence[RunCosts]
) -> StageTables:
    """Only submesh `index`, counted as one device each; a mesh holds `per_rank` stages' lasting bytes."""
    only = slice(index, index + 1)
    seconds = tables.seconds[:, :, only]
    if not keep_remat:
        width = runs[index].remat.shape[2]
        seconds = seconds.copy()
        seconds[:, :, 0, :width][runs[index].remat] = np.inf
    assert tables.boundary is not None
    return StageTables(
        np.ones(1, dtype=int),
        seconds,
        tables.once_seconds[:, :, only],
        tables.bytes_always[:, :, only] * per_rank,
        tables.bytes_in_flight[:, :, only],
        tables.boundary[:, only, only],
    )


def _solved_plan(candidate: _Candidate, meshes: Sequence[tuple[int, int]]) -> Plan:
    """The chosen stages, each solved by the ILP, and the prediction from their exact costs."""
    job = candidate.job
    solver = StageSolver(job)
    solved: list[SolvedStage] = []
    offset = 0
    first_devices: list[int] = []
    stored: dict[int, dict[str, ParameterPlan]] = defaultdict(dict)  # by a mesh's first device
    for i, stage in enumerate(candidate.choice.stages):
        mesh = meshes[stage.submesh]
        if candidate.per_rank > 1:
            first = rank_of(candidate.schedule, candidate.num_ranks, i) * math.prod(mesh)
        else:
            first, offset = offset, offset + math.prod(mesh)
        first_devices.append(first)
        wish = StageWish(
            job.cuts[stage.first], job.cuts[stage.last], mesh, candidate.shapes[i], candidate.remat[i],
            candidate.alive[i], candidate.per_rank, stored[first],
        )  # fmt: skip
        solved.append(solver.solve(wish))
        stored[first].update(solved[-1].plan.parameter_plans)
    spans = [span_name(job.graph, job.cuts[s.first], job.cuts[s.last]) for s in candidate.choice.stages]
    stages = tuple(
        replace(s.plan, first_device=first, layers=span, boundary_seconds=wire)
        for s, first, span, wire in zip(solved, first_devices, spans, candidate.wires, strict=True)
    )
    B = job.num_microbatches
    busy = [B * s.cost.seconds(remat) + s.cost.once for s, remat in zip(solved, candidate.remat, strict=True)]
    slowest = int(np.argmax(busy))
    step_seconds = seconds_on_the_clock(
        candidate.schedule, candidate.num_ranks, B, [s.cost for s in solved], candidate.remat, candidate.wires,
        runtime_seconds(job.cluster.device),
    )  # fmt: skip
    peaks: dict[int, int] = defaultdict(int)
    for s, f in zip(solved, first_devices, strict=True):
        peaks[f] += s.plan.predicted.peak_bytes
    if max(peaks.values()) > job.memory_limit:
        raise PlanError(
            f"the stages of one mesh need {format_bytes(max(peaks.values()))} of {format_bytes(job.memory_limit)}"
        )
    worst = stages[slowest].predicted
    return Plan(
        fingerprint=_no_fingerprint(),
        stages=stages,
        predicted=Predicted(
            step_seconds,
            max(peaks.values()),
            worst.compute_seconds,
            worst.communication_seconds,
            worst.optimizer_seconds,
        ),
        num_microbatches=B,
        schedule=candidate.schedule if len(stages) > 1 else "none",
        gap=max(s.gap for s in solved),
        cluster_name=job.cluster.name,
    )


def _no_fingerprint():
    from alpa_strategy.plan.plan import Fingerprint

    return Fingerprint("", "", "", "", "", "")


def plan_job(job: CostJob, meshes: Sequence[tuple[int, int]], store: CostStore | None = None) -> Plan:
    """The best plan of one job, without a fingerprint: what `plan_pipeline` does for each number of micro-batches.

    Raises:
        PlanError: nothing fits.
    """
    found = _solve_schedules(job, meshes, stage_costs(job, meshes, store), math.inf)
    failures = [f"no stages fit into {job.memory_limit:.3g} bytes a device"]
    for candidate in found[:4]:
        try:
            return _solved_plan(candidate, meshes)
        except PlanError as error:
            failures.append(error.problem)
    raise PlanError("; ".join(failures), "use more devices, or raise memory_limit")
