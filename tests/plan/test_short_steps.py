"""Steps of a few milliseconds in a running job: data parallelism, where nothing tells plans apart
but what the host hides.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import MODELS

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan
from alpa_strategy.planner.short_steps import SHORT_SECONDS, is_short, why_data_parallel


def fake_task(measured: bool) -> Any:
    return SimpleNamespace(cluster=SimpleNamespace(measured=measured))


@pytest.mark.parametrize(
    ("measured", "data_seconds", "best_seconds", "reason"),
    [
        (True, 2e-3, 2e-3, None),
        (True, 1e-3, 2e-3, "beside the backward"),
        (False, 1e-3, 2e-3, "beside the backward"),
        (True, 4.2e-3, 4.0e-3, "too little to tell"),
        (True, 4.2e-3, 3.1e-3, "less than the host needs"),
        (True, 4.2e-3, 2.0e-3, None),
        (True, 42e-3, 40e-3, "too little to tell"),
        (True, 42e-3, 31e-3, None),
        (False, 4.2e-3, 4.1e-3, None),
        (False, 4.2e-3, 3.1e-3, None),
    ],
)
def test_when_data_parallelism_takes_the_place_of_a_plan(
    measured, data_seconds, best_seconds, reason
):
    found = why_data_parallel(fake_task(measured), data_seconds, best_seconds)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_a_step_is_short_by_its_prediction_in_a_running_job():
    assert is_short(fake_task(measured=True), SHORT_SECONDS / 2)
    assert not is_short(fake_task(measured=True), SHORT_SECONDS * 2)
    assert not is_short(fake_task(measured=False), SHORT_SECONDS / 2)


def plan(measured: bool, **options: Any) -> Any:
    """Wide linears on few rows, where tensor parallelism moves less than gradients are."""
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    with torch.device("meta"):
        module = MODELS["mlp"](d_in=512, d_hidden=512, d_out=512, num_layers=4)
        batch = (torch.empty(64, 512), torch.empty(64, 512))
    chosen = PlanOptions(batch_scope="global", **options)
    return make_plan(module, batch, replace(spec, measured=measured), chosen)


def test_no_pipeline_is_looked_at_for_a_short_step():
    best = plan(measured=True)
    assert best.predicted.step_seconds < SHORT_SECONDS
    assert len(best.stages) == 1
    assert "pipelines" not in best.solver_seconds
    assert any("no pipeline: the host" in note for note in best.notes)


def test_what_is_asked_for_is_planned_in_a_short_step_too():
    assert len(plan(measured=True, num_stages=2).stages) == 2
    tensor = plan(measured=True, parallel="tensor")
    assert not any("data parallel" in note for note in tensor.notes)
