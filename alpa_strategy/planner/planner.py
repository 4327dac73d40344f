"""choose_plan: one stage over all devices, or a pipeline; by predicted step seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.search import microbatch_counts, plan_pipeline
from alpa_strategy.intra_op.build import IntraOp, OptionTables, build
from alpa_strategy.intra_op.decode import decode, working_bytes
from alpa_strategy.intra_op.problem import Solution
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.intra_op.solver.solve import NotCheaper, solve
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.parameter_plan import ParameterPlan
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_plan import StagePlan
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.planner.early_step import against_early_step, with_reason
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.task import PlanTask, Progress, unseen
from alpa_strategy.sharding.strategies import replicated_notes
from alpa_strategy.units import format_bytes

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import CostStore

MARGIN = 0.1  # a pipeline must be predicted faster by this share: its prediction is the less sure one
SCREEN = 0.15  # pipelines are not looked at where one stage waits for less than this share of its step
BACKWARD_SHARE = 2 / 3  # of compute


def choose_plan(
    task: PlanTask,
    pinned: Mapping[str, ParameterPlan] | None = None,
    stage_costs: Callable[[], OpCosts] | None = None,
) -> Plan:
    """A plan of one stage, or a pipeline.

    A pipeline is made when the options ask for one (on one device: micro-batches, recomputation). Else it is where
    micro-batches give exactly the whole batch's result, and no single stage fits or the pipeline is predicted to be
    faster by `MARGIN` than the best one, whose reduction of gradients is taken to hide behind the backward as far as it
    can. Where neither fits and the optimizer allows it, one stage whose parameters are updated within the backward.

    Args:
        pinned: as for `plan_step`; then there is one stage.
        stage_costs: makes the op costs of pipelines, when they are looked at; None: `task.costs`.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """

    def of_stages() -> PlanTask:
        return task if stage_costs is None else replace(task, costs=stage_costs())

    if pinned is not None:
        return plan_step(task, pinned)
    if task.options.asks_for_pipeline:
        return _asked_for(task, of_stages)
    try:
        one = plan_step(task)
    except PlanError as error:
        return _where_one_stage_fails(task, of_stages, error)
    one = _or_data_parallel(one, task)
    if task.cluster.num_devices == 1 or not _may_be_pipelined(task):
        return one
    waiting = max(0.0, 1 - divided_seconds(task.step, task.cluster, task.op_costs) / hidden_seconds(one))
    if waiting < SCREEN:
        return _with_note(one, f"no pipeline: one stage loses only {waiting:.0%} of its step by not being ideal")
    return _faster(one, of_stages())


def _asked_for(task: PlanTask, of_stages: Callable[[], PlanTask]) -> Plan:
    """The pipeline that the options ask for."""
    options = task.options
    if task.cluster.num_devices == 1 and ((options.num_stages or 1) > 1 or options.schedule is not None):
        raise PlanError(
            "num_stages and schedule need at least 2 devices",
            "leave them out; num_microbatches and remat are for one device, too",
        )
    try:
        return plan_pipeline(of_stages())
    except DoesNotFitError as error:
        raise with_reason(error, against_early_step(task.step, task.optimizer, options)) from error


def _where_one_stage_fails(task: PlanTask, of_stages: Callable[[], PlanTask], error: PlanError) -> Plan:
    """A pipeline, or one stage that updates parameters within the backward; `error`, with a reason, where none fits."""
    if shared_bytes(task.step, task.cluster, task.optimizer) <= task.memory_limit and _may_be_pipelined(task):
        with suppress(PlanError):  # the first error speaks of the ordinary case
            return plan_pipeline(of_stages())
    if not isinstance(error, DoesNotFitError):
        raise error
    against = against_early_step(task.step, task.optimizer, task.options)
    if against is None:
        early = replace(task, optimizer=replace(task.optimizer, steps_in_backward=True))
        note = "parameters are updated within the backward: all gradients at once would not fit"
        with suppress(PlanError):
            return _with_note(plan_step(early), note)
    raise with_reason(error, against) from error


def _or_data_parallel(one: Plan, task: PlanTask) -> Plan:
    """The solved stage, or plain data parallelism where that is faster because its reduction hides in the backward.

    The ILP adds up what runs side by side: fair to all layouts but to this one, most of whose communication is hidden.
    """
    data, options = one.baselines.get("data"), task.options
    is_free = options.parallel == "auto" and not options.placements and options.logical_mesh is None
    if data is None or not is_free or options.baselines:
        return one
    seconds = hidden_seconds(one)
    if data - BACKWARD_SHARE * one.predicted.compute_seconds >= seconds:
        return one
    flat = replace(options, parallel="data", logical_mesh=(task.cluster.num_devices,))
    try:
        plan = plan_step(replace(task, options=flat, progress=unseen))
    except PlanError:
        return one
    if hidden_seconds(plan) >= seconds:
        return one
    plan = replace(plan, fingerprint=one.fingerprint, baselines=one.baselines, solver_seconds=one.solver_seconds)
    return _with_note(plan, "data parallel: the reduction of gradients runs beside the backward")


def _faster(one: Plan, task: PlanTask) -> Plan:
    """The single stage, or a pipeline that is clearly faster; a note says why."""
    seconds = hidden_seconds(one)
    started = time.perf_counter()
    limit = seconds * (1 - MARGIN)
    try:
        # Stages that take turns on one micro-batch win only where everything is latency, the least sure to predict. One
        # stage gains nothing from micro-batches but memory: where it seems to, short ops were timed on a warmer cache.
        many = plan_pipeline(task, known=limit, several=True)
    except PlanError:
        many = None
    spent = {"pipelines": time.perf_counter() - started}
    if many is None or many.predicted.step_seconds > limit:
        found = f"none is faster by {MARGIN:.0%}"
        return _with_note(replace(one, solver_seconds={**one.solver_seconds, **spent}), f"no pipeline: {found}")
    many = replace(
        many,
        baselines={"one stage": one.predicted.step_seconds, **one.baselines},
        solver_seconds={**one.solver_seconds, **many.solver_seconds},
    )
    return _with_note(many, f"a pipeline: one stage would take {seconds / many.predicted.step_seconds:.2f}x as long")


def hidden_seconds(one: Plan) -> float:
    """Seconds of a single stage's step where its reduction of gradients runs beside the backward."""
    reduction = sum(
        c.seconds for c in one.collectives() if c.phase == "step" and c.kind in ("all_reduce", "reduce_scatter")
    )
    return one.predicted.step_seconds - min(reduction, BACKWARD_SHARE * one.predicted.compute_seconds)


def shared_bytes(step: StepGraph, cluster: ClusterSpec, optimizer: OptimizerInfo) -> float:
    """Bytes per device of parameters, gradients and optimizer state if nothing is held twice: the least possible."""
    total = 0.0
    for parameter in step.parameters:
        meta = parameter.meta
        total += meta.num_bytes * (2 if meta.requires_grad else 1)
        total += meta.num_elements * optimizer.state_bytes if meta.requires_grad else 0.0
    return total / cluster.num_devices


def divided_seconds(step: StepGraph, cluster: ClusterSpec, costs: OpCosts) -> float:
    """Seconds of the step's ops if the devices shared them and nothing else took time; an op starts on every device."""
    launch = cluster.device.launch_seconds * cluster.device.slowdown
    whole = [seconds for op in step.ops for seconds in costs.op_seconds(op.call)]
    return sum(max(seconds / cluster.num_devices, min(seconds, launch)) for seconds in whole)


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _may_be_pipelined(task: PlanTask) -> bool:
    """Whether nothing that the user asked for, and nothing in the step, stands against a pipeline."""
    step, cluster, options = task.step, task.cluster, task.options
    if options.num_stages == 1 or options.num_microbatches == 1:
        return False
    if options.parallel != "auto" or options.logical_mesh is not None:
        return False
    counts = [count for count in microbatch_counts(step, cluster, options) if count > 1]
    if not counts:
        return False
    try:
        # A note says where micro-batches are not exactly the whole batch (BatchNorm): that is for the user to ask for.
        return microbatch(step, counts[-1], cluster.num_devices).graph.notes == step.notes
    except PlanError:
        return False


# --- From a captured step and a cluster to a Plan: every logical shape is solved, the best wins. No process groups.


BASELINES = ("data", "zero2", "zero3", "tensor")


@dataclass(frozen=True)
class MeshSolution:
    """The best stage on one logical mesh.

    `objective` is what the solver minimised (seconds plus the penalties of named plans); the rest excludes penalties.
    """

    stage: StagePlan
    objective: float
    gap: float
    method: str


def make_plan(
    module: Any,
    batch: Any,
    cluster: ClusterSpec,
    options: PlanOptions | None = None,
    optimizer: OptimizerInfo | None = None,
    progress: Progress | None = None,
    context: Callable[[], AbstractContextManager] | None = None,
    store: CostStore | None = None,
) -> Plan:
    """Capture `module.training_step` on `batch` and plan it for `cluster`. Needs no devices; tensors may be meta.

    Args:
        batch: one rank's batch (`options.batch_scope == "rank"`), or the whole one (`"global"`).
        optimizer: taken from `module.configure_optimizers()` when None, for a Trainer without clipping, callbacks and
            gradient scaler (`optimizer_info_of` takes those into account).
        context: what surrounds the step, such as autocast (see `capture_step`).
        store: where costs of pipeline stages are kept as they come, so that a planning that was interrupted resumes.

    Raises:
        CaptureError, PlanError: see there.
    """
    from alpa_strategy.planner.planner import choose_plan

    options, progress = options or PlanOptions(), progress or unseen
    started = time.perf_counter()
    with progress("capture"):
        step = capture_step(
            module, batch, world_size=cluster.num_devices, batch_scope=options.batch_scope, context=context
        )
    capture_seconds = time.perf_counter() - started
    optimizer = optimizer or optimizer_info_of(module)
    plan = choose_plan(PlanTask(step, cluster, options, optimizer, progress=progress, store=store))
    return replace(plan, solver_seconds={"capture": capture_seconds, **plan.solver_seconds})


def plan_step(task: PlanTask, pinned: Mapping[str, ParameterPlan] | None = None) -> Plan:
    """The best single stage over all devices: every logical shape that the options allow is solved.

    Args:
        pinned: parameter name -> plan to keep; `options.logical_mesh` must then be the running plan's.

    Raises:
        PlanError: nothing fits, with the reason for every logical shape.
    """
    task = replace(task, costs=task.op_costs)
    seconds: dict[str, float] = {}
    failures: list[tuple[str, PlanError]] = []
    best: MeshSolution | None = None
    for label, intra, free in _priced_meshes(task, pinned, seconds, failures):
        with task.progress(f"solve {label}"), _timed(seconds, f"solve {label}"):
            try:
                best = solve_mesh(intra, task, best.objective if best else float("inf"), free)
            except NotCheaper:
                continue
            except PlanError as error:
                failures.append((label, error))
    if best is None:
        fixes = {error.fix for _, error in failures}
        kind = DoesNotFitError if any(isinstance(error, DoesNotFitError) for _, error in failures) else PlanError
        raise kind(
            "no plan fits:" + "".join(f"\n    logical mesh {label}: {error.problem}" for label, error in failures),
            fixes.pop() if len(fixes) == 1 else "use more devices, a smaller batch, or relax the options named above",
        )
    with task.progress("baselines"), _timed(seconds, "baselines"):
        baselines = _baselines(task) if pinned is None else {}
    return Plan(
        fingerprint=task.fingerprint,
        stages=(best.stage,),
        predicted=best.stage.predicted,
        baselines=baselines,
        gap=best.gap,
        notes=(*task.step.notes, *_notes(task, best)),
        solver_seconds=seconds,
        cluster_name=task.cluster.name,
    )


def _priced_meshes(
    task: PlanTask,
    pinned: Mapping[str, ParameterPlan] | None,
    seconds: dict[str, float],
    failures: list[tuple[str, PlanError]],
) -> list[tuple[str, IntraOp, Solution]]:
    """(name, problem, optimum) of every logical mesh, those first that would be fastest if memory were free.

    No plan on a mesh is faster than that: a mesh is left alone when it is slower than a plan on another one.
    """
    options = task.options
    priced: list[tuple[str, IntraOp, Solution]] = []
    for shape in logical_shapes(options, task.cluster):
        label = "x".join(map(str, shape))
        with task.progress(f"price {label}"), _timed(seconds, f"price {label}"):
            try:
                intra = restrict(_problem(task, shape), options, task.optimizer, pinned)
                free = solve(replace(intra.problem, memory_limit=float("inf")), options.solver_seconds)
                priced.append((label, intra, free))
            except PlanError as error:
                failures.append((label, error))
    return sorted(priced, key=lambda entry: (entry[2].bound, entry[0]))


def _problem(task: PlanTask, shape: tuple[int, ...]) -> IntraOp:
    """The unrestricted problem on one logical mesh."""
    mesh = task.cluster.logical_mesh(shape)
    tables = OptionTables(mesh, task.op_costs, task.optimizer, task.options.accumulate_grad_batches)
    return build(task.step, tables, task.memory_limit)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Write down how long the block took."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - started


def solve_mesh(
    intra: IntraOp, task: PlanTask, cutoff: float = float("inf"), free: Solution | None = None
) -> MeshSolution:
    """The cheapest stage on one logical mesh that fits, short-lived memory included.

    The ILP's memory row holds what is kept; the largest working set depends on the solution, so it is reserved after
    the fact: solve, look, lower the limit by what is missing, solve again.

    Args:
        intra: restricted as the user wants it.
        cutoff: objective of a plan that will be taken unless this one is cheaper.
        free: the optimum without a memory limit, where it is known.

    Raises:
        NotCheaper: than `cutoff`. PlanError: nothing fits.
    """
    limit = intra.problem.memory_limit
    reserve = 0.0
    for _ in range(4):
        problem = replace(intra.problem, memory_limit=limit - reserve)
        solution = solve(problem, task.options.solver_seconds, cutoff=cutoff, unlimited=free)
        working = working_bytes(intra, solution.assignment)
        if solution.num_bytes + working <= limit:
            break
        reserve = max(reserve, working)
    else:
        raise DoesNotFitError(
            f"kept and short-lived tensors need {format_bytes(solution.num_bytes + working)} of {format_bytes(limit)}"
        )
    if solution.seconds >= cutoff:
        raise NotCheaper
    submesh = task.cluster.num_nodes, task.cluster.devices_per_node
    stage = decode(intra, solution.assignment, task.op_costs, task.optimizer, submesh)
    absolute_gap = max(0.0, solution.seconds - solution.bound)
    step_seconds = stage.predicted.step_seconds
    gap = 0.0 if absolute_gap <= 1e-6 * solution.seconds else min(1.0, absolute_gap / step_seconds)
    return MeshSolution(stage, solution.seconds, gap, solution.method)


def logical_shapes(options: PlanOptions, cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """The shapes to try: the pinned one, or all whose number of axes agrees with the pins."""
    if options.logical_mesh is not None:
        size = 1
        for n in options.logical_mesh:
            size *= n
        if size != cluster.num_devices:
            raise PlanError(
                f"logical_mesh={options.logical_mesh} has {size} devices, the cluster {cluster.num_devices}",
                "choose a shape whose product is the number of devices",
            )
        return [options.logical_mesh]
    shapes = cluster.logical_shapes()
    counts = {len(text.split()) for _, text in options.placements}
    if not isinstance(options.parallel, str):
        counts.add(len(options.parallel))
    fitting = [shape for shape in shapes if not counts or counts == {len(shape)}]
    if not fitting:
        raise PlanError(
            f"placements and parallel name {sorted(counts)} mesh axes; {cluster.num_devices} devices allow the logical "
            f"meshes {shapes}",
            "give every pin one mode per axis of one of these, or set logical_mesh",
        )
    return fitting


def _baselines(task: PlanTask) -> dict[str, float | None]:
    """Predicted seconds of named plans on the flat mesh under the same costs and memory; None where none fits."""
    if task.cluster.num_devices == 1:
        return {}
    flat = (task.cluster.num_devices,)
    intra = _problem(task, flat)
    found: dict[str, float | None] = {}
    for name in BASELINES if task.options.baselines else BASELINES[:1]:
        named = replace(task, options=replace(task.options, parallel=name, placements=(), logical_mesh=flat))
        try:
            stage = solve_mesh(restrict(intra, named.options, named.optimizer), named).stage
            found[name] = stage.predicted.step_seconds
        except PlanError:
            found[name] = None
    return found


def _notes(task: PlanTask, solution: MeshSolution) -> list[str]:
    """What the user should know: ops without a rule that run replicated, unproved optimality."""
    notes = replicated_notes(task.step, task.op_costs)
    if solution.gap > 0:
        notes.append(f"optimality not proved: within {solution.gap:.2%} of the best ({solution.method})")
    return notes
