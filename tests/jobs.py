"""Scripts that start their own ranks, run as a user runs them: in processes of their own, without
the worker pool.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    command = [sys.executable, *launcher, str(path), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=folder
    )


def processes_left(folder: Path) -> str:
    """Ids of processes that still run the script of `folder`, a line each."""
    return subprocess.run(
        ["pgrep", "-f", str(folder / "job.py")], capture_output=True, text=True
    ).stdout
