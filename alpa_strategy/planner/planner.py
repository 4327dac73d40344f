"""The planner: from a module and a cluster to a Plan (`make_plan`), or from a captured step
(`choose_plan`).

One stage over all devices is the pipeline of one: `search.py` makes plans of both kinds by the same
costs, and here is decided which is looked at and which is taken. No process groups, no Trainer.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import Any

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.candidates import EVERY_SIZE
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterPlan, Plan
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.phases import capture_phases, plan_iteration
from alpa_strategy.planner.plan_check import check_devices
from alpa_strategy.planner.replan import pinned_task, replan
from alpa_strategy.planner.search import (
    hidden_seconds,
    microbatch_counts,
    plan_one_stage,
    plan_pipeline,
)
from alpa_strategy.planner.short_steps import is_short
from alpa_strategy.planner.task import PlanTask, Progress

MARGIN = (
    0.1  # a pipeline must be predicted faster by this share: its prediction is the less sure one
)
SCREEN = (
    0.15  # pipelines are not looked at where one stage waits for less than this share of its step
)
LEAST_GAIN = 0.01  # of samples/s: what less than that is gained by is not worth a larger batch


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
    """Capture `module.training_step` on `batch` and plan it for `cluster`. Needs no devices;
    tensors may be meta.

    Of a module with `iteration_phases` these are captured instead (see `phases.Phase`) and the one
    that trains planned.

    Args:
        batch: one rank's batch (`options.batch_scope == "rank"`), or the whole one (`"global"`).
        optimizer: taken from `module.configure_optimizers()` when None, for a Trainer without
            clipping, callbacks and gradient scaler (`optimizer_info_of` takes those into account).
        context: what surrounds the step, such as autocast (see `capture_step`).
        costs: a cost model of your own, as `options.costs`.
        choose: finds the plan; None: `choose_plan`.
        around: a plan for another step of the same module: parameters lie as there, the rest is
            solved around them.
        results: where costs and solutions are stored as they are computed; `results.done()` is the
            caller's.

    Raises:
        CaptureError, PlanError: see there.
    """
    options, progress = options or PlanOptions(), progress or nullcontext
    if costs is not None:
        options = replace(options, costs=costs)
    started = time.perf_counter()
    with progress("capture"):
        scope: dict[str, Any] = {"world_size": cluster.num_devices, "batch_scope": options.rows}
        scope["context"] = context or nullcontext
        phases = (
            capture_phases(module, batch, **scope) if hasattr(module, "iteration_phases") else {}
        )
        trained = next((step for phase, step in phases.values() if phase.trains), None)
        step = trained or capture_step(module, batch, **scope)
    capture_seconds = time.perf_counter() - started
    optimizer = optimizer or optimizer_info_of(module)
    task = PlanTask(step, cluster, options, optimizer, progress=progress, results=results)
    find = (choose or choose_plan) if around is None else partial(plan_around, running=around)
    plan = plan_iteration(phases, task, find) if phases else find(task)
    plan = plan.with_notes_of(step.notes)
    return replace(plan, solver_seconds={"capture": capture_seconds, **plan.solver_seconds})


def choose_plan(task: PlanTask, pinned: Mapping[str, ParameterPlan] | None = None) -> Plan:
    """A plan of one stage, or a pipeline; where links differ, in each order of the devices that may
    be the best.

    A pipeline is made when the options ask for one (on one device: micro-batches, recomputation).
    Else it is where micro-batches give exactly the whole batch's result, and no single stage fits
    or the pipeline is predicted to be faster by `MARGIN` than the best one, whose reduction of
    gradients hides behind the backward as far as it can.

    Args:
        pinned: as for `plan_one_stage`; then there is one stage.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    plans: list[Plan] = []
    failures: list[PlanError] = []
    given = task.cluster
    if (
        task.options.device_map and given.order == "searched"
    ):  # devices that a user names stay in their order
        given = replace(given, order="numbered")
    for cluster in given.orders():
        ordered = replace(task, cluster=cluster)
        try:
            plans.append(_choose(ordered) if pinned is None else plan_one_stage(ordered, pinned))
        except PlanError as error:
            failures.append(error)
    if not plans:
        raise failures[0]
    plan = min(plans, key=lambda plan: plan.predicted.step_seconds)
    return replace(plan, fingerprint=replace(plan.fingerprint, cluster=task.cluster.digest()))


def plan_around(task: PlanTask, running: Plan) -> Plan:
    """The plan of another step on the stages of `running`, whose parameters stay where and as they
    lie.

    Raises:
        PlanError: the devices or the parameters' shapes are others, or the stages cannot run the
            step (see `replan`).
    """
    check_devices(running.stages, task.cluster.num_devices)
    shapes = {name: shape for stage in running.stages for name, shape in stage.shapes.items()}
    for given in task.step.parameters:
        wanted = tuple(given.module_shape or given.meta.shape)
        if (shape := shapes.get(given.name, wanted)) != wanted:
            problem = f"the plan is for {given.name} of shape {list(shape)}, the model's has {list(wanted)}"
            raise PlanError(problem, "give one that was made for this model")
    return (
        replan(task, running) if running.is_pipelined else choose_plan(*pinned_task(task, running))
    )


def _choose(task: PlanTask) -> Plan:
    """See `choose_plan`; on the cluster as it is."""
    asked = task.options
    is_placed = any(len(ranks) < task.cluster.num_devices for _, ranks in asked.device_map)
    if asked.asks_for_pipeline or is_placed or (asked.remat is True and _may_be_pipelined(task)):
        if task.cluster.num_devices == 1 and (
            (asked.num_stages or 1) > 1 or asked.schedule is not None
        ):
            raise PlanError(
                "num_stages and schedule need at least 2 devices",
                "leave them out; num_microbatches and remat are for one device, too",
            )
        return plan_pipeline(task.for_stages())
    try:
        # What to make again takes minutes to solve on meshes of many devices; pipelines decide it
        # stage by stage.
        is_small = task.cluster.num_devices <= EVERY_SIZE
        if asked.remat is True:  # as the named plan lies on all devices
            return _one_stage(task.for_stages())
        one = plan_one_stage(task, by_tensor=is_small or not _may_be_pipelined(task))
    except PlanError as error:
        clear_frames(error.__traceback__)  # its tables are as large as all those to come
        return _where_one_stage_fails(task, error)
    one = _or_on_devices(one, task)
    if task.cluster.num_devices == 1 or not _may_be_pipelined(task):
        return one
    if is_short(task, one.predicted.step_seconds):
        return _with_note(
            one,
            "no pipeline: the host needs longer for its actions than the devices for such a step",
        )
    ideal = divided_seconds(task.step, task.cluster, task.op_costs)
    waiting = max(0.0, 1 - ideal / hidden_seconds(one, task.cluster.overlap))
    if waiting < SCREEN:
        return _with_note(
            one, f"no pipeline: one stage loses only {waiting:.0%} of its step by not being ideal"
        )
    return _faster(one, task.for_stages())


def _where_one_stage_fails(task: PlanTask, error: PlanError) -> Plan:
    """A pipeline, or one stage whose spans are made again, or either with all state on the host;
    else `error`.
    """
    if shared_bytes(
        task.step, task.cluster, task.optimizer
    ) <= task.memory_limit and _may_be_pipelined(task):
        with suppress(PlanError):  # the first error speaks of the ordinary case
            return plan_pipeline(task.for_stages())
    if not isinstance(error, DoesNotFitError):
        raise error
    if task.options.remat is None:  # whole spans made again need less than single results
        with suppress(PlanError):
            return _one_stage(task.for_stages())
    if task.options.offload is None and task.cluster.host is not None and _may_be_pipelined(task):
        on_host = replace(task.for_stages(), options=replace(task.options, offload=True))
        with suppress(PlanError):
            return replace(plan_pipeline(on_host), fingerprint=task.fingerprint)
    raise error


def _one_stage(task: PlanTask) -> Plan:
    """One stage over all devices, as pipelines have them: it may compute spans again and run
    micro-batches.
    """
    count = task.options.num_microbatches or (None if _can_be_cut(task) else 1)
    alone = replace(task.options, num_stages=1, num_microbatches=count)
    return replace(plan_pipeline(replace(task, options=alone)), fingerprint=task.fingerprint)


def _or_on_devices(one: Plan, task: PlanTask) -> Plan:
    """The solved stage, or what keeps all on the devices, where that is faster: a pipeline, spans
    that are made again.

    What is offloaded is solved with the layouts of one stage that makes single results again.
    """
    offloads = any(how.on_host for stage in one.stages for how in stage.parameter_plans.values())
    if not offloads or task.options.offload is not None:
        return one
    without = replace(task, options=replace(task.options, offload=False))
    try:
        other = _where_one_stage_fails(without, DoesNotFitError(""))
    except PlanError:
        return one
    return other if other.predicted.step_seconds < one.predicted.step_seconds else one


def _faster(one: Plan, task: PlanTask) -> Plan:
    """The single stage, or a pipeline that is clearly faster; a note says why."""
    seconds = hidden_seconds(one, task.cluster.overlap)
    started = time.perf_counter()
    limit = seconds * (1 - MARGIN)
    try:
        # Stages that take turns on one micro-batch win only where everything is latency, the least
        # sure to predict. One stage gains nothing from micro-batches but memory: where it seems to,
        # short ops were timed on a warmer cache.
        many = plan_pipeline(task, known=limit, several=True)
    except PlanError:
        many = None
    spent = {"pipelines": time.perf_counter() - started}
    if many is None or many.predicted.step_seconds > limit:
        one = replace(one, solver_seconds={**one.solver_seconds, **spent})
        return _with_note(one, f"no pipeline: none is faster by {MARGIN:.0%}")
    baselines = {"one stage": one.predicted.step_seconds, **one.baselines}
    many = replace(
        many, baselines=baselines, solver_seconds={**one.solver_seconds, **many.solver_seconds}
    )
    return _with_note(
        many,
        f"a pipeline: one stage would take {seconds / many.predicted.step_seconds:.2f}x as long",
    )


def shared_bytes(step: StepGraph, cluster: ClusterSpec, optimizer: OptimizerInfo) -> float:
    """Bytes per device of parameters, gradients and optimizer state if nothing is held twice: the
    least possible.
    """
    total: float = sum(parameter.meta.num_bytes for parameter in step.parameters)
    trained = [parameter.meta for parameter in step.parameters if parameter.meta.requires_grad]
    total += sum(meta.num_bytes + meta.num_elements * optimizer.state_bytes for meta in trained)
    return total / cluster.num_devices


def divided_seconds(step: StepGraph, cluster: ClusterSpec, costs: OpCosts) -> float:
    """Seconds of the step's ops if the devices shared them and nothing else took time; an op starts
    on every device.
    """
    launch = cluster.device.launch_seconds * cluster.device.slowdown
    whole = [seconds for op in step.ops for seconds in costs.op_seconds(op.call)]
    return sum(max(seconds / cluster.num_devices, min(seconds, launch)) for seconds in whole)


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _may_be_pipelined(task: PlanTask) -> bool:
    """Whether nothing that the user asked for, and nothing in the step, stands against a
    pipeline.
    """
    options = task.options
    pins_mesh = options.parallel != "auto" or options.logical_mesh is not None or options.device_map
    return not pins_mesh and options.num_stages != 1 and _can_be_cut(task)


def _can_be_cut(task: PlanTask) -> bool:
    """Whether some number of micro-batches gives exactly the whole batch's results."""
    step, cluster, options = task.step, task.cluster, task.options
    counts = [count for count in microbatch_counts(step, cluster, options) if count > 1]
    if not counts:
        return False
    try:
        # A note says where micro-batches are not exactly the whole batch (BatchNorm): that is for
        # the user to ask for.
        return microbatch(step, counts[-1], cluster.num_devices).graph.notes == step.notes
    except PlanError:
        return False


# --- The batch size with the most samples a second that fits: the given one doubled and halved.


def tune_batch(plan_at: Callable[[int], Plan], given: int) -> dict[int, Plan | PlanError]:
    """What `plan_at` gives by batch size, or why there is no plan; the best is `best_batch` of it.

    Doubled while that gains samples/s and fits; halved while it does not fit, or while that is the
    faster way.
    """
    found: dict[int, Plan | PlanError] = {}

    def rate(batch_size: int) -> float:
        """Batches of one sample a second; 0 where there is no plan."""
        if batch_size not in found:
            try:
                found[batch_size] = plan_at(batch_size)
            except PlanError as error:
                found[batch_size] = error
        plan = found[batch_size]
        return 0.0 if isinstance(plan, PlanError) else batch_size / plan.iteration_seconds

    up = given
    while rate(up) and rate(2 * up) > rate(up) * (1 + LEAST_GAIN):
        up *= 2
    down = given
    while up == given and down % 2 == 0 and (not rate(down) or rate(down // 2) >= rate(down)):
        down //= 2
        rate(down)
    return dict(sorted(found.items()))


def best_batch(found: dict[int, Plan | PlanError]) -> int | None:
    """The batch size with the most samples a second, of equals within `LEAST_GAIN` the smallest;
    None: nothing fits.
    """
    rates = {
        n: n / plan.iteration_seconds
        for n, plan in found.items()
        if not isinstance(plan, PlanError)
    }
    return next(
        (n for n, rate in rates.items() if rate * (1 + LEAST_GAIN) >= max(rates.values())), None
    )
