"""From a captured step and a cluster to a Plan: every logical shape is solved, the best wins. No process groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.intra_op.build import IntraOp, OptionTables, build
from alpa_strategy.intra_op.decode import decode, working_bytes
from alpa_strategy.intra_op.presets import restrict
from alpa_strategy.intra_op.solve import NotCheaper, solve
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.plan.fingerprint import fingerprint_of
from alpa_strategy.plan.plan import ParameterPlan, Plan, StagePlan
from alpa_strategy.plan.replicated import replicated_notes

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import CostStore

Progress = Callable[[str], AbstractContextManager]
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
    from alpa_strategy.optimizer_info import optimizer_info_of
    from alpa_strategy.plan.choose import choose_plan

    options = options or PlanOptions()
    progress = progress or (lambda name: nullcontext())
    started = time.perf_counter()
    with progress("capture"):
        step = capture_step(
            module, batch, world_size=cluster.num_devices, batch_scope=options.batch_scope, context=context
        )
    capture_seconds = time.perf_counter() - started
    optimizer = optimizer or optimizer_info_of(module)
    plan = choose_plan(step, cluster, options, optimizer, progress, store=store)
    return replace(plan, solver_seconds={"capture": capture_seconds, **plan.solver_seconds})


def plan_step(
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    progress: Progress | None = None,
    pinned: Mapping[str, ParameterPlan] | None = None,
    costs: OpCosts | None = None,
) -> Plan:
    """The best single stage over all devices: every logical shape that the options allow is solved.

    Args:
        pinned: parameter name -> plan to keep; `options.logical_mesh` must then be the running plan's.
        costs: op costs; the roofline of `cluster.device` when None.

    Raises:
        PlanError: nothing fits, with the reason for every logical shape.
    """
    from alpa_strategy.cost.roofline import RooflineCosts

    progress = progress or (lambda name: nullcontext())
    costs = costs or RooflineCosts(cluster.device)
    limit = options.usable_bytes(cluster.device.memory_bytes)
    seconds: dict[str, float] = {}
    problems: list[tuple[float, str, IntraOp]] = []  # seconds if memory were free: no plan on that mesh is faster
    failures: list[tuple[str, PlanError]] = []
    for shape in logical_shapes(options, cluster):
        label = "x".join(map(str, shape))
        with progress(f"price {label}"), _timed(seconds, f"price {label}"):
            tables = OptionTables(cluster.logical_mesh(shape), costs, optimizer, options.accumulate_grad_batches)
            try:
                intra = restrict(build(step, tables, limit), options, optimizer, pinned)
                least = solve(replace(intra.problem, memory_limit=float("inf")), options.solver_seconds).bound
                problems.append((least, label, intra))
            except PlanError as error:
                failures.append((label, error))
    best: MeshSolution | None = None
    for _, label, intra in sorted(problems, key=lambda entry: entry[:2]):
        with progress(f"solve {label}"), _timed(seconds, f"solve {label}"):
            try:
                best = solve_mesh(intra, options, costs, optimizer, cluster, best.objective if best else float("inf"))
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
    with progress("baselines"), _timed(seconds, "baselines"):
        baselines = _baselines(step, cluster, options, optimizer, costs) if pinned is None else {}
    return Plan(
        fingerprint=fingerprint_of(step, cluster, options, optimizer),
        stages=(best.stage,),
        predicted=best.stage.predicted,
        baselines=baselines,
        gap=best.gap,
        notes=(*step.notes, *_notes(step, best, costs)),
        solver_seconds=seconds,
        cluster_name=cluster.name,
    )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Write down how long the block took."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - started


def solve_mesh(
    intra: IntraOp,
    options: PlanOptions,
    costs: OpCosts,
    optimizer: OptimizerInfo,
    cluster: ClusterSpec,
    cutoff: float = float("inf"),
) -> MeshSolution:
    """The cheapest stage on one logical mesh that fits, short-lived memory included.

    The ILP's memory row holds what is kept; the largest working set depends on the solution, so it is reserved after
    the fact: solve, look, lower the limit by what is missing, solve again.

    Args:
        intra: restricted as the user wants it.
        cutoff: objective of a plan that will be taken unless this one is cheaper.

    Raises:
        NotCheaper: than `cutoff`. PlanError: nothing fits.
    """
    limit = intra.problem.memory_limit
    reserve = 0.0
    for _ in range(4):
        problem = replace(intra.problem, memory_limit=limit - reserve)
        solution = solve(problem, options.solver_seconds, cutoff=cutoff)
        working = working_bytes(intra, solution.assignment)
        if solution.num_bytes + working <= limit:
            break
        reserve = max(reserve, working)
    else:
        raise DoesNotFitError(
            f"kept and short-lived tensors need {solution.num_bytes + working:.3g} bytes of {limit:.3g}"
        )
    if solution.seconds >= cutoff:
        raise NotCheaper
    stage = decode(intra, solution.assignment, costs, optimizer, (cluster.num_nodes, cluster.devices_per_node))
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


def _baselines(
    step: StepGraph, cluster: ClusterSpec, options: PlanOptions, optimizer: OptimizerInfo, costs: OpCosts
) -> dict[str, float | None]:
    """Predicted seconds of named plans on the flat mesh under the same costs and memory; None where none fits."""
    if cluster.num_devices == 1:
        return {}
    flat = (cluster.num_devices,)
    tables = OptionTables(cluster.logical_mesh(flat), costs, optimizer, options.accumulate_grad_batches)
    intra = build(step, tables, options.usable_bytes(cluster.device.memory_bytes))
    found: dict[str, float | None] = {}
    for name in BASELINES if options.baselines else BASELINES[:1]:
        named = replace(options, parallel=name, placements=(), logical_mesh=flat)
        try:
            stage = solve_mesh(restrict(intra, named, optimizer), named, costs, optimizer, cluster).stage
            found[name] = stage.predicted.step_seconds
        except PlanError:
            found[name] = None
    return found


def _notes(step: StepGraph, solution: MeshSolution, costs: OpCosts) -> list[str]:
    """What the user should know: ops without a rule that run replicated, unproved optimality."""
    notes = replicated_notes(step, costs)
    if solution.gap > 0:
        notes.append(f"optimality not proved: within {solution.gap:.2%} of the best ({solution.method})")
    return notes
