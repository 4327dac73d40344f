"""LightningModules whose values cross many stages: read everywhere, complex, integers, parameters
used three times.

Importing this file adds them to `models.MODELS`. Ordinary user code, as in models.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import MODELS, TestModel
from torch import Tensor, nn


class Everywhere(TestModel):
    """Every layer reads the outputs of all before it, a condition and a scalar gate. Batch: (x [B,
    D], c [B, 3], y).
    """

    def __init__(
        self, width: int = 6, depth: int = 6, optimizer: str = "adamw", lr: float = 1e-2
    ) -> None:
        super().__init__(optimizer, lr)
        self.width = width
        self.condition = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width * (i + 2), width) for i in range(depth))
        self.gate = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, 3)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, condition, y = batch
        condition, outputs = torch.tanh(self.condition(condition)), [x]
        for layer in self.layers:
            outputs.append(F.gelu(layer(torch.cat([*outputs, condition], -1))) * self.gate)
        loss = F.mse_loss(self.head(outputs[-1] + outputs[1]), y)
        self.log_dict({"loss": loss, "condition": condition.mean()})
        self.log("middle", outputs[3].abs().max(), reduce_fx="max")
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ...]:
        dtype = self.head.weight.dtype
        sizes = (self.width, 3, 3)
        return tuple(
            torch.randn(batch_size, size, generator=generator, dtype=dtype) for size in sizes
        )


class ThreeTimes(TestModel):
    """A linear layer at the beginning, in the middle and at the end, one norm everywhere, a head
    tied to the embedding
    with a bias of its own; a weighted sum for a loss. Batch: {"tokens" [B, T], "labels" [B, T] with
    -100}."""

    def __init__(
        self,
        vocab_size: int = 23,
        width: int = 8,
        seq_len: int = 5,
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.embed = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, vocab_size)
        self.head.weight = self.embed.weight
        self.register_buffer("class_weight", torch.linspace(0.5, 2, vocab_size))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, labels = self.mix(self.embed(batch["tokens"])), batch["labels"]
        for number, block in enumerate(self.blocks):
            x = x + block(self.norm(x))
            if number == 1:
                x = x + torch.tanh(self.mix(x))
        logits = self.head(self.norm(self.mix(x)))
        loss = (
            F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), weight=self.class_weight, reduction="sum"
            )
            / 7
        )
        self.log_dict(
            {"loss": loss, "right": (logits.argmax(-1) == labels).double().mean()}, on_epoch=True
        )
        return {"loss": loss, "predicted": logits.argmax(-1)}

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        shape = (batch_size, self.seq_len)
        tokens, labels = (
            torch.randint(self.vocab_size, shape, generator=generator) for _ in range(2)
        )
        return {
            "tokens": tokens,
            "labels": torch.where(torch.rand(shape, generator=generator) < 0.4, -100, labels),
        }


class Fourier(TestModel):
    """Filters in the frequency domain: complex values cross stages, weights are real pairs. Batch:
    (x, y) [B, 3, D].
    """

    def __init__(
        self, width: int = 8, depth: int = 4, optimizer: str = "adamw", lr: float = 1e-2
    ) -> None:
        super().__init__(optimizer, lr)
        self.width = width
        self.filters = nn.ParameterList(
            nn.Parameter(torch.randn(width // 2 + 1, 2)) for _ in range(depth)
        )
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        spectrum = torch.fft.rfft(x, dim=-1)
        for weight, mix in zip(self.filters, self.mixes, strict=True):
            spectrum = spectrum * torch.view_as_complex(weight)
            h = torch.fft.irfft(spectrum, n=self.width, dim=-1)
            spectrum = spectrum + 0.1 * torch.fft.rfft(h + torch.tanh(mix(h)), dim=-1)
        return F.mse_loss(torch.fft.irfft(spectrum, n=self.width, dim=-1), y)

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        shape, dtype = (batch_size, 3, self.width), self.mixes[0].weight.dtype
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


class Derived(TestModel):
    """Weights made of parameters: weight norm, a product of two, one shared by all layers, a
    penalty on the loss; some
    parameters are used as they are, too, and one is frozen. Batch: (x [B, D], y [B, D])."""

    def __init__(
        self, width: int = 6, depth: int = 3, optimizer: str = "adamw", lr: float = 1e-2
    ) -> None:
        super().__init__(optimizer, lr)
        self.width = width
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Linear(width, width)) for _ in range(depth)
        )
        self.left, self.right = (
            nn.Parameter(torch.randn(width, 2)),
            nn.Parameter(torch.randn(2, width)),
        )
        self.mix = nn.Parameter(torch.randn(width, depth))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        product = self.left @ self.right + torch.arange(self.width) * 0.1
        weights = torch.softmax(self.mix * self.scale[:, None], dim=-1)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) + x @ product.t()) * weights[:, number] + self.frozen.exp()
        x = x * self.mix[:, 0] + x @ product
        penalty = 0.01 * sum(p.square().sum() for p in (self.left, self.mix))
        self.log("penalty", penalty)
        loss = F.mse_loss(x, y) + penalty
        self.log("loss", loss)
        return loss

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ...]:
        sizes = (batch_size, self.width)
        return tuple(
            torch.randn(sizes, generator=generator, dtype=self.left.dtype) for _ in range(2)
        )


class Routed(TestModel):
    """Integers, booleans and indices made in the first stage are read by the last. Batch: (tokens,
    labels) [B, T].
    """

    def __init__(
        self, vocab_size: int = 11, width: int = 8, optimizer: str = "adamw", lr: float = 1e-2
    ) -> None:
        super().__init__(optimizer, lr)
        self.vocab_size, self.width = vocab_size, width
        self.embed = nn.Embedding(vocab_size, width)
        self.router = nn.Linear(width, 3)
        self.experts = nn.Embedding(3, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, vocab_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        x = self.embed(tokens)
        share = self.router(x).softmax(-1)
        chosen = share.argmax(-1)
        is_odd = (tokens % 2).bool()
        segment = tokens // 4
        for layer in self.layers:
            x = x + layer(x)
        x = x + self.experts(chosen) * share.gather(-1, chosen[..., None])
        x = torch.where(is_odd[..., None], x, x * 0.5) + F.one_hot(segment, self.width).to(x.dtype)
        self.log("odd", is_odd.sum().double(), reduce_fx="sum", on_epoch=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def example_batch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.randint(self.vocab_size, (batch_size, 4), generator=generator) for _ in range(2)
        )


CROSSING = {
    "everywhere": Everywhere,
    "three_times": ThreeTimes,
    "fourier": Fourier,
    "routed": Routed,
}
MODELS.update(CROSSING | {"derived": Derived})
