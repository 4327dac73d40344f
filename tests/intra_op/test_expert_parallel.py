"""The solver shards experts where gradients of experts cost more than moving tokens, and only
there. Planning alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from intra_op.test_known_optima import cluster_of

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.task import PlanTask

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

from moe import MoE

EXPERTS = {"*.mlp.fc": "S0", "*.mlp.proj": "S0"}


def plan_experts(hidden: int, factor: int, experts: int, rows: int, **options: Any) -> Plan:
    """Four slow devices, a block with experts and one without; `rows` of 64 tokens a device."""
    with torch.device("meta"):
        model = MoE(
            num_layers=2,
            hidden=hidden,
            num_heads=4,
            num_experts=experts,
            vocab_size=64,
            sequence_length=64,
            group_size=64,
            mlp_factor=factor,
            capacity_factor=2.0,
        )
        tokens = torch.empty(rows, 64, dtype=torch.long)
    cluster = cluster_of(4)
    cluster = replace(cluster, device=replace(cluster.device, peak_flops=(("float32", 2e12),)))
    step = capture_step(model, (tokens, tokens), world_size=4)
    wanted = PlanOptions.from_user(logical_mesh=(4,), memory_limit=float("inf"), **options)
    return plan_one_stage(PlanTask(step, cluster, wanted, OptimizerInfo()))


def modes(plan: Plan, name: str) -> str:
    return str(plan.stages[0].parameter_plans[name].modes[0])


def test_large_experts_are_sharded_and_tokens_are_sent_to_them() -> None:
    plan = plan_experts(hidden=256, factor=8, experts=16, rows=16)
    assert [modes(plan, f"blocks.0.mlp.{name}") for name in ("fc", "proj")] == ["S0", "S0"]
    assert modes(plan, "blocks.1.mlp.fc.weight")[0] in "GR"  # the rest is data parallel
    assert "all_to_all" in {c.kind for c in plan.collectives()}
    by_hand = plan_experts(hidden=256, factor=8, experts=16, rows=16, placements=EXPERTS)
    assert plan.predicted.step_seconds <= by_hand.predicted.step_seconds * (1 + 1e-6)
    # Under data parallelism 67 MB of experts' gradients are all-reduced at 10 GB/s.
    assert (
        plan.predicted.step_seconds
        < plan_experts(256, 8, 16, 16, parallel="data").predicted.step_seconds - 8e-3
    )


def test_small_experts_stay_where_the_tokens_are() -> None:
    plan = plan_experts(hidden=64, factor=1, experts=4, rows=64)
    assert modes(plan, "blocks.0.mlp.fc")[0] in "GR"
    assert "all_to_all" not in {c.kind for c in plan.collectives()}
