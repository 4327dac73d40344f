"""What a notebook's cells do. Run by `python -i`, as test_notebook.py does; prints a line of JSON
for each cell of the command line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import alpa_strategy
from alpa_strategy import AlpaStrategy

FOLDER = sys.argv[1]

# Cells before have computed with several threads, which workers cannot have.
torch.set_num_threads(2)
assert (torch.ones(600, 600) @ torch.ones(600, 600)).sum() > 0


class Line(lightning.LightningModule):
    """Fits a line. `fails_on`: the rank that raises an error; `dies_on`: that is killed."""

    def __init__(self, fails_on: int = -1, dies_on: int = -1) -> None:
        super().__init__()
        self.fails_on = fails_on
        self.dies_on = dies_on
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", (self.layer(x) - y).square().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == self.fails_on:
            raise ZeroDivisionError("a mistake of rank 1")
        if self.global_rank == self.dies_on:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LateLine(Line):
    """Builds its layer in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(4, 1)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def trainer(strategy: Any = None, **arguments: Any) -> lightning.Trainer:
    if strategy is None:
        strategy = AlpaStrategy(start_method="fork", cluster="localhost", verbose=False)
    defaults = {"enable_checkpointing": False, "max_epochs": 2, "logger": False}
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        **{**defaults, **arguments},
    )


def error(value: float) -> float:
    """How far a module's line is from the data's."""
    return float((module.layer.weight - value).abs().max())


module = Line()


def fit_twice() -> dict[str, Any]:
    """Two Trainers, one after the other."""
    errors = [error(1.0)]
    seen = []
    for _ in range(2):
        run = trainer()
        run.fit(module, loader())
        errors.append(error(1.0))
        seen.append([run.global_step, run.current_epoch, run.state.finished])
    return {
        "errors": errors,
        "seen": seen,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "plan_devices": run.strategy.plan.stages[0].logical_mesh,
        "variables": [name for name in ("LOCAL_RANK", "MASTER_PORT") if name in os.environ],
    }


def raise_in_worker() -> dict[str, Any]:
    try:
        trainer().fit(Line(fails_on=1), loader())
    except ZeroDivisionError as raised:
        return {"text": str(raised), "cause": str(raised.__cause__)}
    return {}


def ask_for_alpa() -> dict[str, Any]:
    try:
        trainer("alpa")
    except alpa_strategy.AlpaError as raised:
        return {"fix": raised.fix}
    return {}


def train_by_name() -> dict[str, Any]:
    """The registered name, on measured costs, with callbacks and a checkpoint."""
    stopping = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    checkpoint = ModelCheckpoint(FOLDER + "/checkpoints", monitor="val_loss")
    run = trainer(
        "alpa_notebook",
        callbacks=[stopping, checkpoint],
        enable_checkpointing=True,
        max_epochs=5,
    )
    run.fit(module, loader(), loader())
    return {
        "stopped_epoch": stopping.stopped_epoch,
        "has_best": os.path.exists(checkpoint.best_model_path),
        "best": float(checkpoint.best_model_score),
    }


def evaluate() -> dict[str, Any]:
    run = trainer()
    validated = run.validate(module, loader(), verbose=False)
    predicted = run.predict(module, loader())
    return {"validated": validated, "num_predicted": len(predicted)}


def lose_a_worker() -> dict[str, Any]:
    try:
        trainer().fit(Line(dies_on=1), loader())
    except alpa_strategy.AlpaError as raised:
        return {"problem": raised.problem}
    return {}


def build_late() -> dict[str, Any]:
    late = LateLine()
    trainer(max_epochs=4).fit(late, loader())
    return {"error": float((late.layer.weight - 1.0).abs().max())}


def fit_the_same_trainer() -> dict[str, Any]:
    run = trainer()
    run.fit(module, loader())
    try:
        run.fit(module, loader())
    except alpa_strategy.AlpaError as raised:
        return {"problem": raised.problem}
    return {}


for cell in sys.argv[2:]:
    print(json.dumps({cell: globals()[cell]()}), flush=True)
