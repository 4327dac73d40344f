"""A training on two ranks in which one of them raises an error of the user's at one place.

Arguments: the place, the rank, a folder.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import QUIET
from torch.utils.data import DataLoader, Dataset

import alpa_strategy

PLACE, RANK = sys.argv[1], int(sys.argv[2])


class Mistake(ValueError):
    """The user's own."""


def may_fail(place: str) -> None:
    if place == PLACE and int(os.environ.get("LOCAL_RANK", "0")) == RANK:
        raise Mistake("my own mistake")


class Rows(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 16:
            may_fail("dataset")
        return torch.ones(8)


class Optimizer(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        may_fail("optimizer")
        return loss


class Stops(pl.Callback):
    """A wish of one rank alone."""

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        if PLACE == "should_stop" and trainer.global_rank == RANK and trainer.global_step == 2:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if PLACE == "should_stop at an end" and trainer.global_rank == RANK:
            trainer.should_stop = True


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            may_fail("training_step")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        may_fail("validation_step")
        self.log("loss", self.layer(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        may_fail("configure_optimizers")
        return Optimizer(self.parameters(), 1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            may_fail("on_train_batch_start")

    def on_after_backward(self) -> None:
        may_fail("on_after_backward")

    def on_train_epoch_end(self) -> None:
        may_fail("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        may_fail("on_save_checkpoint")


if __name__ == "__main__":
    strategy = alpa_strategy.AlpaStrategy(cluster="pcie_8gpu", verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        callbacks=[Stops()],
        default_root_dir=sys.argv[3],
        **{**QUIET, "enable_checkpointing": PLACE == "on_save_checkpoint"},
    )
    loader = DataLoader(Rows(), batch_size=4)
    validates = "without validation" not in sys.argv[4:]
    trainer.fit(
        Module(), loader, DataLoader(torch.randn(8, 8), batch_size=4) if validates else None
    )
    print("FINISHED", flush=True)
