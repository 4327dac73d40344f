"""Planning inside a running job: every rank captures, rank 0 finds or makes the plan, all ranks get
the same one.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
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
from alpa_strategy.inter_op.pins import logical_shapes
from alpa_strategy.ir.graph import Place, StepGraph, stable_text
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.plan import Fingerprint, ParameterPlan, Plan, StagePlan, modes_text
from alpa_strategy.ir.user_code import user_line
from alpa_strategy.lightning import batch_rows
from alpa_strategy.lightning.digests import ReplicatedInputCheck
from alpa_strategy.lightning.evaluation_loop import step_counters
from alpa_strategy.lightning.host_costs import add_host_seconds
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.rank_consistency import SAME_SHAPES, shapes_text
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.partial_results import Key, PartialResults
from alpa_strategy.planner.microbatch_search import microbatch_counts
from alpa_strategy.planner.plan_check import check_devices, check_plan
from alpa_strategy.planner.plan_store import PlanStore
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.replan import pinned_task, replan, replan_fingerprint
from alpa_strategy.planner.task import PlanTask, check_fits
from alpa_strategy.runtime.host_memory import KEPT_BLOCKS, LEAST_BYTES, PAGE_FAULTS
from alpa_strategy.sharding.strategies import localize, op_strategies
from alpa_strategy.units import format_bytes, format_seconds

STAGES_BUDGET = 3.0  # seconds for timing ops of micro-batches, where pipelines are looked at
FIRST_BUDGET, LATER_BUDGET = (
    3.0,
    1.0,
)  # seconds for timing ops: of the training step, and of what is pinned to its plan

LIKELY_PER_DEVICE, LIKELY_COUNTS = 4, 3  # numbers of micro-batches whose shapes are timed


def capture(
    module: Any, batch: Any, batch_idx: int, job: Job, numbers: tuple[Place, ...] = ()
) -> StepGraph:
    """Capture the training step on every rank and make sure that all captured the same. Collective.

    Where the step can still run as it is written, any error is a CaptureError: the user's own comes
    again there.

    Args:
        numbers: what has changed since the step was captured: inputs of the step where that gives
            the same step.

    Raises:
        UnlikeStepsError: the ranks' batches or steps differ.
    """
    kinds = batch_rows.agreed_kinds(
        module.trainer, batch, job.hooks, job.may_run_eagerly, job.group
    )
    is_joint = job.options.rows == "rank" and world_size() > 1
    own = batch_rows.own_leaves(kinds or {}, batch) if is_joint else {}

    captured = partial(
        capture_step,
        module,
        world_size=world_size(job.group),
        batch_scope=job.options.rows,
        batch_idx=batch_idx,
        context=job.context,
        rows=None if kinds is None else batch_rows.are_rows(kinds, batch),
    )

    def work() -> StepGraph:
        try:
            with job.progress("capture"), batch_rows.naming(own, batch):
                step = captured(batch)
            batch_rows.check_own_leaves(own, step)
            if is_joint:
                batch_rows.check_own_numbers(
                    job.hooks, module, step, batch, captured, job.may_run_eagerly, kinds is None
                )
            if not numbers:
                return step
            return _with_numbers(
                step, module, batch, batch_idx, partial(captured, batch, numbers=numbers)
            )
        except Exception as error:
            if isinstance(error, AlpaError) or not (job.may_run_eagerly or job.submodules):
                if not isinstance(error, AlpaError):
                    _explain(error, is_joint)
                raise
            text = f"{type(error).__name__}: {error}\n  at {user_line(error.__traceback__)}"
            raise CaptureError(f"training_step cannot be captured: {text}") from error

    def summary(step: StepGraph) -> tuple[str, str, str]:
        return shapes_text(batch), step.parameter_digest, step.graph_digest

    step, summaries = on_all_ranks(work, summary, job.group)
    for part, (what, fix, kind) in enumerate(_PARTS):
        values = [summary[part] for summary in summaries]
        if len(set(values)) > 1:
            if what == _COMPUTES:
                values = _first_that_differs(step, job.group)
            shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise kind(f"the ranks differ in {what}: {shown}", fix)
    leaves = ReplicatedInputCheck(step, batch, job.group)
    leaves.begin(batch)
    leaves.finish()
    return step


def _explain(error: Exception, is_joint: bool) -> None:
    """An error of the user's step, which stays what it is, says under what the step has run."""
    if is_joint:
        error.add_note(f"alpa: {_JOINT_ROWS}")
    if error.__cause__ is None:
        error.__cause__ = CaptureError(
            f"training_step raises {type(error).__name__} while it is captured\n"
            f"  at {user_line(error.__traceback__)}",
            "see the error below, which is the step's own",
        )


def _with_numbers(
    step: StepGraph, module: Any, batch: Any, batch_idx: int, captured: Callable[[], StepGraph]
) -> StepGraph:
    """The step as `captured` with numbers that change, where this is what `step` has with the
    numbers as they are.
    """
    try:
        found = captured()
        known = {
            **step_counters(module.trainer, batch_idx),
            **numbers_now(found.numbers, module, batch),
        }
        return found if is_same_step(step, found, known) else step
    except Exception:  # the user's code may be written for plain numbers only
        return step


def _first_that_differs(step: StepGraph, group: Any) -> list[str]:
    """Of every rank the first op, log or constant that others have not. Collective."""
    own = [
        f"{op.call.target_name}{op.call.args} of {op.operands} ({op.source or op.module})"
        for op in step.ops
    ]
    own += [f"self.log({log.name!r}): {stable_text(log)}" for log in step.logs]
    own += [f"a constant {list(c.meta.shape)} {c.digest[:8]}" for c in step.constants]
    own += [
        "what it reads of buffers, returns and checks:"
        f" {stable_text((step.buffers, step.output, step.checks))}"
    ]
    lines = zip_longest(*all_gather_object(own, group), fillvalue="no more")
    return list(
        next(
            (each for each in lines if len(set(each)) > 1),
            ("the order of values",) * world_size(group),
        )
    )


_JOINT_ROWS = (
    "all ranks' rows are one batch here: take numbers of rows from its tensors (x.shape[0])"
)
_COMPUTES = "what training_step computes"
_PARTS = (
    ("the shapes of their batches", SAME_SHAPES, UnlikeStepsError),
    ("the parameters of the module", "build the same module on every rank", RuntimeMismatchError),
    (_COMPUTES, "do not let the step depend on the rank", UnlikeStepsError),
)


def job_cluster(job: Job) -> ClusterSpec:
    """The cluster that the plan is made for: declared costs on the job's devices, or measured ones.
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
    """The plan of `step`, the same on every rank: the user's file, that of the run that is resumed
    (`job.plans`), a stored one, or a new one that rank 0 solves.

    Args:
        running: for a step of another shape: the plan under which the parameters lie, and stay.
        resumed: rank 0: the plan (as data) of the training that is resumed, perhaps at a batch of
            another shape than
            its first: it goes on under that plan where nothing but the shape differs.

    Raises:
        PlanError: nothing fits, or the running stages cannot run the step.
    """
    task = PlanTask(step, cluster, job.options, optimizer)
    pinned: Mapping[str, ParameterPlan] | None = None
    if running is not None and not running.is_pipelined:
        task, pinned = pinned_task(task, running)

    def follow(running: Plan) -> Plan:
        """See `replan`."""
        table = OpTable.load(job.folder / "costs" / "ops.json")  # as it is: nothing is timed
        costs = (
            RooflineCosts(cluster.device, table, job.options.compile) if cluster.measured else None
        )
        with _partial_results(job) as results:
            return replan(replace(task, costs=costs, results=results), running)

    def work() -> Plan:
        if running is not None and running.is_pipelined:
            wanted = replan_fingerprint(task, running)
            return _of_resumed_run(wanted, step, job, task) or _stored(
                wanted, step, job, partial(follow, running)
            )
        return _plan_on_rank_zero(replace(task, progress=job.progress), job, pinned, resumed)

    def with_current_notes() -> dict[str, Any]:
        return work().with_notes_of(step.notes).to_dict()

    data = rank_zero.result_of(with_current_notes, "planning")
    if rank_in(job.group) == 0:  # which writes them into checkpoints
        job.plans.add(data)
    return Plan.from_dict(data)


def _of_resumed_run(wanted: Fingerprint, step: StepGraph, job: Job, task: PlanTask) -> Plan | None:
    """The plan under which the run that is resumed ran this step, None where it cannot be used."""
    why: str | None = None
    try:
        plan = job.plans.find(wanted, task.cluster, task.memory_limit)
        if plan is not None:
            _check_computes(plan, step, job)
            job.progress.say("alpa: the plan is the checkpoint's")
            return plan
    except PlanError as error:  # somebody edited it, or a rule has changed since
        why = error.problem
    job.plans.report_new_plan(wanted, why)
    return None


def _partial_results(job: Job) -> PartialResults:
    """Where this process stores what a planning computes, so that one that is killed goes on."""
    return PartialResults(job.folder / "planning", job.progress.tell)


def _stored(wanted: Fingerprint, step: StepGraph, job: Job, make: Callable[[], Plan]) -> Plan:
    """The stored plan of this fingerprint, or a new one that is stored."""
    store = PlanStore(job.plan_folder)
    plan = store.find(wanted)
    why = store.explain(wanted) if plan is None else ""
    if plan is not None:
        try:
            _check_computes(plan, step, job)
            job.progress.say(f"alpa: plan {store.path(plan.fingerprint)}")
            return plan
        except PlanError as error:  # somebody edited it, or a rule has changed since
            why = f"the stored one cannot be used: {error.problem}"
    job.progress.say(f"alpa: making a plan: {why}")
    plan = make().with_notes_of(step.notes)
    _check_computes(plan, step, job)  # the planner's own are held to it, too
    try:
        job.progress.say(f"alpa: plan stored in {store.put(plan)}")
    except OSError as error:
        job.progress.say(f"alpa: the plan cannot be stored in {store.folder}: {error.strerror}")
    return plan


def _plan_on_rank_zero(
    task: PlanTask,
    job: Job,
    pinned: Mapping[str, ParameterPlan] | None,
    resumed: Mapping[str, Any] | None,
) -> Plan:
    wanted = task.fingerprint
    if resumed is not None and _differs_in_shape(resumed, wanted):
        plan = Plan.from_dict(resumed)
        # Its devices alone: the rest is replanned, and checked, around it.
        check_devices(plan.stages, math.prod(job.step_devices))
        return plan
    if job.plan_file is not None and pinned is None:
        plan = Plan.load(job.plan_file)
        check_fits(plan, wanted, str(job.plan_file))
        _check_computes(plan, task.step, job)
        return plan

    if (plan_of_run := _of_resumed_run(wanted, task.step, job, task)) is not None:
        return plan_of_run

    def make() -> Plan:
        with _partial_results(job) as results:
            return _made(replace(task, results=results), job, pinned)

    return _stored(wanted, task.step, job, make)


def _made(task: PlanTask, job: Job, pinned: Mapping[str, ParameterPlan] | None) -> Plan:
    """A new plan, by op times measured on this rank where the cluster is measured."""
    if not task.cluster.measured or task.options.costs is not None:
        return _chosen(task, job, pinned)

    with job.progress("time ops"):
        budget = FIRST_BUDGET if pinned is None else LATER_BUDGET
        shapes = logical_shapes(task.options, task.cluster)
        calls = set().union(*(local_calls(task.step, shape) for shape in shapes))
        whole = {op.call for op in task.step.ops}  # seldom chosen, and known by their parts
        costs = _timed(calls, task, job, budget, later=whole)

    costed = replace(task, costs=costs, stage_costs=partial(_measured_stage_costs, task, job))
    plan = _chosen(costed, job, pinned)
    with job.progress("time host"):
        return add_host_seconds(plan, costed, job.device)


def _chosen(task: PlanTask, job: Job, pinned: Mapping[str, ParameterPlan] | None) -> Plan:
    """See `choose_plan`. In host memory what is planned has room for freed blocks, too, if the plan
    is not slower by
    more than page faults take where all of these are given back in the midst of a step; else it
    counts them."""
    plan, roomy = choose_plan(task, pinned), task.memory_limit / KEPT_BLOCKS
    planned = plan.predicted
    if job.device.type != "cpu" or planned.peak_bytes <= max(roomy, LEAST_BYTES):
        return plan
    faults = PAGE_FAULTS * planned.step_seconds
    with suppress(PlanError):
        other = choose_plan(
            replace(task, options=replace(task.options, memory_limit=roomy)), pinned
        )
        if other.predicted.step_seconds <= planned.step_seconds + faults:
            return replace(other, fingerprint=plan.fingerprint)
    note = (
        f"{format_seconds(faults)} of a step are page faults: it needs nearly all of the memory"
        " limit, so freed memory "
        "goes back to the system at once. A limit of"
        f" {format_bytes(KEPT_BLOCKS * planned.peak_bytes)} has none"
    )
    seconds, compute = planned.step_seconds + faults, planned.compute_seconds + faults
    planned = replace(planned, step_seconds=seconds, compute_seconds=compute)
    return replace(plan, predicted=planned, notes=(*plan.notes, note))


def _differs_in_shape(plan: Mapping[str, Any], wanted: Fingerprint) -> bool:
    """Whether a plan (as data) was made for batches of another shape, and for all else that is
    wanted.
    """
    prints = plan.get("fingerprint") if isinstance(plan, Mapping) else None
    if not isinstance(prints, Mapping) or set(prints) != set(Fingerprint.__dataclass_fields__):
        return False
    return {"batch"} <= set(Fingerprint(**prints).differences(wanted)) <= {"batch", "graph"}


def _check_computes(plan: Plan, step: StepGraph, job: Job) -> None:
    """PlanError where a plan would compute anything but the step."""
    num_devices = math.prod(job.step_devices)
    if not plan.is_pipelined:
        return check_plan(plan, step, num_devices)
    micro = microbatch(step, plan.num_microbatches, num_devices)
    return check_plan(plan, micro.graph, num_devices, micro.given)


def check_optimizer(optimizer: OptimizerInfo, stages: tuple[StagePlan, ...]) -> None:
    """AlpaError when the optimizer cannot work on shards and a stage shards a parameter, or on one
    stage's alone.
    """
    if len(stages) > 1 and not optimizer.parameter_wise:
        raise AlpaError(
            f"{optimizer.name} updates parameters by other parameters' gradients or in train() and"
            " eval(), and others "
            "are on other stages",
            "use an optimizer that looks at one parameter at a time, such as AdamW, or"
            " num_stages=1",
        )
    if optimizer.element_wise:
        return
    for name, plan in (item for stage in stages for item in stage.parameter_plans.items()):
        if not plan.is_whole:
            raise AlpaError(
                f"{optimizer.name} does not work element by element (or has train() and eval()),"
                " and the plan stores "
                f"{name!r} in shards ({modes_text(plan.module_modes)})",
                'use an element-wise optimizer such as AdamW, or parallel="data"',
            )


def _measured_stage_costs(task: PlanTask, job: Job) -> RooflineCosts:
    """Costs with the shapes that micro-batches have in stages: on one device, or on the devices of
    a node.
    """
    step, cluster, options = task.step, task.cluster, task.options
    likely = [
        n
        for n in microbatch_counts(step, cluster, options)
        if 1 < n <= LIKELY_PER_DEVICE * cluster.num_devices
    ]
    calls: set[OpCall] = set()
    with job.progress("time ops of stages"):
        for count in likely[:LIKELY_COUNTS]:
            graph = microbatch(step, count, cluster.num_devices).graph
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
    """Costs from the table in `job.folder`, after timing what it lacks on this rank's device,
    within the budget.

    Where an interrupted planning of the same task has timed its calls already, the table is taken
    as it is: more times would be other costs, and nothing that was priced by them of any use.

    later: calls that wait until the others are timed.
    """
    path, device = job.folder / "costs" / "ops.json", task.cluster.device

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
    """Every op of the step as one device runs it under each of its strategies on the mesh."""
    origin = (0,) * len(mesh_shape)
    return {
        local.call
        for call in {op.call for op in step.ops}
        for strategy in op_strategies(call, mesh_shape)
        if (local := localize(call, strategy, mesh_shape, origin)).implementation is None
    }
