"""The stages of a plan as the planner's requests, to solve them once more."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from alpa_strategy.inter_op.pins import layers_of
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest
from alpa_strategy.ir.plan import ParameterPlan, Plan, job_ranks
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.details import stage_problems
from alpa_strategy.planner.execution import can_overlap
from alpa_strategy.planner.one_stage import whole_batch, whole_step_request
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight_by_stage
from alpa_strategy.sharding.cross_mesh import boundary_link


def stage_job(task: PlanTask, plan: Plan) -> StageCostTask:
    """Return the task of pricing the stages of a plan, on its devices and micro-batches.

    Raises:
        PlanError: the step cannot be split into the plan's micro-batches.
    """
    task = replace(task, cluster=task.cluster.in_order(job_ranks(plan.stages)))
    if not plan.is_pipelined:
        return whole_batch(task)
    task = task.for_stages()
    graph = microbatch(task.step, plan.num_microbatches, task.cluster.num_devices).graph
    cuts, _ = layers_of(graph, task.cluster, task.options)
    overlaps = can_overlap(plan)
    return stage_cost_task(task, graph, cuts, plan.num_microbatches, overlaps_matmuls=overlaps)


def in_flight_of(plan: Plan, num_microbatches: int) -> tuple[int, Sequence[int]]:
    """Return (stages per mesh, most micro-batches in flight by stage) of a plan's stages; (1,) for
    a single stage.
    """
    num_stages = len(plan.stages)
    num_meshes = len({stage.first_device for stage in plan.stages})
    stages_per_mesh = num_stages // num_meshes
    if num_stages == 1:
        return stages_per_mesh, (1,)
    alive = in_flight_by_stage(plan.schedule, num_meshes, num_microbatches, stages_per_mesh)
    return stages_per_mesh, alive


def stage_request(job: StageCostTask, task: PlanTask, plan: Plan, index: int) -> StageRequest:
    """Return the request for which stage `index` of a plan was solved.

    Args:
        task: of the planning.
    """
    stage = plan.stages[index]
    if job.is_whole_batch:
        return whole_step_request(task, stage.logical_mesh, {})

    stages_per_mesh, in_flight = in_flight_of(plan, plan.num_microbatches)

    # Parameters that an earlier stage on the mesh stores.
    pinned: dict[str, ParameterPlan] = {}
    for earlier in plan.stages[:index]:
        if earlier.first_device == stage.first_device:
            pinned.update(earlier.parameter_plans)
    first, last = stage.ops
    return StageRequest(
        first=first,
        last=last,
        submesh=stage.submesh,
        shape=stage.logical_mesh,
        remat=stage.remat,
        alive=in_flight[index],
        stages_per_mesh=stages_per_mesh,
        pinned=pinned,
        cuts=tuple(cut for cut in job.cuts if first < cut < last),
    )


@dataclass(frozen=True)
class PlanCost:
    """Seconds and bytes of a step with the layouts of a plan that was made for another task."""

    seconds: float

    # Of the device that needs most, at the peak.
    peak_bytes: int


def cost_on(task: PlanTask, plan: Plan) -> PlanCost:
    """Return the seconds and bytes of a step of `task` with the layouts of a plan that was made for
    another cluster, batch or costs, on as many devices.

    Raises:
        PlanError: the step cannot have these layouts.
    """
    job = stage_job(task, plan)
    stages_per_mesh, in_flight = in_flight_of(plan, plan.num_microbatches)
    wires = boundary_seconds(job, plan)
    bytes_of_mesh: Counter[int] = Counter()
    pipeline = []
    step_seconds = 0.0
    for index, (stage, assigned) in enumerate(stage_problems(task, plan)):
        cost = assigned.cost
        num_bytes = cost.num_bytes(in_flight[index] / stages_per_mesh, stage.remat)
        # Parameters and, in the backward, gradients.
        bytes_of_mesh[stage.first_device] += int(num_bytes + 2 * stage.prefetched_bytes)
        step_seconds = cost.seconds() + cost.once
        backward = cost.backward + (cost.forward if stage.remat else 0.0)
        pipeline.append((cost.forward, backward, cost.once, wires[index]))
    if not job.is_whole_batch:
        step_seconds = _simulated(job, plan, pipeline)
    return PlanCost(step_seconds, max(bytes_of_mesh.values()))


def boundary_seconds(job: StageCostTask, plan: Plan) -> list[float]:
    """Return the seconds of a micro-batch's values to the next stage and back, for each stage of a
    plan on the devices of `job`; 0 for the last one and between stages on one mesh.
    """
    cluster = job.cluster
    num_bytes = job.bytes_between([stage.ops[1] for stage in plan.stages])
    seconds = []
    for index, (sender, receiver) in enumerate(pairwise(plan.stages)):
        first_sender, num_sending = sender.first_device, math.prod(sender.submesh)
        if receiver.first_device == first_sender:
            seconds.append(0.0)
            continue
        if cluster.is_uniform:
            per_node = cluster.devices_per_node
            last_node = (first_sender + num_sending - 1) // per_node
            crosses_nodes = last_node != receiver.first_device // per_node
            link = boundary_link(sender.submesh, receiver.submesh, cluster, crosses_nodes)
        else:
            target = receiver.first_device, math.prod(receiver.submesh)
            link = cluster.between((first_sender, num_sending), target)
        of_cut = num_bytes[index]
        num_messages = int((of_cut > 0).sum())
        seconds.append(num_messages * link.latency + float(of_cut.sum()) / link.bandwidth)
    return [*seconds, 0.0]


def step_with(job: StageCostTask, plan: Plan, index: int, solved: SolvedStage) -> float:
    """Return the seconds of the plan's step if stage `index` had another solution."""
    if job.is_whole_batch:
        return solved.plan.predicted.step_seconds
    pipeline = []
    for number, stage in enumerate(plan.stages):
        forward, backward = stage.forward_seconds, stage.backward_seconds
        once = stage.predicted.step_seconds - plan.num_microbatches * (forward + backward)
        if number == index:
            forward, backward = solved.plan.forward_seconds, solved.plan.backward_seconds
            once = solved.cost.once
        pipeline.append((forward, backward, once, stage.boundary_seconds))
    return _simulated(job, plan, pipeline)


def _simulated(
    job: StageCostTask, plan: Plan, pipeline: Sequence[tuple[float, float, float, float]]
) -> float:
    """Return the seconds of a step, simulated with each stage's seconds.

    Args:
        job: of the stages.
        plan: whose schedule and stages are simulated.
        pipeline: one of the `pipelines` of `simulated_seconds`.
    """
    overhead = runtime_seconds(job.cluster.device)
    num_meshes = len({stage.first_device for stage in plan.stages})
    (seconds,) = simulated_seconds(
        plan.schedule, num_meshes, plan.num_microbatches, [pipeline], overhead
    )
    return seconds
