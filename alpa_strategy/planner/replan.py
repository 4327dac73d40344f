"""Plans of another step on running stages, for batches of another shape.

Parameters keep their devices and layouts. The step is split where the running stages' parameters
allow it and the fewest bytes pass from stage to stage; layouts are solved around the parameters'.
"""

import glob
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import boundary_bytes, cluster_layers
from alpa_strategy.intra_op.memory_choices import offload_of
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import (
    Fingerprint,
    ParameterPlan,
    Plan,
    StagePlan,
    job_ranks,
    modes_text,
    stage_ranks,
)
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.microbatch.transform import MicroStep, microbatch
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.execution import can_overlap
from alpa_strategy.planner.figures import with_figures
from alpa_strategy.planner.plan_stages import in_flight_of
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import refusal


def replan_fingerprint(task: PlanTask, running: Plan) -> Fingerprint:
    """Return the fingerprint under which the result of `replan` is stored: that of the task, with
    the running plan in place of pins.
    """
    stage_texts = [
        (
            stage.submesh,
            stage_ranks(stage),
            stage.logical_mesh,
            sorted(stage.parameter_plans.items()),
        )
        for stage in running.stages
    ]
    digest = hashlib.sha256(repr(stage_texts).encode()).hexdigest()[:16]
    options = replace(
        task.options,
        placements=(("running plan", digest),),
        parallel="auto",
        logical_mesh=None,
    )
    return replace(task, options=options).fingerprint


def pinned_task(task: PlanTask, running: Plan) -> tuple[PlanTask, dict[str, ParameterPlan]]:
    """Return the task of another step on the only stage of `running`, and the layouts of the
    parameters that both have.

    The layouts become pins of the task, so that plans under different ones have different
    fingerprints.

    Raises:
        PlanError: the plan has none of the step's parameters.
    """
    stage = running.stages[0]
    names = {name for parameter in task.step.parameters for name in parameter.names}
    pinned = {name: plan for name, plan in stage.parameter_plans.items() if name in names}
    if not pinned:
        raise PlanError(
            "the plan has none of the step's parameters", "give one that was made for this model"
        )

    placements = tuple(
        (glob.escape(name), modes_text(plan.module_modes)) for name, plan in pinned.items()
    )
    options = replace(
        task.options,
        logical_mesh=stage.logical_mesh,
        parallel="auto",
        placements=placements,
        offload=offload_of(pinned),
        device_map=(),
    )
    cluster = task.cluster.in_order(job_ranks(running.stages))
    return replace(task, cluster=cluster, options=options), pinned


def replan(task: PlanTask, running: Plan) -> Plan:
    """Return the plan of `task.step` on the stages of `running`.

    Raises:
        PlanError: the step uses parameters in another order than the stages have them, has others,
            cannot be split, or does not fit.
    """
    cluster = task.cluster.in_order(job_ranks(running.stages))
    micro = _microbatches(task.step, running, cluster.num_devices)
    graph = micro.graph
    stages = running.stages
    _check_parameters(graph, stages)

    # The running plan was made under the user's pins: its layouts are the pins now.
    running_plans: dict[str, ParameterPlan] = {}
    for stage in stages:
        running_plans.update(stage.parameter_plans)
    options = replace(
        task.options,
        placements=(),
        parallel="auto",
        logical_mesh=None,
        offload=offload_of(running_plans),
    )
    job = stage_cost_task(
        task,
        graph,
        stage_cuts(graph, stages),
        micro.num_microbatches,
        cluster=cluster,
        options=options,
        remat=False,
        overlaps_matmuls=can_overlap(running),
    )

    solver = StageSolver(job)
    solved = [solver.solve(request) for request in _requests(job, running)]
    plan = plan_of(
        job,
        replan_fingerprint(task, running),
        solved,
        [stage.first_device for stage in stages],
        running.schedule,
        [0.0] * len(stages),
    )
    return with_figures(replace(plan, notes=graph.notes), task)


def _check_parameters(graph: StepGraph, stages: Sequence[StagePlan]) -> None:
    """Raise PlanError if the step has parameters that no stage has."""
    stage_names = {name for stage in stages for name in stage.parameter_plans}
    new_names = [
        parameter.name for parameter in graph.parameters if stage_names.isdisjoint(parameter.names)
    ]
    if new_names:
        raise PlanError(
            f"the step trains {', '.join(new_names)}, which the running pipeline's stages do not"
            " have",
            "use the same parameters in every step",
        )


def _requests(job: StageCostTask, running: Plan) -> list[StageRequest]:
    """Return a request per running stage, to be solved for the new step: its ops, its mesh and its
    parameters' layouts.
    """
    stages = running.stages
    stages_per_mesh, in_flight = in_flight_of(running, job.num_microbatches)

    requests = []
    for stage, (first, last), alive in zip(stages, pairwise(job.cuts), in_flight, strict=True):
        segments: tuple[int, ...] = ()
        if stage.remat:
            graph = stage_on(job.graph, first, last, math.prod(stage.logical_mesh))
            layers = cluster_layers(graph, min(len(stage.spans), len(graph.ops)))
            segments = tuple(first + cut for cut in layers[1:-1])
        request = StageRequest(
            first=first,
            last=last,
            submesh=stage.submesh,
            shape=stage.logical_mesh,
            remat=stage.remat,
            alive=alive,
            stages_per_mesh=stages_per_mesh,
            pinned=stage.parameter_plans,
            cuts=segments,
        )
        requests.append(request)
    return requests


def _microbatches(step: StepGraph, running: Plan, num_devices: int) -> MicroStep:
    """Return the step in as many micro-batches as the running plan has, or the most below that its
    samples and ops allow.

    Raises:
        PlanError: why it cannot have as many as the running plan, if no number is possible.
    """
    num_meshes = len({stage.first_device for stage in running.stages})
    failures: list[PlanError] = []
    for count in range(running.num_microbatches, 0, -1):
        if len(running.stages) > 1:
            problem = refusal(running.schedule, num_meshes, count)
            if problem is not None:
                failures.append(PlanError(problem, "load batches of one size"))
                continue
        try:
            return microbatch(step, count, num_devices)
        except PlanError as error:
            failures.append(error)
    raise failures[0]


def stage_cuts(graph: StepGraph, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """Return the positions of ops at which stages begin, from 0 to the number of ops.

    Every stage has the parameters that its ops read, and as few bytes as possible pass from stage
    to stage.

    Raises:
        PlanError: there is no such split.
    """
    num_ops = len(graph.ops)
    bytes_at = boundary_bytes(graph, with_gradients=True)
    # fewest[i]: bytes that pass if the stages so far have the ops before position i.
    fewest = np.full(num_ops + 1, np.inf)
    fewest[0] = 0.0
    previous_cuts: list[np.ndarray] = []
    for stage in stages:
        starts = _earliest_starts(graph, stage, stages)
        fewest_with_stage = np.full(num_ops + 1, np.inf)
        previous_cut = np.zeros(num_ops + 1, dtype=int)
        for end in range(1, num_ops + 1):
            start = starts[end]
            if start < end:
                best_start = start + int(np.argmin(fewest[start:end]))
                fewest_with_stage[end] = fewest[best_start] + bytes_at[end]
                previous_cut[end] = best_start
        fewest = fewest_with_stage
        previous_cuts.append(previous_cut)

    if not np.isfinite(fewest[num_ops]):
        raise PlanError(
            "the step uses parameters in another order than the running pipeline's stages have"
            " them",
            "use the same layers in the same order in every step",
        )
    cuts = [num_ops]
    for previous_cut in reversed(previous_cuts):
        cuts.append(int(previous_cut[cuts[-1]]))
    return tuple(reversed(cuts))


def _earliest_starts(graph: StepGraph, stage: StagePlan, stages: Sequence[StagePlan]) -> list[int]:
    """Return, for every end position, the first op from which on `stage` has all parameters that
    are read before that end.

    Parameters that no stage has do not count.
    """
    names_of_value = {parameter.value: parameter.names for parameter in graph.parameters}
    names_in_stages = {name for each_stage in stages for name in each_stage.parameter_plans}
    start = 0
    starts = [start]
    for position, op in enumerate(graph.ops, start=1):
        for value in op.operands:
            names = set(names_of_value.get(value, ()))
            is_of_another_stage = not names & stage.parameter_plans.keys()
            if names & names_in_stages and is_of_another_stage:
                start = position
        starts.append(start)
    return starts
