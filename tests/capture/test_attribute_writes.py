"""Attributes that the step sets to tensors of its own are results of the step, which each step sets
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph, ValueRef
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.lightning.step_effects import set_attributes


class Step(LightningModule):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.layer.loss = None
        self.function = function
        self.table: Tensor | None = None
        self.length = 0
        self.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.function(self, batch)


def keeps_losses(self: Step, x: Tensor) -> Tensor:
    h = self.layer(x)
    self.layer.loss = h.square().mean()
    self.results = {"sum": h.sum(), "number": 3, "rows": [x, None]}
    return self.layer.loss + self.results["sum"]


def makes_a_table_once(self: Step, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(4.0).cos()
    return (self.layer(x) * self.table).sum()


def makes_a_longer_table(self: Step, x: Tensor) -> Tensor:
    if len(x) > self.length:
        self.length = len(x)
        self.table = torch.arange(4.0).cos()
    assert self.table is not None
    return (self.layer(x) * self.table).sum()


def counts(self: Step, x: Tensor) -> Tensor:
    self.calls += 1
    weight = min(1.0, self.calls / 4)
    return self.layer(x).sum() * weight


def values_of_step(step: StepGraph, module: Step, batch: Tensor) -> dict[int, Tensor]:
    counters = {str(place): place.value(module) for place in step.numbers}
    parameters = dict(module.named_parameters())
    values = run_step(step, parameters, {"<counters>": counters}, [batch])
    set_attributes(module, step, values, [batch], counters)
    return values


@pytest.mark.parametrize(
    "function", [keeps_losses, makes_a_table_once, makes_a_longer_table, counts]
)
def test_steps_leave_the_attributes_that_eager_steps_leave(function) -> None:
    torch.manual_seed(0)
    captured, eager = Step(function), Step(function)
    eager.load_state_dict(captured.state_dict())
    step = capture_step(captured, torch.randn(5, 3))
    for _ in range(3):
        batch = torch.randn(5, 3)
        loss = values_of_step(step, captured, batch)[step.loss]
        torch.testing.assert_close(loss, eager.training_step(batch, 0))
        assert captured.calls == eager.calls
        for name in ("table", "results"):
            torch.testing.assert_close(vars(captured).get(name), vars(eager).get(name))
        torch.testing.assert_close(captured.layer.loss, eager.layer.loss)
        if captured.layer.loss is not None:
            assert not captured.layer.loss.requires_grad
        assert changed_value(step.attributes) is None


def test_the_module_stays_as_it_was() -> None:
    module = Step(keeps_losses)
    step = capture_step(module, torch.ones(5, 3))
    assert module.layer.loss is None
    assert not hasattr(module, "results")
    assert [record.place.attribute for record in step.assigned] == ["results", "layer.loss"]
    assert isinstance(step.assigned[1].value, ValueRef)


def sets_a_view_of_a_weight(self: Step, x: Tensor) -> Tensor:
    self.results = self.layer.weight.t()
    return self.layer(x).sum()


def sets_an_object(self: Step, x: Tensor) -> Tensor:
    self.results = Step(keeps_losses)
    return self.layer(x).sum()


def table_and_another_loss(self: Step, x: Tensor) -> Tensor:
    """The first call computes another loss than later ones."""
    loss = self.layer(x).sum()
    if self.table is None:
        self.table = torch.ones(4)
        return loss * 2
    return loss


@pytest.mark.parametrize(
    "function", [sets_a_view_of_a_weight, sets_an_object, table_and_another_loss]
)
def test_what_later_steps_would_not_repeat_is_refused(function) -> None:
    with pytest.raises(CaptureError, match="sets or changes attributes"):
        capture_step(Step(function), torch.ones(5, 3))
