"""What the devices tell each other of the batch alone is begun before the forward; parameters are
prefetched.
"""

from __future__ import annotations

import math
from dataclasses import replace

import lightning.pytorch as pl
import lowered_cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proofs.thread_mesh import run_on_threads

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.decode import _forward_seconds, _gatherings, bytes_ahead
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.intra_op.solver.solve import solve
from alpa_strategy.ir.gathers import launched_counts
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.lower.codegen import lower
from alpa_strategy.lower.lines import Line, launch_early
from alpa_strategy.planner.early import early_values
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

CLASSES = 64


class Tagger(pl.LightningModule):
    """Mean over some targets; `one_hot` makes something as large as the logits of the batch
    alone.
    """

    def __init__(self, one_hot: bool) -> None:
        super().__init__()
        self.net, self.one_hot = torch.nn.Linear(6, CLASSES), one_hot

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        x, y = batch
        logits = torch.relu(self.net(x))
        if self.one_hot:
            chosen = torch.nn.functional.one_hot(y.clamp(min=0), CLASSES).to(x.dtype)
            return -(torch.log_softmax(logits, 1) * chosen).sum() / chosen.sum()
        return torch.nn.functional.cross_entropy(logits, y)


def captured(one_hot: bool, world_size: int = 2) -> StepGraph:
    batch = torch.randn(8, 6), torch.randint(CLASSES, (8,))
    return capture_step(Tagger(one_hot), batch, world_size=world_size)


def test_a_program_of_one_device_brings_nothing_into_another_layout():
    step = captured(one_hot=False, world_size=1)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})
    stage = choose_plan(PlanTask(step, cluster, PlanOptions(), OptimizerInfo())).stages[0]
    (source,) = run_on_threads(
        (1,), lambda mesh: lower(step, stage, mesh, torch.device("cpu"), None).source
    )
    assert "f_cross_entropy_sum" in source
    assert "reshard" not in source


@pytest.mark.parametrize("one_hot", [False, True])
def test_nothing_larger_than_the_batch_is_made_early(one_hot):
    step = captured(one_hot)
    batch_bytes = sum(step.values[leaf.value].num_bytes for leaf in step.batch)
    early = set(early_values(step))
    assert early.issuperset(leaf.value for leaf in step.batch)
    assert all(step.values[value].num_bytes <= batch_bytes for value in early)
    assert not any(step.values[value].requires_grad for value in early)
    assert (step.loss in early) is False


def test_the_program_launches_early_what_the_plan_says():
    step = captured(one_hot=False)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    options = PlanOptions(parallel="tensor")
    plan = choose_plan(PlanTask(step, cluster, options, OptimizerInfo()))
    (stage,) = plan.stages
    sources = []
    for names in (stage.execution.early_reshardings, ()):
        stage = replace(stage, execution=replace(stage.execution, early_reshardings=names))
        check_plan(replace(plan, stages=(stage,)), step, 2)
        program = run_on_threads(
            (2,), lambda mesh, stage=stage: lower(step, stage, mesh, torch.device("cpu"), None)
        )[0]
        sources.append(program.source)
    assert ".start(" in sources[0]
    assert ".start(" not in sources[1]

    wrong = replace(stage.execution, early_reshardings=("linear",))
    with pytest.raises(PlanError, match="early_reshardings has 'linear'"):
        check_plan(replace(plan, stages=(replace(stage, execution=wrong),)), step, 2)


def test_lines_move_with_what_they_need():
    lines = [
        Line("v1 = batch[0]", ("v1",)),
        Line("v2 = f(parameters[0])", ("v2",)),
        Line("v3 = g(v1)", ("v3",), ("v1",)),
        Line("v4 = h(v2, v1)", ("v4",), ("v2", "v1")),
        Line("v3_0 = r(v3)", ("v3_0",), ("v3",), is_resharding=True, is_early=True),
        Line("return (v4, v3_0, v3, )", (), ("v4", "v3_0", "v3")),
    ]
    start = Line("coming_v3_0 = r.start(v3)", ("coming_v3_0",), ("v3",))
    wait = Line("v3_0 = r(v3, coming_v3_0)", ("v3_0",), ("v3", "coming_v3_0"))
    assert launch_early(lines) == [lines[0], lines[2], start, lines[1], lines[3], wait, lines[5]]


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 120))
def test_as_many_gatherings_have_begun_as_the_bytes_allow(sizes, ahead):
    counts = list(launched_counts(sizes, ahead))
    assert counts == sorted(counts)
    for number, count in enumerate(counts):
        beyond = sum(sizes[number + 1 : count])
        before = max(counts[:number], default=0)
        assert count >= number + 1
        assert beyond <= ahead
        # No more than what had begun before, unless the next one would be too much.
        assert count == len(sizes) or beyond + sizes[count] > ahead or count == before


def test_a_gathering_begins_with_the_casts_it_needs():
    lines = [
        Line("v3 = cast(v1)", ("v3",), ("v1",)),
        Line("v3_0 = reshard_v3_0(v3)", ("v3_0",), ("v3",), is_resharding=True, gathers=8),
        Line("v5 = f(v3_0, v0)", ("v5",), ("v3_0", "v0")),
        Line("v4 = cast(v2)", ("v4",), ("v2",)),
        Line("v4_0 = reshard_v4_0(v4)", ("v4_0",), ("v4",), is_resharding=True, gathers=8),
        Line("v6 = f(v4_0, v5)", ("v6",), ("v4_0", "v5")),
        Line("return (v6, )", (), ("v6",)),
    ]
    assert launch_early(lines, 7)[2].code == "v3_0 = reshard_v3_0(v3, coming_v3_0)"
    assert launch_early(lines, 7)[4:6] == [lines[3], launch_early(lines, 8)[3]]
    assert [line.code for line in launch_early(lines, 8)] == [
        "v3 = cast(v1)",
        "coming_v3_0 = reshard_v3_0.start(v3)",
        "v4 = cast(v2)",
        "coming_v4_0 = reshard_v4_0.start(v4)",
        "v3_0 = reshard_v3_0(v3, coming_v3_0)",
        "v5 = f(v3_0, v0)",
        "v4_0 = reshard_v4_0(v4, coming_v4_0)",
        "v6 = f(v4_0, v5)",
        "return (v6, )",
    ]
    assert launch_early(lines, 0) == lines


def zero3(bandwidth: float) -> IntraOp:
    """The problem of a GPT on two devices whose link moves `bandwidth` bytes per second."""
    links = {"intra_node.bandwidth": bandwidth}
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2, **links})
    tables = OptionTables(
        cluster.logical_mesh((2,)), RooflineCosts(cluster.device), OptimizerInfo()
    )
    return build(lowered_cases.captured("gpt", 2).step, tables)


def test_as_many_bytes_are_gathered_ahead_as_hide_the_gathering():
    """By a simulation of the forward: nothing is hidden of a slow link; of others what can be, by
    the fewest bytes.
    """
    results = []
    for bandwidth in (1e6, 1e9, 1e11):
        intra = zero3(bandwidth)
        assignment = solve(
            restrict(intra, PlanOptions(parallel="zero3"), OptimizerInfo()).problem
        ).assignment
        gatherings = sorted(_gatherings(intra, assignment), key=lambda each: each.op)
        gathered_bytes = [gathering.num_bytes for gathering in gatherings]
        largest = max(gathered_bytes)
        total = sum(gathered_bytes)
        of_ops = zip(intra.ops, assignment[len(intra.parameters) :], strict=False)
        before = np.cumsum([0.0, *(float(options.forward_seconds[k]) for options, k in of_ops)])
        results.append(bytes_ahead(intra, assignment, math.inf))
        seconds = _forward_seconds(gatherings, before, results[-1])
        assert seconds <= 1.005 * _forward_seconds(gatherings, before, total)
        assert results[-1] == 0 or _forward_seconds(gatherings, before, results[-1] // 2) > seconds
        assert bytes_ahead(intra, assignment, largest - 1) == 0
        # Nothing ahead: one after the other, as the ILP has it.
        alone = before[-1] + sum(each.seconds for each in gatherings)
        assert _forward_seconds(gatherings, before, 0) == pytest.approx(alone)
    assert results[0] == 0
    assert results[2] > 0


class Recorded:
    """A parameter's gathering, which says when it begins and when it is waited for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.start(tensor).wait()

    def start(self, tensor: torch.Tensor) -> Pending:
        self.said.append(f"begin {self.name}")

        def finish() -> torch.Tensor:
            self.said.append(f"use {self.name}")
            return tensor.clone()

        return Pending(finish)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_backward_gathers_ahead_in_its_own_order(ahead):
    said: list[str] = []
    weights = [torch.eye(4, requires_grad=True) for _ in range(4)]
    x = torch.randn(2, 4, requires_grad=True)
    with SavedTensorHooks(weights, prefetched_bytes=ahead * weights[0].nbytes) as regather:
        y = x
        for number, weight in enumerate(weights):
            whole = weight.clone()
            regather.note(Recorded(str(number), said), weight, whole)  # type: ignore[arg-type]
            y = y @ whole
    y.sum().backward()
    assert [each for each in said if each.startswith("use")] == ["use 3", "use 2", "use 1", "use 0"]
    assert [each for each in said if each.startswith("begin")] == [
        "begin 3",
        "begin 2",
        "begin 1",
        "begin 0",
    ]
    for number in range(4):
        early = min(3 - number, ahead)
        assert said.index(f"begin {number}") < said.index(f"use {number + early}") or not early
        assert number + early == 3 or said.index(f"begin {number}") > said.index(
            f"use {number + early + 1}"
        )
    for weight in weights:
        torch.testing.assert_close(weight.grad, x.T @ torch.ones(2, 4))
