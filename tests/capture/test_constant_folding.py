"""What a step's Python may ask of tensors: values made of constants and buffers, never of the batch
or parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_capture_equality import Step, assert_same_step, example
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import changed_value


def test_mask_of_constants_decides() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h, mask = self.a(x)[None], nn.Transformer.generate_square_subsequent_mask(6)
        return self.child(h, mask=mask).pow(2).sum()

    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    step = assert_same_step(
        Step(function, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), example()
    )
    attention = [op for op in step.ops if "scaled_dot_product" in str(op.call.target)]
    assert len(attention) == 2


def test_value_written_in_place_through_a_view() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        table = torch.zeros(3, 2)
        table[1].add_(2.0)
        assert table.tolist() == [[0, 0], [2, 2], [0, 0]]
        table[2].fill_(5)
        return self.a(x).sum() * (3 if table.sum().item() == 14 else 1)

    assert_same_step(Step(function), example())


def test_buffer_decides_until_it_changes() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).sum() * (2.0 if (self.buffer > 0).all() else 1.0)

    module = Step(function)
    step = assert_same_step(module, example())
    assert changed_value(step.attributes) is None
    module.buffer.fill_(-1)
    assert changed_value(step.attributes) is not None
    assert_same_step(module, example())


def batch_writes_into_a_constant(self: Step, x: Tensor, y: Tensor) -> Tensor:
    table = torch.zeros(6, 4)
    flat = table.view(-1)
    table.copy_(x)
    return self.a(x).sum() * (2.0 if flat.sum() > 0 else 1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, y: self.a(x).sum() * (2.0 if x.sum() > 0 else 1.0),
        lambda self, x, y: self.a(x).sum() * (2.0 if self.a.weight.sum() > 0 else 1.0),
        lambda self, x, y: self.a(x).sum() * (2.0 if torch.rand(3).sum() > 0 else 1.0),
        batch_writes_into_a_constant,
    ],
)
def test_other_values_are_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match="needed by Python"):
        capture_step(Step(function), example())


def test_distributions_are_not_checked_but_noted() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        q = torch.distributions.Normal(self.a(x), self.b(x).exp())
        p = torch.distributions.Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
        loss = torch.distributions.kl_divergence(q, p).sum() - q.log_prob(x).sum()
        return (
            loss
            - torch.distributions.Categorical(logits=self.a(x), validate_args=True)
            .log_prob(y)
            .sum()
        )

    step = assert_same_step(Step(function), example())
    assert any("torch.distributions" in note for note in step.notes)


def test_default_dtype_of_the_capture_stays() -> None:
    """Under `precision="64-true"` the step runs with another default dtype than what surrounds
    it.
    """

    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        right = self.a(x).argmax(-1) == y
        share = right.sum() / len(right)
        table = (
            torch.ones(4) / 3
            + torch.full((4,), 0.1)
            + torch.arange(4) * 0.1
            + torch.linspace(0, 1, 4)
        )
        chosen = torch.where(right, 0.1, 0.7).sum()
        return (self.a(x) * table).sum() * (1 + share) + chosen

    class DoubleByDefault:
        def __enter__(self) -> None:
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: Any) -> None:
            torch.set_default_dtype(torch.float32)

    module = Step(function).double()
    assert_same_step(module, (example()[0].double(), example()[1]), context=DoubleByDefault)


def test_shared_submodule_is_left_as_it_was() -> None:
    shared = nn.Linear(4, 4)
    module = Step(
        lambda self, x, y: self.child(self.a(x)).pow(2).sum(),
        nn.Sequential(shared, nn.ReLU(), shared),
    )
    before = dict(module.named_parameters(remove_duplicate=False))
    assert_same_step(module, example())
    after = dict(module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is p for name, p in before.items())
