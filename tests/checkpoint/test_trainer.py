"""What a Lightning user does with checkpoints works with directories as it does with files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint.runs import (
    ONE_STAGE,
    PIPELINE,
    assert_bitwise,
    fit,
    make_loader,
    make_model,
    make_trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from worker_pool import WorkerError

from alpa_strategy.checkpoint.opening import is_checkpoint
from alpa_strategy.errors import CheckpointError


def best_last_and_test(root: str, options: dict[str, Any]) -> None:
    folder = f"{root}/checkpoints"
    best = ModelCheckpoint(folder, "{step}", monitor="val_loss", save_top_k=2, save_last="link")
    val = make_loader(make_model(), 2, 1)
    trainer, model, _ = fit(root, options, 2, 6, steps=2, callbacks=[best], val_loader=val)
    kept = sorted(os.listdir(folder))
    assert len(kept) == 3, kept
    assert all(is_checkpoint(f"{folder}/{name}") for name in kept), kept
    assert os.path.islink(f"{folder}/last.ckpt")
    scores = {float(v) for v in best.best_k_models.values()}
    at_the_end = {k: v.clone() for k, v in model.state_dict().items()}
    found = trainer.validate(model, val, ckpt_path="best", verbose=False)[0]["val_loss"]
    assert found == pytest.approx(min(scores))
    other = make_trainer(
        root, options, 2, max_steps=8, callbacks=[ModelCheckpoint(folder, save_last=True)]
    )
    fresh = make_model()
    other.fit(fresh, make_loader(fresh, 2, 2), ckpt_path="last")
    assert other.global_step == 8
    single = make_trainer(root, options, 2)
    fresh = make_model()
    single.validate(
        fresh, val, ckpt_path=f"{folder}/{os.readlink(f'{folder}/last.ckpt')}", verbose=False
    )
    assert_bitwise(dict(fresh.state_dict()), at_the_end)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ONE_STAGE["zero3"], id="zero3"),
        # Saved and resumed in test_resume.py.
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_best_last_links_and_evaluation(pool, tmp_path: Path, options: dict[str, Any]) -> None:
    pool.run(2, best_last_and_test, str(tmp_path), options)


class Hooked(pl.Callback):
    """Takes an entry out of what is saved, adds own content, and puts a value in what is loaded."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        assert checkpoint["state_dict"]["head.weight"].shape == (33, 16)
        del checkpoint["state_dict"]["wpe.weight"]
        checkpoint["mine"] = {"rank": trainer.global_rank, "table": torch.arange(3)}

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            assert checkpoint["mine"]["rank"] == 0
            assert float(checkpoint["state_dict"]["head.weight"].abs().max()) > 0
            checkpoint["state_dict"]["wpe.weight"] = torch.zeros(
                module.wpe.weight.shape, dtype=torch.float64
            )

        module.on_load_checkpoint = on_load_checkpoint

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step:
            assert module.wpe.weight.abs().max() == 0


def save_and_load_with_hooks(root: str) -> None:
    options = {**ONE_STAGE["zero3"], "checkpoint": "sharded"}
    trainer, _, _ = fit(root, options, 2, 2, callbacks=[Hooked()])
    trainer.save_checkpoint(f"{root}/a.ckpt")
    fit(root, options, 2, 3, ckpt_path=f"{root}/a.ckpt", callbacks=[Hooked()])
    trainer.save_checkpoint(f"{root}/weights.ckpt", weights_only=True)
    fresh = make_trainer(root, options, 2)
    with pytest.raises(KeyError, match="only the model"):
        fit(root, options, 2, 3, ckpt_path=f"{root}/weights.ckpt")
    fresh.validate(make_model(), make_loader(make_model(), 2, 1), verbose=False)
    if trainer.is_global_zero:
        os.unlink(f"{root}/a.ckpt/lightning.pt")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="missing"):
        fit(root, options, 2, 3, ckpt_path=f"{root}/a.ckpt")


def test_hooks(pool, tmp_path: Path) -> None:
    pool.run(2, save_and_load_with_hooks, str(tmp_path))


class Fails(pl.Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step == 2:
            raise ValueError("the user's own mistake")


def fail(root: str, ranks: tuple[int, ...]) -> None:
    callbacks = [OnExceptionCheckpoint(root), Fails(ranks)]
    callbacks[0].teardown = lambda *unused, **kwargs: None  # it would remove what it saved
    fit(root, ONE_STAGE["zero3"], 2, 3, callbacks=callbacks)


def test_an_exception_on_all_ranks_is_saved(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="the user's own mistake"):
        pool.run(2, fail, str(tmp_path), (0, 1))
    assert is_checkpoint(tmp_path / "on_exception.ckpt")


@pytest.mark.slow
def test_an_exception_on_one_rank_does_not_hang(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="the user's own mistake"):
        pool.run(2, fail, str(tmp_path), (1,), timeout=60)
    assert not (tmp_path / "on_exception.ckpt").exists()


class Forgets(pl.Callback):
    """Edits optimizer state before the first batch, as users do who resume with other data."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg"].zero_()


def go_on(
    root: str, options: dict[str, Any] | None, devices: int, callbacks: Any, path: str = ""
) -> dict[str, Any]:
    """Two steps more; the first call trains the two before and saves."""
    alone = {
        "steps": 1,
        "model_kwargs": {"dropout": 0.0},
    }  # a step an epoch: the order of rows does not matter
    if not path:
        path = f"{root}/two.ckpt"
        trainer, _, _ = fit(root, options, devices, 2, **alone)
        trainer.save_checkpoint(path)
    trainer, _, steps = fit(root, options, devices, 4, ckpt_path=path, callbacks=callbacks, **alone)
    with open(os.devnull, "wb") as nowhere:
        torch.save(trainer, nowhere)
    return steps


def test_other_strategies_resume_sharded_checkpoints(pool, tmp_path: Path) -> None:
    root, options = str(tmp_path), {**ONE_STAGE["zero3"], "checkpoint": "sharded"}
    ours = pool.run(2, go_on, root, options, 2, [])[0]
    edited = pool.run(2, go_on, root, options, 2, [Forgets()])[0]
    assert is_checkpoint(f"{root}/two.ckpt")
    for expected, callbacks in ((ours, []), (edited, [Forgets()])):
        found = go_on(root, None, 1, callbacks, f"{root}/two.ckpt")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert edited[4]["loss"] != ours[4]["loss"]
