"""Layers that callbacks, or steps, freeze and unfreeze: all ranks train the same ones, wherever
these lie.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from models import MLP
from test_training import assert_same, train
from torch import Tensor, nn


class Finetuned(MLP):
    """Its backbone trains from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
            nn.Linear(8, 4),
        )
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.head(self.backbone(self.net(batch[0]))), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]


def run_train(root: str, strategy: dict[str, Any]) -> Any:
    return train(Finetuned, root, strategy, max_epochs=3)


@pytest.mark.parametrize(
    "strategy", [{"num_stages": 2, "num_microbatches": 2}, {"parallel": "zero3"}], ids=str
)
def test_layers_that_lightning_unfreezes(pool, tmp_path, strategy: dict[str, Any]) -> None:
    reference = train(Finetuned, str(tmp_path), None, max_epochs=3)
    for run in pool.run(2, run_train, str(tmp_path), strategy):
        assert_same(run, reference)


class FrozenAtFirst(nn.Linear):
    """Does not train in the first epoch, as prototypes of clusters do."""

    epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        self.requires_grad_(self.epoch > 0)
        return super().forward(x)


class Prototypes(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.head = FrozenAtFirst(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.head.epoch = self.current_epoch
        loss = F.mse_loss(self.head(self.net(batch[0])), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss


def run_prototypes(root: str, strategy: dict[str, Any]) -> Any:
    return train(Prototypes, root, strategy, max_epochs=3)


@pytest.mark.parametrize("parallel", ["data", "zero2", "zero3"])
def test_what_a_step_freezes_it_may_unfreeze(pool, tmp_path, parallel: str) -> None:
    reference = train(Prototypes, str(tmp_path), None, max_epochs=3)
    for run in pool.run(2, run_prototypes, str(tmp_path), {"parallel": parallel}):
        assert_same(run, reference)
