"""Measured op costs for a plan: the step's distinct ops at the local shapes that the plan can choose, timed once.

The times go to `.alpa/costs/ops.json`, where other models on the same kind of device find them.
"""

from __future__ import annotations

import torch

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.measured import OpTable, measure_ops
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import OpCall
from alpa_strategy.lightning.job import Job
from alpa_strategy.options import PlanOptions
from alpa_strategy.sharding import localize, op_strategies

LIKELY_PER_DEVICE, LIKELY_COUNTS = 4, 3  # numbers of micro-batches whose shapes are timed


def measured_costs(
    step: StepGraph, cluster: ClusterSpec, options: PlanOptions, job: Job, budget_seconds: float
) -> RooflineCosts:
    """Costs from the table in `job.folder`, after timing what it lacks on this rank's device, within the budget."""
    from alpa_strategy.planner.planner import logical_shapes

    calls: set[OpCall] = set()
    for shape in logical_shapes(options, cluster):
        calls |= local_calls(step, shape)
    return _timed(calls, cluster, job, budget_seconds)


def measured_stage_costs(
    step: StepGraph, cluster: ClusterSpec, options: PlanOptions, job: Job, budget_seconds: float
) -> RooflineCosts:
    """The same with the shapes that micro-batches have in stages: on one device, or on the devices of a node."""
    from alpa_strategy.inter_op.search import microbatch_counts
    from alpa_strategy.microbatch.transform import microbatch

    likely = [n for n in microbatch_counts(step, cluster, options) if 1 < n <= LIKELY_PER_DEVICE * cluster.num_devices]
    calls: set[OpCall] = set()
    for count in likely[:LIKELY_COUNTS]:
        graph = microbatch(step, count, cluster.num_devices).graph
        for size in {1, cluster.devices_per_node}:
            calls |= local_calls(graph, (size,))
    return _timed(calls, cluster, job, budget_seconds)


def _timed(calls: set[OpCall], cluster: ClusterSpec, job: Job, budget_seconds: float) -> RooflineCosts:
    table = OpTable.load(job.folder / "costs" / "ops.json")
    known = len(table)
    with torch.enable_grad():
        measure_ops(calls, job.device, budget_seconds, table, name=cluster.device.name)
    if len(table) > known:
        try:
            table.save()
        except OSError as error:
            job.say(f"alpa: op times cannot be stored in {table.path}: {error.strerror}")
    return RooflineCosts(cluster.device, table)


def known_costs(cluster: ClusterSpec, job: Job) -> RooflineCosts:
    """Costs from the table in `job.folder` as it is."""
    return RooflineCosts(cluster.device, OpTable.load(job.folder / "costs" / "ops.json"))


def local_calls(step: StepGraph, mesh_shape: tuple[int, ...]) -> set[OpCall]:
    """Every op of the step as one device runs it under each of its strategies on the mesh."""
    origin = (0,) * len(mesh_shape)
    return {
        local.call
        for call in {op.call for op in step.ops}
        for strategy in op_strategies(call, mesh_shape)
        if (local := localize(call, strategy, mesh_shape, origin)).implementation is None
    }
