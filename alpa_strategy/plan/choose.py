"""choose_plan: one stage over all devices, or a pipeline; by predicted step seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.make import microbatch_counts, plan_pipeline
from alpa_strategy.inter_op.microbatch import microbatch
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.plan.make import plan_step
from alpa_strategy.plan.plan import ParameterPlan, Plan

Progress = Callable[[str], AbstractContextManager]


def choose_plan(
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    progress: Progress | None = None,
    pinned: Mapping[str, ParameterPlan] | None = None,
    costs: OpCosts | None = None,
) -> Plan:
    """A plan of one stage, or a pipeline; arguments as for `plan_step`.

    A pipeline is made when the options ask for one, and where no single stage fits and micro-batches give exactly the
    whole batch's result. It does not yet compete with a single stage that fits: that waits until predicted and measured
    times of pipelines have been compared.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    if options.asks_for_pipeline and pinned is None:
        if cluster.num_devices == 1:
            raise PlanError(
                "num_microbatches, num_stages, schedule and remat need at least 2 devices",
                "leave them out; accumulate_grad_batches does the work of micro-batches on one device",
            )
        return plan_pipeline(step, cluster, options, optimizer, costs, progress)
    try:
        return plan_step(step, cluster, options, optimizer, progress, pinned, costs)
    except PlanError:
        if pinned is not None or not _may_be_pipelined(step, cluster, options):
            raise
        try:
            return plan_pipeline(step, cluster, options, optimizer, costs, progress)
        except PlanError:
            pass
        raise


def _may_be_pipelined(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> bool:
    """Whether nothing that the user asked for, and nothing in the step, stands against a pipeline."""
    if cluster.num_devices == 1 or options.num_stages == 1 or options.num_microbatches == 1:
        return False
    if options.parallel != "auto" or options.logical_mesh is not None:
        return False
    num_ranks = cluster.num_devices if step.batch_scope == "rank" else 1
    counts = [count for count in microbatch_counts(step, cluster, options) if count > 1]
    if not counts:
        return False
    try:
        # A note says where micro-batches are not exactly the whole batch (BatchNorm): that is for the user to ask for.
        return microbatch(step, counts[-1], num_ranks).graph.notes == step.notes
    except PlanError:
        return False
