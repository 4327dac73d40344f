"""Losses that compare the samples of a batch with each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality.programs.basic import Program, pairs
from torch import Tensor, nn


def _encoder(width: int = 6, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, out))


class Clip(Program):
    """Two towers with a learned temperature, and a symmetric loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _encoder(), nn.Embedding(3, 4)
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        image = F.normalize(self.image(x), dim=-1)
        text = F.normalize(self.text(y), dim=-1)
        scores = self.log_scale.exp() * image @ text.t()
        labels = torch.arange(scores.size(0), device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


class SigLip(Program):
    """A sigmoid loss of all pairs, divided by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _encoder(), nn.Embedding(3, 4)
        self.scale, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = self.image(x) @ self.text(y).T * self.scale + self.bias
        signs = 2 * torch.eye(len(x), dtype=scores.dtype, device=self.device) - 1
        return -F.logsigmoid(signs * scores).sum() / len(x)


class BarlowTwins(Program):
    """A correlation matrix of features over the batch, behind BatchNorm without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.norm = nn.BatchNorm1d(4, affine=False)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        first, second = self.norm(self.encoder(x)), self.norm(self.encoder(x * 0.9 + 0.1))
        correlation = first.T @ second / x.shape[0]
        diagonal = torch.diagonal(correlation)
        others = correlation - torch.diag(diagonal)
        return (diagonal - 1).pow(2).sum() + 0.05 * others.pow(2).sum()


class VicReg(Program):
    """Variance and covariance of features over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        first, second = self.encoder(x), self.encoder(x.flip(1))
        similarity = F.mse_loss(first, second)
        deviation = torch.sqrt(first.var(dim=0) + 1e-4)
        variance = F.relu(1 - deviation).mean()
        centred = first - first.mean(dim=0)
        covariance = centred.T @ centred / (len(x) - 1)
        off_diagonal = covariance.flatten()[:-1].view(3, 5)[:, 1:].flatten()
        return similarity + variance + off_diagonal.pow(2).sum() / 4


class HardTriplets(Program):
    """The hardest positive and negative within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    @staticmethod
    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = pairs(generator, 6)
        return x, torch.tensor([0, 1, 2, 0, 1, 2])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.encoder(x)
        distances = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(-1)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        positive = distances.masked_fill(~same, -1.0).max(1).values
        negative = distances.masked_fill(same, 1e9).min(1).values
        return F.relu(positive - negative + 0.2).mean()


class SupervisedContrastive(Program):
    """SupCon: all samples of a class are positives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    example = staticmethod(HardTriplets.example)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = F.normalize(self.encoder(x), dim=1)
        scores = z @ z.T / 0.3
        not_self = 1 - torch.eye(len(x), dtype=scores.dtype, device=self.device)
        positives = (y[:, None] == y[None, :]) * not_self
        log_share = scores - torch.log((scores.exp() * not_self).sum(1, keepdim=True))
        return -((positives * log_share).sum(1) / positives.sum(1)).mean()


class InBatchNegatives(Program):
    """Retrieval with a correction for how often an item is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Linear(6, 4), nn.Embedding(7, 4)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        x, _ = pairs(generator)
        return {"user": x, "item": torch.randint(0, 7, (4,), generator=generator)}

    def loss(self, batch: Any) -> Tensor:
        items = batch["item"]
        scores = self.users(batch["user"]) @ self.items(items).T
        frequency = (items[:, None] == items[None, :]).to(scores.dtype).mean(1)
        return F.cross_entropy(
            scores - frequency.log(), torch.arange(len(items), device=self.device)
        )


class ListRanking(Program):
    """ListNet: a softmax over the samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = self.score(x).squeeze(-1)
        target = y.to(scores.dtype).softmax(0)
        return -(target * scores.log_softmax(0)).sum()


class NormalisedAdvantages(Program):
    """PPO's clipped ratio with advantages that are normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(6, 3), nn.Linear(6, 1)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        x, action = pairs(generator, 6)
        old = torch.rand(6, generator=generator, dtype=torch.float64).log()
        returns = torch.randn(6, generator=generator, dtype=torch.float64)
        return {"x": x, "action": action, "old": old, "returns": returns}

    def loss(self, batch: Any) -> Tensor:
        values = self.value(batch["x"]).squeeze(1)
        advantage = batch["returns"] - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        distribution = torch.distributions.Categorical(logits=self.policy(batch["x"]))
        ratio = (distribution.log_prob(batch["action"]) - batch["old"]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = F.mse_loss(values, batch["returns"])
        return policy_loss + 0.5 * value_loss - 0.01 * distribution.entropy().mean()


PROGRAMS = (
    Clip,
    SigLip,
    BarlowTwins,
    VicReg,
    HardTriplets,
    SupervisedContrastive,
    InBatchNegatives,
    ListRanking,
    NormalisedAdvantages,
)
