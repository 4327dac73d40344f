"""A training script as a user writes one: checkpoints every other step, resumed from the last one
when it starts.

Arguments: folder, number of steps, options of AlpaStrategy as JSON, devices. With the environment
variable DIE_AT, rank 1 is killed at that step of the first attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
from checkpoint.runs import make_loader, make_model, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class Dies(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if (
            first
            and trainer.global_rank == 1
            and str(trainer.global_step) == os.environ.get("DIE_AT")
        ):
            os.kill(os.getpid(), signal.SIGKILL)


class Losses(pl.Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *unused: Any
    ) -> None:
        if trainer.is_global_zero:
            print(f"STEP {trainer.global_step} {float(outputs['loss'])!r}", flush=True)


def main(folder: str, steps: str, options: str, devices: str) -> None:
    saving = ModelCheckpoint(
        f"{folder}/checkpoints", "{step}", every_n_train_steps=2, save_top_k=1, save_last=True
    )
    callbacks = [saving, Losses(), Dies()]
    trainer = make_trainer(
        folder, json.loads(options), int(devices), max_steps=int(steps), callbacks=callbacks
    )
    model = make_model()
    trainer.fit(model, make_loader(model, int(devices)), ckpt_path="last")
    if trainer.is_global_zero:
        print("FINISHED", trainer.global_step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
