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
from alpa_strategy.ir.plan import EAGER_SCHEDULE, Plan
from alpa_strategy.lower.codegen import lower
from alpa_strategy.lower.overlapped_matmul import MatmulSpec
from alpa_strategy.planner.execution import with_execution
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

CPU = torch.device("cpu")
META = torch.device("meta")


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


@pytest.mark.parametrize("schedule", ["none", EAGER_SCHEDULE])
def test_matmuls_of_eager_steps_are_not_fused(schedule):
    """The user's code may differentiate them twice."""
    case = captured("gpt", 2)
    plan = replace(planned(case.step, 0.0), schedule=schedule)
    stage = replace(plan.stages[0], num_chunks={"linear_1": 2}, execution=None)
    (stage,) = with_execution(replace(plan, stages=(stage,)), case.step).stages

    def source(mesh):
        return lower(case.step, stage, mesh, CPU, ShardedRandom(mesh, 0)).source

    fused = stage.execution.fused_matmuls
    assert bool(fused) == (schedule == "none")
    assert ("products_" in run_on_threads((2,), source)[0]) == bool(fused)


class Wide(pl.LightningModule):
    """Layers whose sums take about as long as their products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)
        self.norm = nn.LayerNorm(1024)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(batch * self.norm.weight)
        return self.norm(x + self.down(torch.relu(self.up(x)))).square().mean()


def captured_wide(*shape: int) -> StepGraph:
    with torch.device("meta"):
        return capture_step(Wide(), torch.zeros(shape, device="meta"), world_size=2)


@pytest.fixture(scope="module")
def wide() -> StepGraph:
    return captured_wide(4096, 1024)


def test_a_cluster_that_says_what_is_hidden_has_sums_in_parts():
    step = captured_wide(32, 128, 1024)
    alone, hiding = planned(step, 0.0), planned(step, 0.75)
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


def with_execution_of(plan: Plan, **fields: object) -> Plan:
    """The plan with other fields in the execution of its only stage."""
    (stage,) = plan.stages
    return replace(plan, stages=(replace(stage, execution=replace(stage.execution, **fields)),))


def text_of(plan: Plan, step: StepGraph) -> str:
    """The program of the first device, and the matmuls that its names stand for."""

    def text(mesh):
        program = lower(step, plan.stages[0], mesh, META, ShardedRandom(mesh, 0))
        names = program.function.__globals__
        matmuls = [names[name].args for name in names if name.startswith("products_")]
        return f"{program.source} {matmuls}"

    return run_on_threads((2,), text)[0]


def test_the_program_has_the_fused_matmuls_of_the_plan():
    step = captured("llama", 2).step
    plan = planned(step, 0.0)
    groups = plan.stages[0].execution.fused_matmuls
    assert max(map(len, groups)) == 2, "gate and up read one input"
    fewer = with_execution_of(plan, fused_matmuls=groups[1:])
    check_plan(fewer, step, 2)
    assert text_of(plan, step).count(" = products_") == len(groups)
    assert text_of(fewer, step).count(" = products_") == len(groups) - 1
    stored = Plan.from_dict(plan.to_dict())
    assert text_of(stored, step) == text_of(plan, step)


def test_the_program_has_the_chunks_of_the_plan():
    step = captured("gpt", 2).step
    plan = planned(step, 0.0)
    matmuls = [name for name in plan.stages[0].strategies if name.startswith("linear")]
    stage = replace(plan.stages[0], num_chunks=dict.fromkeys(matmuls, 2), execution=None)
    plan = with_execution(replace(plan, stages=(stage,)), step)
    dims = plan.stages[0].execution.chunk_dims
    assert dims
    for name, dim in dims.items():
        changed = with_execution_of(plan, chunk_dims={name: dim})
        check_plan(changed, step, 2)
        assert text_of(changed, step).count(f"dim={dim}, num_chunks=2") == 1
    none = with_execution_of(plan, chunk_dims={})
    check_plan(none, step, 2)
    assert "num_chunks=2" not in text_of(none, step)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fused_matmuls", (("linear",),)),
        ("fused_matmuls", (("linear", "nothing"),)),
        ("chunk_dims", {"linear_1": 1}),
        ("chunk_dims", {"relu": 0}),
    ],
)
def test_an_overlap_that_is_impossible_is_refused(wide, field, value):
    """Data parallelism sums no gradient of an input; dim 1 is the last."""
    plan = planned(wide, 0.75, parallel="data" if field == "fused_matmuls" else "tensor")
    with pytest.raises(PlanError, match=field):
        check_plan(with_execution_of(plan, **{field: value}), wide, 2)
