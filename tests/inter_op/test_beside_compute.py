"""What a run hides behind computation is not in the seconds of one stage on all devices, and the
lower bounds follow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from covering import slow_but
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec, Link
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.one_stage import ZERO3_NOTE, plan_one_stage
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.task import PlanTask

FAST = 3e11
MIDDLE = 2e10
SLOW = 1e9


def task_of(overlap: float, bandwidth: float, **options) -> PlanTask:
    """A small GPT on four devices whose ops take far longer than to launch them."""
    module = MODELS["gpt"](num_layers=1, d_model=128, seq_len=32, vocab_size=32)
    batch = module.example_batch(16, torch.Generator().manual_seed(0))
    step = capture_step(module, batch, world_size=1, batch_scope="global")
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})
    device = replace(cluster.device, launch_seconds=1e-8, memory_bandwidth=1e11)
    link = Link(1e-9, bandwidth)
    cluster = replace(cluster, device=device, intra_node=link, overlap=overlap)
    options = {"batch_scope": "global", "solver_seconds": 0.5, "offload": False, **options}
    return PlanTask(step, cluster, PlanOptions(**options), OptimizerInfo())


def zero3(overlap: float, bandwidth: float, **options) -> Plan:
    """ZeRO-3 on a flat mesh, the whole batch at once."""
    return plan_one_stage(task_of(overlap, bandwidth, parallel="zero3", **options))


def collectives_seconds(plan: Plan) -> float:
    return sum(collective.seconds for collective in plan.collectives())


def test_the_share_that_overlaps_costs_nothing_where_computation_lasts_longer():
    alone = zero3(0.0, FAST)
    beside = zero3(0.75, FAST)
    assert alone.predicted.communication_seconds == pytest.approx(collectives_seconds(alone), 1e-6)
    assert 0 < collectives_seconds(alone) < 0.3 * alone.predicted.compute_seconds
    hidden = alone.predicted.step_seconds - beside.predicted.step_seconds
    assert hidden == pytest.approx(0.75 * collectives_seconds(alone), rel=0.02)


def test_no_more_is_hidden_than_computation_lasts():
    alone, beside = (zero3(overlap, SLOW) for overlap in (0.0, 0.75))
    assert collectives_seconds(alone) > 3 * alone.predicted.compute_seconds
    hidden = alone.predicted.step_seconds - beside.predicted.step_seconds
    assert hidden == pytest.approx(0.75 * alone.predicted.compute_seconds, rel=0.02)


def test_parameters_that_memory_has_no_place_for_are_gathered_when_they_are_used():
    alone, free = (zero3(overlap, FAST) for overlap in (0.0, 0.75))
    assert free.stages[0].prefetched_bytes > 0
    without_prefetching = free.predicted.peak_bytes - 2 * free.stages[0].prefetched_bytes
    full = zero3(0.75, FAST, memory_limit=without_prefetching + 1, remat=False)
    assert full.stages[0].prefetched_bytes == 0
    assert free.predicted.step_seconds < full.predicted.step_seconds
    assert full.predicted.step_seconds <= alone.predicted.step_seconds


@pytest.mark.parametrize(
    ("bandwidth", "parallel"), slow_but(((FAST, "auto"), (SLOW, "zero3")), ((SLOW, "zero3"),))
)
def test_no_plan_of_one_stage_is_below_its_bound(bandwidth, parallel):
    options = {"num_stages": 1, "num_microbatches": 2, "parallel": parallel}
    task = task_of(0.75, bandwidth, **options)
    plan = plan_pipeline(task)
    assert 0 <= plan.gap < math.inf
    bound = (1 - plan.gap) * plan.predicted.step_seconds
    named = plan_pipeline(replace(task, options=replace(task.options, parallel="zero3")))
    assert bound <= named.predicted.step_seconds * (1 + 1e-9)


def test_zero_3_is_taken_where_what_it_gathers_is_hidden():
    """The integer program adds up, and shards ops in the place of parameters."""
    named = zero3(1.0, MIDDLE)
    limit = 1.01 * named.predicted.peak_bytes
    tasks = [
        task_of(overlap, MIDDLE, memory_limit=limit, remat=False, logical_mesh=mesh)
        for overlap, mesh in ((0.0, None), (1.0, None), (1.0, (4,)))
    ]
    alone, beside, solved = map(plan_one_stage, tasks)
    assert beside.notes[-1] == ZERO3_NOTE
    assert beside.predicted.step_seconds < alone.predicted.step_seconds
    assert beside.predicted.step_seconds < solved.predicted.step_seconds
