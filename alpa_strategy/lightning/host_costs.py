"""The host's part of a plan's step, measured by rank 0 of the job when it has planned."""

import torch

from alpa_strategy.cost.host import (
    LONGEST_SECONDS,
    ROUNDS,
    SAMPLE_ROUNDS,
    SAMPLE_SECONDS,
    OrderedCall,
    plan_with_host,
    time_in_order,
)
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.planner.known_host import known_host_seconds
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.strategies import localize


def add_host_seconds(plan: Plan, task: PlanTask, device: torch.device) -> Plan:
    """Return the plan, with the Python of a step's ops, of the optimizer and of the loop in its
    prediction.

    The loop's part is an assumption until it has run (`loop_clock.py`).
    """
    spec = task.cluster.device
    optimizer, loop = known_host_seconds(task)
    ops = _ops_host_seconds(plan, task, device)
    return plan_with_host(plan, ops + optimizer, loop, spec)


def _ops_host_seconds(plan: Plan, task: PlanTask, device: torch.device) -> float:
    """Return the seconds that the ops of a step take more in their order than priced one by one, on
    the devices whose seconds are the plan's. They are run on `device`.

    Of long steps and of pipelines, the first ops of the longest stage are run, and stand for the
    others; accelerators hide their host's time there, so that it is 0. 0 as well if the ops cannot
    be run by themselves.
    """
    compute = plan.predicted.compute_seconds
    slowdown = task.cluster.device.slowdown
    is_sampled = plan.is_pipelined or compute > LONGEST_SECONDS
    if not is_sampled:
        (stage,) = plan.stages
        seconds = _seconds_in_order(ordered_calls(stage, task.step), device, ROUNDS)
        return 0.0 if seconds is None else max(0.0, slowdown * seconds - compute)

    if device.type != "cpu":
        return 0.0
    calls, priced = _first_calls(plan, task)
    seconds = _seconds_in_order(calls, device, SAMPLE_ROUNDS)
    if seconds is None or priced == 0:
        return 0.0
    return compute * max(0.0, slowdown * seconds / priced - 1)


def _seconds_in_order(
    calls: list[OrderedCall], device: torch.device, num_rounds: int
) -> float | None:
    """Return `time_in_order` of the same arguments, with autograd."""
    with torch.enable_grad():
        return time_in_order(calls, device, num_rounds)


def _first_calls(plan: Plan, task: PlanTask) -> tuple[list[OrderedCall], float]:
    """Return the first local calls of the stage that works longest, for one micro-batch, and the
    seconds at which they are priced one by one: about `SAMPLE_SECONDS`, as one device alone.
    """
    from alpa_strategy.planner.plan_stages import stage_job

    graph = stage_job(task, plan).graph
    stage = max(plan.stages, key=lambda stage: stage.predicted.step_seconds)
    limit = SAMPLE_SECONDS * task.cluster.device.slowdown
    calls: list[OrderedCall] = []
    priced = 0.0
    for ordered in ordered_calls(stage, graph):
        if priced >= limit:
            break
        calls.append(ordered)
        priced += sum(task.op_costs.op_seconds(ordered.call))
    return calls, priced


def ordered_calls(stage: StagePlan, graph: StepGraph) -> list[OrderedCall]:
    """Return the local calls of a stage's ops, as its first device runs them.

    Args:
        graph: the step, or one micro-batch of it, of which the stage has the ops `stage.ops`.
    """
    first, last = stage.ops
    shape = stage.logical_mesh
    origin = (0,) * len(shape)
    calls = []
    for op in graph.ops[first:last]:
        local = localize(op.call, stage.strategies[op.name], shape, origin)
        calls.append(OrderedCall(local.call, op.operands, op.results))
    return calls
