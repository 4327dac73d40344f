"""What a plan takes on its own task is what was predicted; on another, what that changes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from models import MODELS
from page.test_details import PIPELINE, planned

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.value_names import without_indices
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.details import details_of
from alpa_strategy.planner.plan_stages import boundary_seconds, cost_on, stage_job
from alpa_strategy.planner.planner import captured_task, plan_captured

EXACT = 1e-6
SHARE = re.compile(r" \((\d+)% of the bytes\)$")
FOUR_STAGES = (("num_stages", 4), ("num_microbatches", 4), ("schedule", "1F1B"))


@pytest.mark.parametrize("options", [(), PIPELINE, (*PIPELINE, ("remat", True)), FOUR_STAGES])
def test_seconds_and_bytes_are_those_that_were_predicted(options):
    plan, task = planned("gpt", options)
    cost = cost_on(task, plan)
    assert cost.seconds == pytest.approx(plan.predicted.step_seconds, rel=EXACT)
    assert cost.peak_bytes == pytest.approx(plan.predicted.peak_bytes, abs=8)
    wires = boundary_seconds(stage_job(task, plan), plan)
    assert wires == pytest.approx([stage.boundary_seconds for stage in plan.stages], rel=EXACT)


def test_slower_links_take_longer_and_more_memory_changes_nothing():
    plan, task = planned("gpt", PIPELINE)
    link = task.cluster.intra_node
    slow = replace(link, bandwidth=link.bandwidth / 1000)
    changed = replace(task, cluster=replace(task.cluster, intra_node=slow))
    before, after = cost_on(task, plan), cost_on(changed, plan)
    assert after.seconds > before.seconds
    assert after.peak_bytes == before.peak_bytes
    (wire, _) = boundary_seconds(stage_job(changed, plan), plan)
    assert wire > 10 * plan.stages[0].boundary_seconds


def test_recomputed_results_of_a_plan_are_recomputed():
    torch.manual_seed(0)
    module = MODELS["gpt"](d_model=32, seq_len=64)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})

    def plan_of(**options):
        pinned = PlanOptions.from_user(num_stages=1, offload=False, **options)
        captured = captured_task(module, module.example_batch(8), cluster, pinned)
        return plan_captured(captured), captured.task

    stored, _ = plan_of(remat=False)
    plan, task = plan_of(memory_limit=0.8 * stored.predicted.peak_bytes)
    assert plan.stages[0].recomputed
    cost = cost_on(task, plan)
    assert cost.seconds == pytest.approx(plan.predicted.step_seconds, rel=EXACT)
    assert cost.peak_bytes == pytest.approx(plan.predicted.peak_bytes, abs=8)


@pytest.mark.parametrize(
    "options", [(("parallel", "zero3"),), (("parallel", "tensor"),), (("parallel", "data"),)]
)
def test_the_largest_part_of_a_collective_is_what_most_bytes_belong_to(options):
    plan, task = planned("gpt", options)
    details = details_of(task, plan)
    for stage, of_stage in zip(plan.stages, details.stages, strict=True):
        assert stage.collectives
        for collective in stage.collectives:
            key = collective.kind, collective.axis, collective.phase
            bytes_of: dict[str, int] = defaultdict(int)
            for of in (*of_stage.parameters, *of_stage.ops):
                for message in of.messages:
                    if (message.kind, message.axis, message.phase) == key:
                        name = re.sub(r"_\d+$", "", without_indices(message.value or of.name))
                        bytes_of[name] += message.num_bytes

            match = SHARE.search(collective.largest)
            if match is None:
                assert len(bytes_of) == 1
                continue
            percent = int(match[1])
            assert 0 < percent <= 100
            text = collective.largest.removeprefix("the gradient of ").removeprefix(
                "the result of "
            )
            of_named = max(size for name, size in bytes_of.items() if text.startswith(name))
            # Ops of one name on different lines are parts of their own.
            assert percent <= 100 * of_named / sum(bytes_of.values()) + 1
