"""What the devices tell each other of the batch alone is begun before the forward."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from proofs.thread_mesh import run_on_threads

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.lower.codegen import Line, lower, prefetch_first, prefetchable
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

CLASSES = 64


class Tagger(pl.LightningModule):
    """Mean over some targets; `one_hot` makes something as large as the logits of the batch alone."""

    def __init__(self, one_hot: bool) -> None:
        super().__init__()
        self.net, self.one_hot = torch.nn.Linear(6, CLASSES), one_hot

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = torch.relu(self.net(x))
        if self.one_hot:
            chosen = torch.nn.functional.one_hot(y.clamp(min=0), CLASSES).to(x.dtype)
            return -(torch.log_softmax(logits, 1) * chosen).sum() / chosen.sum()
        return torch.nn.functional.cross_entropy(logits, y)


def captured(one_hot: bool) -> StepGraph:
    batch = torch.randn(8, 6), torch.randint(CLASSES, (8,))
    return capture_step(Tagger(one_hot), batch, world_size=2)


def test_the_number_of_targets_is_known_before_the_forward():
    step = captured(one_hot=False)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    stage = choose_plan(PlanTask(step, cluster, PlanOptions(parallel="data"), OptimizerInfo())).stages[0]
    sources = run_on_threads((2,), lambda mesh: lower(step, stage, mesh, torch.device("cpu"), None).source)
    for source in sources:
        lines = source.splitlines()
        begun = [number for number, line in enumerate(lines) if ".start(" in line]
        forward = next(number for number, line in enumerate(lines) if "f_linear" in line)
        assert begun
        assert max(begun) < forward


@pytest.mark.parametrize("one_hot", [False, True])
def test_nothing_larger_than_the_batch_is_made_early(one_hot):
    step = captured(one_hot)
    batch_bytes = sum(step.values[leaf.value].num_bytes for leaf in step.batch)
    early = prefetchable(step)
    assert early.issuperset(leaf.value for leaf in step.batch)
    assert all(step.values[value].num_bytes <= batch_bytes for value in early)
    assert not any(step.values[value].requires_grad for value in early)
    assert (step.loss in early) is False


def test_lines_move_with_what_they_need():
    lines = [
        Line("v1 = batch[0]", ("v1",)),
        Line("v2 = f(parameters[0])", ("v2",)),
        Line("v3 = g(v1)", ("v3",), ("v1",)),
        Line("v4 = h(v2, v1)", ("v4",), ("v2", "v1")),
        Line("v3_0 = coming_v3_0.wait()", ("v3_0",), ("coming_v3_0",)),
        Line("return (v4, v3_0, v3, )", (), ("v4", "v3_0", "v3")),
    ]
    start = Line("coming_v3_0 = r.start(v3)", ("coming_v3_0",), ("v3",))
    assert prefetch_first({"v3": [start]}, lines) == [lines[0], lines[2], start, lines[1], *lines[3:]]
