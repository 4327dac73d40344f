"""Trainings for the checkpoint tests: a small GPT in fp64 with dropout, shuffling, clipping, a
schedule, recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from equality.harness import Rows
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from models import GPT
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy

STEPS_PER_EPOCH = 4
ROWS_PER_STEP = 8

ONE_STAGE = {
    "zero3": {"parallel": "zero3"},
    "zero2": {"parallel": "zero2"},
    "tensor": {"parallel": "tensor"},
    "data": {"parallel": "data"},
}
PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}


class Scheduled(GPT):
    """Weight decay for matrices only, and a learning rate that changes every step."""

    def __init__(
        self, dropout: float = 0.1, schedule: bool = True, num_layers: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(num_layers=num_layers, vocab_size=33, dropout=dropout, **kwargs)
        self.schedule = schedule
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


class Recorder(pl.Callback):
    """Loss, learning rates and unsharded weights after every step, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *unused: Any
    ) -> None:
        store = trainer.strategy.store if isinstance(trainer.strategy, AlpaStrategy) else None
        weights = {}
        for name, parameter in module.named_parameters():
            weights[name] = (
                parameter.detach() if store is None else store.gather(parameter)
            ).clone()
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        # Each rank has the loss of its own batch.
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.steps[trainer.global_step] = {
            "loss": float(loss),
            "lr": rates,
            "weights": weights,
        }


class Keep(ModelCheckpoint):
    """A checkpoint every `every` steps, all kept."""

    def __init__(self, folder: str, every: int, **kwargs: Any) -> None:
        super().__init__(folder, "{step}", save_top_k=-1, every_n_train_steps=every, **kwargs)


def make_trainer(
    root: str, options: dict[str, Any] | None, devices: int, **arguments: Any
) -> pl.Trainer:
    strategy: Any = "auto"
    if options is not None:
        strategy = AlpaStrategy(
            cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, **options
        )
    defaults = {
        "accelerator": "cpu",
        "precision": "64-true",
        **QUIET,
        "enable_checkpointing": any(
            isinstance(c, Checkpoint) for c in arguments.get("callbacks", ())
        ),
        "default_root_dir": root,
        "gradient_clip_val": 0.1,
    }
    return pl.Trainer(devices=devices, strategy=strategy, **{**defaults, **arguments})


def make_model(**kwargs: Any) -> Scheduled:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        return Scheduled(**kwargs)
    finally:
        torch.set_default_dtype(torch.float32)


def make_loader(model: GPT, devices: int, steps: int = STEPS_PER_EPOCH) -> DataLoader:
    """`steps` batches an epoch on every rank, shuffled; the Trainer adds the sampler."""
    rows = Rows(model.example_batch(ROWS_PER_STEP * steps, torch.Generator().manual_seed(3)))
    return DataLoader(rows, batch_size=ROWS_PER_STEP // devices, shuffle=True)


def fit(
    root: str,
    options: dict[str, Any] | None,
    devices: int,
    max_steps: int,
    ckpt_path: str | None = None,
    steps: int = STEPS_PER_EPOCH,
    model_kwargs: dict[str, Any] | None = None,
    loader: Any = None,
    val_loader: Any = None,
    **arguments: Any,
) -> tuple[pl.Trainer, Scheduled, dict[int, dict[str, Any]]]:
    """Train to `max_steps`; what `Recorder` saw."""
    recorder = Recorder()
    callbacks = [*arguments.pop("callbacks", ()), recorder]
    trainer = make_trainer(
        root, options, devices, max_steps=max_steps, callbacks=callbacks, **arguments
    )
    model = make_model(**(model_kwargs or {}))
    torch.manual_seed(11)  # dropout; every rank alike, as after seed_everything
    if loader is None:
        loader = make_loader(model, devices, steps)
    trainer.fit(model, loader, val_loader, ckpt_path=ckpt_path)
    return trainer, model, recorder.steps


def whole_state(trainer: pl.Trainer, model: Any) -> dict[str, Any]:
    """Parameters, and the optimizer's state and groups, after a training."""
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
    }


def assert_bitwise(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_device=False)


def checkpoint_at(root: str, step: int) -> str:
    return str(Path(root) / "kept" / f"step={step}.ckpt")
