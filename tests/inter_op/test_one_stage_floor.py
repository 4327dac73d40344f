"""The bound of one stage over all devices is below whatever is solved, and a pipeline that is taken
for it is clearly faster than one stage.
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
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.inter_op.one_stage_floor import least_one_stage_seconds
from alpa_strategy.inter_op.pins import layers_of
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner import planner
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.one_stage import plan_one_stage, seconds_with_overlap
from alpa_strategy.planner.pipeline_first import APPROXIMATION, search_pipeline_first
from alpa_strategy.planner.task import PlanTask


def task_of(overlap: float = 0.0, bandwidth: float = 1e9, **options) -> PlanTask:
    """A small GPT on four devices. One solve takes half a second at most."""
    module = MODELS["gpt"](num_layers=2, d_model=128, seq_len=32, vocab_size=32)
    batch = module.example_batch(16, torch.Generator().manual_seed(0))
    step = capture_step(module, batch, world_size=1, batch_scope="global")
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})
    device = replace(cluster.device, launch_seconds=1e-8)
    link = Link(1e-6, bandwidth)
    cluster = replace(cluster, device=device, intra_node=link, overlap=overlap)
    options = {"batch_scope": "global", "solver_seconds": 0.5, "offload": False, **options}
    return PlanTask(step, cluster, PlanOptions(**options), OptimizerInfo())


def shared_seconds(task: PlanTask) -> float:
    return planner.divided_seconds(task.step, task.cluster, RooflineCosts(task.cluster.device))


def bound_of(task: PlanTask) -> float:
    cuts, _ = layers_of(task.step, task.cluster, task.options)
    job = stage_cost_task(task, task.step, cuts, 1, remat=False)
    return min(least_one_stage_seconds(job, shared_seconds(task)).values())


@pytest.mark.parametrize("overlap", slow_but((0.0, 0.75), (0.75,)))
def test_no_stage_over_all_devices_is_below_the_bound(overlap):
    """Whatever its memory: the less there is, the slower is the stage, and the higher the bound."""
    free = plan_one_stage(task_of(overlap), by_tensor=False)
    bounds = []
    for share in (math.inf, 0.4):
        task = task_of(overlap, memory_limit=share * free.predicted.peak_bytes)
        bounds.append(bound_of(task))
        try:
            seconds = seconds_with_overlap(plan_one_stage(task, by_tensor=False), overlap)
        except DoesNotFitError:
            continue
        assert (1 - APPROXIMATION) * bounds[-1] <= seconds
    assert bounds == sorted(bounds)
    assert bounds[0] > 0.2 * seconds_with_overlap(free, overlap)
    assert bounds[-1] > bounds[0]


def test_a_pipeline_that_is_taken_unseen_is_clearly_faster_than_one_stage():
    """One stage needs memory that there is not, so it is slower than its free layouts."""
    free = plan_one_stage(task_of(0.05, 1e10), by_tensor=False)
    limit = 0.55 * free.predicted.peak_bytes
    task = task_of(0.05, 1e10, remat=False, memory_limit=limit, num_microbatches=4)
    first = search_pipeline_first(task, shared_seconds(task), planner.SCREEN, planner.MARGIN)
    assert first is not None
    assert first.is_better
    assert first.pipeline is not None
    one = plan_one_stage(task, by_tensor=False)
    assert min(first.least_seconds.values()) <= seconds_with_overlap(one, 0.05)
    assert first.pipeline.predicted.step_seconds <= 0.9 * seconds_with_overlap(one, 0.05)
    assert first.noted_pipeline is not None
    note = first.noted_pipeline.notes[-1]
    assert note.startswith("a pipeline: one stage does not fit, or would take at least")


def test_no_pipeline_is_searched_if_one_stage_loses_little():
    task = task_of()
    assert search_pipeline_first(task, shared_seconds(task), 0.99, planner.MARGIN) is None
