"""Plans of a model whose layers save much for their backward, under a limit."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy


class Deep(pl.LightningModule):
    """Layers that keep tensors of 6 to 24 MB for their backward: with no thread that trims, 592 MB
    were held.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [128, 512, 256, 384] * 4
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def planned_under_limit(
    root: str, limit: float | None, **options: Any
) -> tuple[Any, tuple[str, ...]]:
    """What is predicted of a plan that keeps all, and its notes. options: of the Trainer."""
    strategy = AlpaStrategy(
        cluster="pcie_8gpu",
        plan_dir=root,
        verbose=False,
        memory_limit=limit,
        num_stages=1,
        remat=False,
    )
    options |= {"default_root_dir": root, **QUIET}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **options)
    trainer.fit(Deep(), DataLoader(torch.randn(12288, 128), batch_size=12288))
    assert strategy.plan is not None
    return strategy.plan.predicted, strategy.plan.notes
