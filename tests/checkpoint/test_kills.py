"""kill -9 at random moments of training and saving: the last complete checkpoint is always there,
and leads on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from checkpoint.runs import ONE_STAGE, PIPELINE, assert_bitwise, fit
from lightning.pytorch.callbacks import ModelCheckpoint
from worker_pool import WorkerError

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint.tensors import StoredTensor, map_tensors

STEPS = 50
KILLS = 20


def saving(root: str) -> ModelCheckpoint:
    return ModelCheckpoint(
        f"{root}/kept", "{step}", every_n_train_steps=1, save_top_k=1, save_last=True
    )


class Kills(pl.Callback):
    """Draws a rank and a moment, and kills the rank then: in the midst of a save, or at any
    time.
    """

    def __init__(self, root: str, number: int) -> None:
        draw = random.Random(number)
        self.victim = draw.randrange(2)
        self.step = draw.randrange(1, 6)
        self.at_save = draw.random() < 0.6
        self.seconds = draw.uniform(0, 0.03 if self.at_save else 0.3)
        self.folder, self.num_steps = Path(root) / "kept", 0

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        self.num_steps += 1
        if self.num_steps == self.step and trainer.global_rank == self.victim:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        before = self._savings()
        while (
            self.at_save and self._savings() <= before
        ):  # what an earlier kill has left does not count
            pass
        time.sleep(self.seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def _savings(self) -> set[tuple[str, int]]:
        found = set()
        for path in self.folder.glob(".alpa.*.saving"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found


def train(root: str, options: dict[str, Any], kill: int | None) -> dict[int, Any]:
    """Train from the last checkpoint on; with a number, a rank is killed at a moment that is drawn
    with it.
    """
    callbacks = [saving(root)] if kill is None else [Kills(root, kill), saving(root)]
    _, _, steps = fit(root, options, 2, STEPS, ckpt_path="last", callbacks=callbacks)
    return steps


def check(folder: Path) -> int:
    """All that is there under a checkpoint's name can be read, every tensor of it; the highest
    step.
    """
    found = 0
    for path in folder.glob("*.ckpt"):
        checkpoint = open_checkpoint(path)
        map_tensors(checkpoint, StoredTensor, StoredTensor.full_tensor)
        found = max(found, checkpoint["global_step"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{**ONE_STAGE["zero3"]}, {**PIPELINE, "async_checkpoint": True}],
    ids=["zero3", "pipeline in the background"],
)
def test_kill_at_random_moments(pool, tmp_path: Path, options: dict[str, Any]) -> None:
    root = str(tmp_path)
    expected = pool.run(2, train, f"{root}/undisturbed", options, None)[0]
    step = 0
    for kill in range(KILLS):
        with contextlib.suppress(WorkerError):  # the last attempt may be over before it is killed
            pool.run(2, train, root, options, kill, timeout=300)
        latest = check(tmp_path / "kept")
        assert latest >= step
        step = latest
        if step == STEPS:
            break
    assert step > 0
    steps = pool.run(2, train, root, options, None, timeout=300)[0]
    assert_bitwise(steps, {number: expected[number] for number in steps})
