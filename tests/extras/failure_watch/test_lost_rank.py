"""kill -9 of one rank in mid-schedule or while rank 0 plans: all others end soon and name it, no
process is left.
"""

from __future__ import annotations

import re
import time

import pytest
from jobs import processes_left, run_job

JOB = """
import os, signal, sys, time
import lightning.pytorch as pl
import torch
from alpa_strategy import AlpaStrategy
from alpa_strategy.comm.collectives import RankZero
from alpa_strategy.pipeline.stage_worker import StageWorker
from models import MLP

root = sys.argv[1]
lost = int(sys.argv[2])
world = int(sys.argv[3])
options = eval(sys.argv[4])
moment = sys.argv[5]
run = StageWorker.backward
result_of = RankZero.result_of
calls = []

def die(where):
    if where == moment and torch.distributed.get_rank() == lost:
        open(root + "/killed", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

def backward(worker, *args, **kwargs):
    calls.append(args)
    if len(calls) == 10:
        die("schedule")
    run(worker, *args, **kwargs)

def slow_result_of(rank_zero, work, what):
    if moment == "planning":
        time.sleep(2)
        die("planning")
    return result_of(rank_zero, lambda: (time.sleep(10 * (moment == "planning")), work())[1], what)

StageWorker.backward, RankZero.result_of = backward, slow_result_of
model = MLP(num_layers=4)
rows = torch.utils.data.TensorDataset(*model.example_batch(4 * 4 * world))
strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, num_microbatches=4, **options)
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=world,
    max_epochs=50,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=root,
)
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
print("FINISHED", flush=True)
"""
TWO_STAGES = {"num_stages": 2, "schedule": "1F1B"}
PIPELINE = {"num_stages": 3, "schedule": "1F1B"}
INSIDE = {"num_stages": 2, "schedule": "1F1B", "parallel": "tensor"}
INTERLEAVED = {"num_stages": 6, "schedule": "Interleaved1F1B"}  # two on each of three ranks
INTERLEAVED_INSIDE = {
    "num_stages": 4,
    "schedule": "Interleaved1F1B",
    "parallel": "zero3",
}  # on two meshes of two


@pytest.mark.parametrize(
    ("launcher", "world", "options", "lost", "moment"),
    [
        ("own", 2, TWO_STAGES, 1, "schedule"),
        pytest.param("own", 3, PIPELINE, 1, "schedule", marks=pytest.mark.slow),
        pytest.param("own", 3, PIPELINE, 0, "schedule", marks=pytest.mark.slow),
        pytest.param("own", 4, INSIDE, 3, "schedule", marks=pytest.mark.slow),
        pytest.param("torchrun", 3, PIPELINE, 1, "schedule", marks=pytest.mark.slow),
        pytest.param("torchrun", 4, INSIDE, 0, "schedule", marks=pytest.mark.slow),
        pytest.param("own", 3, INTERLEAVED, 2, "schedule", marks=pytest.mark.slow),
        pytest.param("own", 4, INTERLEAVED_INSIDE, 1, "schedule", marks=pytest.mark.slow),
        pytest.param("torchrun", 3, INTERLEAVED, 0, "schedule", marks=pytest.mark.slow),
        pytest.param("torchrun", 4, INTERLEAVED_INSIDE, 2, "schedule", marks=pytest.mark.slow),
        pytest.param("torchrun", 3, PIPELINE, 1, "planning", marks=pytest.mark.slow),
        pytest.param("torchrun", 3, PIPELINE, 0, "planning", marks=pytest.mark.slow),
        pytest.param("own", 3, PIPELINE, 2, "planning", marks=pytest.mark.slow),
    ],
)
def test_the_others_end_and_name_it(tmp_path, launcher, world, options, lost, moment):
    launched: tuple[str, ...] = ()
    if launcher == "torchrun":
        launched = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    arguments = [str(tmp_path), str(lost), str(world), repr(options), moment]
    done = run_job(tmp_path, JOB, *arguments, launcher=launched, timeout=300)
    ended = time.time()
    left = "?"
    # if rank 0 is killed, the ranks that it launched outlive it for a while
    while left and time.time() < ended + 40:
        left = processes_left(tmp_path)
        time.sleep(0.2)
    assert left == "", done.stderr
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    assert time.time() - float((tmp_path / "killed").read_text()) < 60
    named = (
        rf"rank {lost} \(process \d+\) was ended by SIGKILL"
        rf"|no sign of life from rank {lost}"
        rf"|rank {lost} is gone"
    )
    if launcher == "torchrun":
        # torchrun names the rank itself, in its last lines
        named += rf"|Root Cause[^=]*\srank +: {lost} "
    assert re.search(named, done.stderr), done.stderr
    for rank in set(range(world)) - {lost}:
        assert re.search(rf"alpa: rank {rank}\b", done.stderr), done.stderr
