"""The host's part of a plan's step, measured by rank 0 of the job when it has planned."""

import torch

from alpa_strategy.cost.host import (
    LONGEST_SECONDS,
    OrderedCall,
    plan_with_host,
    time_in_order,
)
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan
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
    ops = _ops_host_seconds(plan, task.step, device, spec.slowdown)
    return plan_with_host(plan, ops + optimizer, loop, spec)


def _ops_host_seconds(plan: Plan, step: StepGraph, device: torch.device, slowdown: float) -> float:
    """Return the seconds that the ops of a single stage take more in their order than priced one by
    one. They are run on `device`.

    0 for pipelines, whose prediction has the runtime's own time of each micro-batch, for long
    steps, and if the ops cannot be run by themselves.
    """
    compute = plan.predicted.compute_seconds
    if plan.is_pipelined or compute > LONGEST_SECONDS:
        return 0.0
    with torch.enable_grad():
        seconds = time_in_order(ordered_calls(plan, step), device)
    if seconds is None:
        return 0.0
    return max(0.0, slowdown * seconds - compute)


def ordered_calls(plan: Plan, step: StepGraph) -> list[OrderedCall]:
    """Return the local calls of the ops of a plan's only stage, as its first device runs them."""
    (stage,) = plan.stages
    shape = stage.logical_mesh
    origin = (0,) * len(shape)
    calls = []
    for op in step.ops:
        local = localize(op.call, stage.strategies[op.name], shape, origin)
        calls.append(OrderedCall(local.call, op.operands, op.results))
    return calls
