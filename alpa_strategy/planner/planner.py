"""The planner: from a module and a cluster to a Plan (`make_plan`), or from a captured step
(`choose_plan`).

`one_stage.py` plans the whole batch at once on all devices, `pipeline_search.py` micro-batches and
stages, both by the same costs. This file decides which of the two is searched and which is taken.
It needs no process groups and no Trainer.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import Any

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.hook_points import ITERATION_PHASES, CapturedIteration
from alpa_strategy.inter_op.candidates import EVERY_SIZE
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterPlan, Plan
from alpa_strategy.microbatch.transform import microbatch, notes_of_split
from alpa_strategy.options import PlanOptions
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.planner.explain import explain
from alpa_strategy.planner.figures import with_figures
from alpa_strategy.planner.microbatch_search import microbatch_counts
from alpa_strategy.planner.one_stage import (
    may_choose_freely,
    or_zero3,
    plan_one_stage,
    recomputes_or_offloads,
    seconds_with_overlap,
)
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.pipeline_first import PipelineFirst, search_pipeline_first
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.plan_check import check_devices
from alpa_strategy.planner.replan import pinned_task, replan
from alpa_strategy.planner.short_steps import is_short
from alpa_strategy.planner.task import PlanTask, Progress

# A pipeline must be predicted to be faster by this share: its prediction is the less certain one.
MARGIN = 0.1
# Pipelines are not searched if one stage loses less than this share of its step to anything but
# its ops, divided by the number of devices.
SCREEN = 0.15
# Of planning, that are listed if no search that is listed has taken them.
NOTICEABLE_SECONDS = 1.0


def make_plan(
    module: Any,
    batch: Any,
    cluster: ClusterSpec,
    options: PlanOptions | None = None,
    optimizer: OptimizerInfo | None = None,
    progress: Progress | None = None,
    context: Callable[[], AbstractContextManager] | None = None,
    costs: OpCosts | None = None,
    choose: Callable[[PlanTask], Plan] | None = None,
    around: Plan | None = None,
    results: PartialResults = NOT_STORED,
) -> Plan:
    """Capture `module.training_step` on `batch` and return its plan for `cluster`.

    No devices are needed; tensors may be meta. Of a module with `iteration_phases` these are
    captured instead (`extras/iteration_phases.py`), and the phase that trains is planned.

    Args:
        batch: one rank's batch (`options.batch_scope == "rank"`), or the whole one (`"global"`).
        optimizer: taken from `module.configure_optimizers()` when None, for a Trainer without
            clipping, callbacks and gradient scaler (`optimizer_info_of` takes those into account).
        context: what surrounds the step, such as autocast (see `capture_step`).
        costs: a custom cost model, as `options.costs`.
        choose: finds the plan; None: `choose_plan`.
        around: a plan for another step of the same module: parameters keep its layouts, the rest
            is solved around them.
        results: where costs and solutions are stored as they are computed; the caller ends it.

    Raises:
        CaptureError: the step cannot be captured.
        PlanError: nothing fits, or a pin cannot be met.
    """
    captured = captured_task(
        module, batch, cluster, options, optimizer, progress, context, costs, results
    )
    return plan_captured(captured, choose, around)


@dataclass(frozen=True)
class CapturedTask:
    """The task of a captured step, before it is planned."""

    task: PlanTask

    # The phases of which the step is one, of a module with `iteration_phases`.
    iteration: CapturedIteration | None

    # Of capturing.
    seconds: float


def captured_task(
    module: Any,
    batch: Any,
    cluster: ClusterSpec,
    options: PlanOptions | None = None,
    optimizer: OptimizerInfo | None = None,
    progress: Progress | None = None,
    context: Callable[[], AbstractContextManager] | None = None,
    costs: OpCosts | None = None,
    results: PartialResults = NOT_STORED,
) -> CapturedTask:
    """Capture `module.training_step` on `batch` and return the task of planning it.

    Args and raises: as of `make_plan`.
    """
    options = options or PlanOptions()
    progress = progress or nullcontext
    if costs is not None:
        options = replace(options, costs=costs)
    started = time.perf_counter()
    with progress("capture"):
        scope: dict[str, Any] = {
            "world_size": cluster.num_devices,
            "batch_scope": options.rows,
            "context": context or nullcontext,
        }
        extra = ITERATION_PHASES.extra
        iteration = None if extra is None else extra.captured_iteration(module, batch, **scope)
        step = capture_step(module, batch, **scope) if iteration is None else iteration.step
    capture_seconds = time.perf_counter() - started
    optimizer = optimizer or optimizer_info_of(module)
    task = PlanTask(step, cluster, options, optimizer, progress=progress, results=results)
    return CapturedTask(task, iteration, capture_seconds)


def plan_captured(
    captured: CapturedTask,
    choose: Callable[[PlanTask], Plan] | None = None,
    around: Plan | None = None,
) -> Plan:
    """Return the plan of a captured step. Raises: as of `make_plan`.

    Args:
        choose: searches the plan of a task; None: `choose_plan`.
        around: a running plan, whose stages and layouts the new one keeps; None: there is none.
    """
    task = captured.task
    find = choose or choose_plan
    if around is not None:
        find = partial(plan_around, running=around)
    iteration = captured.iteration
    started = time.perf_counter()
    plan = find(task) if iteration is None else iteration.plan(task, find)
    planning_seconds = time.perf_counter() - started
    # An iteration's step is planned with less memory; other searches give no figures.
    if iteration is not None or plan.figures is None:
        plan = with_figures(plan, task)
    plan = plan.with_notes_of(task.step.notes)
    seconds = {"capture": captured.seconds, **plan.solver_seconds}
    # Of searches that have ended without a plan, or with a slower one.
    other_seconds = planning_seconds - sum(plan.solver_seconds.values())
    if other_seconds >= NOTICEABLE_SECONDS:
        seconds["other searches"] = other_seconds
    plan = replace(plan, solver_seconds=seconds)
    return plan.explained_by(partial(explain, replace(task, results=NOT_STORED)))


def choose_plan(task: PlanTask, pinned: Mapping[str, ParameterPlan] | None = None) -> Plan:
    """Return a plan of one stage, or a pipeline.

    A pipeline is returned if the options require one (on one device: micro-batches,
    recomputation). Otherwise it is returned only if micro-batches give exactly the full batch's
    result, and either no single stage fits, or the pipeline is predicted to be faster by `MARGIN`
    than the best single stage, whose reduction of gradients overlaps with the backward.

    If links differ, every order of the devices that may be the best is planned.

    Args:
        pinned: as for `plan_one_stage`; then there is one stage.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    plans: list[Plan] = []
    failures: list[PlanError] = []
    cluster = task.cluster
    if task.options.device_map and cluster.order == "searched":
        # Devices that the user names stay in their order.
        cluster = replace(cluster, order="numbered")

    for ordered_cluster in cluster.orders():
        ordered = replace(task, cluster=ordered_cluster)
        try:
            if pinned is None:
                plans.append(_choose(ordered))
            else:
                plans.append(plan_one_stage(ordered, pinned))
        except PlanError as error:
            failures.append(error)
    if not plans:
        raise failures[0]
    plan = min(plans, key=lambda plan: plan.predicted.step_seconds)
    fingerprint = replace(plan.fingerprint, cluster=task.cluster.digest())
    return with_figures(replace(plan, fingerprint=fingerprint), task)


def plan_around(task: PlanTask, running: Plan) -> Plan:
    """Return the plan of another step on the stages of `running`, whose parameters keep their
    devices and layouts.

    Raises:
        PlanError: the number of devices or a parameter's shape differs, or the stages cannot run
            the step (see `replan`).
    """
    check_devices(running.stages, task.cluster.num_devices)
    planned_shapes: dict[str, tuple[int, ...]] = {}
    for stage in running.stages:
        planned_shapes.update(stage.shapes)

    for parameter in task.step.parameters:
        shape = tuple(parameter.module_shape or parameter.meta.shape)
        planned_shape = planned_shapes.get(parameter.name, shape)
        if planned_shape != shape:
            raise PlanError(
                f"the plan is for {parameter.name} of shape {list(planned_shape)}, the model's has"
                f" {list(shape)}",
                "give one that was made for this model",
            )

    if running.is_pipelined:
        return replan(task, running)
    return choose_plan(*pinned_task(task, running))


def _choose(task: PlanTask) -> Plan:
    """Return the plan of `choose_plan` for the cluster's devices in their present order. Raises: as
    of that.
    """
    if _requires_pipeline(task):
        _check_single_device(task)
        return plan_pipeline(task.for_stages())

    first: PipelineFirst | None = None
    try:
        if task.options.remat is True:
            # A named plan whose stage recomputes segments.
            return _one_stage(task.for_stages())
        # On meshes of many devices, solving which results to recompute takes minutes; pipelines
        # decide that stage by stage.
        is_open = task.cluster.num_devices > EVERY_SIZE and _may_be_pipelined(task)
        if is_open and not task.options.baselines:
            ideal_seconds = divided_seconds(task.step, task.cluster, task.op_costs)
            first = search_pipeline_first(task, ideal_seconds, SCREEN, MARGIN)
            if first is not None and first.is_better and first.noted_pipeline is not None:
                return first.noted_pipeline
        without = sorted(first.slower_meshes) if first is not None else []
        one = plan_one_stage(task, by_tensor=not is_open, without=without)
    except PlanError as error:
        # The tables of its frames are as large as all those to come.
        clear_frames(error.__traceback__)
        return _plan_without_one_stage(task, error, first)

    one = _or_in_microbatches(_or_on_devices(one, task), task)
    if task.cluster.num_devices == 1 or not _may_be_pipelined(task):
        return one
    reason = _why_no_pipeline(task, one)
    if reason is not None:
        return _with_note(one, f"no pipeline: {reason}")
    return _faster(one, task.for_stages(), first)


def _requires_pipeline(task: PlanTask) -> bool:
    """Whether the options can be met by stages or micro-batches alone."""
    options = task.options
    num_devices = task.cluster.num_devices
    pins_devices = any(len(ranks) < num_devices for _, ranks in options.device_map)
    recomputes_segments = options.remat is True and _may_be_pipelined(task)
    return bool(options.asks_for_pipeline or pins_devices or recomputes_segments)


def _check_single_device(task: PlanTask) -> None:
    """Check that a cluster of one device has no pinned stages and no schedule.

    Raises:
        PlanError: it has.
    """
    options = task.options
    num_stages = options.num_stages or 1
    pins_stages = num_stages > 1 or options.schedule is not None
    if task.cluster.num_devices == 1 and pins_stages:
        raise PlanError(
            "num_stages and schedule need at least 2 devices",
            "leave them out; num_microbatches and remat are for one device, too",
        )


def _why_no_pipeline(task: PlanTask, one: Plan) -> str | None:
    """Return why no pipeline can be clearly faster than the single stage `one`; None: it may be."""
    if is_short(task, one.predicted.step_seconds):
        return "the host needs longer for its actions than the devices for such a step"

    ideal_seconds = divided_seconds(task.step, task.cluster, task.op_costs)
    lost = max(0.0, 1 - ideal_seconds / seconds_with_overlap(one, task.cluster.overlap))
    if lost < SCREEN:
        return (
            f"at best, with equal stages and free communication, it would shorten the step by"
            f" {lost:.0%}"
        )
    return None


def _plan_without_one_stage(
    task: PlanTask, error: PlanError, first: PipelineFirst | None = None
) -> Plan:
    """Return a plan where no single stage could be solved: a pipeline, one stage that recomputes
    segments, or a pipeline with all state in host memory.

    Args:
        error: of the single stage.
        first: the pipelines that were searched before; None: none were.

    Raises:
        PlanError: `error`, that of the single stage, if none of these fits either.
    """
    if first is not None and first.noted_pipeline is not None:
        return _or_one_stage_in_microbatches(first.noted_pipeline, task, first)

    least_bytes = shared_bytes(task.step, task.cluster, task.optimizer)
    if least_bytes <= task.memory_limit and _may_be_pipelined(task):
        # If it fails, the error of the single stage describes the ordinary case.
        with suppress(PlanError):
            return plan_pipeline(task.for_stages())
    if not isinstance(error, DoesNotFitError):
        raise error

    if task.options.remat is None:
        # Recomputed segments need less memory than recomputed single results.
        with suppress(PlanError):
            return _one_stage(task.for_stages())

    may_offload = task.options.offload is None and task.cluster.host is not None
    if may_offload and _may_be_pipelined(task):
        on_host = replace(task.for_stages(), options=replace(task.options, offload=True))
        with suppress(PlanError):
            return replace(plan_pipeline(on_host), fingerprint=task.fingerprint)
    raise error


def _or_one_stage_in_microbatches(pipeline: Plan, task: PlanTask, first: PipelineFirst) -> Plan:
    """Return the pipeline that was searched first, or one stage that computes micro-batches if that
    is faster and was not among the candidates.
    """
    if first.has_one_stage:
        return pipeline
    with suppress(PlanError):
        # With the seconds that are known, few of all candidates are priced again.
        return plan_pipeline(task.for_stages(), known=pipeline.predicted.step_seconds)
    return pipeline


def _one_stage(task: PlanTask) -> Plan:
    """Return a pipeline of one stage over all devices, which may recompute segments and run
    micro-batches.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    num_microbatches = task.options.num_microbatches
    if num_microbatches is None and not _can_be_split(task):
        num_microbatches = 1
    options = replace(task.options, num_stages=1, num_microbatches=num_microbatches)
    plan = plan_pipeline(replace(task, options=options))
    if task.cluster.overlap and may_choose_freely(task):
        # The integer program does not see what is hidden behind computation.
        flat = (task.cluster.num_devices,)
        zero3 = replace(options, parallel="zero3", logical_mesh=flat)
        with suppress(PlanError):
            plan = or_zero3(plan, plan_pipeline(replace(task, options=zero3)))
    return replace(plan, fingerprint=task.fingerprint)


def _or_on_devices(one: Plan, task: PlanTask) -> Plan:
    """Return `one`, or a plan that stores everything on the devices if that is faster.

    Offloading is solved with the layouts of one stage that recomputes single results. A pipeline,
    or recomputed segments, may need no host memory.
    """
    offloads = any(
        parameter.on_host for stage in one.stages for parameter in stage.parameter_plans.values()
    )
    if not offloads or task.options.offload is not None:
        return one
    on_devices = replace(task, options=replace(task.options, offload=False))
    try:
        other = _plan_without_one_stage(on_devices, DoesNotFitError(""))
    except PlanError:
        return one
    return other if other.predicted.step_seconds < one.predicted.step_seconds else one


def _or_in_microbatches(one: Plan, task: PlanTask) -> Plan:
    """Return `one`, or one stage that computes micro-batches if that is faster.

    The whole batch at once is searched first. Where it recomputes results or stores them in host
    memory, smaller batches (gradient accumulation) may need neither.
    """
    is_slowed = any(map(recomputes_or_offloads, one.stages))
    if not is_slowed or task.options.device_map or not _can_be_split(task):
        return one
    try:
        other = _one_stage(task.for_stages())
    except PlanError:
        return one
    if other.predicted.step_seconds >= one.predicted.step_seconds:
        return one
    baselines = {"whole batch at once": one.predicted.step_seconds, **one.baselines}
    spent = {**one.solver_seconds, **other.solver_seconds}
    return replace(other, baselines=baselines, solver_seconds=spent)


def _faster(one: Plan, task: PlanTask, first: PipelineFirst | None = None) -> Plan:
    """Return the single stage, or a pipeline that is clearly faster, with a note that says why.

    Args:
        one: plan of the single stage.
        first: the pipelines that were searched before the single stage was solved; None: they are
            searched now.
    """
    seconds = seconds_with_overlap(one, task.cluster.overlap)
    started = time.perf_counter()
    limit = seconds * (1 - MARGIN)
    pipeline = None if first is None else first.pipeline
    # Stages that take turns on one micro-batch win only if latency is everything, which is the
    # hardest to predict. One stage gains nothing from micro-batches but memory: if it seems to,
    # short ops were timed on a warmer cache.
    if first is None:
        with suppress(PlanError):
            pipeline = plan_pipeline(task, known=limit, several=True)
    spent = {"pipelines": time.perf_counter() - started}

    if pipeline is None or pipeline.predicted.step_seconds > limit:
        one = replace(one, solver_seconds={**one.solver_seconds, **spent})
        return _with_note(one, f"no pipeline: none is faster by {MARGIN:.0%}")

    # On some logical meshes one stage was bounded, not solved.
    least_elsewhere = math.inf if first is None else first.least_on_slower_meshes
    label, at_least = "one stage", ""
    if least_elsewhere < seconds:
        mesh = "x".join(map(str, one.stages[0].logical_mesh))
        label, at_least = f"one stage on mesh {mesh}", "at least "
    pipeline = replace(
        pipeline,
        baselines={label: one.predicted.step_seconds, **one.baselines},
        solver_seconds={**one.solver_seconds, **pipeline.solver_seconds},
    )
    factor = min(seconds, least_elsewhere) / pipeline.predicted.step_seconds
    note = f"a pipeline: one stage would take {at_least}{factor:.2f}x as long"
    return _with_note(pipeline, note)


def shared_bytes(step: StepGraph, cluster: ClusterSpec, optimizer: OptimizerInfo) -> float:
    """Return the least possible bytes per device of parameters, gradients and optimizer state:
    those of a cluster that stores nothing twice.
    """
    total_bytes = 0.0
    for parameter in step.parameters:
        meta = parameter.meta
        total_bytes += meta.num_bytes
        if meta.requires_grad:
            gradient_bytes = meta.num_bytes
            total_bytes += gradient_bytes + meta.num_elements * optimizer.state_bytes
    return total_bytes / cluster.num_devices


def divided_seconds(step: StepGraph, cluster: ClusterSpec, costs: OpCosts) -> float:
    """Return the seconds of the step's ops if the devices shared them evenly and nothing else took
    time.

    An op is launched on every device: it takes at least that long.
    """
    launch_seconds = cluster.device.launch_seconds * cluster.device.slowdown
    total_seconds = 0.0
    for op in step.ops:
        for seconds in costs.op_seconds(op.call):
            least_seconds = min(seconds, launch_seconds)
            total_seconds += max(seconds / cluster.num_devices, least_seconds)
    return total_seconds


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _may_be_pipelined(task: PlanTask) -> bool:
    """Whether neither the options nor the step rule out a pipeline."""
    options = task.options
    pins_mesh = options.parallel != "auto" or options.logical_mesh is not None or options.device_map
    return not pins_mesh and options.num_stages != 1 and _can_be_split(task)


def _can_be_split(task: PlanTask) -> bool:
    """Whether the smallest number of micro-batches above 1 that may be tried gives exactly the full
    batch's results.
    """
    counts = microbatch_counts(task.step, task.cluster, task.options)
    smallest = min((count for count in counts if count > 1), default=None)
    if smallest is None:
        return False
    try:
        graph = microbatch(task.step, smallest, task.cluster.num_devices).graph
    except PlanError:
        return False
    # A note is added if micro-batches are not exactly the full batch (BatchNorm): only the user can
    # choose that.
    return not notes_of_split(task.step, graph)
