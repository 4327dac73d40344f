"""Where jobs run: torchrun that restarts them, and SLURM's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint.runs import ONE_STAGE, fit
from lightning.pytorch.plugins.environments import SLURMEnvironment

from alpa_strategy.comm.job_store import agree_on_name

HERE = Path(__file__).resolve().parent


def test_ranks_agree_in_a_store_that_others_have_used() -> None:
    """Attempts of 3 ranks, one after the other in one store; in some, a rank dies after its
    hello.
    """
    store = dist.HashStore()
    names = []
    with ThreadPoolExecutor(3) as threads:
        for attempt in range(4):
            if attempt % 2:
                store.set("alpa/hello/1", f"of a process {attempt} that is gone")
                store.set("alpa/hello/2", f"of another {attempt}")
            found = set(threads.map(lambda rank: agree_on_name(store, rank, 3, 30.0), (0, 2, 1)))
            assert len(found) == 1
            names += found
    assert len(set(names)) == 4


def run_under_slurm(root: str) -> tuple[str, int]:
    rank = os.environ.pop("RANK")
    for name in (
        "WORLD_SIZE",
        "LOCAL_RANK",
        "GROUP_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    ):
        os.environ.pop(name, None)
    os.environ |= {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "4242",
    }
    os.environ |= {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
    }
    trainer, _, _ = fit(root, ONE_STAGE["zero3"], 2, 2)
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    trainer.save_checkpoint(f"{root}/hpc_ckpt_1.ckpt")
    trainer, _, steps = fit(root, ONE_STAGE["zero3"], 2, 3)  # a requeued job goes on by itself
    return str(sorted(steps)), trainer.global_rank


def test_slurm(pool, tmp_path: Path) -> None:
    assert pool.run(2, run_under_slurm, str(tmp_path), init_group=False) == [("[3]", 0), ("[3]", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ['{"parallel": "zero3"}', '{"num_stages": 2, "num_microbatches": 2}']
)
def test_torchrun_restarts_a_job_with_a_killed_rank(tmp_path: Path, options: str) -> None:
    """It resumes from its last checkpoint with the stored plan, and every step is what it would
    have been.
    """
    expected = _torchrun(tmp_path / "undisturbed", options, {})
    found = _torchrun(tmp_path / "killed", options, {"DIE_AT": "5"})
    assert _steps(expected) == {str(step) for step in range(1, 9)}
    assert _steps(found) == _steps(expected)
    lines = [line for line in found.splitlines() if line.startswith("STEP")]
    assert set(lines) == {line for line in expected.splitlines() if line.startswith("STEP")}
    assert "FINISHED 8" in found
    assert len(list((tmp_path / "killed" / "plans").glob("*.json"))) == 1


def _torchrun(folder: Path, options: str, extra: dict[str, str]) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
    ]
    environment = {**os.environ, **extra, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        environment.pop(name, None)
    command += [str(HERE / "job.py"), str(folder), "8", options, "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _steps(text: str) -> set[str]:
    return {line.split()[1] for line in text.splitlines() if line.startswith("STEP")}
