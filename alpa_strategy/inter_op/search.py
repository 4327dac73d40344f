"""From a captured step and a cluster to a Plan of several stages: micro-batches, layers, stage costs, DP, then the ILP.

Everything is searched that the options leave open: the number of micro-batches, the schedule, stages, submeshes,
logical shapes, recomputation and layouts. Stages are chosen on the costs of `stage_costs.py`; the chosen ones are then
solved by the same ILP as a single stage, and the prediction is made of their exact costs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.candidates import Candidate, runtime_seconds, seconds_on_the_clock, solve_schedules
from alpa_strategy.inter_op.layer_matrix import WORKING
from alpa_strategy.inter_op.pins import check_pins, least_stages, submeshes
from alpa_strategy.inter_op.stage_costs import CostJob, CostStore, allowed_shapes, run_parts, stage_costs
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageSolver, StageWish
from alpa_strategy.inter_op.subgraph import cluster_layers, default_num_layers, span_name
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.parameter_plan import ParameterPlan
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_plan import Fingerprint, Predicted
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import rank_of
from alpa_strategy.sharding.strategies import replicated_notes
from alpa_strategy.units import format_bytes

KEPT = 4  # candidates that are solved exactly, in turn, until one is as good as it promised
SLACK = 1.5  # plans up to so many times slower than what is known still show where better ones lie


def plan_pipeline(task: PlanTask, known: float = math.inf, several: bool = False) -> Plan:
    """The best plan with micro-batches and stages (one stage included); its ops are those of the micro-batched graph.

    Args:
        known: seconds of a step that is there already: only what the DP prices below it is looked at.
        several: at least two stages and two micro-batches.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    task = replace(task, costs=task.op_costs)
    check_pins(task.step, task.cluster, task.options)
    search = _Search(task, several)
    search.run(known)
    started = time.perf_counter()
    for candidate in search.best:
        try:
            with task.progress("solve the chosen stages"):
                plan = _solved_plan(candidate, search.meshes)
        except PlanError as error:
            count = candidate.job.num_microbatches
            search.failures.append(f"{count} micro-batches, {candidate.schedule}: {error.problem}")
            continue
        search.spent["chosen stages"] = time.perf_counter() - started
        notes = (*candidate.job.graph.notes, *search.notes_on(plan), *replicated_notes(task.step, task.op_costs))
        return replace(plan, fingerprint=task.fingerprint, notes=notes, solver_seconds=dict(search.spent))
    kind = PlanError
    if search.last_job is not None and (largest := largest_need(search.last_job, search.meshes)):
        search.failures.append(largest)
        kind = DoesNotFitError
    raise kind(
        "no pipeline fits:\n    " + "\n    ".join(search.failures),
        "use more devices, a smaller batch, other num_microbatches, num_stages or schedule, or raise memory_limit",
    )


class _Search:
    """The numbers of micro-batches that are looked at (see `counts.climb`), and the best candidates of them.

    Attributes:
        best: candidates over all submeshes, best first.
        failures: why there are no others.
        last_job: of which nothing fitted into memory.
        spent: seconds by phase.
    """

    def __init__(self, task: PlanTask, several: bool) -> None:
        self.task = task
        self.several = several
        self.store = task.store or CostStore()
        self.meshes = submeshes(task.cluster)
        self.best: list[Candidate] = []
        self.failures: list[str] = []
        self.last_job: CostJob | None = None
        self.spent: dict[str, float] = defaultdict(float)
        self._jobs: dict[int, CostJob | None] = {}

    def run(self, known: float) -> None:
        """Fill `best` with candidates that are predicted to take less than `known` seconds."""
        counts = microbatch_counts(self.task.step, self.task.cluster, self.task.options)
        if self.several:
            counts = [count for count in counts if count > 1]
        if len(counts) == 1:
            self._jobs[counts[0]] = self._make_job(counts[0])
        climb(counts, self.task.cluster.num_devices, self._bound, lambda n, used: self._look(n, used, known), known)
        self.best = sorted((c for c in self.best if c.seconds < known), key=lambda c: c.seconds)[:KEPT]
        if not self.best and not self.failures:
            self.failures.append(f"no number of micro-batches can take less than {known:.3g} s")

    def notes_on(self, plan: Plan) -> tuple[str, ...]:
        """Why stages take turns, where they do and nobody asked for it."""
        if len(plan.stages) == 1 or plan.num_microbatches > 1 or self.task.options.num_microbatches == 1:
            return ()
        more = [count for count in self._jobs if count > 1]
        why = self.failures[0] if self.failures else "more would take longer" if more else "no rows for more"
        return (f"one micro-batch, so the stages work one after the other: {why}",)

    def _job(self, count: int) -> CostJob | None:
        """None where the step cannot be cut so; says why once."""
        if count not in self._jobs:
            try:
                self._jobs[count] = self._make_job(count)
            except PlanError as error:
                self.failures.append(f"{count} micro-batches: {error.problem}")
                self._jobs[count] = None
        return self._jobs[count]

    def _make_job(self, count: int) -> CostJob:
        with self._timed("micro-batches and layers"):
            task = self.task
            graph = microbatch(task.step, count, task.cluster.num_devices).graph
            cuts = _cuts(graph, least_stages(task.cluster, task.options))
            return CostJob(
                graph, cuts, count, task.cluster, task.op_costs, task.options, task.optimizer, task.memory_limit,
                task.options.remat,
            )  # fmt: skip

    def _bound(self, count: int) -> float:
        """Seconds if all devices were always busy: an op on several devices takes at least as much of their time."""
        job = self._job(count)
        if job is None:
            return math.inf
        seconds = sum(sum(self.task.op_costs.op_seconds(op.call)) for op in job.graph.ops)
        return count * seconds / self.task.cluster.num_devices

    def _look(self, count: int, used: Submeshes | None, known: float) -> Look:
        """On all submeshes: remember the best candidates. On those in use: only how good the best one is."""
        job = self._job(count)
        assert job is not None
        meshes = self.meshes if used is None else tuple(self.meshes[i] for i in sorted(used))
        ceiling = min([SLACK * known, *(c.seconds for c in self.best)])
        with self.task.progress(f"{count} micro-batches"):
            with self._timed("stage costs"):
                runs = stage_costs(job, meshes, self.store)
            with self._timed("stage DP"):
                allowed = np.ones((job.num_layers, job.num_layers + 1, len(meshes)), dtype=bool)
                # A schedule that the user asks for is one of several stages (`pins.py`).
                allowed[0, job.num_layers] = not self.several and job.options.schedule is None
                found = solve_schedules(job, meshes, runs, ceiling, allowed=allowed)
        if used is not None:
            return Look(found[0].seconds, used) if found else Look()
        self.best += found
        if not found:
            limit = format_bytes(job.memory_limit)
            faster = "" if ceiling == math.inf else f" in less than {ceiling:.3g} s"
            self.failures.append(f"{count} micro-batches: no stages fit into {limit} a device{faster}")
            self.last_job = job if ceiling == math.inf else None
            return Look()
        return Look(found[0].seconds, frozenset(found[0].submesh_of))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[phase] += time.perf_counter() - started


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


def _cuts(graph: StepGraph, num_stages: int) -> tuple[int, ...]:
    """Layers, at least one per stage."""
    return cluster_layers(graph, max(num_stages, min(default_num_layers(graph), len(graph.ops))))


def _solved_plan(candidate: Candidate, meshes: Sequence[tuple[int, int]]) -> Plan:
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
            candidate.alive[i], candidate.per_rank, stored[first], job.cuts[stage.first + 1 : stage.last],
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


def _no_fingerprint() -> Fingerprint:
    return Fingerprint("", "", "", "", "", "")


def plan_job(
    job: CostJob,
    meshes: Sequence[tuple[int, int]],
    store: CostStore | None = None,
    schedules: Sequence[str] | None = None,
    allowed: np.ndarray | None = None,
) -> Plan:
    """The best plan of one job, without a fingerprint: what `plan_pipeline` does for each number of micro-batches.

    Args:
        schedules, allowed: see `candidates.solve_schedules`.

    Raises:
        PlanError: nothing fits.
    """
    found = solve_schedules(job, meshes, stage_costs(job, meshes, store), math.inf, schedules, allowed)
    failures = [f"no stages fit into {format_bytes(job.memory_limit)} a device"]
    for candidate in found[:KEPT]:
        try:
            return _solved_plan(candidate, meshes)
        except PlanError as error:
            failures.append(error.problem)
    raise PlanError("; ".join(failures), "use more devices, or raise memory_limit")


# --- Which numbers of micro-batches are looked at, and in which order: by promise and by bounds, never by the clock.
#
# A step is slow with many micro-batches (ops too small for the device, a launch each) and slow with few (stages that
# wait, activations that do not fit), so the best number is climbed to from a middling one. At the first number all
# submeshes are priced; its neighbours are compared on the submeshes that the best plan uses, which is a small part of
# the work; where another number wins, all submeshes are priced once more for that one. How busy the machine is cannot
# change the plan.


Submeshes = frozenset[int]
FILL = 8  # micro-batches per device of the first number tried: a pipeline over all of them waits for an eighth


@dataclass(frozen=True)
class Look:
    """The best plan found for one number of micro-batches: its seconds (inf: none fits) and submeshes in use."""

    seconds: float = math.inf
    used: Submeshes = frozenset()


def climb(
    counts: Sequence[int],
    num_devices: int,
    bound: Callable[[int], float],
    look: Callable[[int, Submeshes | None], Look],
    known: float = math.inf,
) -> list[int]:
    """Look at `counts` (descending) until their best is found; the counts that were looked at, in order.

    Args:
        bound: seconds below which no plan with so many micro-batches can be; inf: the step cannot be cut so.
        look: the best plan with so many micro-batches; on the given submeshes only, or on all of them (None).
        known: seconds of a plan that is there already: numbers of micro-batches that cannot beat it are left out.
    """
    visited: list[int] = []

    def at(index: int, used: Submeshes | None = None, limit: float = known) -> Look:
        if bound(counts[index]) >= min(limit, known):
            return Look()
        visited.append(counts[index])
        return look(counts[index], used)

    first = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / (FILL * num_devices))))
    best, found = first, at(first)
    # Where nothing fits, more micro-batches need less memory; fewer may be faster than what is known.
    for index in (*range(first - 1, -1, -1), *range(first + 1, len(counts))):
        if found.used:
            break
        best, found = index, at(index)
    if not found.used:
        return visited
    whole = best
    # More micro-batches may have to grow twice before they are so small that nothing need be recomputed.
    for step, patience in ((-1, 2), (1, 1)):
        index, misses = best + step, 0
        while 0 <= index < len(counts) and counts[index] not in visited and misses < patience:
            other = at(index, found.used, found.seconds)
            if other.seconds < found.seconds:
                best, found, misses, patience = index, other, 0, 1
            else:
                misses += 1
            index += step
        if best != whole:
            break  # where more is better, fewer is not
    if best != whole:
        at(best)
    return visited


# --- Why no stages fit: the layer that needs the most memory, whatever it runs on.


def largest_need(job: CostJob, meshes: Sequence[tuple[int, int]]) -> str | None:
    """A sentence that names the layer which needs the most bytes a device as a stage of its own, on its best submesh.

    With one micro-batch in flight: every plan needs at least that. None where layouts of the user's stand in the way.
    """
    least = np.full(job.num_layers, np.inf)
    for submesh in meshes:
        for shape in allowed_shapes(job, submesh):
            parts = run_parts(job, submesh, shape)
            for layer in range(job.num_layers):
                forward, _, _, always, saved, _, leaving = parts[:, layer, layer + 1, :WORKING].T
                need = always + saved + leaving + parts[:, layer, layer + 1, WORKING]
                least[layer] = min(least[layer], np.where(np.isfinite(forward), need, np.inf).min())
    if not np.isfinite(least).all():
        return None
    worst = int(least.argmax())
    name = span_name(job.graph, *job.cuts[worst : worst + 2])
    alone = f"of all layers, {name} needs the most: {format_bytes(least[worst])} a device on its best submesh"
    if least[worst] <= job.memory_limit:
        alone += (
            ", which fits; with what the schedule keeps for other micro-batches, and with other layers, it does not"
        )
    return alone
