"""Dynamic padding on each rank: batches of forty lengths. What is prepared for new lengths must not
hold up the run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.lightning import session
from alpa_strategy.lightning.run import Run

STEPS = 200
LENGTHS = 40
BEGINNING = 10
IN_ORDER = -1  # of lengths, not at random


class Padded(IterableDataset):
    """Batches [8, T, 64]: T differs from step to step; and between the ranks, where no seed for all
    is given.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __iter__(self) -> Any:
        draw = random.Random(torch.distributed.get_rank() if self.seed is None else self.seed)
        for step in range(STEPS):
            in_order = step * LENGTHS // STEPS
            yield torch.randn(
                8, 24 + (in_order if self.seed == IN_ORDER else draw.randrange(LENGTHS)), 64
            )


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2
        )

    def training_step(self, x_BTD: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(x_BTD), x_BTD)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Seconds of the run, and of what prepares its steps: in all, and after the beginning."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds = 0.0
        self.late = 0.0

    def watch(self, owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds += seconds
                self.late += seconds if self.step >= BEGINNING else 0.0

        setattr(owner, name, timed)

    def on_train_batch_end(self, *_: Any) -> None:
        self.step += 1


def train(root: str, seed: int | None) -> tuple[float, float, float]:
    """Seconds of the run, of preparing steps, of that after the tenth step."""
    torch.manual_seed(0)
    clock = Clock()
    before = Run._captured_step, session.Session._shard
    clock.watch(Run, "_captured_step")
    clock.watch(session.Session, "_shard")
    try:
        start = time.perf_counter()
        strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False)
        common = {"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "callbacks": [clock]}
        pl.Trainer(strategy=strategy, default_root_dir=root, **common, **QUIET).fit(
            Model(), DataLoader(Padded(seed), batch_size=None)
        )
        return time.perf_counter() - start, clock.seconds, clock.late
    finally:
        Run._captured_step, session.Session._shard = before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1, 2, IN_ORDER])
def test_new_lengths_do_not_hold_up_a_run(pool, tmp_path, seed: int | None) -> None:
    for total, prepared, late in pool.run(2, train, str(tmp_path), seed):
        print(
            f"{total:.1f} s, {prepared:.2f} s for preparing steps, {late:.2f} s of it after step"
            f" {BEGINNING}"
        )
        assert prepared > 0
        assert late < 0.05 * total
