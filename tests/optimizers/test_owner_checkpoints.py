"""State that owners have is in checkpoints, readable under other plans and by one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from equality.harness import Rows
from models import GPT
from optimizers.matrix_optimizers import with_optimizer
from quiet import QUIET
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy, export_checkpoint

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
    """Train to `max_steps` on the same batches everywhere; weights and full optimizer state."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(7)
        model = with_optimizer(GPT, optimizer)(num_layers=2, vocab_size=33)
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
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict()["state"],
    }


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


@pytest.mark.parametrize(
    ("optimizer", "saved"), [("muon", "zero3"), ("shampoo", "stages"), ("shampoo", "data")]
)
def test_resumed_under_another_plan(pool, tmp_path: Path, optimizer: str, saved: str) -> None:
    root = str(tmp_path)
    path = f"{root}/middle.ckpt"
    expected = pool.run(1, train, root, optimizer, None, 1, NUM_STEPS, init_group=False)[0]
    devices, options = PLANS[saved]
    saves = pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS, None, path)
    # At the end of a training every rank has the full state.
    for found in saves:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    for name, (devices, options) in PLANS.items():
        if name == saved:
            continue
        resumed = pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS, path)
        for found in resumed:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    plain = f"{root}/plain.ckpt"
    if Path(path).is_dir():
        export_checkpoint(path, plain)
    else:
        plain = path
    args = (root, optimizer, None, 1, NUM_STEPS, plain)
    (found,) = pool.run(1, train, *args, init_group=False)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
