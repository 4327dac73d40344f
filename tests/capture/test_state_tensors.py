"""Tensors in plain attributes that one step leaves for the next are inputs of the step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.state_tensors import state_leaves
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.lightning.step_effects import set_attributes, without_writes, write_batch


class Step(LightningModule):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function
        self.mean = torch.zeros(4)
        self.pair = (torch.zeros(4), 2.0)
        self.by_name = {"sum": torch.zeros(())}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.function(self, batch)


def averages(self: Step, x: Tensor) -> Tensor:
    h = self.layer(x)
    loss = (h - self.mean).square().mean()
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return loss


def averages_in_place(self: Step, x: Tensor) -> Tensor:
    h = self.layer(x)
    self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return (h - self.mean).square().mean()


def in_a_tuple(self: Step, x: Tensor) -> Tensor:
    last, factor = self.pair
    h = self.layer(x) + last * factor
    self.pair = (h.detach()[0], factor)
    return h.square().mean()


def in_a_dict(self: Step, x: Tensor) -> Tensor:
    h = self.layer(x)
    self.by_name["sum"].add_(h.detach().sum())
    return h.square().mean() + self.by_name["sum"]


def run(step: StepGraph, module: Step, batch: Tensor) -> Tensor:
    leaves = [batch, *state_leaves(module, step.states)]
    inputs = without_writes(step, leaves)
    tensors = [inputs[entry.leaf] for entry in step.batch]
    values = run_step(step, dict(module.named_parameters()), {}, tensors)
    set_attributes(module, step, values, leaves, {})
    write_batch(step, values, leaves)
    return values[step.loss].detach()


@pytest.mark.parametrize("function", [averages, averages_in_place, in_a_tuple, in_a_dict])
def test_steps_go_on_from_what_the_last_one_left(function) -> None:
    torch.manual_seed(0)
    captured, eager = Step(function), Step(function)
    eager.load_state_dict(captured.state_dict())
    step = capture_step(captured, torch.randn(5, 3))
    assert len(step.states) == 1
    # The trace has not written into them.
    for name in ("mean", "pair", "by_name"):
        torch.testing.assert_close(vars(captured)[name], vars(eager)[name])
    for _ in range(3):
        batch = torch.randn(5, 3)
        torch.testing.assert_close(
            run(step, captured, batch), eager.training_step(batch, 0).detach()
        )
        for name in ("mean", "pair", "by_name"):
            torch.testing.assert_close(vars(captured)[name], vars(eager)[name])
        assert changed_value(step.attributes) is None


def test_another_shape_is_another_step() -> None:
    module = Step(averages)
    step = capture_step(module, torch.ones(5, 3))
    module.mean = torch.zeros(1, 4)
    assert changed_value(step.attributes) == "mean"
    module.mean = None
    assert changed_value(step.attributes) == "mean"


def under_two_names(self: Step) -> None:
    self.other = self.mean


def a_part_of_another(self: Step) -> None:
    self.other = torch.zeros(2, 4)
    self.mean = self.other[0]


def in_an_object(self: Step) -> None:
    self.other = SimpleNamespace(tensor=self.mean)


def a_buffer(self: Step) -> None:
    self.register_buffer("other", self.mean)


@pytest.mark.parametrize("share", [under_two_names, a_part_of_another, in_an_object, a_buffer])
def test_a_tensor_in_two_places_is_not_changed_in_place(share) -> None:
    def writes(self: Step, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.sum())
        return self.layer(x).sum() + getattr(self.other, "tensor", self.other).sum()

    module = Step(writes)
    share(module)
    with pytest.raises(CaptureError, match="in place"):
        capture_step(module, torch.ones(5, 3))


def test_tensors_that_come_to_share_memory_are_another_step() -> None:
    def writes(self: Step, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.sum())
        return self.layer(x).sum() + self.pair[0].add_(x.sum()).sum()

    module = Step(writes)
    step = capture_step(module, torch.ones(5, 3))
    assert changed_value(step.attributes) is None
    module.pair = (module.mean, 2.0)
    assert "share memory" in str(changed_value(step.attributes))
    with pytest.raises(CaptureError, match="in place"):
        capture_step(module, torch.ones(5, 3))


def test_each_rank_has_its_own() -> None:
    step = capture_step(Step(averages), torch.ones(5, 3), world_size=2)
    shapes = [(entry.leaf, entry.meta.shape) for entry in step.batch]
    assert shapes == [(0, (10, 3)), (1, (8,))]


def test_tensors_of_other_objects_are_refused() -> None:
    table = torch.zeros(4)

    def writes(self: Step, x: Tensor) -> Tensor:
        table.mul_(0.5).add_(x.sum())
        return self.layer(x).sum()

    table.fill_(2.0)
    with pytest.raises(CaptureError, match="no buffer in place"):
        capture_step(Step(writes), torch.ones(5, 3))
    assert table.tolist() == [2.0] * 4
