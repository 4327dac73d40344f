"""Memory by the tensor: where a limit binds, some activations are made again in the backward; results are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality.harness import assert_same, record
from models import MODELS

from alpa_strategy import ClusterSpec, Plan, PlanOptions, make_plan

SIZES = {"vocab_size": 32, "d_model": 32, "num_layers": 2, "seq_len": 64}


def plan(model: str, **options: Any) -> Plan:
    """For one device and the harness's batch in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS[model](**SIZES)
        cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})
        given = PlanOptions.from_user(batch_scope="global", num_stages=1, **options)
        return make_plan(module, module.example_batch(8), cluster, given)
    finally:
        torch.set_default_dtype(torch.float32)


def train(model: str, strategy: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    """Two steps."""
    return record(model, SIZES, strategy, 2, world_size)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_less_memory_costs_less_than_recomputing_everything(model: str) -> None:
    kept, everything = plan(model, remat=False), plan(model, remat=True)
    limit = kept.predicted.peak_bytes * 0.8
    chosen = plan(model, memory_limit=limit)
    assert chosen.stages[0].recomputed
    assert not chosen.stages[0].remat
    assert chosen.predicted.peak_bytes <= limit
    assert kept.predicted.step_seconds <= chosen.predicted.step_seconds < everything.predicted.step_seconds
    assert Plan.from_dict(chosen.to_dict()) == chosen


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("model", "parallel"), [("gpt", "auto"), ("llama", "auto"), ("llama", "zero3")])
def test_what_is_made_again_is_the_same(pool, tmp_path: Path, model: str, parallel: str, world_size: int) -> None:
    """Gathered norms' weights included."""
    limit = plan(model, remat=False).predicted.peak_bytes * (0.8 if world_size == 1 else 0.45)
    strategy = {
        "memory_limit": limit, "parallel": parallel, "cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "num_stages": 1,
    }  # fmt: skip
    runs = pool.run(world_size, train, model, strategy, world_size)
    (reference,) = pool.run(1, train, model, None, world_size, init_group=False)
    for run in runs:
        assert_same(run, reference)
        assert run["recomputed"]
