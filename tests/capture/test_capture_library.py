"""Modules of torch.nn and what surrounds them: each equals eager, statistics included, or ends in a
clear error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MLP
from test_capture_equality import Step, assert_same_step, example
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.run_step import run_step


def on_rows(self: Step, x: Tensor, y: Tensor) -> Tensor:
    return self.child(self.a(x)).pow(3).sum()


def on_sequence(self: Step, x: Tensor, y: Tensor) -> Tensor:
    out = self.child(self.a(x)[None])
    return (out[0] if isinstance(out, tuple) else out).pow(2).sum()


def on_images(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)[:, None]
    return self.child(torch.cat([h, h * 2], 1)).pow(3).sum()


def on_itself(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)[None]
    return self.child(h, h, h)[0].pow(2).sum()


def on_itself_causal(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h, mask = self.a(x)[None], nn.Transformer.generate_square_subsequent_mask(6)
    return self.child(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0].pow(2).sum()


def on_two(self: Step, x: Tensor, y: Tensor) -> Tensor:
    return self.child(self.a(x)[None], self.b(x)[None]).pow(2).sum()


def encoder(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **kwargs)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (on_rows, lambda: nn.BatchNorm1d(4).eval()),
        (on_rows, lambda: nn.BatchNorm1d(4, momentum=None)),
        (on_rows, lambda: nn.BatchNorm1d(4, momentum=None).eval()),
        (on_rows, lambda: nn.BatchNorm1d(4, track_running_stats=False)),
        (on_images, lambda: nn.InstanceNorm1d(2, affine=True)),
        (on_images, lambda: nn.InstanceNorm1d(2, track_running_stats=True).eval()),
        (on_rows, lambda: parametrizations.spectral_norm(nn.Linear(4, 3))),
        (on_rows, lambda: nn.utils.spectral_norm(nn.Linear(4, 3))),
        (on_rows, lambda: parametrizations.weight_norm(nn.Linear(4, 3))),
        (on_rows, lambda: parametrizations.orthogonal(nn.Linear(4, 3))),
        (on_itself, lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)),
        (on_itself_causal, lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        (on_sequence, encoder),
        (
            on_sequence,
            lambda: nn.TransformerEncoder(encoder(norm_first=True), 2, enable_nested_tensor=False),
        ),
        (on_sequence, lambda: nn.TransformerEncoder(encoder(), 2).eval()),
        (on_two, lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)),
        (on_sequence, lambda: nn.LSTM(4, 4, 2, dropout=0.3, bidirectional=True, batch_first=True)),
        (on_sequence, lambda: nn.GRU(4, 4, 2, batch_first=True)),
        (on_rows, lambda: nn.GRUCell(4, 4)),
    ],
)
def test_equals_eager(function: Callable[..., Any], make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_same_step(Step(function, make()), example())


def test_functional_batch_norm_with_given_statistics() -> None:
    def function(self: Any, x: Any, y: Any) -> Any:
        return F.batch_norm(self.a(x), self.buffer, self.buffer + 1).pow(3).sum()

    step = assert_same_step(Step(function), example())
    assert all(b.update is None for b in step.buffers)


def test_result_written_into_a_given_tensor() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.zeros(6, 4)
            torch.mul(x, 2, out=h)
            F.normalize(self.buffer, dim=0, out=self.buffer)
        return (self.a(x) * h).sum() + self.buffer.sum()

    step = assert_same_step(Step(function), example())
    assert [b.name for b in step.buffers if b.update is not None] == ["buffer"]


@pytest.mark.parametrize(
    ("function", "child", "message"),
    [
        (
            on_images,
            nn.InstanceNorm1d(2, track_running_stats=True, momentum=None),
            "momentum=None",
        ),
        (on_images, nn.InstanceNorm1d(2, track_running_stats=True), "running statistics"),
        (
            lambda self, x, y: (self.child(y) * x).sum(),
            nn.Embedding(4, 4, max_norm=1.0),
            "parameter child.weight",
        ),
        (
            lambda self, x, y: torch.native_batch_norm(
                self.a(x), None, None, self.buffer, self.buffer.clone(), True, 0.1, 1e-5
            )[0].sum(),
            None,
            "writes into its arguments",
        ),
        (
            lambda self, x, y: (self.a(x) * torch.rand(4, generator=torch.Generator())).sum(),
            None,
            "generator of its",
        ),
        (
            lambda self, x, y: self.a(x).sum() * self.optimizers().param_groups[0]["lr"],
            None,
            "self.optimizers",
        ),
    ],
)
def test_clear_error(function: Callable[..., Any], child: nn.Module | None, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture_step(Step(function, child), example())


@pytest.mark.parametrize("generator", ["random", "numpy.random"])
def test_numbers_of_python_and_numpy_are_refused(generator: str) -> None:
    draw = random.random if generator == "random" else np.random.rand
    before, numpy_before = random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(CaptureError, match=f"draws numbers from {generator}") as caught:
        capture_step(Step(lambda self, x, y: self.a(x).sum() * draw()), example())
    assert "torch.rand" in caught.value.fix
    assert random.getstate() == before
    assert (np.random.get_state()[1] == numpy_before).all()


def blocks(self: Step, x: Tensor) -> Tensor:
    return F.dropout(self.b(self.a(x)).relu(), 0.3)


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (
            lambda s, x, y: checkpoint(blocks, s, x, use_reentrant=False).sum(),
            "activation checkpointing",
        ),
        (
            lambda s, x, y: checkpoint_sequential(s.child, 2, s.a(x), use_reentrant=False).sum(),
            "checkpointing",
        ),
        (lambda s, x, y: saved_on_cpu(s, x), "save_on_cpu"),
    ],
)
def test_checkpointing_is_left_to_the_plan(function: Callable[..., Any], note: str) -> None:
    child = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    step = assert_same_step(Step(function, child), example())
    assert len(step.notes) == 1
    assert note in step.notes[0]
    assert capture_step(Step(lambda s, x, y: s.a(x).sum()), example()).notes == ()


class Checkpointed(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return checkpoint(self.net, batch[0], use_reentrant=False).sum()


def test_what_torch_keeps_of_a_first_call_is_no_change_of_the_step() -> None:
    vars(checkpoint.__wrapped__).pop("__dynamo_disable", None)
    module = Checkpointed()
    assert "activation checkpointing" in capture_step(module, module.example_batch(4)).notes[0]


def saved_on_cpu(self: Step, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return self.b(self.a(x)).pow(2).sum()


class Broadcast(MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        prediction = self.net(batch)
        row, whole, same = torch.broadcast_tensors(
            self.net[0].bias[:2], prediction[:, :2], prediction[:1, :2]
        )
        return (row * whole + same).sum()


def test_broadcast_tensors() -> None:
    module, batch = Broadcast(), torch.randn(4, 8)
    step = capture_step(module, batch)
    assert torch.equal(
        run_step(step, dict(module.named_parameters()), {}, [batch])[step.loss],
        module.training_step(batch, 0),
    )
