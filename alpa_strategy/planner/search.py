"""The two kinds of plans that the planner chooses between: the whole batch on one stage, and
pipelines.

Both are stages of a `StageCostTask`, solved by the same `StageSolver` and put together by
`plan_of`: costs, pins, the reserve for short-lived memory and the reasons why nothing fits are the
same. One stage is solved on every logical mesh; stages of pipelines are chosen on the costs of
`inter_op/stage_costs.py` and then solved. Everything that the options leave
open is searched: number of micro-batches, schedule, stages, submeshes, logical shapes,
recomputation and layouts.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import clear_frames

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.bound import step_bound
from alpa_strategy.inter_op.candidates import (
    EVERY_SIZE,
    TOLERANCE,
    Candidate,
    StageSpace,
    check_places,
    runtime_seconds,
    simulated_seconds,
    solve_schedules,
)
from alpa_strategy.inter_op.pins import (
    check_pins,
    check_placements,
    layers_of,
    logical_shapes,
    submeshes,
)
from alpa_strategy.inter_op.stage_costs import (
    LayerRangeCosts,
    StageCostTask,
    out_of_memory,
    stage_costs,
)
from alpa_strategy.inter_op.stage_solve import PricedStage, SolvedStage, StageRequest, StageSolver
from alpa_strategy.inter_op.stored_costs import (
    candidate_fields,
    candidates_key,
    candidates_record,
    has_own_schedules,
    plan_of_record,
)
from alpa_strategy.inter_op.subgraph import MAX_LAYERS, span_name
from alpa_strategy.intra_op.options import REDUCTIONS
from alpa_strategy.intra_op.solver.solve import NoCheaperSolution
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Fingerprint, ParameterPlan, Plan, Predicted, job_ranks
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.partial_results import Key
from alpa_strategy.planner.known_host import seconds_with_host
from alpa_strategy.planner.short_steps import why_data_parallel
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import mesh_of
from alpa_strategy.sharding.strategies import replicated_notes
from alpa_strategy.units import format_bytes

BASELINES = ("data", "zero2", "zero3", "tensor")
BACKWARD_SHARE = 2 / 3  # of compute
MOST_SOLVED = (
    6  # candidates that are solved exactly, in turn, until one is as good as others promise
)
SLACK = 1.5  # plans up to so many times slower than what is known still show where better ones lie

Failures = list[tuple[str, PlanError]]  # (what was tried, why it cannot be)


def plan_one_stage(
    task: PlanTask, pinned: Mapping[str, ParameterPlan] | None = None, by_tensor: bool = True
) -> Plan:
    """As `_plan_one_stage`, or the plan that an interrupted planning has stored."""
    pins = sorted((pinned or {}).items())
    return task.results.get(
        "plan",
        key=lambda: Key(_whole_batch(task).content, task.fingerprint.digest, pins, by_tensor),
        compute=lambda: _plan_one_stage(task, pinned, by_tensor),
        encode=Plan.to_dict,
        decode=plan_of_record,
    )


def _plan_one_stage(
    task: PlanTask, pinned: Mapping[str, ParameterPlan] | None, by_tensor: bool
) -> Plan:
    """The best single stage over all devices: every logical mesh that the options allow is solved.

    Meshes are taken by their optimum if memory were free: one that is slower so than a plan on
    another is left alone.

    Args:
        pinned: parameter name -> plan to keep; `options.logical_mesh` must then be the running
            plan's.
        by_tensor: whether activations may be made again where the options leave that open.

    Raises:
        PlanError: nothing fits, with the reason for every logical mesh.
    """
    fingerprint = task.fingerprint
    if task.options.remat is None and not by_tensor:
        task = replace(task, options=replace(task.options, remat=False))
    check_placements(task.step, task.cluster, task.options)
    solver = StageSolver(_whole_batch(task))
    spent: dict[str, float] = defaultdict(float)
    failures: Failures = []
    priced: list[tuple[str, PricedStage]] = []
    for shape in logical_shapes(task.options, task.cluster):
        label = "x".join(map(str, shape))
        with task.progress(f"price {label}"), _timed(spent, f"price {label}"):
            try:
                priced.append((label, solver.price(_everything(task, shape, pinned or {}))))
            except PlanError as error:
                failures.append((f"logical mesh {label}", error))
    best: SolvedStage | None = None
    # A mesh is left as soon as its bound is above the best objective so far (NoCheaperSolution):
    # that makes all affordable.
    priced.sort(key=lambda entry: (entry[1].free.bound, entry[0]), reverse=True)
    while priced:
        label, stage = priced.pop()  # its tables go with it
        with task.progress(f"solve {label}"), _timed(spent, f"solve {label}"):
            try:
                best = solver.solve_priced(stage, best.objective if best else math.inf)
            except NoCheaperSolution:
                continue
            except PlanError as error:
                clear_frames(error.__traceback__)
                failures.append((f"logical mesh {label}", error))
    if best is None:
        raise _nothing_fits(
            "no plan fits",
            failures,
            "use more devices, a smaller batch, or relax the options named above",
        )
    with task.progress("baselines"), _timed(spent, "baselines"):
        named = _baselines(task, solver) if pinned is None else {}
    notes = (*task.step.notes, *replicated_notes(task.step, task.op_costs))
    plan, options = plan_of(solver.job, fingerprint, [best], [0]), task.options
    is_free = options.parallel == "auto" and not options.placements and options.logical_mesh is None
    if is_free and not options.baselines and (data := named.get("data")) is not None:
        # The ILP adds up what runs side by side: unfair to data parallelism, most of whose
        # communication is hidden.
        other = plan_of(solver.job, fingerprint, [data], [0])
        # What the devices would save beside a host that takes longer tells no plans apart.
        theirs, ours = (
            seconds_with_host(hidden_seconds(each, task.cluster.overlap), task)
            for each in (other, plan)
        )
        why = why_data_parallel(task, theirs, ours)
        if why is not None:
            plan = replace(other, notes=(*other.notes, f"data parallel: {why}"))
    return replace(
        plan,
        baselines={
            name: stage.plan.predicted.step_seconds if stage else None
            for name, stage in named.items()
        },
        notes=(*notes, *plan.notes),
        solver_seconds=dict(spent),
    )


def _whole_batch(task: PlanTask) -> StageCostTask:
    """The step as it is, on all devices."""
    return StageCostTask(
        task.step, (0, len(task.step.ops)), 1, task.cluster, task.op_costs, task.options, task.optimizer,
        task.memory_limit, remat=False, is_whole_batch=True, results=task.results,
    )  # fmt: skip


def _everything(
    task: PlanTask, shape: tuple[int, ...], pinned: Mapping[str, ParameterPlan]
) -> StageRequest:
    devices = task.cluster.num_nodes, task.cluster.devices_per_node
    return StageRequest(0, len(task.step.ops), devices, shape, remat=False, alive=1, pinned=pinned)


def hidden_seconds(one: Plan, overlap: float = 0.0) -> float:
    """Seconds of a single stage's step where its reduction of gradients runs beside the backward.

    overlap: the cluster's; where it says how much is hidden, the plan was predicted so.
    """
    if overlap:
        return one.predicted.step_seconds
    reduction = sum(
        c.seconds for c in one.collectives() if c.phase == "step" and c.kind in REDUCTIONS
    )
    return one.predicted.step_seconds - min(
        reduction, BACKWARD_SHARE * one.predicted.compute_seconds
    )


def _baselines(task: PlanTask, solver: StageSolver) -> dict[str, SolvedStage | None]:
    """Named plans on the flat mesh under the same costs and memory; None where none fits."""
    if task.cluster.num_devices == 1:
        return {}
    flat = (task.cluster.num_devices,)
    found: dict[str, SolvedStage | None] = {}
    for name in BASELINES if task.options.baselines else BASELINES[:1]:
        named = solver.under(replace(task.options, parallel=name, placements=(), logical_mesh=flat))
        try:
            found[name] = named.solve(_everything(task, flat, {}))
        except PlanError:
            found[name] = None
    return found


def plan_pipeline(
    task: PlanTask,
    known: float = math.inf,
    several: bool = False,
    solve: Callable[..., list[Candidate]] = solve_schedules,
) -> Plan:
    """The best plan with micro-batches and stages (one stage included); its ops are those of the
    micro-batched graph.

    Args:
        known: seconds of a step that is there already: only what the DP prices below it is looked
            at.
        several: at least two stages and two micro-batches.
        solve: finds stages for one number of micro-batches; its arguments are those of
            `solve_schedules`.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    check_pins(task.step, task.cluster, task.options)
    search = _Search(task, several, solve)
    search.run(known)
    return replace(search.solve_best(), solver_seconds=dict(search.spent))


def _nothing_fits(what: str, failures: Failures, fix: str) -> PlanError:
    """One error of all reasons: of memory where one of them is."""
    fixes = {error.fix for _, error in failures if error.fix}
    kind = (
        DoesNotFitError
        if any(isinstance(error, DoesNotFitError) for _, error in failures)
        else PlanError
    )
    first = {error.problem: label for label, error in reversed(failures)}  # each problem once
    reasons = (
        f"\n    {label}{': ' if label else ''}{problem}"
        for problem, label in reversed(first.items())
    )
    return kind(f"{what}:{''.join(reasons)}", fixes.pop() if len(fixes) == 1 else fix)


@contextmanager
def _timed(spent: dict[str, float], phase: str) -> Iterator[None]:
    """Add to `spent` how long the block took."""
    started = time.perf_counter()
    try:
        yield
    finally:
        spent[phase] += time.perf_counter() - started


class _Search:
    """The numbers of micro-batches that are looked at (see `search_microbatches`), and the best
    candidates of them.
    """

    def __init__(
        self, task: PlanTask, several: bool, solve: Callable[..., list[Candidate]]
    ) -> None:
        self.task, self._solve = task, solve
        self.several = several
        self._runs: dict[Hashable, LayerRangeCosts] = {}
        self.meshes = submeshes(task.cluster)
        self.best: list[Candidate] = []  # over all submeshes, best first
        self.failures: Failures = []  # why there are no others
        self.last_job: StageCostTask | None = None  # of which nothing fitted into memory
        self.spent: dict[str, float] = defaultdict(float)  # seconds by phase
        self._jobs: dict[int, StageCostTask | None] = {}
        self._bounds: dict[int, float] = {}  # by number of micro-batches
        self._unlikely: frozenset[tuple[int, int]] = (
            frozenset()
        )  # submeshes of which a bound is enough

    def run(self, known: float) -> None:
        """Fill `best` with candidates that are predicted to take less than `known` seconds."""
        options, num_devices = self.task.options, self.task.cluster.num_devices
        counts = microbatch_counts(self.task.step, self.task.cluster, options)
        if self.several:
            counts = [count for count in counts if count > 1]
        if len(counts) == 1:
            self._jobs[counts[0]] = self._make_job(counts[0])

        def look(count: int, used: Submeshes | None) -> SearchResult:
            return self._look(count, used if num_devices > EVERY_SIZE else None, known)

        search_microbatches(counts, min(num_devices, MAX_LAYERS), self._bound, look, known)
        is_free = not (self.several or options.schedule or options.num_stages or options.device_map)
        if self.best and is_free and num_devices <= EVERY_SIZE:
            self._look_at_one_stage(counts, known)
        self.best = sorted((c for c in self.best if c.seconds < known), key=lambda c: c.seconds)
        if not self.best and not self.failures:
            self.failures.append(
                ("", PlanError(f"no number of micro-batches can take less than {known:.3g} s"))
            )

    def solve_best(self) -> Plan:
        """The best candidates solved by the ILP (see `best_solved`)."""

        def solve(candidate: Candidate) -> Plan:
            with self.task.progress("solve the chosen stages"), _timed(self.spent, "chosen stages"):
                return solved_plan(candidate, self.meshes, self.task.fingerprint)

        plan, failures = best_solved(self.best, solve)
        self.failures += failures
        if plan is None:
            if (
                self.last_job is not None
                and (largest := out_of_memory(self.last_job, self.meshes)) is not None
            ):
                self.failures.append(("", DoesNotFitError(largest)))
            raise _nothing_fits(
                "no pipeline fits",
                self.failures,
                "use more devices, a smaller batch, other num_microbatches, num_stages or schedule,"
                " or raise "
                "memory_limit",
            )
        job = self._jobs[plan.num_microbatches]
        assert job is not None
        notes = [*job.graph.notes, *self.notes_on(plan)]
        notes += [*replicated_notes(self.task.step, self.task.op_costs), *plan.notes]
        bound = self._bounds.get(
            plan.num_microbatches, 0.0
        )  # of all plans with so many micro-batches
        return replace(
            plan, notes=tuple(notes), gap=max(0.0, 1 - bound / plan.predicted.step_seconds)
        )

    def notes_on(self, plan: Plan) -> tuple[str, ...]:
        """Why stages take turns, where they do and nobody asked for it."""
        if (
            len(plan.stages) == 1
            or plan.num_microbatches > 1
            or self.task.options.num_microbatches == 1
        ):
            return ()
        more = [count for count in self._jobs if count > 1]
        why = "more would take longer" if more else "no rows for more"
        if self.failures:
            label, error = self.failures[0]
            why = f"{label}: {error.problem}"
        return (f"one micro-batch, so the stages work one after the other: {why}",)

    def _job(self, count: int) -> StageCostTask | None:
        """None where the step cannot be cut so; says why once."""
        if count not in self._jobs:
            try:
                self._jobs[count] = self._make_job(count)
            except PlanError as error:
                self.failures.append((f"{count} micro-batches", error))
                self._jobs[count] = None
        return self._jobs[count]

    def _make_job(self, count: int) -> StageCostTask:
        with _timed(self.spent, "micro-batches and layers"):
            task = self.task
            graph = microbatch(task.step, count, task.cluster.num_devices).graph
            cuts, places = layers_of(graph, task.cluster, task.options)
            remat = task.options.remat
            job = StageCostTask(
                graph, cuts, count, task.cluster, task.op_costs, task.options, task.optimizer, task.memory_limit,
                False if isinstance(remat, tuple) else remat,  # names: no spans, but single results
                places=places, results=task.results,
            )  # fmt: skip
            if any(places):
                check_places(job, self.meshes)
            return job

    def _bound(self, count: int) -> float:
        """Seconds if all devices were always busy: an op on several devices takes at least as much
        of their time.
        """
        job = self._job(count)
        if job is None:
            return math.inf
        seconds = sum(sum(self.task.op_costs.op_seconds(op.call)) for op in job.graph.ops)
        return count * seconds / self.task.cluster.num_devices

    def _look(self, count: int, used: "Submeshes | None", known: float) -> "SearchResult":
        """On all submeshes: remember the best candidates. On those in use: only how good the best
        one is.
        """
        if used is None and count in self._bounds:
            return SearchResult()  # it has been looked at on all of them
        job = self._job(count)
        assert job is not None
        meshes = self.meshes if used is None else tuple(self.meshes[i] for i in sorted(used))
        ceiling = min([SLACK * known, *(c.seconds for c in self.best)])
        with self.task.progress(f"{count} micro-batches"):
            with _timed(self.spent, "stage costs"):
                runs = stage_costs(job, meshes, self._runs, unlikely=self._unlikely)
            # [first layer, last + 1, submesh]
            allowed = np.ones((job.num_layers, job.num_layers + 1, len(meshes)), dtype=bool)
            allowed[0, job.num_layers] = not self.several
            space = StageSpace(job, meshes, runs, allowed)
            if used is None:  # layouts that are propagated are never called optimal
                self._bounds[count] = (
                    0.0 if job.options.solver == PROPAGATION else step_bound(space)
                )
            with _timed(self.spent, "stage DP"):
                found = self._candidates(space, ceiling)
        if used is not None:
            return SearchResult(found[0].seconds, used) if found else SearchResult()
        self.best += found
        if not found:
            problem = f"no stages fit into {format_bytes(job.memory_limit)} a device"
            slow = PlanError(f"{problem} in less than {ceiling:.3g} s")
            self.failures.append(
                (f"{count} micro-batches", slow if ceiling < math.inf else DoesNotFitError(problem))
            )
            self.last_job = job if ceiling == math.inf else None
            return SearchResult()
        if (
            self.task.cluster.num_devices > EVERY_SIZE
        ):  # prices of sizes far from those in use take minutes there
            sizes = {math.prod(self.meshes[i]) for i in found[0].submesh_of}
            self._unlikely = frozenset(
                mesh
                for mesh in self.meshes
                if not any(size <= 2 * math.prod(mesh) <= 4 * size for size in sizes)
            )
        return SearchResult(found[0].seconds, frozenset(found[0].submesh_of))

    def _candidates(self, space: StageSpace, ceiling: float) -> list[Candidate]:
        """Those that `solve` finds, or that an interrupted planning has stored of it."""
        if self._solve is not solve_schedules or has_own_schedules():
            return self._solve(space, ceiling)
        return self.task.results.get(
            "candidates",
            key=lambda: candidates_key(space, ceiling),
            compute=lambda: solve_schedules(space, ceiling),
            encode=candidates_record,
            decode=lambda record: [
                Candidate(**candidate_fields(row, space)) for row in record["candidates"]
            ],
        )

    def _look_at_one_stage(self, counts: Sequence[int], known: float) -> None:
        """Pipelines want many micro-batches, one stage as few as fit: it is looked at from few to
        many, on its own.
        """
        whole = next(
            mesh for mesh in self.meshes if math.prod(mesh) == self.task.cluster.num_devices
        )
        self._unlikely = frozenset(self.meshes) - {whole}
        misses = 0
        for count in reversed(counts):
            best, job = min([known, *(c.seconds for c in self.best)]), self._job(count)
            if job is None or count in self._bounds:
                continue
            with _timed(self.spent, "stage costs"):
                least = stage_costs(job, [whole], self._runs, unlikely=[whole])[0].least.sum()
                if least >= best or misses > 1:  # and with more micro-batches it takes longer
                    return
                fits = np.isfinite(stage_costs(job, [whole], self._runs)[0].seconds[0, -1]).any()
            if fits and self._look(count, None, known).seconds >= best:
                misses += 1


def microbatch_counts(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> list[int]:
    """Numbers of micro-batches to try, from many to few: divisors of the rows, each at most half of
    the one before.
    """
    if options.num_microbatches is not None:
        return [options.num_microbatches]
    rows = math.gcd(*(leaf.meta.shape[0] for leaf in step.batch if leaf.batch_dim == 0))
    rows //= cluster.num_devices if step.batch_scope == "rank" else 1
    counts: list[int] = []
    for divisor in range(rows, 0, -1):
        if rows % divisor == 0 and (not counts or 2 * divisor <= counts[-1]):
            counts.append(divisor)
    return counts or [1]


def best_solved(
    candidates: Sequence[Candidate], solve: Callable[[Candidate], Plan]
) -> tuple[Plan | None, Failures]:
    """The fastest plan of the candidates, which are solved in turn until it is as fast as the next
    one promises.

    Where one falls short of its promise, as stages do that do not fit as they were priced, those
    with the same schedule
    on such meshes are taken to do so as well: else they would all come before another schedule that
    keeps its promise.
    """
    best: Plan | None = None
    failures: Failures = []
    short: dict[Hashable, float] = {}
    left = list(candidates)

    def kind(candidate: Candidate) -> Hashable:
        return candidate.schedule, candidate.job.num_microbatches, frozenset(candidate.submesh_of)

    def promise(candidate: Candidate) -> float:
        return candidate.seconds * short.get(kind(candidate), 1.0)

    for _ in range(min(MOST_SOLVED, len(left))):
        candidate = min(left, key=promise)
        if best is not None and promise(candidate) >= best.predicted.step_seconds * (1 - TOLERANCE):
            break
        left.remove(candidate)
        try:
            plan = solve(candidate)
        except PlanError as error:
            failures.append(
                (f"{candidate.job.num_microbatches} micro-batches, {candidate.schedule}", error)
            )
            continue
        short[kind(candidate)] = max(1.0, plan.predicted.step_seconds / candidate.seconds)
        if best is None or plan.predicted.step_seconds < best.predicted.step_seconds:
            best = plan
    return best, failures


def solved_plan(
    candidate: Candidate, meshes: Sequence[tuple[int, int]], fingerprint: Fingerprint
) -> Plan:
    """The stages that the DP chose, each solved by the ILP."""
    job, solver = candidate.job, StageSolver(candidate.job)
    if candidate.solved:
        return plan_of(job, fingerprint, candidate.solved, [0], candidate.schedule, candidate.wires)
    solved: list[SolvedStage] = []
    first_devices: list[int] = []
    stored: dict[int, dict[str, ParameterPlan]] = defaultdict(dict)  # by a mesh's first device
    seen_as: dict[
        int, tuple[int, ...]
    ] = {}  # by the same: stages on one mesh see it as one grid, that of the first
    offset = 0
    for i, stage in enumerate(candidate.stages):
        mesh = meshes[stage.submesh]
        if candidate.stages_per_mesh > 1:
            ranks = len(candidate.stages) // candidate.stages_per_mesh
            first = mesh_of(candidate.schedule, ranks, i) * math.prod(mesh)
        else:
            first, offset = offset, offset + math.prod(mesh)
        request = StageRequest(
            job.cuts[stage.first], job.cuts[stage.last], mesh, seen_as.setdefault(first, candidate.shapes[i]),
            candidate.remat[i], candidate.alive[i], candidate.stages_per_mesh, stored[first],
            job.cuts[stage.first + 1 : stage.last],
        )  # fmt: skip
        solved.append(solver.solve(request))
        first_devices.append(first)
        stored[first].update(solved[-1].plan.parameter_plans)
    return plan_of(job, fingerprint, solved, first_devices, candidate.schedule, candidate.wires)


def plan_of(
    job: StageCostTask,
    fingerprint: Fingerprint,
    solved: Sequence[SolvedStage],
    first_devices: Sequence[int],
    schedule: str = "none",
    wires: Sequence[float] = (0.0,),
) -> Plan:
    """The one place where a Plan is made: solved stages in pipeline order, with what their exact
    costs predict.

    Args:
        first_devices: per stage; stages with the same one share a mesh.
        schedule: of several stages.
        wires: per stage, seconds of a micro-batch's values to the next one and their gradients
            back.

    Raises:
        PlanError: the stages of one mesh do not fit together.
    """
    B = job.num_microbatches
    stages = []
    for s, first, wire in zip(solved, first_devices, wires, strict=True):
        devices, layers = (
            job.cluster.ranks_of(first, math.prod(s.plan.submesh)),
            span_name(job.graph, *s.plan.ops),
        )
        stages.append(
            replace(
                s.plan, first_device=first, devices=devices, layers=layers, boundary_seconds=wire
            )
        )
    peaks: dict[int, int] = defaultdict(int)
    for stage in stages:
        peaks[stage.first_device] += stage.predicted.peak_bytes
    if len(solved) > 1 and max(peaks.values()) > job.memory_limit:
        needed, limit = format_bytes(max(peaks.values())), format_bytes(job.memory_limit)
        raise DoesNotFitError(f"the stages of one mesh need {needed} of {limit}")
    slowest = max(
        stages, key=lambda stage: stage.predicted.step_seconds
    )  # what its mesh does stands for the step
    worst = [stage.predicted for stage in stages if stage.first_device == slowest.first_device]
    seconds = worst[0].step_seconds
    if not job.is_whole_batch:
        # Stages are simulated, and a micro-batch takes time of the runtime's own.
        overhead = runtime_seconds(job.cluster.device)
        every = zip(stages, solved, wires, strict=True)
        pipeline = [
            (s.forward_seconds, s.backward_seconds, own.cost.once, wire) for s, own, wire in every
        ]
        (seconds,) = simulated_seconds(schedule, len(peaks), B, [pipeline], overhead)
    order = list(job_ranks(stages))
    listed = ", ".join(map(str, order[:16])) + ", ..." * (len(order) > 16)
    gap = max(s.gap for s in solved)
    method = next(s.method for s in solved if s.gap == gap)
    layouts = f"layouts not proved optimal: within {gap:.2%} of the best ({method})"
    if method == PROPAGATION:
        layouts = "layouts propagated from op to op, not optimised"
    return Plan(
        fingerprint=fingerprint,
        stages=tuple(stages),
        predicted=Predicted(
            seconds,
            max(peaks.values()),
            sum(each.compute_seconds for each in worst),
            sum(each.communication_seconds for each in worst),
            sum(each.optimizer_seconds for each in worst),
        ),
        num_microbatches=B,
        schedule=schedule if len(stages) > 1 else "none",
        gap=gap,
        notes=(
            *((layouts,) if gap > 0 else ()),
            *(
                (f"devices in the order {listed}: their links differ",)
                if order != sorted(order)
                else ()
            ),
        ),
        cluster_name=job.cluster.name,
    )


# --- Which numbers of micro-batches are looked at, and in which order: by promise and by bounds,
# never by the clock.
#
# A step is slow with many micro-batches (ops too small for the device, a launch each) and slow with
# few (stages that wait, activations that do not fit), so the best number is climbed to from a
# middling one. At the first number all submeshes are priced; its neighbours are compared on the
# submeshes that the best plan uses, which is a small part of the work; where another wins, all are
# priced once more for that one. How busy the machine is changes no plan.


Submeshes = frozenset[int]
# micro-batches per stage of the first number tried: a pipeline over all devices waits for an eighth
FILL = 8


@dataclass(frozen=True)
class SearchResult:
    """The best plan found for one number of micro-batches: its seconds (inf: none fits) and
    submeshes in use.
    """

    seconds: float = math.inf
    used: Submeshes = frozenset()


def search_microbatches(
    counts: Sequence[int],
    most_stages: int,
    bound: Callable[[int], float],
    look: Callable[[int, Submeshes | None], SearchResult],
    known: float = math.inf,
) -> list[int]:
    """Look at `counts` (descending) until their best is found; the counts that were looked at, in
    order.

    Args:
        bound: seconds below which no plan with so many micro-batches can be; inf: the step cannot
            be cut so.
        look: the best plan with so many micro-batches; on the given submeshes only, or on all of
            them (None).
        known: seconds of a plan that is there already: numbers of micro-batches that cannot beat it
            are left out.
    """
    visited: list[int] = []

    def at(index: int, used: Submeshes | None = None, limit: float = known) -> SearchResult:
        if bound(counts[index]) >= min(limit, known):
            return SearchResult()
        visited.append(counts[index])
        return look(counts[index], used)

    first = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / (FILL * most_stages))))
    best, found = first, at(first)
    # Where nothing fits, more micro-batches need less memory; fewer may be faster than what is
    # known.
    for index in (*range(first - 1, -1, -1), *range(first + 1, len(counts))):
        if found.used:
            break
        best, found = index, at(index)
    if not found.used:
        return visited
    whole = best
    # More micro-batches may have to grow twice before they are so small that nothing need be
    # recomputed.
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
