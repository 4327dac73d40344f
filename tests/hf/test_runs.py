"""Runs around the training: evaluation before it, and resuming under another plan."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers")

from equality.harness import Rows, _loader, _parallel_arguments
from hf.finetune import SAMPLES, FineTuning
from hf.tiny_models import MODELS
from quiet import QUIET

os.environ["HF_HUB_OFFLINE"] = "1"


class Evaluated(FineTuning):
    """Logs the loss of an evaluation."""

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.log("val_loss", MODELS[self.name].loss(self.model, dict(batch)), sync_dist=True)


def run(
    path: str, root: str, options: dict[str, Any] | None, world_size: int, steps: int, **fit: Any
) -> tuple[pl.Trainer, Any]:
    rows = MODELS["gpt2"].batch(SAMPLES * 2, torch.Generator().manual_seed(3))
    module = Evaluated("gpt2", path, torch.float64, by_name=False)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        precision="64-true",
        default_root_dir=root,
        **QUIET,
        **_parallel_arguments(options, world_size),
    )
    trainer.fit(module, _loader(Rows(rows), options, world_size, 1, SAMPLES), **fit)
    return trainer, module


def resumed(path: str, root: str, checkpoint: str) -> dict[str, torch.Tensor]:
    trainer, _ = run(path, root, {"parallel": "zero3"}, 2, 1)
    trainer.save_checkpoint(checkpoint)
    _, module = run(path, root, {"parallel": "tensor"}, 2, 2, ckpt_path=checkpoint)
    return dict(module.model.state_dict())


def alone(path: str, root: str) -> dict[str, torch.Tensor]:
    return dict(run(path, root, None, 2, 2)[1].model.state_dict())


def test_resuming_under_another_plan(pool, tmp_path):
    path = str(MODELS["gpt2"].save(tmp_path / "gpt2"))
    root = str(tmp_path)
    expected = pool.run(1, alone, path, root, init_group=False)[0]
    for state in pool.run(2, resumed, path, root, str(tmp_path / "one.ckpt")):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def evaluated(path: str, root: str, world_size: int, limit: str | None) -> float:
    """The loss of an evaluation without a training."""
    rows = MODELS["gpt2"].batch(SAMPLES, torch.Generator().manual_seed(3))
    options: dict[str, Any] | None = None
    if world_size > 1:
        options = {} if limit is None else {"memory_limit": limit}
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        default_root_dir=root,
        **QUIET,
        **_parallel_arguments(options, world_size),
    )
    module = Evaluated("gpt2", path, torch.float64, by_name=False)
    loader = _loader(Rows(rows), options, world_size, 1, SAMPLES)
    return trainer.validate(module, loader)[0]["val_loss"]


# The second model does not fit on one device.
@pytest.mark.parametrize("limit", [None, "700KB"])
def test_an_evaluation_reads_the_weights(pool, tmp_path, limit):
    path = str(MODELS["gpt2"].save(tmp_path / "gpt2"))
    expected = pool.run(1, evaluated, path, str(tmp_path), 1, None, init_group=False)[0]
    for loss in pool.run(2, evaluated, path, str(tmp_path), 2, limit):
        assert loss == pytest.approx(expected, rel=1e-6)
