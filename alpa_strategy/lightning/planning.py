"""Planning inside a running job: every rank captures, rank 0 finds or makes the plan for all.

The planner is imported where a plan is made: not by other ranks, nor for a stored plan.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.python_reads import is_same_step, numbers_now
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import (
    RankZero,
    all_gather_object,
    on_all_ranks,
    rank_in,
    world_size,
)
from alpa_strategy.comm.measure import measure_cluster
from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.cost.measured import OpTable, measure_ops
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import (
    AlpaError,
    CaptureError,
    PlanError,
    RuntimeMismatchError,
    UnlikeStepsError,
)
from alpa_strategy.hook_points import HOST_ALLOCATOR
from alpa_strategy.ir.graph import StepGraph, stable_text
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.places import Place
from alpa_strategy.ir.plan import Fingerprint, ParameterPlan, Plan, StagePlan, modes_text
from alpa_strategy.ir.user_code import user_line
from alpa_strategy.lightning.digests import SameBatchCheck
from alpa_strategy.lightning.evaluation_loop import StepCounters
from alpa_strategy.lightning.host_costs import add_host_seconds
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.rank_consistency import SAME_SHAPES, shapes_text
from alpa_strategy.loading import without_collections
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.partial_results import Key, PartialResults
from alpa_strategy.planner.execution import with_execution
from alpa_strategy.planner.figures import with_figures
from alpa_strategy.planner.plan_check import check_devices, check_plan
from alpa_strategy.planner.plan_store import PlanStore
from alpa_strategy.planner.task import PlanTask, check_fits
from alpa_strategy.sharding.strategies import localize, op_strategies

# Seconds for timing ops of the training step, and of later steps that are pinned to its plan.
FIRST_BUDGET = 3.0
LATER_BUDGET = 1.0

# Seconds for timing ops of micro-batches, if pipelines are searched.
STAGES_BUDGET = 3.0

# Numbers of micro-batches whose ops are timed: at most this many per device, and this many numbers.
LIKELY_PER_DEVICE = 4
LIKELY_COUNTS = 3


def capture(
    module: Any,
    batch: Any,
    batch_idx: int,
    job: Job,
    numbers: tuple[Place, ...] = (),
    state: frozenset[str] | None = None,
) -> StepGraph:
    """Capture the training step on every rank and check that all captured the same. Collective.

    If the step may still run eagerly, every error is a CaptureError. An eager step raises the
    user's own error once more.

    Args:
        module: the module of the training.
        batch: this rank's batch.
        batch_idx: its index in the epoch.
        job: the job.
        numbers: numbers that changed since the last capture, to become inputs of the step.
        state: as of `capture_step`.

    Raises:
        CaptureError: the step cannot be captured.
        UnlikeStepsError: the ranks' batches or steps differ.
        RuntimeMismatchError: the ranks' modules differ, or batches that are to be the same.
    """
    captured = partial(
        capture_step,
        module,
        world_size=world_size(job.group),
        batch_scope=job.options.rows,
        batch_idx=batch_idx,
        context=job.context,
        state=state,
    )

    def capture_on_this_rank() -> StepGraph:
        with job.progress("capture"):
            step = captured(batch)
        if not numbers:
            return step
        with_numbers = partial(captured, batch, numbers=numbers)
        return _with_numbers(step, module, batch, batch_idx, with_numbers)

    def summary(step: StepGraph) -> tuple[str, str, str]:
        return shapes_text(batch), step.parameter_digest, step.graph_digest

    capture_or_explain = partial(_explaining_errors, capture_on_this_rank, job)
    step, summaries = on_all_ranks(capture_or_explain, summary, job.group)
    _check_equal(step, summaries, job.group)
    if step.batch_scope == "global":
        check = SameBatchCheck(job.group)
        check.begin(batch)
        check.finish()
    return step


def _explaining_errors(capture: Callable[[], StepGraph], job: Job) -> StepGraph:
    """Return `capture()`; errors of the user's code get a CaptureError with the user's line as
    their cause.

    Raises:
        CaptureError: instead of such an error, if the step may run eagerly or with planned
            submodules.
    """
    try:
        return capture()
    except AlpaError:
        raise
    except Exception as error:
        if not (job.may_run_eagerly or job.submodules):
            _explain(error)
            raise
        text = f"{type(error).__name__}: {error}\n  at {user_line(error.__traceback__)}"
        raise CaptureError(f"training_step cannot be captured: {text}") from error


def _check_equal(step: StepGraph, summaries: list[tuple[str, str, str]], group: Any) -> None:
    """Check the ranks' summaries of the step (`_SUMMARY_ITEMS`). Collective if they differ.

    Raises:
        UnlikeStepsError, RuntimeMismatchError: the summaries differ.
    """
    for index, (item, fix, kind) in enumerate(_SUMMARY_ITEMS):
        values = [summary[index] for summary in summaries]
        if len(set(values)) == 1:
            continue
        if item == _COMPUTES:
            values = _first_that_differs(step, group)
        shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise kind(f"the ranks differ in {item}: {shown}", fix)


def _explain(error: Exception) -> None:
    """Add to an error of the user's step that the step ran in a capture, and on which batch."""
    if error.__cause__ is None:
        error.__cause__ = CaptureError(
            f"training_step raises {type(error).__name__} while it is captured\n"
            f"  at {user_line(error.__traceback__)}",
            "see the error below, which is the step's own",
        )


def _with_numbers(
    step: StepGraph, module: Any, batch: Any, batch_idx: int, captured: Callable[[], StepGraph]
) -> StepGraph:
    """Return the step as `captured` returns it, with changing numbers as inputs, if it is the same.

    Args:
        step: the step with the current numbers as constants. It is returned if the other one
            differs or cannot be captured.
        module: the module of the training.
        batch: this rank's batch.
        batch_idx: its index in the epoch.
        captured: captures the step with numbers as inputs.
    """
    try:
        numbered = captured()
        counters = StepCounters(module.trainer, batch_idx).all()
        numbers = numbers_now(numbered.numbers, module, batch)
        return numbered if is_same_step(step, numbered, {**counters, **numbers}) else step
    # The user's code may accept plain numbers only.
    except Exception:
        return step


def _first_that_differs(step: StepGraph, group: Any) -> list[str]:
    """Return, for every rank, its first op, log or constant that differs. Collective."""
    lines = []
    for op in step.ops:
        location = op.source or op.module
        lines.append(f"{op.call.target_name}{op.call.args} of {op.operands} ({location})")
    lines += [f"self.log({log.name!r}): {stable_text(log)}" for log in step.logs]
    lines += [f"a constant {list(c.meta.shape)} {c.digest[:8]}" for c in step.constants]
    state = stable_text((step.buffers, step.output, step.checks))
    lines.append(f"buffers, results and checks: {state}")

    lines_of_ranks = all_gather_object(lines, group)
    for texts in zip_longest(*lines_of_ranks, fillvalue="no more"):
        if len(set(texts)) > 1:
            return list(texts)
    return ["the order of values"] * world_size(group)


_COMPUTES = "the computation of training_step"

# Items of a captured step's summary on which all ranks must agree: text, fix, type of the error.
_SUMMARY_ITEMS = (
    ("the shapes of their batches", SAME_SHAPES, UnlikeStepsError),
    ("the parameters of the module", "build the same module on every rank", RuntimeMismatchError),
    (_COMPUTES, "do not let the step depend on the rank", UnlikeStepsError),
)


def job_cluster(job: Job) -> ClusterSpec:
    """Return the cluster to plan for: one replica's devices, with declared or measured costs.

    Collective.
    """
    spec = job.cluster
    if spec is None:
        with job.progress("cluster"):
            spec = measure_cluster(
                job.num_nodes, job.devices_per_node, build_mesh, job.folder / "costs", job.device
            )
    nodes, devices = job.step_devices
    return replace(spec, num_nodes=nodes, devices_per_node=devices)


def find_or_make_plan(
    step: StepGraph,
    job: Job,
    cluster: ClusterSpec,
    optimizer: OptimizerInfo,
    rank_zero: RankZero,
    running: Plan | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of `step`, the same on every rank. Collective.

    It is the user's file, the plan of the resumed run (`job.plans`), a stored one, or a new one
    that rank 0 solves.

    Args:
        step: the captured step.
        job: the job.
        cluster: the job's devices and costs.
        optimizer: the training's optimizer.
        rank_zero: distributes rank 0's result.
        running: the plan of the current layouts, for a step of another shape; they stay.
        resumed: on rank 0, the plan (as data) of the resumed training. It is used if only the
            batch's shape differs from that of its first step.

    Raises:
        PlanError: no plan fits, or the running stages cannot run the step.
    """
    task = PlanTask(step, cluster, job.options, optimizer)
    pinned: Mapping[str, ParameterPlan] | None = None
    if running is not None and not running.is_pipelined:
        from alpa_strategy.planner.replan import pinned_task

        task, pinned = pinned_task(task, running)

    def plan_on_this_rank() -> Plan:
        if running is not None and running.is_pipelined:
            from alpa_strategy.planner.replan import replan_fingerprint

            wanted = replan_fingerprint(task, running)
            plan = _of_resumed_run(wanted, task, job)
            return plan or _stored(wanted, task, job, partial(_replanned, task, job, running))
        return _plan_on_rank_zero(replace(task, progress=job.progress), job, pinned, resumed)

    def with_current_notes() -> dict[str, Any]:
        plan = plan_on_this_rank().with_notes_of(step.notes)
        # Plans of an older version have no figures.
        return (plan if plan.figures is not None else with_figures(plan, task)).to_dict()

    data = rank_zero.result_of(with_current_notes, "planning")
    # Rank 0 writes its plans into checkpoints.
    if rank_in(job.group) == 0:
        job.plans.add(data)
    return Plan.from_dict(data)


def _replanned(task: PlanTask, job: Job, running: Plan) -> Plan:
    """Plan the task around the running stages, with the op times that were measured before."""
    from alpa_strategy.planner.replan import replan

    with _partial_results(job) as results:
        return replan(replace(_with_known_costs(task, job), results=results), running)


def _with_known_costs(task: PlanTask, job: Job) -> PlanTask:
    """Return the task with op times of earlier runs, if costs are measured and none are given."""
    if not task.cluster.measured or task.options.costs is not None:
        return task
    costs = RooflineCosts(task.cluster.device, OpTable.load(_op_times(job)), job.options.compile)
    return replace(task, costs=costs)


def _of_resumed_run(wanted: Fingerprint, task: PlanTask, job: Job) -> Plan | None:
    """Return the plan of this step in the resumed run; None, reported to the user, if there is none
    that can be used.

    Args:
        wanted: fingerprint of the step.
    """
    why: str | None = None
    try:
        plan = job.plans.find(wanted, task.cluster, task.memory_limit)
        if plan is not None:
            plan = _checked(plan, task.step, job)
            job.progress.say("alpa: the plan is the checkpoint's")
            return plan
    # The plan was edited, or a sharding rule has changed since.
    except PlanError as error:
        why = error.problem
    job.plans.report_new_plan(wanted, why)
    return None


def _op_times(job: Job) -> Path:
    """Return the path of the measured times of ops."""
    return job.folder / "costs" / "ops.json"


def _partial_results(job: Job) -> PartialResults:
    """Return the store of intermediate results, with which a killed planning continues."""
    return PartialResults(job.folder / "planning", job.progress.tell)


def _stored(wanted: Fingerprint, task: PlanTask, job: Job, make: Callable[[], Plan]) -> Plan:
    """Return the plan stored for `wanted`, or that of `make`, stored. Raises: as `make`."""
    store = PlanStore(job.plan_folder, job.plan_url)
    plan = store.find(wanted)
    why = store.explain(wanted) if plan is None else ""
    if plan is not None:
        try:
            plan = _checked(plan, task.step, job)
            job.progress.say(f"alpa: plan {store.location(plan.fingerprint)}")
            _expect_page(plan, store, task, job, is_new=False)
            return plan
        # The file was edited, or a sharding rule has changed since.
        except PlanError as error:
            why = f"the stored one cannot be used: {error.problem}"

    job.progress.say(f"alpa: making a plan: {why}")
    plan = make().with_notes_of(task.step.notes)
    # A check of the planner, too.
    plan = _checked(plan, task.step, job)
    try:
        store.put(plan)
        job.progress.say(f"alpa: plan stored in {store.location(plan.fingerprint)}")
    except OSError as error:
        place = job.plan_url or store.folder
        job.progress.say(f"alpa: the plan cannot be stored in {place}: {error.strerror or error}")
    _expect_page(plan, store, task, job, is_new=True)
    return plan


def _expect_page(plan: Plan, store: PlanStore, task: PlanTask, job: Job, is_new: bool) -> None:
    """Let the page of a stored plan be written after the first steps, unless details are there.

    Args: as of `PlanPages.expect`, and the task that the plan is for.
    """
    from alpa_strategy.ir.plan_details import PlanDetails, details_path

    def details() -> PlanDetails | None:
        from alpa_strategy.planner.details import details_of

        return details_of(_with_known_costs(task, job), plan)

    if is_new or not details_path(store.path(plan.fingerprint)).exists():
        job.pages.expect(plan, store, details, is_new)


def _plan_on_rank_zero(
    task: PlanTask,
    job: Job,
    pinned: Mapping[str, ParameterPlan] | None,
    resumed: Mapping[str, Any] | None,
) -> Plan:
    """Return the task's plan, on rank 0: resumed, from a file (none if `pinned`), stored or new.

    Args:
        task: the task.
        job: the job.
        pinned: layouts of parameters that stay; None: all are planned.
        resumed: as of `find_or_make_plan`.

    Raises:
        PlanError: no plan fits, or that of the file does not fit the task.
    """
    wanted = task.fingerprint
    if resumed is not None and _differs_in_shape(resumed, wanted):
        plan = Plan.from_dict(resumed)
        # Only its devices are checked here. The step is replanned around it, and checked then.
        check_devices(plan.stages, math.prod(job.step_devices))
        return plan

    if job.plan_file is not None and pinned is None:
        plan = Plan.load(job.plan_file)
        check_fits(plan, wanted, str(job.plan_file))
        return _checked(plan, task.step, job)

    plan_of_run = _of_resumed_run(wanted, task, job)
    if plan_of_run is not None:
        return plan_of_run

    def make() -> Plan:
        with _partial_results(job) as results:
            return _made(replace(task, results=results), job, pinned)

    return _stored(wanted, task, job, make)


def _made(task: PlanTask, job: Job, pinned: Mapping[str, ParameterPlan] | None) -> Plan:
    """Return a new plan; on a measured cluster, ops are timed on this rank's device first.

    Args:
        pinned: plans of parameters that are stored already, by name; None: all are free.
    """
    if not task.cluster.measured or task.options.costs is not None:
        return _chosen(task, job, pinned)

    from alpa_strategy.inter_op.pins import logical_shapes

    with job.progress("time ops"):
        budget = FIRST_BUDGET if pinned is None else LATER_BUDGET
        shapes = logical_shapes(task.options, task.cluster)
        calls = set().union(*(local_calls(task.step, shape) for shape in shapes))
        # Unsharded ops come last: they are rarely chosen, and estimated from their shards.
        unsharded = {op.call for op in task.step.ops}
        costs = _timed(calls, task, job, budget, later=unsharded)

    costed = replace(task, costs=costs, stage_costs=partial(_measured_stage_costs, task, job))
    plan = _chosen(costed, job, pinned)
    with job.progress("time host"):
        return add_host_seconds(plan, costed, job.device)


def _chosen(task: PlanTask, job: Job, pinned: Mapping[str, ParameterPlan] | None) -> Plan:
    """Return the plan of `choose_plan`, with the costs of page faults on CPUs.

    Args: as of `_made`. Raises: as `choose_plan`.
    """
    with without_collections():
        from alpa_strategy.planner.planner import choose_plan

    plan = choose_plan(task, pinned)
    allocator = HOST_ALLOCATOR.extra
    if allocator is None or job.device.type != "cpu":
        return plan

    return allocator.with_page_faults(plan, task, partial(choose_plan, pinned=pinned))


def _differs_in_shape(plan: Mapping[str, Any], wanted: Fingerprint) -> bool:
    """Whether a plan (as data) differs from the fingerprint `wanted` in the batch's shape alone."""
    prints = plan.get("fingerprint") if isinstance(plan, Mapping) else None
    if not isinstance(prints, Mapping) or set(prints) != set(Fingerprint.__dataclass_fields__):
        return False

    differences = set(Fingerprint(**prints).differences(wanted))
    return {"batch"} <= differences <= {"batch", "graph"}


def _checked(plan: Plan, step: StepGraph, job: Job) -> Plan:
    """Return a plan that computes the step, with the execution of its stages.

    Raises:
        PlanError: it would compute something else.
    """
    num_devices = math.prod(job.step_devices)
    graph = step
    external: Mapping[int, int] = {}
    if plan.is_pipelined:
        micro = microbatch(step, plan.num_microbatches, num_devices)
        graph = micro.graph
        external = micro.from_prologue
    check_plan(plan, graph, num_devices, external)
    # Plan files of an older version lack the execution, and those of runs that do not compile lack
    # a part of it.
    return with_execution(plan, graph, job.compile is not None)


def check_optimizer(optimizer: OptimizerInfo, stages: tuple[StagePlan, ...]) -> None:
    """Check that the optimizer can update the parameters as the stages store them.

    Raises:
        AlpaError: it cannot update shards, or the parameters of one stage alone.
    """
    if len(stages) > 1 and not optimizer.parameter_wise:
        raise AlpaError(
            f"{optimizer.why_in_full}, and others are on other stages",
            "use an optimizer that updates one parameter at a time, such as AdamW, or num_stages=1",
        )
    if optimizer.may_step_shards:
        return

    for stage in stages:
        for name, plan in stage.parameter_plans.items():
            if not plan.is_unsharded:
                raise AlpaError(
                    f"{optimizer.why_in_full}, and the plan stores {name!r} in shards"
                    f" ({modes_text(plan.module_modes)})",
                    "use an optimizer that updates one parameter at a time, such as AdamW or Muon,"
                    ' or parallel="data"',
                )


def _measured_stage_costs(task: PlanTask, job: Job) -> RooflineCosts:
    """Return costs after timing ops in the shapes of likely numbers of micro-batches that can split
    the step, on one device and on a node.
    """
    from alpa_strategy.planner.microbatch_search import microbatch_counts

    cluster = task.cluster
    most = LIKELY_PER_DEVICE * cluster.num_devices
    counts = microbatch_counts(task.step, cluster, task.options)
    likely = [count for count in counts if 1 < count <= most]
    calls: set[OpCall] = set()
    with job.progress("time ops of stages"):
        for count in likely[:LIKELY_COUNTS]:
            try:
                graph = microbatch(task.step, count, cluster.num_devices).graph
            except PlanError:
                # Others may divide the step, such as one for each rank; the search tries all.
                continue
            for size in {1, cluster.devices_per_node}:
                calls |= local_calls(graph, (size,))
        return _timed(calls, task, job, STAGES_BUDGET)


def _timed(
    calls: set[OpCall],
    task: PlanTask,
    job: Job,
    budget_seconds: float,
    later: Iterable[OpCall] = (),
) -> RooflineCosts:
    """Return costs from the table in `job.folder`, after timing missing ops on this rank's device.

    If an interrupted planning of the same task has timed its calls, none are timed: other times
    would be other costs, which would invalidate its intermediate results.

    Args:
        calls: ops to be timed.
        task: the task.
        job: the job.
        budget_seconds: seconds for timing.
        later: calls that are timed after the others.
    """
    path = _op_times(job)
    device = task.cluster.device

    def measure() -> OpTable:
        table = OpTable.load(path)
        known = len(table)
        with torch.enable_grad():
            measure_ops(calls, job.device, budget_seconds, table, name=device.name, later=later)
        if len(table) > known:
            try:
                table.save()
            except OSError as error:
                job.progress.say(f"alpa: op times cannot be stored in {path}: {error.strerror}")
        return table

    table = task.results.get(
        "timed",
        key=lambda: Key(task.fingerprint.digest, budget_seconds),
        compute=measure,
        encode=lambda table: {"num_times": len(table)},
        decode=lambda record: OpTable.load(path),
    )
    return RooflineCosts(device, table, job.options.compile)


def local_calls(step: StepGraph, mesh_shape: tuple[int, ...]) -> set[OpCall]:
    """Return the ops of the step in local shapes, under all strategies on a mesh of this shape;
    without strategies that need another implementation.
    """
    origin = (0,) * len(mesh_shape)
    local_calls = set()
    for call in {op.call for op in step.ops}:
        for strategy in op_strategies(call, mesh_shape):
            local = localize(call, strategy, mesh_shape, origin)
            if local.implementation is None:
                local_calls.add(local.call)
    return local_calls
