"""Another step on running stages: batches of another shape. Parameters stay where and as they lie.

The step is cut where the running stages' parameters allow it and least has to pass; layouts are
solved around these.
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
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import boundary_bytes, cluster_layers, stage_on
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
from alpa_strategy.microbatch.transform import MicroStep, microbatch
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight_by_stage, why_not


def replan_fingerprint(task: PlanTask, running: Plan) -> Fingerprint:
    """What `replan`'s result is stored under: the running plan takes the place of pins."""
    text = repr(
        [
            (s.submesh, stage_ranks(s), s.logical_mesh, sorted(s.parameter_plans.items()))
            for s in running.stages
        ]
    )
    pins = (("running plan", hashlib.sha256(text.encode()).hexdigest()[:16]),)
    options = replace(task.options, placements=pins, parallel="auto", logical_mesh=None)
    return replace(task, options=options).fingerprint


def pinned_task(task: PlanTask, running: Plan) -> tuple[PlanTask, dict[str, ParameterPlan]]:
    """The task of another step on the only stage of `running`, and the parameters that stay as they
    lie.

    They are pins, so that plans under different ones have different fingerprints.

    Raises:
        PlanError: there are none.
    """
    stage, names = (
        running.stages[0],
        {name for parameter in task.step.parameters for name in parameter.names},
    )
    held = {name: plan for name, plan in stage.parameter_plans.items() if name in names}
    if not held:
        raise PlanError(
            "the plan has none of the step's parameters", "give one that was made for this model"
        )
    placements = tuple(
        (glob.escape(name), modes_text(plan.module_modes)) for name, plan in held.items()
    )
    options = replace(
        task.options, logical_mesh=stage.logical_mesh, parallel="auto", placements=placements
    )
    options = replace(options, offload=offload_of(held), device_map=())
    return replace(
        task, cluster=task.cluster.in_order(job_ranks(running.stages)), options=options
    ), held


def replan(task: PlanTask, running: Plan) -> Plan:
    """The plan of `task.step` on the stages of `running`.

    Raises:
        PlanError: the step uses parameters in another order than the stages have them, or cannot be
            cut.
    """
    step, cluster = task.step, task.cluster.in_order(job_ranks(running.stages))
    micro = _microbatches(step, running, cluster.num_devices)
    graph, count, stages = micro.graph, micro.num_microbatches, running.stages
    held = {name for stage in stages for name in stage.parameter_plans}
    if new := [p.name for p in graph.parameters if held.isdisjoint(p.names)]:
        raise PlanError(
            f"the step trains {', '.join(new)}, which the running pipeline's stages do not have",
            "use the same parameters in every step",
        )
    cuts = stage_cuts(graph, stages)
    # The running plan was made under the user's pins: its layouts are the pins now.
    offload = offload_of(
        {name: plan for stage in stages for name, plan in stage.parameter_plans.items()}
    )
    free = replace(task.options, placements=(), parallel="auto", logical_mesh=None, offload=offload)
    job = StageCostTask(
        graph,
        cuts,
        count,
        cluster,
        task.op_costs,
        free,
        task.optimizer,
        task.memory_limit,
        remat=False,
        results=task.results,
    )
    solver = StageSolver(job)
    firsts = [stage.first_device for stage in stages]
    shared = len(stages) // len(set(firsts))  # stages on a mesh
    alive = (
        in_flight_by_stage(running.schedule, len(set(firsts)), count, shared)
        if len(stages) > 1
        else (1,)
    )
    solved: list[SolvedStage] = []
    for stage, (first, last), pairs in zip(stages, pairwise(cuts), alive, strict=True):
        own = stage_on(graph, first, last, math.prod(stage.logical_mesh))
        layers = cluster_layers(own, min(len(stage.spans), len(own.ops))) if stage.remat else ()
        spans = tuple(first + cut for cut in layers[1:-1])
        shape, pinned = stage.logical_mesh, stage.parameter_plans
        request = StageRequest(
            first, last, stage.submesh, shape, stage.remat, pairs, shared, pinned, spans
        )
        solved.append(solver.solve(request))
    plan = plan_of(
        job,
        replan_fingerprint(task, running),
        solved,
        firsts,
        running.schedule,
        [0.0] * len(stages),
    )
    return replace(plan, notes=graph.notes)


def _microbatches(step: StepGraph, running: Plan, num_devices: int) -> MicroStep:
    """The step in as many micro-batches as the running plan has, or the most below that its rows
    and ops allow.
    """
    num_meshes = len({stage.first_device for stage in running.stages})
    failures: list[PlanError] = []
    for count in range(running.num_microbatches, 0, -1):
        try:
            if len(running.stages) > 1 and (why := why_not(running.schedule, num_meshes, count)):
                raise PlanError(why, "load batches of one size")
            return microbatch(step, count, num_devices)
        except PlanError as error:
            failures.append(error)
    raise failures[0]


def stage_cuts(graph: StepGraph, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """Positions from 0 to the number of ops: every stage has the parameters that its ops read, and
    least is passed on.

    Raises:
        PlanError: there is no such cut.
    """
    num_ops = len(graph.ops)
    names = {p.value: p.names for p in graph.parameters}
    staged = {name for stage in stages for name in stage.parameter_plans}
    passing = boundary_bytes(graph, with_gradients=True)
    best = np.full(num_ops + 1, np.inf)
    best[0] = 0.0
    origins: list[np.ndarray] = []
    for stage in stages:
        start = 0  # the first op from which on the stage has all that is read
        found, origin = np.full(num_ops + 1, np.inf), np.zeros(num_ops + 1, dtype=int)
        for position in range(1, num_ops + 1):
            read = [names[v] for v in graph.ops[position - 1].operands if v in names]
            if any(
                staged.intersection(n) and not stage.parameter_plans.keys() & set(n) for n in read
            ):
                start = position
            if start < position:
                k = start + int(np.argmin(best[start:position]))
                found[position], origin[position] = best[k] + passing[position], k
        best = found
        origins.append(origin)
    if not np.isfinite(best[num_ops]):
        raise PlanError(
            "the step uses parameters in another order than the running pipeline's stages have"
            " them",
            "use the same layers in the same order in every step",
        )
    cuts = [num_ops]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return tuple(reversed(cuts))
