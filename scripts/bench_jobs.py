"""Starts the processes of a benchmark, and ends the benchmark with their output when one fails; the
check of arguments that benchmarks of steps share.
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# How much of a failed job's output is printed, in characters.
STDOUT_TAIL = 3000
STDERR_TAIL = 5000


def compile_package(checkout: Path) -> None:
    """Compile a checkout's package to bytecode, as pip does when it installs one.

    Where PYTHONDONTWRITEBYTECODE is set, every process of a job would compile it anew: half of the
    CPU time of its imports.
    """
    compileall.compile_dir(checkout / "alpa_strategy", quiet=1)


def torchrun(script: str | Path, num_ranks: int) -> list[str]:
    """Return the command that runs `script` on `num_ranks` processes of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        str(script),
    ]


def user_threads() -> dict[str, str]:
    """Return OMP_NUM_THREADS as the user set it, 1 by default: variables for `run_job`."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def run_job(
    command: Sequence[str],
    name: str,
    folder: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder` with one thread a process, and return its captured output.

    Args:
        command: the program and its arguments.
        name: of the job, for the error.
        folder: working directory; the benchmark's own by default.
        variables: environment variables to set in addition; they win over OMP_NUM_THREADS=1.

    Raises:
        SystemExit: the job failed; the message has the end of its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    job = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if job.returncode:
        raise SystemExit(f"{name} failed:\n{output_tail(job)}")
    return job


def output_tail(job: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a job printed."""
    return f"{job.stdout[-STDOUT_TAIL:]}\n{job.stderr[-STDERR_TAIL:]}"


def check_steps(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with an error unless `--steps` leaves two steps after `--warmup`."""
    if args.steps < args.warmup + 2:
        parser.error(
            f"--steps {args.steps} leaves none to time: give at least {args.warmup + 2}, --warmup"
            " and two"
        )
