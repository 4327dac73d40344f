"""An exception on one rank ends the whole job, quickly, with that exception shown, and leaves no
process behind.
"""

from __future__ import annotations

import time
from pathlib import Path

from jobs import processes_left, run_job

JOB = """
import sys
import lightning.pytorch as pl
import torch
import alpa_strategy
from models import MLP
from quiet import QUIET

class Fails(pl.Callback):
    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("the user's own mistake")

model = MLP()
rows = torch.utils.data.TensorDataset(*model.example_batch(64))
strategy = alpa_strategy.AlpaStrategy(cluster="pcie_8gpu", verbose=False)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, callbacks=[Fails()],
    default_root_dir=sys.argv[1], **QUIET)
print("STARTED", flush=True)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
print("FINISHED", flush=True)
"""


def test_one_ranks_exception_ends_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_job(tmp_path, JOB, str(tmp_path))
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    assert time.monotonic() - started < 100
    shown = done.stderr.split("rank 0 ends because rank 1 failed:")
    assert len(shown) == 2, done.stderr
    assert shown[1].startswith(" ValueError: the user's own mistake\n")
    # The rank that failed shows where, and no other does.
    assert done.stderr.count('raise ValueError("the user') == 1
    assert processes_left(tmp_path) == ""
