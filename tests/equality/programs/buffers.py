"""Steps that change buffers by a rank's samples: queues, codebooks, running statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality.programs.basic import Program, pairs
from torch import Tensor, nn


class MomentumQueue(Program):
    """MoCo: keys of the batch go into a queue of negatives; the key encoder follows slowly."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 8), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        queries = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.1)
            keys = F.normalize(self.key(x + 0.1), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        scores = torch.cat([positive, queries @ self.queue.clone()], dim=1) / 0.2
        with torch.no_grad():
            columns = (self.place + torch.arange(len(x), device=self.device)) % 8
            self.queue.index_copy_(1, columns, keys.T)
            self.place.add_(len(x)).remainder_(8)
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long, device=self.device))


class Codebook(Program):
    """VQ-VAE with codes that follow the means of what was assigned to them."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        codes = torch.randn(5, 4)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", codes.clone())

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        code = self.codes[chosen]
        with torch.no_grad():
            used = F.one_hot(chosen, 5).to(z.dtype)
            self.counts.mul_(0.9).add_(used.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(used.T @ z, alpha=0.1)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        through = z + (code - z).detach()
        return F.mse_loss(self.decoder(through), x) + 0.25 * F.mse_loss(z, code)


class RunningNorm(Program):
    """Inputs normalised by all samples that the rank has seen."""

    count: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("square", torch.ones(6))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            total = self.count + len(x)
            change = x.mean(0) - self.mean
            self.mean += change * len(x) / total
            self.square += (x.pow(2).mean(0) - self.square) * len(x) / total
            self.count.copy_(total)
        deviation = (self.square - self.mean.pow(2)).clamp(min=0.1).sqrt()
        return F.cross_entropy(self.net((x - self.mean) / deviation), y)


class CentreLoss(Program):
    """Class centres as a buffer, moved towards the samples of their class."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("centres", torch.zeros(3, 4))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.net(x)
        pull = (z - self.centres[y]).pow(2).sum(1).mean()
        with torch.no_grad():
            step = torch.zeros_like(self.centres).index_add_(0, y, z - self.centres[y])
            self.centres += 0.5 * step / (1 + torch.bincount(y, minlength=3))[:, None]
        return F.cross_entropy(self.head(z), y) + 0.1 * pull


class SelfDistillation(Program):
    """DINO: a centre of the teacher's outputs over the batch, moved slowly."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 4))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            scores = self.teacher(x)
            target = ((scores - self.centre) / 0.1).softmax(-1)
        loss = -(target * self.student(x * 0.9).log_softmax(-1)).sum(-1).mean()
        self.centre = self.centre * 0.9 + scores.mean(0, keepdim=True) * 0.1
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pairs_of_weights = zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            )
            for teacher, student in pairs_of_weights:
                teacher.lerp_(student, 0.1)


class GhostNorm(Program):
    """BatchNorm over halves of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        halves = [self.norm(part) for part in self.net(x).chunk(2)]
        return F.cross_entropy(self.head(torch.cat(halves)), y)


PROGRAMS = (MomentumQueue, Codebook, RunningNorm, CentreLoss, SelfDistillation, GhostNorm)
