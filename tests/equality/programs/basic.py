"""Steps whose numbers depend on which samples are a rank's: what one device would compute on all
samples is something else than DDP.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Program(pl.LightningModule):
    """A step that logs its loss; `example(generator)` makes the samples of one rank's batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("own", loss)
        self.log("mean", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def pairs(generator: torch.Generator, num: int = 4) -> tuple[Tensor, Tensor]:
    """Return x [num, 6] and classes [num] of three."""
    x = torch.randn(num, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (num,), generator=generator)


class IgnoredTargets(Program):
    """A mean over the targets that count: every rank has its own number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y, ignore_index=1)


class BatchNorms(Program):
    """Statistics of the rank's samples; buffers are those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)
        )

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 3, 4, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 4, (4,), generator=generator)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Contrastive(Program):
    """SimCLR: every sample against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        views = torch.cat([self.encoder(x), self.encoder(x + 0.1)])
        z = F.normalize(views, dim=1)
        scores = z @ z.T / 0.5
        num = len(x)
        scores = scores.masked_fill(torch.eye(2 * num, dtype=torch.bool, device=self.device), -1e9)
        others = torch.arange(num, device=self.device)
        return F.cross_entropy(scores, torch.cat([others + num, others]))


class MaskedTokens(Program):
    """A mean over the tokens of a mask, weighted by class weights that come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "ids": torch.randint(0, 11, (4, 5), generator=generator),
            "mask": torch.rand(4, 5, generator=generator) > 0.3,
            "weight": torch.rand(11, generator=generator, dtype=torch.float64),
            "scale": torch.rand((), generator=generator, dtype=torch.float64),
        }

    def loss(self, batch: Any) -> Tensor:
        ids, mask = batch["ids"], batch["mask"]
        h = self.embedding(ids)
        h = h + self.attention(h, h, h, key_padding_mask=~mask, need_weights=False)[0]
        scores = self.head(self.norm(h)).transpose(1, 2)
        losses = F.cross_entropy(scores, ids, weight=batch["weight"], reduction="none")
        return (losses * mask).sum() / mask.sum() * (1 + batch["scale"])


class Episode(Program):
    """The first samples are the support of the others; the sum is divided by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        z = self.encoder(x)
        prototype = z[:2].mean(0)
        distance = ((z[2:] - prototype) ** 2).sum() / len(x)
        return distance + z[0].norm() + z.sort(0).values[1].sum() + z.var(0).mean()


class KeepsValues(Program):
    """A layer that keeps its own loss, a teacher that follows, a count of calls, averages in plain
    attributes, and a BatchNorm with a cumulative average.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())
        self.teacher, self.head = nn.Linear(8, 3), nn.Linear(8, 3)
        self.teacher.requires_grad_(False)
        self.calls = 0
        self.mean: Tensor | None = None
        self.scale = torch.ones(3)

    example = staticmethod(pairs)

    def features(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.inner.penalty = h.square().mean()
        return h

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.calls += 1
        h = self.features(x)
        with torch.no_grad():
            pairs_of = zip(self.teacher.parameters(), self.head.parameters(), strict=True)
            for teacher, student in pairs_of:
                teacher.data = teacher.data * 0.9 + student.data * 0.1
            target = self.teacher(h).softmax(-1)
        scores = self.head(h) - (0.0 if self.mean is None else self.mean)
        self.mean = scores.detach().mean(0)
        self.scale.mul_(0.9).add_(scores.detach().square().mean(0), alpha=0.1)
        scores = scores / self.scale.sqrt()
        distance = (scores.softmax(-1) - target).square().mean()
        return F.cross_entropy(scores, y) + distance / self.calls + self.inner.penalty

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("penalty", self.inner.penalty.detach())


class LoadBalancing(Program):
    """A mixture of experts whose auxiliary loss is a product of means over the rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        used = F.one_hot(chosen, 3).to(x.dtype).mean((0, 1))
        return F.cross_entropy(self.head(out), y) + (used * probabilities.mean(0)).sum()


class Recurrent(Program):
    """An RNN whose first state is made of the batch size, and a loss divided by a loader's."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out, last = self.rnn(
            x.view(len(x), 2, 3), torch.zeros(1, len(x), 5, dtype=x.dtype, device=self.device)
        )
        score = self.head(out[:, -1] + last[0]).squeeze(-1)
        return (score - y).pow(2).sum() / self.trainer.train_dataloader.batch_size


PROGRAMS = (
    IgnoredTargets,
    BatchNorms,
    Contrastive,
    MaskedTokens,
    Episode,
    LoadBalancing,
    KeepsValues,
    Recurrent,
)
