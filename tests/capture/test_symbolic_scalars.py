"""Numbers made of the step's counters: one captured graph for all steps, each with the number of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import cos, exp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import COUNTERS
from alpa_strategy.ir.run_step import run_step

Form = Callable[[Any, Tensor, int], Any]


class Step(LightningModule):
    def __init__(self, function: Form, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.function = nn.Linear(4, 4, dtype=dtype), function
        self.register_buffer("mean", torch.zeros(4, dtype=dtype))
        self._trainer = SimpleNamespace(
            global_step=3, current_epoch=0, max_steps=40, num_training_batches=7, loggers=[]
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.function(self, batch, batch_idx)

    def ramp(self) -> float:
        p = np.clip(self.global_step / self.trainer.max_steps, 0.0, 1.0)
        return 2.0 / (1.0 + math.exp(-10 * p)) - 1.0


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


def moving_average(self: Step, x: Tensor, i: int) -> Tensor:
    decay = min(0.999, (1 + self.global_step) / (10 + self.global_step))
    with torch.no_grad():
        self.mean.mul_(decay).add_(x.mean(0) * (1 - decay))
    return (self.a(x) - self.mean).square().mean()


def moving_average_at_once(self: Step, x: Tensor, i: int) -> Tensor:
    decay = 1 - 1 / (1 + self.global_step)
    self.mean.mul_(decay).add_(x.detach().mean(0), alpha=1 - decay)
    return torch.addcmul(self.a(x), x, x, value=0.1 * self.global_step).square().sum()


def teacher_forcing(self: Step, x: Tensor, i: int) -> Tensor:
    own = self.a(x)
    return (
        torch.where(x.sigmoid() < 1.0 - self.global_step / 40, own, own.detach() * 2)
        .square()
        .mean()
    )


def changes_in_place(self: Step, x: Tensor, i: int) -> Tensor:
    h = self.a(x)
    h[:, 0] = self.global_step / 7
    h[:, 1] *= self.ramp()
    return h.sum()


def created(self: Step, x: Tensor, i: int) -> Tensor:
    a = torch.tensor(self.global_step / 3, dtype=x.dtype)
    b = torch.full((4,), self.global_step, dtype=x.dtype)
    c = (
        torch.full_like(x, self.ramp())
        + x.new_full((6, 1), 0.1 * self.global_step)
        + x.new_tensor(self.ramp())
    )
    return (self.a(x) * a + b * c).sum()


def distribution(self: Step, x: Tensor, i: int) -> Tensor:
    return (
        self.a(x).sum()
        * torch.distributions.Normal(self.global_step / 7, 1 + self.ramp()).log_prob(x).sum()
    )


def stacked(self: Step, x: Tensor, i: int) -> Tensor:
    parts = torch.stack([self.a(x).sum(), x.sum() * self.ramp()])
    return (
        parts.pow(2).sum()
        + torch.distributions.Normal(self.a(x), 1 + self.ramp()).log_prob(x).sum()
    )


FORMS: dict[str, Form] = {
    "factor": lambda self, x, i: self.a(x).sum() * (self.global_step / 1000),
    "factor first": lambda self, x, i: 0.1 * self.global_step * self.a(x).sum(),
    "added": lambda self, x, i: self.a(x).sum() + self.global_step,
    "taken from": lambda self, x, i: (self.global_step - self.a(x)).sum(),
    "divisor": lambda self, x, i: (self.a(x) / (1 + self.global_step / 10)).softmax(-1)[:, 0].sum(),
    "dividend": lambda self, x, i: ((1 + self.global_step) / (5 + self.a(x).square())).sum(),
    "warm-up": lambda self, x, i: (
        self.a(x).sum() + min(1.0, self.global_step / 1000) * self.a(x).square().sum()
    ),
    "decay": lambda self, x, i: self.a(x).sum() * 0.99**self.global_step,
    "decay with a floor": lambda self, x, i: (
        self.a(x).sum() * max(0.1, 0.9 ** (self.global_step // 3))
    ),
    "cosine": lambda self, x, i: (
        self.a(x).sum() * 0.5 * (1 + math.cos(math.pi * self.global_step / 40))
    ),
    "cosine by name": lambda self, x, i: (
        self.a(x).sum() * (cos(self.global_step / 9) + exp(-self.global_step))
    ),
    "of the trainer": lambda self, x, i: (
        self.a(x).sum() * (1 - self.trainer.global_step / self.trainer.max_steps)
    ),
    "batch number": lambda self, x, i: (
        self.a(x).sum() * (self.current_epoch * self.trainer.num_training_batches + i)
    ),
    "cyclic": lambda self, x, i: (
        self.a(x).sum() * ((self.global_step % 10) / 10) * abs(5 - self.global_step % 10)
    ),
    "rounded": lambda self, x, i: (
        self.a(x).sum() * round(self.global_step / 7, 2) * math.floor(self.global_step / 7)
    ),
    "NumPy": lambda self, x, i: self.a(x).sum() * np.exp(-self.global_step / 10) * np.float64(3.0),
    "turned into floats": lambda self, x, i: (
        self.a(x).sum() * (float(self.global_step) / float(max(1, 7)) + int(i / 2))
    ),
    "ramp": lambda self, x, i: self.a(x).sum() * self.ramp(),
    "power of a tensor": lambda self, x, i: (self.a(x).abs() ** (1 + self.global_step / 10)).sum(),
    "square": lambda self, x, i: (self.a(x) ** (self.global_step - self.global_step + 2)).sum(),
    "power of a number": lambda self, x, i: ((1 + self.global_step / 10) ** self.a(x)).sum(),
    "threshold": lambda self, x, i: (
        ((x > self.global_step / 20) * self.a(x)).sum() + (self.global_step / 30 < x).sum()
    ),
    "clamped": lambda self, x, i: (
        self.a(x).clamp(-self.global_step / 10, self.global_step / 10).sum()
    ),
    "clamped below": lambda self, x, i: self.a(x).clamp(min=self.global_step / 40).sum(),
    "clamped to both": lambda self, x, i: (
        self.a(x).clamp(self.global_step / 90, self.global_step / 40).sum()
    ),
    "vector": lambda self, x, i: (
        torch.tensor([1, self.global_step / 9, self.ramp(), i]) * self.a(x)
    ).sum(),
    "chosen": lambda self, x, i: torch.where(x > 0, self.a(x), self.global_step / 10).sum(),
    "masked": lambda self, x, i: self.a(x).masked_fill(x > 0, self.global_step / 10).sum(),
    "mixed": lambda self, x, i: torch.lerp(self.a(x), x, self.global_step / 40).sum(),
    "teacher forcing": teacher_forcing,
    "reversed gradient": lambda self, x, i: Reversed.apply(self.a(x), self.ramp()).square().sum(),
    "in place": changes_in_place,
    "created": created,
    "stacked": stacked,
    "distribution": distribution,
    "noise": lambda self, x, i: (
        self.a(x) + 0.0 * torch.randn_like(x) * (1 - self.global_step / 40)
    ).sum(),
    "noise left out": lambda self, x, i: F.dropout(
        self.a(x), self.global_step / 100, training=False
    ).sum(),
    "slope": lambda self, x, i: F.leaky_relu(self.a(x), 1 / (1 + self.global_step)).sum(),
    "threshold of a loss": lambda self, x, i: F.huber_loss(
        self.a(x), x, delta=1 + self.global_step / 10
    ),
    "interpolated": lambda self, x, i: (
        self.a(x).sum() * np.interp(self.global_step, [0, 10, 40], [0.0, 1.0, 0.3])
    ),
    "moving average": moving_average,
    "moving average at once": moving_average_at_once,
    "whole numbers": lambda self, x, i: (
        self.a(x).sum() * ((x > 0).long() * self.global_step % 5).sum()
    ),
    "logged": lambda self, x, i: (self.log("beta", self.ramp()), self.a(x).sum() * self.ramp())[1],
}


GROUPS = [tuple(FORMS)[k::4] for k in range(4)]


def all_of(names: tuple[str, ...]) -> Form:
    """A step that makes the losses of several forms, and returns each."""

    def step(self: Step, x: Tensor, i: int) -> dict[str, Tensor]:
        losses = {name: FORMS[name](self, x, i) for name in names}
        return {"loss": sum(losses.values()), **losses}

    return step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_one_graph_for_all_steps(names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Bit by bit what Python's numbers give, in every dtype."""
    x = torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    graph = capture_step(Step(all_of(names), dtype), x)
    for step in (3, 9, 31):
        counters = {"batch_idx": step % 7, "global_step": step, "current_epoch": step // 7}
        assert all(guard.holds(**counters) for guard in graph.guards), graph.guards
        plain, module = Step(all_of(names), dtype), Step(all_of(names), dtype)
        vars(plain._trainer).update(counters)
        logged: dict[str, float] = {}
        plain.log = lambda name, value, logged=logged: logged.update({name: value})
        expected = plain.training_step(x, step % 7)
        expected["loss"].backward()
        outputs = run_step(
            graph,
            dict(module.named_parameters()),
            {**dict(module.named_buffers()), COUNTERS: counters},
            [x],
        )
        outputs[graph.loss].backward()
        for name, value in expected.items():
            same = outputs[graph.output[name].index]
            assert value.dtype == same.dtype
            assert torch.equal(value, same), name
        if (
            "reversed gradient" not in names or dtype != torch.bfloat16
        ):  # that number is rounded to bfloat16
            assert torch.equal(plain.a.weight.grad, module.a.weight.grad)
        updates = {
            buffer.name: outputs[buffer.update]
            for buffer in graph.buffers
            if buffer.update is not None
        }
        assert all(torch.equal(plain.get_buffer(name), new) for name, new in updates.items())
        assert {record.name: record.value.value(counters) for record in graph.logs} == logged


@pytest.mark.parametrize(
    "text", [lambda i: f"task{i % 2}", lambda i: "task" + str(i % 2)], ids=["format", "str"]
)
def test_a_text_that_chooses_is_guarded(text: Callable[[int], str]) -> None:
    factors = {"task0": 1.0, "task1": 2.0}
    step = capture_step(
        Step(lambda self, x, i: self.a(x).sum() * factors[text(i)]), torch.ones(6, 4)
    )
    holds = []
    for index in range(4):
        holds.append(all(guard.holds(batch_idx=index) for guard in step.guards))
    assert holds == [True, False, True, False]


def test_guards_and_digests_know_no_values() -> None:
    """A comparison decides between two graphs; their digests, and so the plans, are the same at
    every step.
    """
    x = torch.randn(6, 4, dtype=torch.float64)

    def at(step: int, form: str) -> StepGraph:
        module = Step(FORMS[form])
        module._trainer.global_step = step
        return capture_step(module, x)

    assert [str(guard) for guard in at(3, "warm-up").guards] == [
        "(global_step / 1000 < 1.0) is True"
    ]
    first, later, last = (at(step, "warm-up") for step in (3, 17, 2000))
    assert first == later
    assert first.graph_digest == later.graph_digest != last.graph_digest
    assert [guard.holds(global_step=1001) for guard in (*first.guards, *last.guards)] == [
        False,
        True,
    ]
    assert at(3, "cosine").graph_digest == at(30, "cosine").graph_digest
    assert at(3, "cosine").graph_digest != at(3, "ramp").graph_digest


def by_item(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * (1.0, 2.0, 3.0)[i]


def as_shape(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x)[:, : self.global_step].sum()


def as_size(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() + torch.ones(self.global_step).sum()


def as_index(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x)[self.global_step].sum()


def as_scale(self: Step, x: Tensor, i: int) -> Tensor:
    return F.interpolate(self.a(x)[None], scale_factor=1 + self.global_step).sum()


def in_a_set(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * (2 if self.global_step in {100, 200} else 1)


def turns(self: Step, x: Tensor, i: int) -> Tensor:
    return sum(self.a(x).sum() for _ in range(self.global_step))


def asked(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * torch.tensor(i / 10).exp().item()


def asked_of_a_product(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * (2.0 if torch.tensor(2.0) * self.global_step > 6.5 else 1.0)


@pytest.mark.parametrize("form", [asked, asked_of_a_product])
def test_a_tensor_of_a_counter_is_no_constant(form: Form) -> None:
    with pytest.raises(CaptureError, match="a tensor's value is needed by Python"):
        capture_step(Step(form), torch.randn(6, 4, dtype=torch.float64))


@pytest.mark.parametrize("form", [by_item, as_shape, as_size, as_index, as_scale, in_a_set, turns])
def test_other_places_are_refused_with_the_line(form: Form) -> None:
    with pytest.raises(
        CaptureError,
        match=r"made of it stands where.*test_symbolic_scalars\.py:\d+: return .*\n.*element by",
    ):
        capture_step(Step(form), torch.randn(6, 4, dtype=torch.float64))
    assert "float" not in globals()
    assert type(cos) is type(math.cos) is type(len)
