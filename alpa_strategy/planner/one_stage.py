"""Plans of one stage: the whole batch at once, on all devices.

One integer program is solved for every logical mesh that the options allow. Named plans (data,
tensor, ZeRO) are solved beside it, by the same costs and within the same memory, and data
parallelism is taken in the place of the solver's plan if the predictions do not tell them apart,
and ZeRO-3 if it is faster with what the run hides.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from traceback import clear_frames

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.pins import check_placements, logical_shapes
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import PricedStage, SolvedStage, StageRequest, StageSolver
from alpa_strategy.inter_op.stored_costs import plan_of_record
from alpa_strategy.intra_op.options import REDUCTIONS
from alpa_strategy.intra_op.solver.solve import NoCheaperSolution
from alpa_strategy.ir.plan import ParameterPlan, Plan, StagePlan
from alpa_strategy.partial_results import Key
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.failures import Failures, no_plan_error, timed
from alpa_strategy.planner.known_host import seconds_with_host
from alpa_strategy.planner.short_steps import why_data_parallel
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.strategies import replicated_notes

BASELINES = ("data", "zero2", "zero3", "tensor")
# Of a plan that is taken in the place of the solver's.
ZERO3_NOTE = "ZeRO-3: most of what is gathered is hidden behind computation"

# The backward's share of a step's compute seconds.
BACKWARD_SHARE = 2 / 3


def plan_one_stage(
    task: PlanTask,
    pinned: Mapping[str, ParameterPlan] | None = None,
    by_tensor: bool = True,
    without: Collection[tuple[int, ...]] = (),
) -> Plan:
    """Return the best single stage over all devices.

    Every logical mesh that the options allow is priced, and solved unless its optimum with free
    memory is slower than the plan on another mesh. A plan that an interrupted planning has stored
    is returned as it is.

    Args:
        pinned: layouts of parameters to keep, by name; `options.logical_mesh` must then be the
            running plan's.
        by_tensor: whether single activations may be recomputed if the options leave that open.
        without: logical meshes to leave out.

    Raises:
        PlanError: nothing fits, with the reason for every logical mesh.
    """
    pins = sorted((pinned or {}).items())
    return task.results.get(
        "plan",
        key=lambda: Key(
            whole_batch(task).content, task.fingerprint.digest, pins, by_tensor, *without
        ),
        compute=lambda: _plan_one_stage(task, pinned, by_tensor, without),
        encode=Plan.to_dict,
        decode=plan_of_record,
    )


def _plan_one_stage(
    task: PlanTask,
    pinned: Mapping[str, ParameterPlan] | None,
    by_tensor: bool,
    without: Collection[tuple[int, ...]],
) -> Plan:
    """Return the best plan of one stage.

    Args:
        task: the task.
        pinned: parameter plans that stay; None for a free choice, which has baselines.
        by_tensor: whether single results may be recomputed.
        without: logical meshes to leave out.

    Raises:
        OptionError, PlanError: nothing fits, or a pin cannot be met.
    """
    fingerprint = task.fingerprint
    if task.options.remat is None and not by_tensor:
        task = replace(task, options=replace(task.options, remat=False))
    check_placements(task.step, task.cluster, task.options)

    solver = StageSolver(whole_batch(task))
    spent: dict[str, float] = defaultdict(float)
    best = _solve_meshes(task, solver, pinned or {}, without, spent)

    baselines: dict[str, SolvedStage | None] = {}
    with task.progress("baselines"), timed(spent, "baselines"):
        if pinned is None:
            baselines = _baselines(task, solver)

    plan = plan_of(solver.job, fingerprint, [best], [0])
    if may_choose_freely(task):
        named = {
            name: plan_of(solver.job, fingerprint, [stage], [0])
            for name, stage in baselines.items()
            if stage is not None
        }
        plan = _or_named(task, plan, named)

    baseline_seconds: dict[str, float | None] = {}
    for name, stage in baselines.items():
        # Micro-batches would be faster, and are not planned for baselines.
        is_slowed = stage is not None and recomputes_or_offloads(stage.plan)
        label = f"{name}, whole batch at once" if is_slowed else name
        baseline_seconds[label] = stage.plan.predicted.step_seconds if stage else None
    notes = (*task.step.notes, *replicated_notes(task.step, task.op_costs), *plan.notes)
    return replace(plan, baselines=baseline_seconds, notes=notes, solver_seconds=dict(spent))


def recomputes_or_offloads(stage: StagePlan) -> bool:
    """Whether a stage recomputes results, or stores some or parameters in host memory."""
    on_host = any(parameter.on_host for parameter in stage.parameter_plans.values())
    return bool(stage.recomputed_ops or stage.stored or stage.remat or on_host)


def _solve_meshes(
    task: PlanTask,
    solver: StageSolver,
    pinned: Mapping[str, ParameterPlan],
    without: Collection[tuple[int, ...]],
    spent: dict[str, float],
) -> SolvedStage:
    """Return the best stage over all logical meshes; seconds by phase are added to `spent`.

    Args:
        pinned: plans of parameters that are stored already, by name.
        without: logical meshes to leave out.

    Raises:
        PlanError: nothing fits on any mesh.
    """
    failures: Failures = []
    priced: list[tuple[str, PricedStage]] = []
    for shape in logical_shapes(task.options, task.cluster):
        if shape in without:
            continue
        label = "x".join(map(str, shape))
        with task.progress(f"price mesh {label}"), timed(spent, f"price {label}"):
            try:
                priced.append((label, solver.price(whole_step_request(task, shape, pinned))))
            except PlanError as error:
                failures.append((f"logical mesh {label}", error))

    # The mesh with the lowest bound is solved first. A mesh is left as soon as its bound is above
    # the best objective so far (NoCheaperSolution): that makes solving all of them affordable.
    priced.sort(key=lambda entry: (entry[1].free.bound, entry[0]), reverse=True)
    best: SolvedStage | None = None
    while priced:
        # The tables of a priced stage are large: they go with it.
        label, stage = priced.pop()
        with task.progress(f"solve mesh {label}"), timed(spent, f"solve {label}"):
            try:
                best = solver.solve_priced(stage, best.objective if best else math.inf)
            except NoCheaperSolution:
                continue
            except PlanError as error:
                clear_frames(error.__traceback__)
                failures.append((f"logical mesh {label}", error))

    if best is None:
        fix = "use more devices, a smaller batch, or relax the options named above"
        raise no_plan_error("no plan fits", failures, fix)
    return best


def may_choose_freely(task: PlanTask) -> bool:
    """Whether no option pins layouts, and no comparison with the named plans is asked for."""
    options = task.options
    is_pinned = options.parallel != "auto" or options.placements or options.logical_mesh is not None
    return not is_pinned and not options.baselines


def _or_named(task: PlanTask, plan: Plan, named: Mapping[str, Plan]) -> Plan:
    """Return `plan`, or one of the named plans whose communication is hidden, which the integer
    program does not see.
    """
    if "zero3" in named:
        plan = or_zero3(plan, named["zero3"])
    data_parallel = named.get("data")
    if data_parallel is not None:
        plan = _or_data_parallel(task, plan, data_parallel)
    return plan


def or_zero3(plan: Plan, zero3: Plan) -> Plan:
    """Return `plan`, or `zero3` with a note if it is predicted to be faster."""
    if zero3.predicted.step_seconds >= plan.predicted.step_seconds:
        return plan
    return replace(zero3, notes=(*zero3.notes, ZERO3_NOTE))


def _or_data_parallel(task: PlanTask, plan: Plan, data_parallel: Plan) -> Plan:
    """Return `plan`, or `data_parallel` if predictions do not tell that it is slower.

    The integer program adds up what runs side by side. That is unfair to data parallelism, most of
    whose communication is hidden. Nor do seconds tell plans apart that the devices would save
    beside a host that takes longer.
    """
    overlap = task.cluster.overlap
    plan_seconds = seconds_with_host(seconds_with_overlap(plan, overlap), task)
    data_seconds = seconds_with_host(seconds_with_overlap(data_parallel, overlap), task)
    reason = why_data_parallel(task, data_seconds, plan_seconds)
    if reason is None:
        return plan
    # No plan is faster than the bound of the one that is not taken.
    bound = plan.predicted.step_seconds * (1 - plan.gap)
    gap = max(0.0, 1 - bound / data_parallel.predicted.step_seconds)
    notes = (*data_parallel.notes, f"data parallel: {reason}")
    return replace(data_parallel, notes=notes, gap=gap)


def whole_batch(task: PlanTask) -> StageCostTask:
    """Return the task of pricing one stage on all devices, without micro-batches."""
    cuts = (0, len(task.step.ops))
    return stage_cost_task(task, task.step, cuts, 1, remat=False, is_whole_batch=True)


def whole_step_request(
    task: PlanTask, shape: tuple[int, ...], pinned: Mapping[str, ParameterPlan]
) -> StageRequest:
    """Return the request for one stage of all ops on all devices, seen as a mesh of `shape`."""
    devices = task.cluster.num_nodes, task.cluster.devices_per_node
    return StageRequest(0, len(task.step.ops), devices, shape, remat=False, alive=1, pinned=pinned)


def seconds_with_overlap(plan: Plan, overlap: float = 0.0) -> float:
    """Return the seconds of a single stage's whole step, whose reduction of gradients overlaps with
    the backward.

    Args:
        overlap: the cluster's. If it is not 0, the plan was predicted with it already.
    """
    if overlap:
        return plan.predicted.step_seconds
    reduction_seconds = sum(
        collective.seconds
        for collective in plan.collectives()
        if collective.phase == "step" and collective.kind in REDUCTIONS
    )
    backward_seconds = BACKWARD_SHARE * plan.predicted.compute_seconds
    return plan.predicted.step_seconds - min(reduction_seconds, backward_seconds)


def _baselines(task: PlanTask, solver: StageSolver) -> dict[str, SolvedStage | None]:
    """Return name (`data`, `zero3`, ...) -> the stage of that plan on the flat mesh, by the same
    costs and memory; None for those that do not fit.

    Without `options.baselines` these are the plans that may be taken; on one device there are none.
    """
    if task.cluster.num_devices == 1:
        return {}
    names: tuple[str, ...] = ("data", "zero3") if task.cluster.overlap else ("data",)
    if task.options.baselines:
        names = BASELINES
    flat = (task.cluster.num_devices,)
    stages: dict[str, SolvedStage | None] = {}
    for name in names:
        options = replace(task.options, parallel=name, placements=(), logical_mesh=flat)
        try:
            stages[name] = solver.under(options).solve(whole_step_request(task, flat, {}))
        except PlanError:
            stages[name] = None
    return stages
