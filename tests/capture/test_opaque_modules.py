"""Submodules in which shapes depend on data are one op each; what cannot be one ends in the error as before."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.custom_ops import custom_op
from alpa_strategy.sharding import axis_strategies


class Picks(nn.Module):
    """A layer for some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.layer(x[rows]))


class Drops(Picks):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class Remembers(Picks):
    def forward(self, x: Tensor) -> Tensor:
        self.number = x.shape[0]
        return super().forward(x)


class Shrinks(Picks):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0] > 0])


class Outer(nn.Module):
    """Around a module whose result has no fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shrinks()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(0)


class Step(LightningModule):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module = nn.Linear(4, 4), module

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.module(self.first(x)).square().mean()


def op_of(module: nn.Module):
    graph = capture_step(Step(module).double(), torch.ones(8, 4, dtype=torch.float64))
    (found,) = (op for op in graph.ops if op.call.target_name.startswith("alpa_as_written"))
    return graph, found


def test_is_one_op_that_every_device_runs_whole():
    module = Picks()
    graph, op = op_of(module)
    assert len(op.operands) == 3  # rows, weight, bias
    assert [m.shape for m in op.call.results] == [(8, 4)]
    assert len(axis_strategies(op.call, 2)) == 1
    assert any("module (Picks) runs as it is written" in note for note in graph.notes)
    again, _ = op_of(module)
    assert again.graph_digest == graph.graph_digest  # a stored plan is found again


def test_gives_the_modules_results_and_gradients():
    module = Picks()
    _, op = op_of(module)
    x = torch.randn(8, 4, dtype=torch.float64)
    weight, bias = (torch.randn_like(p).requires_grad_() for p in module.layer.parameters())
    (found,) = op.call.call(x, weight, bias)
    expected = torch.where(x[:, :1] > 0, x + nn.functional.linear(x, weight, bias), x)
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(y.square().sum(), (weight, bias)) for y in (found, expected))
    torch.testing.assert_close(*gradients)


def test_the_module_around_is_the_op_where_shapes_leave_the_inner_one():
    _, op = op_of(Outer())
    assert "Outer" in op.call.target_name
    assert [m.shape for m in op.call.results] == [(4,)]


def test_knows_whether_it_draws_random_numbers():
    assert [custom_op(op_of(kind())[1].call.target).is_random for kind in (Picks, Drops)] == [False, True]


def test_one_class_may_be_the_others_parent():
    graph = capture_step(Step(nn.Sequential(Picks(), Drops(), Picks())), torch.ones(8, 4))
    assert sum(op.call.target_name.startswith("alpa_as_written") for op in graph.ops) == 3
    assert Picks.forward.__qualname__ == "Picks.forward"  # as it was


def test_the_steps_of_equal_modules_are_equal():
    steps = [Step(Picks()), Step(Picks())]
    captured = [capture_step(step, torch.randn(6, 4)) for step in steps]
    assert captured[0].graph_digest == captured[1].graph_digest
    targets = [next(op.call.target for op in c.ops if "Picks" in op.call.target_name) for c in captured]
    assert targets[0] is not targets[1]


def test_refusals_name_the_line():
    with pytest.raises(CaptureError, match="rows = "):
        capture_step(Step(Remembers()), torch.ones(8, 4))
