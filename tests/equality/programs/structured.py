"""Graphs, sets, bags, several tasks: batches whose leaves have different first dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality.programs.basic import Program, pairs
from torch import Tensor, nn


class GraphClassification(Program):
    """Nodes of several graphs in one tensor, with edges and a graph index, as in PyG."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(12, 6, generator=generator, dtype=torch.float64),
            "edges": torch.randint(0, 12, (2, 20), generator=generator),
            "graph": torch.arange(3).repeat_interleave(4),
            "y": torch.randint(0, 3, (3,), generator=generator),
        }

    def convolve(self, layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.zeros(len(x), dtype=x.dtype, device=self.device).index_add(
            0, target, torch.ones(edges.shape[1], dtype=x.dtype, device=self.device)
        )
        return layer(x + messages / degree.clamp(min=1)[:, None])

    def loss(self, batch: Any) -> Tensor:
        h = F.relu(self.norm(self.convolve(self.first, batch["x"], batch["edges"])))
        h = self.convolve(self.second, h, batch["edges"])
        pooled = torch.zeros(3, 8, dtype=h.dtype, device=self.device).index_add(
            0, batch["graph"], h
        )
        return F.cross_entropy(self.head(pooled), batch["y"])


class LinkPrediction(Program):
    """Scores of edges between nodes of a graph that every rank has its own part of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, 6)
        self.net = nn.Linear(6, 6)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "nodes": torch.randint(0, 15, (8,), generator=generator),
            "positive": torch.randint(0, 8, (2, 5), generator=generator),
            "negative": torch.randint(0, 8, (2, 7), generator=generator),
        }

    def loss(self, batch: Any) -> Tensor:
        h = self.net(self.embedding(batch["nodes"]))

        def scores(edges: Tensor) -> Tensor:
            return (h[edges[0]] * h[edges[1]]).sum(-1)

        positive, negative = scores(batch["positive"]), scores(batch["negative"])
        return F.softplus(-positive).mean() + F.softplus(negative).mean()


class DeepSets(Program):
    """Sets of different sizes as one tensor with lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.outer = nn.Linear(16, 1)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "x": torch.randn(4, 5, 6, generator=generator, dtype=torch.float64),
            "size": torch.randint(1, 6, (4,), generator=generator),
            "y": torch.randn(4, generator=generator, dtype=torch.float64),
        }

    def loss(self, batch: Any) -> Tensor:
        h = self.inner(batch["x"])
        mask = (torch.arange(5, device=self.device) < batch["size"][:, None])[..., None]
        mean = (h * mask).sum(1) / batch["size"][:, None]
        largest = h.masked_fill(~mask, -1e9).max(1).values
        out = self.outer(torch.cat([mean, largest], -1)).squeeze(-1)
        return F.huber_loss(out, batch["y"])


class EmbeddingBags(Program):
    """Values of all bags in one tensor, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 6, mode="sum")
        self.dense, self.head = nn.Linear(3, 6), nn.Linear(6, 1)

    @staticmethod
    def example(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "values": torch.randint(0, 20, (10,), generator=generator),
            "offsets": torch.tensor([0, 2, 5, 6]),
            "dense": torch.randn(4, 3, generator=generator, dtype=torch.float64),
            "click": torch.randint(0, 2, (4,), generator=generator).double(),
        }

    def loss(self, batch: Any) -> Tensor:
        sparse = self.bags(batch["values"], batch["offsets"])
        dense = self.dense(batch["dense"])
        score = self.head(F.relu(sparse * dense)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, batch["click"])


class UncertainTasks(Program):
    """Two tasks weighted by learned uncertainties, logged as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ELU())
        self.classes, self.value = nn.Linear(8, 3), nn.Linear(8, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    example = staticmethod(pairs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.body(x)
        losses = torch.stack(
            [
                F.cross_entropy(self.classes(h), y, weight=torch.tensor([1.0, 2.0, 0.5]).to(x)),
                F.l1_loss(self.value(h).squeeze(1), x.sum(1)),
            ]
        )
        self.log_dict({"classes": losses[0], "value": losses[1]}, batch_size=len(x))
        return (losses * (-self.log_variances).exp() + self.log_variances).sum()


class Quantiles(Program):
    """Quantiles of the residuals of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1)

    example = staticmethod(pairs)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        residual = (self.net(x).squeeze(1) - y).abs()
        middle = residual.median()
        return F.relu(residual - middle).mean() + 0.1 * middle + 0.1 * residual.topk(2).values.sum()


PROGRAMS = (
    GraphClassification,
    LinkPrediction,
    DeepSets,
    EmbeddingBags,
    UncertainTasks,
    Quantiles,
)
