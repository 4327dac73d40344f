"""Signals of schedulers and people: every rank is gone in 10 seconds, whatever it was doing, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from alpa_strategy import open_checkpoint

LIMIT = 10.0 * (3 if os.environ.get("CI") else 2)  # the machine of the tests does other things beside
JOB = """
import os, sys, time
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from alpa_strategy import AlpaStrategy
from alpa_strategy.comm.collectives import RankZero
from models import MLP

root, moment, resume = sys.argv[1], sys.argv[2], sys.argv[3]
result_of = RankZero.result_of

def ready():
    open(f"{root}/ready-{os.environ.get('LOCAL_RANK', '0')}", "w").write(str(os.getpid()))

def slow_result_of(rank_zero, work, what):
    if moment == "planning":
        ready()
        time.sleep(60)
    return result_of(rank_zero, work, what)

class Model(MLP):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == {"first step": 0, "steady": 5, "pipeline": 5}.get(moment):
            ready()
        time.sleep(0.02)

    def validation_step(self, batch, batch_idx):
        if moment == "validating" and self.global_step > 0:
            ready()
            time.sleep(0.05)
        self.log("val", self.net(batch[0]).mean())

class Slow(pl.Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        if moment == "saving":
            ready()
            time.sleep(1)

RankZero.result_of = slow_result_of
torch.manual_seed(0)
model = Model(num_layers=4)
data = torch.utils.data.TensorDataset(*model.example_batch(400 * 8))
loader = torch.utils.data.DataLoader(data, batch_size=4)
options = {"num_stages": 2, "num_microbatches": 2} if moment == "pipeline" else {}
strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
callbacks = [OnExceptionCheckpoint(root, "last"), Slow(), ModelCheckpoint(root, "every", every_n_train_steps=3)]
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=6 if resume != "none" else 10**6,
    logger=False, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    val_check_interval=20 if moment == "validating" else 1.0, num_sanity_val_steps=0)
trainer.fit(model, loader, loader, ckpt_path=None if resume == "none" else resume, weights_only=False)
print("FINISHED", flush=True)
"""
MOMENTS = ["planning", "first step", "steady", "pipeline", "saving", "validating"]


def start(tmp_path: Path, moment: str, launcher: str) -> subprocess.Popen:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    paths = f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}"
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.Popen(
        [*command, str(script), str(tmp_path), moment, "none"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def pids(tmp_path: Path) -> dict[int, int]:
    """Rank -> process, once both have come to the moment."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = {rank: tmp_path / f"ready-{rank}" for rank in range(2)}
        if all(path.exists() and path.read_text() for path in found.values()):
            return {rank: int(path.read_text()) for rank, path in found.items()}
        time.sleep(0.05)
    raise AssertionError("the job did not come so far")


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


CASES = [
    pytest.param(
        number, ranks, moment, launcher,
        marks=() if (number, ranks, moment, launcher) in (
            (signal.SIGTERM, (0, 1), "steady", "own"),
            (signal.SIGTERM, (1,), "pipeline", "torchrun"),
        ) else pytest.mark.slow,
        id=f"{number.name}-{'all' if len(ranks) == 2 else ranks[0]}-{moment}-{launcher}",
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    for ranks in ((0, 1), (0,), (1,))
    for moment in MOMENTS
    for launcher in ("own", "torchrun")
]  # fmt: skip


@pytest.mark.parametrize(("number", "ranks", "moment", "launcher"), CASES)
def test_every_rank_ends(tmp_path, number, ranks, moment, launcher):
    job = start(tmp_path, moment, launcher)
    try:
        processes = pids(tmp_path)
        for rank in ranks:
            os.kill(processes[rank], number)
        sent = time.monotonic()
        while any(map(is_alive, processes.values())) and time.monotonic() < sent + 60:
            time.sleep(0.05)
        took = time.monotonic() - sent
        output = job.communicate(timeout=60)[0]
    finally:
        subprocess.run(["pkill", "-9", "-f", str(tmp_path / "job.py")], check=False)
    assert took < LIMIT, output
    assert "FINISHED" not in output
    for path in tmp_path.glob("*.ckpt"):  # whatever was saved is whole
        checkpoint = open_checkpoint(path, weights_only=False)
        assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
    if moment in ("steady", "pipeline") and number == signal.SIGTERM:
        assert (tmp_path / "last.ckpt").exists(), output
    assert not list(tmp_path.glob(".*saving*"))
