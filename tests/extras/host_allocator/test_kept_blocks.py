"""Eager steps keep freed memory: its pages are not requested from the system in every step."""

from __future__ import annotations

import multiprocessing
import resource
from itertools import pairwise
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy

# activations of 8 MB
ROWS = 512
WIDTH = 4096
LAYERS = 6
STEPS = 24


class Wide(pl.LightningModule):
    """Its activations are much more than its parameters. [rows, 1] -> [rows, WIDTH] -> ..."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))
        self.faults: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        x = batch[0].expand(-1, WIDTH)
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def faults_of_a_step(root: str) -> float:
    strategy = AlpaStrategy(capture="never", parallel="data", cluster="pcie_8gpu")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=STEPS,
        default_root_dir=root,
        **QUIET,
    )
    module = Wide()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(ROWS * STEPS, 1)), ROWS))
    # Blocks find their places in the first dozen steps: until then the heap grows by a few of them
    # now and then.
    return median(b - a for a, b in pairwise(module.faults[STEPS // 2 :]))


def test_pages_are_kept(tmp_path):
    pages = LAYERS * ROWS * WIDTH * 4 // resource.getpagesize()
    # A process of its own: the heap of one that other tests have used takes longer to find places.
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        assert fresh.apply(faults_of_a_step, (str(tmp_path),)) < 0.05 * pages
