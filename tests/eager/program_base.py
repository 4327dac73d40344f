"""The base of programs whose steps cannot be captured: data, a small net, and its training.

A program is a LightningModule without arguments; `rows(rank)` may give each rank a loader of its
own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 6
CLASSES = 3

# samples of a batch on one rank, and batches of an epoch
ROWS = 4
BATCHES = 6


class Rows(Dataset):
    """Inputs, classes and targets of as many rows as every rank's batches need."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        self.label = torch.randint(0, CLASSES, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.label[i]


class Program(pl.LightningModule):
    """A classifier of two layers that logs its loss as users do under DDP."""

    ddp: ClassVar[str] = "ddp"
    arguments: ClassVar[dict[str, Any]] = {}  # of its Trainer
    begins_captured: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), label)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2 * ROWS * BATCHES, 1), batch_size=ROWS)
