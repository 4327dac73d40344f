"""choose_plan: one stage over all devices, or a pipeline; by predicted step seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.cost.roofline import RooflineCosts
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.make import microbatch_counts, plan_pipeline
from alpa_strategy.inter_op.microbatch import microbatch
from alpa_strategy.inter_op.stage_costs import CostStore
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.plan.early_step import against_early_step, with_reason
from alpa_strategy.plan.make import plan_step
from alpa_strategy.plan.plan import ParameterPlan, Plan

Progress = Callable[[str], AbstractContextManager]
MARGIN = 0.1  # a pipeline must be predicted faster by this share: its prediction is the less sure one
SCREEN = 0.15  # pipelines are not looked at where one stage waits for less than this share of its step
BACKWARD_SHARE = 2 / 3  # of compute


def choose_plan(
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    progress: Progress | None = None,
    pinned: Mapping[str, ParameterPlan] | None = None,
    costs: OpCosts | None = None,
    store: CostStore | None = None,
    stage_costs: Callable[[], OpCosts] | None = None,
) -> Plan:
    """A plan of one stage, or a pipeline; arguments as for `plan_step` and `plan_pipeline`.

    `stage_costs` makes the op costs of pipelines, when they are looked at (default: `costs`).

    A pipeline is made when the options ask for one (on one device: micro-batches, recomputation). Else it is where
    micro-batches give exactly the whole batch's result, and no single stage fits or the pipeline is predicted to be
    faster by `MARGIN` than the best one, whose reduction of gradients is taken to hide behind the backward as far as it
    can. Where neither fits and the optimizer allows it, one stage whose parameters are updated within the backward.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """

    def of_stages() -> OpCosts | None:
        return costs if stage_costs is None else stage_costs()

    if options.asks_for_pipeline and pinned is None:
        if cluster.num_devices == 1 and ((options.num_stages or 1) > 1 or options.schedule is not None):
            raise PlanError(
                "num_stages and schedule need at least 2 devices",
                "leave them out; num_microbatches and remat are for one device, too",
            )
        try:
            return plan_pipeline(step, cluster, options, optimizer, of_stages(), progress, store)
        except DoesNotFitError as error:
            raise with_reason(error, against_early_step(step, optimizer, options)) from error
    try:
        one = plan_step(step, cluster, options, optimizer, progress, pinned, costs)
    except PlanError as error:
        if pinned is not None:
            raise
        usable = options.usable_bytes(cluster.device.memory_bytes)
        if shared_bytes(step, cluster, optimizer) <= usable and _may_be_pipelined(step, cluster, options):
            with suppress(PlanError):  # the first error speaks of the ordinary case
                return plan_pipeline(step, cluster, options, optimizer, of_stages(), progress, store)
        if not isinstance(error, DoesNotFitError):
            raise
        against = against_early_step(step, optimizer, options)
        if against is None:
            early = replace(optimizer, steps_in_backward=True)
            note = "parameters are updated within the backward: all gradients at once would not fit"
            with suppress(PlanError):
                return _with_note(plan_step(step, cluster, options, early, progress, costs=costs), note)
        raise with_reason(error, against) from error
    if pinned is None:
        one = _or_data_parallel(one, step, cluster, options, optimizer, costs)
    if pinned is not None or cluster.num_devices == 1 or not _may_be_pipelined(step, cluster, options):
        return one
    seconds = hidden_seconds(one)
    waiting = max(0.0, 1 - divided_seconds(step, cluster, costs or RooflineCosts(cluster.device)) / seconds)
    if waiting < SCREEN:
        return _with_note(one, f"no pipeline: one stage loses only {waiting:.0%} of its step by not being ideal")
    return _faster(one, step, cluster, options, optimizer, progress, of_stages(), store)


def _or_data_parallel(
    one: Plan,
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    costs: OpCosts | None,
) -> Plan:
    """The solved stage, or plain data parallelism where that is faster because its reduction hides in the backward.

    The ILP adds up what runs side by side: fair to all layouts but to this one, most of whose communication is hidden.
    """
    data = one.baselines.get("data")
    is_free = options.parallel == "auto" and not options.placements and options.logical_mesh is None
    if data is None or not is_free or options.baselines:
        return one
    seconds = hidden_seconds(one)
    if data - BACKWARD_SHARE * one.predicted.compute_seconds >= seconds:
        return one
    flat = replace(options, parallel="data", logical_mesh=(cluster.num_devices,))
    try:
        plan = plan_step(step, cluster, flat, optimizer, costs=costs)
    except PlanError:
        return one
    if hidden_seconds(plan) >= seconds:
        return one
    plan = replace(plan, fingerprint=one.fingerprint, baselines=one.baselines, solver_seconds=one.solver_seconds)
    return _with_note(plan, "data parallel: the reduction of gradients runs beside the backward")


def _faster(
    one: Plan,
    step: StepGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    progress: Progress | None,
    costs: OpCosts | None,
    store: CostStore | None,
) -> Plan:
    """The single stage, or a pipeline that is clearly faster; a note says why."""
    seconds = hidden_seconds(one)
    started = time.perf_counter()
    try:
        limit = seconds * (1 - MARGIN)
        many = plan_pipeline(step, cluster, options, optimizer, costs, progress, store, known=limit)
    except PlanError:
        many = None
    spent = {"pipelines": time.perf_counter() - started}
    # Stages that take turns on one micro-batch win only where everything is latency, the least sure to predict.
    if many is None or many.num_microbatches == 1 or many.predicted.step_seconds > limit:
        found = f"none is faster by {MARGIN:.0%}"
        return _with_note(replace(one, solver_seconds={**one.solver_seconds, **spent}), f"no pipeline: {found}")
    many = replace(
        many,
        baselines={"one stage": one.predicted.step_seconds, **one.baselines},
        solver_seconds={**one.solver_seconds, **many.solver_seconds},
    )
    return _with_note(many, f"a pipeline: one stage would take {seconds / many.predicted.step_seconds:.2f}x as long")


def hidden_seconds(one: Plan) -> float:
    """Seconds of a single stage's step where its reduction of gradients runs beside the backward."""
    reduction = sum(
        c.seconds for c in one.collectives() if c.phase == "step" and c.kind in ("all_reduce", "reduce_scatter")
    )
    return one.predicted.step_seconds - min(reduction, BACKWARD_SHARE * one.predicted.compute_seconds)


def shared_bytes(step: StepGraph, cluster: ClusterSpec, optimizer: OptimizerInfo) -> float:
    """Bytes per device of parameters, gradients and optimizer state if nothing is held twice: the least possible."""
    total = 0.0
    for parameter in step.parameters:
        meta = parameter.meta
        total += meta.num_bytes * (2 if meta.requires_grad else 1)
        total += meta.num_elements * optimizer.state_bytes if meta.requires_grad else 0.0
    return total / cluster.num_devices


def divided_seconds(step: StepGraph, cluster: ClusterSpec, costs: OpCosts) -> float:
    """Seconds of the step's ops if the devices shared them and nothing else took time; an op starts on every device."""
    launch = cluster.device.launch_seconds * cluster.device.slowdown
    whole = [seconds for op in step.ops for seconds in costs.op_seconds(op.call)]
    return sum(max(seconds / cluster.num_devices, min(seconds, launch)) for seconds in whole)


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _may_be_pipelined(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> bool:
    """Whether nothing that the user asked for, and nothing in the step, stands against a pipeline."""
    if options.num_stages == 1 or options.num_microbatches == 1:
        return False
    if options.parallel != "auto" or options.logical_mesh is not None:
        return False
    counts = [count for count in microbatch_counts(step, cluster, options) if count > 1]
    if not counts:
        return False
    try:
        # A note says where micro-batches are not exactly the whole batch (BatchNorm): that is for the user to ask for.
        return microbatch(step, counts[-1], cluster.num_devices).graph.notes == step.notes
    except PlanError:
        return False
