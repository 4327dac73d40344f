"""A step whose loss combines the samples of a rank: its micro-batches are those of full ranks."""

from __future__ import annotations

from typing import Any

import torch
from equality.harness import assert_trains_as_plain, record_model
from models import TestModel
from torch import Tensor, nn


class Contrastive(TestModel):
    """Each sample is compared with all others of the rank."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        z_BD = self.net(batch)
        loss = (z_BD @ z_BD.T).logsumexp(-1).mean()
        self.log("loss", loss)
        return loss

    def example_batch(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(batch_size, 6, generator=generator, dtype=torch.get_default_dtype())


def train(settings: dict[str, Any] | None, root: str, num_ranks: int, num_parts: int) -> dict:
    """Train for three steps; arguments as of `record_model`."""
    more = (num_ranks, None, 1, root, "64-true", num_parts)
    return record_model(Contrastive, {}, settings, 3, *more)


def test_stages_without_a_number_of_microbatches(pool, tmp_path):
    """The search passes over numbers that the step cannot be split into."""
    settings = {"num_stages": 2, "batch_scope": "rank"}
    run = pool.run(2, train, settings, str(tmp_path), 2, 1)[0]
    assert run["pipeline"][0] == 2

    def plain(*counts: int) -> dict:
        return pool.run(1, train, None, str(tmp_path), *counts, init_group=False)[0]

    assert_trains_as_plain(run, "rank", 2, False, plain)
