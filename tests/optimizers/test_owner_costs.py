"""What owners do is in the plan: their work, their state, and what moves to them and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import GPT
from optimizers.matrix_optimizers import HybridMuon, muon_groups, with_optimizer

from alpa_strategy import ClusterSpec, PlanOptions, make_plan
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.planner.optimizer_info import inspect_optimizer, optimizer_info_of


def newton_schulz_flops(rows: int, columns: int, num_steps: int = 5) -> float:
    """FLOPs of the products of `orthogonalized`."""
    return num_steps * (2 * rows**2 * columns * 2 + 2 * rows**3)


@pytest.mark.parametrize("shape", [(256, 256), (128, 512), (24, 96)])
def test_flops_are_those_of_the_optimizers_products(shape: tuple[int, int]) -> None:
    linear = torch.nn.Linear(shape[1], shape[0], bias=False)
    info = inspect_optimizer(HybridMuon(linear.parameters(), use_muon=True), linear)
    update = info.full_update(["weight"])
    assert update is not None
    assert update.flops == pytest.approx(newton_schulz_flops(*shape), rel=0.02)
    assert update.dtype == torch.float32


def test_torchs_muon_multiplies_in_bfloat16() -> None:
    linear = torch.nn.Linear(64, 64, bias=False)
    info = inspect_optimizer(torch.optim.Muon(linear.parameters()), linear)
    update = info.full_update(["weight"])
    assert update is not None
    assert update.dtype == torch.bfloat16


def test_experts_are_counted_one_by_one() -> None:
    module = torch.nn.Module()
    module.experts = torch.nn.Parameter(torch.ones(6, 40, 40))
    info = inspect_optimizer(HybridMuon(module.parameters(), use_muon=True), module)
    update = info.full_update(["experts"])
    assert update is not None
    assert update.reads.free_dims == {0}
    assert update.flops == pytest.approx(6 * newton_schulz_flops(40, 40), rel=0.02)


def test_only_what_is_not_element_wise_is_listed() -> None:
    model = GPT()
    info = inspect_optimizer(HybridMuon(muon_groups(model)), model)
    names = {name for name, _ in info.full_updates}
    assert names == {name for name, p in model.named_parameters() if p.dim() > 1}


def test_a_plan_counts_owners_work_and_state() -> None:
    """Under data parallelism each of two devices has half of the state and of the work."""
    model = with_optimizer(GPT, "muon")()
    batch = model.example_batch(8)
    cluster = replace(ClusterSpec.load("pcie_8gpu"), num_nodes=1, devices_per_node=2)
    options = PlanOptions.from_user(parallel="data")
    muon = optimizer_info_of(model)
    element_wise = OptimizerInfo(muon.state_bytes, moved_bytes=muon.moved_bytes)
    plan = make_plan(model, batch, cluster, options, muon)
    plain = make_plan(model, batch, cluster, options, element_wise)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    saved = plain.predicted.peak_bytes - plan.predicted.peak_bytes
    assert saved == pytest.approx(matrices * muon.state_bytes / 2, rel=0.01)
    assert plan.predicted.optimizer_seconds > plain.predicted.optimizer_seconds
