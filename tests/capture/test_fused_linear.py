"""Fused projections are sharded segment by segment: recognised where they are, left alone where
they are not.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from models import GPT
from torch import nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.ir.run_step import run_step


class Fused(pl.LightningModule):
    """`how` takes the fused projection apart."""

    def __init__(self, how: str, bias: bool = True) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(8, 24, bias=bias)
        self.out = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        x = self.qkv(batch)
        B, T, _ = x.shape
        match self.how:
            case "split":
                q, k, v = x.split(8, dim=-1)
            case "chunk":
                q, k, v = x.chunk(3, dim=2)
            case "view":
                q, k, v = x.view(B, T, 3, 8).unbind(2)
            case "permute":
                q, k, v = x.view(B, T, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
                q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
            case "unflatten":
                q, k, v = x.unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind(0)
                q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
            case "uneven":
                q, k = x.split([8, 16], dim=-1)
                k, v = k.split(8, dim=-1)
            case "heads":
                x = x.view(B, T, 6, 4).relu()
                q, k, v = x.flatten(2).split(8, dim=-1)
            case "twice":
                q, k, v = x.split(8, dim=-1)
                v = v * x.sum()
        return self.out(q * k.sigmoid() + v).square().mean()


@pytest.mark.parametrize("how", ["split", "chunk", "view", "permute", "unflatten"])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_projections_are_segmented(how, bias):
    torch.manual_seed(0)
    module = Fused(how, bias).double()
    batch = torch.randn(2, 5, 8, dtype=torch.float64)
    step = segment_fused_linears(capture_step(module, batch))
    weight = next(p for p in step.parameters if p.name == "qkv.weight")
    assert weight.meta.shape == (3, 8, 8)
    assert weight.module_shape == (24, 8)
    parameters = {p.name: module.get_parameter(p.name).view(p.meta.shape) for p in step.parameters}
    loss = run_step(step, parameters, {}, [batch])[step.loss]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    expected = module.training_step(batch, 0)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, p in module.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("how", ["uneven", "heads", "twice"])
def test_what_is_no_fused_projection_is_left_alone(how):
    module = Fused(how)
    step = segment_fused_linears(capture_step(module, torch.randn(2, 5, 8)))
    assert all(p.module_shape is None for p in step.parameters)


def test_the_step_may_name_its_arguments_as_it_likes():
    class Short(Fused):
        def training_step(self, b, i):
            return super().training_step(b, i)

    assert capture_step(Short("split"), torch.randn(2, 5, 8)).ops


def test_shared_weights_are_left_alone():
    class Twice(Fused):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + F.linear(batch, self.qkv.weight).sum()

    step = segment_fused_linears(capture_step(Twice("split"), torch.randn(2, 5, 8)))
    assert all(p.module_shape is None for p in step.parameters)


def test_autocast_weights_are_segmented_through_their_cast():
    module = Fused("split")
    step = capture_step(
        module, torch.randn(2, 5, 8), context=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    step = segment_fused_linears(step)
    assert {p.name for p in step.parameters if p.module_shape} == {"qkv.weight", "qkv.bias"}


def test_gpt_attention_is_segmented():
    module = GPT()
    step = segment_fused_linears(capture_step(module, module.example_batch(2)))
    assert sum(p.module_shape is not None for p in step.parameters) == 2 * len(module.blocks)
