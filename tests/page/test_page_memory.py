"""The page's memory is the terminal's: the same parts, the same peak, for the same devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from page.test_details import CASES, PIPELINE, planned

from alpa_strategy.display.memory import memory_of_meshes
from alpa_strategy.ir.plan import MEMORY_PARTS
from alpa_strategy.page.memory import memory_of_devices
from alpa_strategy.page.model import page_model
from alpa_strategy.planner.details import details_of


@pytest.mark.parametrize(("model", "options"), CASES)
def test_the_items_of_a_part_sum_to_it(model, options):
    plan, task = planned(model, options)
    data = page_model(plan, details_of(task, plan))
    for stage, of_stage in zip(plan.stages, data["stages"], strict=True):
        assert tuple(of_stage["parts"]) == MEMORY_PARTS
        assert sum(of_stage["parts"].values()) == of_stage["peak"] == stage.predicted.peak_bytes
        for part, items in of_stage["within"].items():
            assert sum(num_bytes for _, num_bytes in items) == of_stage["parts"][part]


def test_what_is_gathered_once_per_step_is_told_apart_from_casts():
    plan, task = planned("gpt", (("parallel", "zero1"),))
    details = details_of(task, plan)
    memory = details.stages[0].memory
    (stage,) = page_model(plan, details)["stages"]
    items = dict(stage["within"]["weights"])
    gathered = items["gathered copies, in the dtype of their use"]
    scattered = stage["within"]["gradients"][1][1]
    assert gathered + scattered == memory.gathered
    assert items["stored"] == memory.weights


def test_the_stages_of_a_device_share_its_memory():
    plan, _ = planned("gpt", PIPELINE)
    both = tuple(replace(stage, first_device=0) for stage in plan.stages)
    (devices,) = memory_of_devices(replace(plan, stages=both))
    assert devices["stages"] == [0, 1]
    assert devices["peak"] == sum(stage.predicted.peak_bytes for stage in plan.stages)
    assert memory_of_meshes(replace(plan, stages=both)) == {"0,1": devices["parts"]}
