"""Trainings that are saved in the middle and resumed under another plan, or by one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from equality.harness import Rows
from models import GPT
from optimizers.matrix_optimizers import OPTIMIZERS, with_optimizer
from optimizers.peoples_optimizers import PEOPLES_OPTIMIZERS, Blocks
from quiet import QUIET
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy

NUM_STEPS = 4
ROWS_PER_STEP = 8


def train(
    root: str,
    optimizer: str,
    options: dict[str, Any] | None,
    devices: int,
    max_steps: int,
    ckpt_path: str | None = None,
    save_to: str | None = None,
) -> dict[str, Any]:
    """Train to `max_steps` on the same batches everywhere; return the weights, and the tensors of
    the full optimizer state.
    """
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(7)
        make = {**OPTIMIZERS, **PEOPLES_OPTIMIZERS}[optimizer]
        model = with_optimizer(GPT, make)(num_layers=2, vocab_size=33)
    finally:
        torch.set_default_dtype(torch.float32)
    strategy: Any = "auto"
    if options is not None:
        strategy = AlpaStrategy(
            cluster="pcie_8gpu",
            plan_dir=f"{root}/plans",
            batch_scope="global",
            verbose=False,
            **options,
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_steps=max_steps,
        max_epochs=NUM_STEPS,
        default_root_dir=root,
        callbacks=[Saves(save_to)],
        **QUIET,
    )
    # All batches are alike: other numbers of ranks share the rest of an epoch in another way.
    batch = model.example_batch(ROWS_PER_STEP, torch.Generator().manual_seed(3))
    rows = Rows(tree_map(lambda values: values.repeat(NUM_STEPS, 1), batch))
    loader = DataLoader(rows, batch_size=ROWS_PER_STEP)
    # GaLore's state has objects.
    trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=False)
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": _tensors(trainer.optimizers[0].state_dict()),
    }


def _tensors(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict by their path, those in objects too."""
    tensors: dict[str, torch.Tensor] = {}
    for path, leaf in tree_flatten_with_path(state_dict)[0]:
        is_object = hasattr(leaf, "project") or isinstance(leaf, Blocks)
        values = vars(leaf) if is_object else {"": leaf}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{keystr(path)}.{name}"] = value.clone()
    return tensors


class Saves(pl.Callback):
    """Saves a checkpoint in the middle of the training."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None and trainer.global_step == NUM_STEPS // 2:
            trainer.save_checkpoint(self.path)


PLANS = {
    "data": (2, {"parallel": "data"}),
    "zero3": (2, {"parallel": "zero3"}),
    "tensor": (2, {"parallel": "tensor"}),
    "stages": (2, {"num_stages": 2, "num_microbatches": 2}),
    "zero2 on 3": (3, {"parallel": "zero2"}),
    "one": (1, {}),
}
