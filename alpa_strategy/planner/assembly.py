"""From candidates to plans: the chosen stages are solved exactly, and solved stages become a
`Plan`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.candidates import TOLERANCE
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest, StageSolver
from alpa_strategy.inter_op.stage_space import Candidate
from alpa_strategy.inter_op.subgraph import span_name
from alpa_strategy.ir.plan import (
    Fingerprint,
    ParameterPlan,
    Plan,
    Predicted,
    StagePlan,
    job_ranks,
)
from alpa_strategy.options import PROPAGATION
from alpa_strategy.planner.execution import with_execution
from alpa_strategy.planner.failures import Failures
from alpa_strategy.schedules import mesh_of, splits_backward
from alpa_strategy.units import format_bytes

# At most this many candidates are solved exactly, those that do not fit apart as long as there is
# no plan.
MAX_SOLVED_CANDIDATES = 6
# Estimates that differ by less than this factor are about equal.
NEAR = 1.005
# A note on the order of devices lists this many of them.
MAX_LISTED_DEVICES = 16


# Called with the candidates that are left, the one that has no plan, why, and the seconds of the
# best plan: returns the candidates that are left then.
SearchAgain = Callable[[list[Candidate], Candidate, PlanError, float], list[Candidate]]


def leave_the_rest(
    remaining: list[Candidate], failed: Candidate, error: PlanError, seconds: float
) -> list[Candidate]:
    """Return the remaining candidates: a `SearchAgain` that does not search."""
    return remaining


def best_solved(
    candidates: Sequence[Candidate],
    solve: Callable[[Candidate], Plan],
    search_again: SearchAgain = leave_the_rest,
) -> tuple[Plan | None, Failures]:
    """Solve candidates in turn until the best plan is as fast as the next candidate's estimate.

    If a plan turns out slower than its candidate's estimate, as plans of stages do that do not fit
    as they were priced, candidates with the same schedule on the same submeshes are expected to be
    slower by the same factor. Without that, all of them would be solved before another schedule
    whose estimate is right. Several stages a mesh in about equal cuts are all solved: no estimate
    tells them apart. At most `MAX_SOLVED_CANDIDATES` are solved; failures before the first
    plan do not count.

    Args:
        candidates: those to begin with.
        solve: returns the plan of one; raises PlanError if there is none.
        search_again: what is left when one has none.

    Returns:
        The fastest plan, None if no candidate could be solved; and why candidates failed.
    """
    best: Plan | None = None
    best_seconds = math.inf
    num_solved = 0
    failures: Failures = []
    slowdown: dict[Hashable, float] = {}
    remaining = list(candidates)
    least_seconds = min((candidate.seconds for candidate in remaining), default=0.0)

    def kind(candidate: Candidate) -> Hashable:
        return candidate.schedule, candidate.job.num_microbatches, frozenset(candidate.submesh_of)

    def expected_seconds(candidate: Candidate) -> float:
        is_near = candidate.stages_per_mesh > 1 and candidate.seconds <= NEAR * least_seconds
        return candidate.seconds * (1.0 if is_near else slowdown.get(kind(candidate), 1.0))

    while remaining and num_solved < MAX_SOLVED_CANDIDATES:
        candidate = min(remaining, key=expected_seconds)
        if expected_seconds(candidate) >= best_seconds * (1 - TOLERANCE):
            break

        remaining.remove(candidate)
        try:
            plan = solve(candidate)
        except PlanError as error:
            label = f"{candidate.job.num_microbatches} micro-batches, {candidate.schedule}"
            failures.append((label, error))
            num_solved += best is not None
            remaining = search_again(remaining, candidate, error, best_seconds)
            continue

        num_solved += 1
        seconds = plan.predicted.step_seconds
        slowdown[kind(candidate)] = max(1.0, seconds / candidate.seconds)
        if seconds < best_seconds:
            best = plan
            best_seconds = seconds
    return best, failures


def solved_plan(
    candidate: Candidate, submeshes: Sequence[tuple[int, int]], fingerprint: Fingerprint
) -> Plan:
    """Solve the stages that the stage DP chose, each by the ILP, and return their plan. Those of
    `candidate.solved` are taken as they are.

    Args:
        submeshes: those that `candidate.stages` index.

    Raises:
        PlanError: a stage does not fit (`stage` of the error is its index), or stages on one mesh
            do not fit together.
    """
    job = candidate.job
    if candidate.solved:
        return plan_of(job, fingerprint, candidate.solved, [0], candidate.schedule, candidate.wires)

    job = _with_schedule(job, candidate)
    solver = StageSolver(job)
    solved: list[SolvedStage] = []
    first_devices: list[int] = []
    # By the first device of a mesh: what its earlier stages store, and the logical shape of its
    # first stage. Stages on one mesh see it as one grid.
    stored: dict[int, dict[str, ParameterPlan]] = defaultdict(dict)
    mesh_shapes: dict[int, tuple[int, ...]] = {}

    num_devices_so_far = 0
    for i, stage in enumerate(candidate.stages):
        submesh = submeshes[stage.submesh]
        if candidate.stages_per_mesh > 1:
            num_meshes = len(candidate.stages) // candidate.stages_per_mesh
            mesh = mesh_of(candidate.schedule, num_meshes, i)
            first_device = mesh * math.prod(submesh)
        else:
            first_device = num_devices_so_far
            num_devices_so_far += math.prod(submesh)

        request = StageRequest(
            first=job.cuts[stage.first],
            last=job.cuts[stage.last],
            submesh=submesh,
            shape=mesh_shapes.setdefault(first_device, candidate.shapes[i]),
            remat=candidate.remat[i],
            alive=candidate.alive[i],
            stages_per_mesh=candidate.stages_per_mesh,
            pinned=stored[first_device],
            cuts=job.cuts[stage.first + 1 : stage.last],
        )
        try:
            solved_stage = solver.solve(request)
        except PlanError as error:
            error.stage = i
            raise
        solved.append(solved_stage)
        first_devices.append(first_device)
        stored[first_device].update(solved_stage.plan.parameter_plans)
    return plan_of(job, fingerprint, solved, first_devices, candidate.schedule, candidate.wires)


def _with_schedule(job: StageCostTask, candidate: Candidate) -> StageCostTask:
    """Return the job as the stages of a candidate are solved.

    Sums over devices do not overlap with matmuls if the schedule splits the backward.
    """
    num_stages = len(candidate.stages)
    stages_per_mesh = candidate.stages_per_mesh
    if num_stages == 1 or not job.cluster.overlap:
        return job
    num_meshes = num_stages // stages_per_mesh
    splits = splits_backward(candidate.schedule, num_meshes, job.num_microbatches, stages_per_mesh)
    return replace(job, overlaps_matmuls=not splits)


def plan_of(
    job: StageCostTask,
    fingerprint: Fingerprint,
    solved: Sequence[SolvedStage],
    first_devices: Sequence[int],
    schedule: str = "none",
    wires: Sequence[float] = (0.0,),
) -> Plan:
    """Return the plan of solved stages, with the step that their exact costs predict.

    All plans but those of eager steps are made here.

    Args:
        solved: stages in pipeline order.
        first_devices: of each stage; stages with the same one share a mesh.
        schedule: of several stages.
        wires: of each stage, seconds to send a micro-batch's values to the next stage and their
            gradients back.

    Raises:
        DoesNotFitError: the stages of one mesh do not fit together; not raised for a single stage.
    """
    stages = _placed_stages(job, solved, first_devices, wires)
    peak_bytes = _peak_bytes_by_mesh(stages)
    if len(solved) > 1 and max(peak_bytes.values()) > job.memory_limit:
        needed = format_bytes(max(peak_bytes.values()))
        limit = format_bytes(job.memory_limit)
        raise DoesNotFitError(f"the stages of one mesh need {needed} of {limit}")

    # The work of the slowest stage's mesh stands for the step.
    slowest = max(stages, key=lambda stage: stage.predicted.step_seconds)
    slowest_mesh = [
        stage.predicted for stage in stages if stage.first_device == slowest.first_device
    ]
    if job.is_whole_batch:
        step_seconds = slowest_mesh[0].step_seconds
    else:
        step_seconds = _simulated_step(job, schedule, len(peak_bytes), stages, solved, wires)

    gap = max(stage.gap for stage in solved)
    plan = Plan(
        fingerprint=fingerprint,
        stages=tuple(stages),
        predicted=Predicted(
            step_seconds,
            max(peak_bytes.values()),
            sum(stage.compute_seconds for stage in slowest_mesh),
            sum(stage.communication_seconds for stage in slowest_mesh),
            sum(stage.optimizer_seconds for stage in slowest_mesh),
        ),
        num_microbatches=job.num_microbatches,
        schedule=schedule if len(stages) > 1 else "none",
        gap=gap,
        notes=_notes(stages, solved, gap),
        cluster_name=job.cluster.name,
    )
    return with_execution(plan, job.graph, job.options.compile)


def _placed_stages(
    job: StageCostTask,
    solved: Sequence[SolvedStage],
    first_devices: Sequence[int],
    wires: Sequence[float],
) -> list[StagePlan]:
    """Return the stages' plans with their devices, the names of their layers and the seconds of
    their messages.

    Args:
        solved: the stages in order.
        first_devices: of each, in the cluster's order of devices.
        wires: seconds of its messages to the next stage, for one micro-batch, both ways.
    """
    stages = []
    num_bytes = job.bytes_between([stage.plan.ops[1] for stage in solved])
    for index, (stage, first_device, wire) in enumerate(
        zip(solved, first_devices, wires, strict=True)
    ):
        num_devices = math.prod(stage.plan.submesh)
        placed = replace(
            stage.plan,
            first_device=first_device,
            devices=job.cluster.ranks_of(first_device, num_devices),
            layers=span_name(job.graph, *stage.plan.ops),
            boundary_seconds=wire,
            # Stages on one mesh hand their values on without messages.
            boundary_bytes=int(num_bytes[index].sum()) if wire > 0 else None,
        )
        stages.append(placed)
    return stages


def _peak_bytes_by_mesh(stages: Sequence[StagePlan]) -> Mapping[int, int]:
    """Return the bytes that the stages of each mesh need on a device, by its first device."""
    peak_bytes: dict[int, int] = defaultdict(int)
    for stage in stages:
        peak_bytes[stage.first_device] += stage.predicted.peak_bytes
    return peak_bytes


def _simulated_step(
    job: StageCostTask,
    schedule: str,
    num_meshes: int,
    stages: Sequence[StagePlan],
    solved: Sequence[SolvedStage],
    wires: Sequence[float],
) -> float:
    """Return the simulated seconds of a step of all micro-batches, the runtime's own time for each
    of them included. Args: as of `_placed_stages`.
    """
    pipeline = [
        (stage.forward_seconds, stage.backward_seconds, solution.cost.once, wire)
        for stage, solution, wire in zip(stages, solved, wires, strict=True)
    ]
    overhead = runtime_seconds(job.cluster.device)
    (seconds,) = simulated_seconds(schedule, num_meshes, job.num_microbatches, [pipeline], overhead)
    return seconds


def _notes(
    stages: Sequence[StagePlan], solved: Sequence[SolvedStage], gap: float
) -> tuple[str, ...]:
    """Return notes on layouts that may not be optimal, and on the order of the devices.

    Args:
        gap: the largest relative gap of the solved stages; 0: all are proved optimal.
    """
    notes = []
    if gap > 0:
        method = next(stage.method for stage in solved if stage.gap == gap)
        if method == PROPAGATION:
            notes.append("layouts propagated from op to op, not optimised")
        else:
            notes.append(
                "layouts not proved optimal: the best of these stages take at most"
                f" {gap:.2%} less ({method})"
            )

    order = list(job_ranks(stages))
    if order != sorted(order):
        listed = ", ".join(map(str, order[:MAX_LISTED_DEVICES]))
        if len(order) > MAX_LISTED_DEVICES:
            listed += ", ..."
        notes.append(f"devices in the order {listed}: their links differ")
    return tuple(notes)
