"""Two ranks on the one device of the GPU exam: processes over gloo that train under given plans."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from gpu_exam_jobs import Row, run_limited
from gpu_exam_models import (
    Exam,
    alpa,
    deterministic,
    gpt,
    trained,
)

# The script that each rank runs, with `--rank-jobs`.
COMMAND = Path(__file__).resolve().parent / "gpu_exam.py"
PLANS: dict[str, Row] = {
    "data": {"parallel": "data"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "pipeline": {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"},
    "zero bubble": {"num_stages": 4, "num_microbatches": 4, "schedule": "InterleavedZeroBubble"},
    "recomputing pipeline": {"num_stages": 2, "num_microbatches": 4, "remat": True},
    "selective recomputation": {"parallel": "zero2", "remat": "selective"},
    "zero2, offloaded": {"parallel": "zero2", "offload": True},
    "zero3, offloaded": {"parallel": "zero3", "offload": True},
    "compiled": {"parallel": "zero2", "compile": True},
    "tensor, compiled": {"parallel": "tensor", "compile": True},
    "planned submodules": {"capture": "submodules", "parallel": "tensor"},
    # Both ranks load the same rows: the mean of their gradients is one process's.
    "eager": {"capture": "never", "batch_scope": "replica", "parallel": "data"},
    "eager, zero3": {"capture": "never", "batch_scope": "replica", "parallel": "zero3"},
}


def two_ranks(
    exam: Exam, jobs: Sequence[Row], environment: dict[str, str] | None = None
) -> Iterator[tuple[Row, Row | str]]:
    """Each job with the losses and weights of its two ranks under one of `PLANS`, or with what went
    wrong.

    All in one pair of processes; those after one that fails in another pair.
    """
    left = list(jobs)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
            command += [
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                str(COMMAND),
                "--device",
                exam.device,
            ]
            command += ["--rank-jobs", json.dumps(left), *(["--small"] if exam.small else [])]
            failure = ""
            try:
                run_limited(
                    command, 40 + (15 if exam.on_gpu else 60) * len(left), folder, environment
                )
            except RuntimeError as error:
                failure = str(error)
            for number, job in enumerate(left):
                out = Path(folder) / f"{number}.pt"
                error_file = out.with_suffix(".error")
                why = error_file.read_text() if error_file.exists() else failure
                yield job, torch.load(out, weights_only=True) if out.exists() else why
                if not out.exists():
                    break
            left = left[number + 1 :]


def rank_jobs(exam: Exam, jobs: Sequence[Row]) -> None:
    """One of the two ranks."""
    import torch.distributed as dist

    # Both on device 0: NCCL refuses that, so the group is gloo's, made before the strategy looks
    # for one.
    dist.init_process_group("gloo")
    for number, job in enumerate(jobs):
        started = time.perf_counter()
        try:
            found = _rank_job(exam, job, f"saved{number}")
        except BaseException as error:
            # the first rank that fails makes the file
            with suppress(FileExistsError), open(f"{number}.error", "x") as file:
                file.write("".join(traceback.format_exception(error))[-1500:])
            raise
        if dist.get_rank() == 0:
            torch.save({**found, "seconds": time.perf_counter() - started}, f"{number}.part")
            Path(f"{number}.part").rename(f"{number}.pt")
    dist.destroy_process_group()


def _rank_job(exam: Exam, job: Row, folder: str) -> Row:
    from lightning.pytorch.callbacks import ModelCheckpoint

    # One device twice; with a number of devices Lightning would request two.
    here = [torch.device("cuda", 0) if exam.on_gpu else torch.device("cpu")] * 2
    given: Row = {"devices": "auto"}
    options = {
        "batch_scope": "global",
        "bucket_bytes": 2**14,
        "parallel_devices": here,
        **PLANS[job["plan"]],
    }
    runs = []
    for path in (None, f"{folder}/step=3.ckpt") if job["resume"] else (None,):
        if job["resume"]:
            saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
            given |= {"callbacks": [saving], "enable_checkpointing": True, "ckpt_path": path}
        with deterministic():
            runs.append(
                trained(exam, gpt, alpa(**options), job["precision"], job["steps"], **given)
            )
    return {"first": runs[0], "run": runs[-1]}
