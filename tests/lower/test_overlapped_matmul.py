"""Products beside collectives: what runs beside what, in the program and in the plan's price."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from threading import get_ident

import lightning.pytorch as pl
import pytest
import torch
from lowered_cases import captured, run_lowered_stage
from proofs.thread_mesh import run_on_threads
from torch import Tensor, nn

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lower.codegen import lower
from alpa_strategy.lower.overlapped_matmul import MatmulSpec
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

CPU = torch.device("cpu")


def planned(step: StepGraph, overlap: float, parallel: str = "tensor") -> Plan:
    """Of the step on two GPUs that are on PCIe."""
    cluster = replace(
        ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2}), overlap=overlap
    )
    return choose_plan(
        PlanTask(step, cluster, PlanOptions(parallel=parallel), OptimizerInfo(state_bytes=16))
    )


def test_weights_wait_until_the_sum_of_the_input_has_begun(monkeypatch):
    seen: dict[int, list[str]] = defaultdict(list)  # of each device's thread

    def watch(owner: type, name: str, letter: str) -> None:
        function = getattr(owner, name)

        def run(this: object, *args: object) -> object:
            seen[get_ident()].append(letter)
            return function(this, *args)

        monkeypatch.setattr(owner, name, run)

    watch(MatmulSpec, "gradient_of_rows", "r")
    watch(Reshard, "start_gradients", "s")
    watch(MatmulSpec, "gradient_of_weight", "w")
    case = captured("llama", 2)
    run_lowered_stage(case, planned(case.step, 0.0).stages[0], (2,))
    first, second = map("".join, seen.values())
    assert first == second
    assert re.fullmatch("(r+sw+)+", first), first
    assert "rrsww" in first, "gate and up read one input"


def test_matmul_rewrites_are_skipped_for_double_backward():
    case = captured("gpt", 2)
    stage = replace(planned(case.step, 0.0).stages[0], num_chunks={"linear_1": 2})

    def source(mesh):
        return lower(case.step, stage, mesh, CPU, ShardedRandom(mesh, 0), overlaps=False).source

    assert "products_" not in run_on_threads((2,), source)[0]


class Wide(pl.LightningModule):
    """Layers whose sums take about as long as their products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)
        self.norm = nn.LayerNorm(1024)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(batch * self.norm.weight)
        return self.norm(x + self.down(torch.relu(self.up(x)))).square().mean()


@pytest.fixture(scope="module")
def wide() -> StepGraph:
    with torch.device("meta"):
        return capture_step(Wide(), torch.zeros(4096, 1024, device="meta"), world_size=2)


def test_a_cluster_that_says_what_is_hidden_has_sums_in_parts(wide):
    alone, hiding = planned(wide, 0.0), planned(wide, 0.75)
    assert not alone.stages[0].num_chunks
    assert set(hiding.stages[0].num_chunks.values()) <= {2, 4}
    assert hiding.stages[0].num_chunks
    assert (
        0.3 * alone.predicted.step_seconds
        < hiding.predicted.step_seconds
        < alone.predicted.step_seconds
    )
    assert hiding.predicted.compute_seconds == pytest.approx(alone.predicted.compute_seconds)
    assert Plan.from_dict(hiding.to_dict()) == hiding


def test_a_wrong_number_of_parts_is_refused(wide):
    plan = planned(wide, 0.75)
    for wrong in ({"linear": 1}, {"relu": 2}, {"nothing": 2}):
        stage = replace(plan.stages[0], num_chunks=wrong)
        with pytest.raises(PlanError, match="in_parts"):
            check_plan(replace(plan, stages=(stage,)), wide, 2)
