"""Scripts that start their own ranks, run as a user runs them: in processes of their own, without
the worker pool. The first rank's has torch and Lightning already (`template.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from template import run_script

TESTS = Path(__file__).parent


def run_job(
    folder: Path, script: str, *arguments: str, launcher: tuple[str, ...] = (), timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `script` as `folder / "job.py"`, where the modules of tests/ and this package can be
    imported.

    Args:
        launcher: what stands before the script, such as ("-m", "torch.distributed.run", ...).
        timeout: seconds.
    """
    path = folder / "job.py"
    path.write_text(script)
    environment = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [str(path), *arguments]
    if not launcher:
        return run_script(command, folder, environment, timeout)
    command = [sys.executable, *launcher, *command]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=folder
    )


def processes_left(folder: Path) -> str:
    """Ids of processes that still run the script of `folder`, a line each."""
    return subprocess.run(
        ["pgrep", "-f", str(folder / "job.py")], capture_output=True, text=True
    ).stdout


def failing_job(hook: str, options: str = "") -> str:
    """A training on two ranks of which rank 1 raises a ValueError in a hook of step 2. Its argument
    is a folder.

    Args:
        hook: of a callback, such as "on_train_batch_end".
        options: keyword arguments of the strategy, as source text.
    """
    return _FAILING_JOB.replace("HOOK", hook).replace("OPTIONS", options)


_FAILING_JOB = """
import sys
import lightning.pytorch as pl
import torch
import alpa_strategy
from models import MLP
from quiet import QUIET

class Fails(pl.Callback):
    def HOOK(self, trainer, *unused):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("the user's own mistake")

model = MLP()
rows = torch.utils.data.TensorDataset(*model.example_batch(64))
strategy = alpa_strategy.AlpaStrategy(cluster="pcie_8gpu", verbose=False, OPTIONS)
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    callbacks=[Fails()],
    default_root_dir=sys.argv[1],
    **QUIET,
)
print("STARTED", flush=True)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
print("FINISHED", flush=True)
"""
