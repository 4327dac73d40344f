"""kill -9 at random moments of training and saving: the last complete checkpoint is always there, and leads on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.runs import ONE_STAGE, PIPELINE, assert_bitwise, fit
from lightning.pytorch.callbacks import ModelCheckpoint
from worker_pool import WorkerError

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint.tensors import StoredTensor
from alpa_strategy.checkpoint.tree import map_tensors

STEPS = 60
KILLS = 20


def saving(root: str) -> ModelCheckpoint:
    return ModelCheckpoint(f"{root}/kept", "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)


def train(root: str, options: dict[str, Any], kill: int | None) -> dict[int, Any]:
    """Train from the last checkpoint on; with a number, some rank is killed at a moment that is drawn with it."""
    rank = torch.distributed.get_rank()
    if kill is not None:
        draw = random.Random(kill)
        victim, seconds, at_save = draw.randrange(2), draw.uniform(0.05, 2.0), draw.random() < 0.6
        if rank == victim:
            threading.Thread(target=_kill, args=(Path(root) / "kept", seconds, at_save), daemon=True).start()
    _, _, steps = fit(root, options, 2, STEPS, ckpt_path="last", callbacks=[saving(root)])
    return steps


def _kill(folder: Path, seconds: float, at_save: bool) -> None:
    while not list(folder.glob("last*.ckpt")):  # training is under way
        time.sleep(0.01)
    time.sleep(seconds)
    while at_save and not list(folder.glob(".alpa.*.saving")):
        pass
    time.sleep(random.uniform(0, 0.03) if at_save else 0)
    os.kill(os.getpid(), signal.SIGKILL)


def check(folder: Path) -> int:
    """All that is there under a checkpoint's name can be read, every tensor of it; the highest step."""
    found = 0
    for path in folder.glob("*.ckpt"):
        checkpoint = open_checkpoint(path)
        map_tensors(checkpoint, StoredTensor, StoredTensor.whole)
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
