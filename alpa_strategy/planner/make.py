"""From a captured step and a cluster to a Plan: every logical shape is solved, the best wins. No process groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.intra_op.build import IntraOp, OptionTables, build
from alpa_strategy.intra_op.decode import decode, working_bytes
from alpa_strategy.intra_op.presets import restrict
from alpa_strategy.intra_op.problem import Solution
from alpa_strategy.intra_op.solve import NotCheaper, solve
from alpa_strategy.ir.plan import ParameterPlan, Plan, StagePlan
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.planner.task import PlanTask, Progress, unseen
from alpa_strategy.sharding.strategies import replicated_notes
from alpa_strategy.units import format_bytes

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import CostStore

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
    from alpa_strategy.capture.capture import capture_step
    from alpa_strategy.planner.choose import choose_plan
    from alpa_strategy.planner.optimizer_info import optimizer_info_of

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
