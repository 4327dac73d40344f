"""One `alpa` command in a process and an empty folder of its own, and what it took."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# First word of a line with the seconds of a calibration loop.
CALIBRATION = "calibration"


@dataclass(frozen=True)
class Finished:
    """A process of `alpa` that has ended.

    Attributes:
        code: exit code.
        output: what it printed, errors included.
        cpu_seconds, peak_gib: of the process.
        calibration_seconds: CPU seconds of `calibration_loop` in the same process: the mean of one
            before the command and one after it.
    """

    code: int
    output: str
    cpu_seconds: float
    peak_gib: float
    calibration_seconds: float


@dataclass(frozen=True)
class Planning:
    """What a process of `alpa plan` gave.

    Attributes:
        plan: the plan file, None if there is none.
        output: what it printed, errors included.
        cpu_seconds, peak_gib: of the process.
        calibration_seconds: CPU seconds of `calibration_loop` in the same process.
    """

    plan: dict[str, Any] | None
    output: str
    cpu_seconds: float
    peak_gib: float
    calibration_seconds: float = 0.0


def calibration_loop() -> float:
    """CPU seconds of a fixed piece of work like a planner's: Python objects and small arrays.

    Planning is compared with it, so that a figure holds on a machine of another speed.
    """
    started = time.process_time()
    table = np.arange(4096.0).reshape(64, 64)
    best: dict[tuple[int, int], float] = {}
    for first in range(300):
        for last in range(first, 300):
            key = first, last % 97
            best[key] = min(best.get(key, math.inf), float(first * last % 1013))
        shifted = table + first
        for _ in range(20):
            best[first, -1] = float((shifted[:, :, None] + table[None, :, :4]).min())
    return time.process_time() - started


def run_plan(checkout: Path, recipe: str, cluster: str, *overrides: str) -> Planning:
    """Plan `recipe` (a name or a file) on `cluster` with the code of `checkout`, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        ended = run_alpa(checkout, "plan", recipe, "--cluster", cluster, *overrides, "-o", str(out))
        plan = None if ended.code else json.loads(out.read_text())
        return Planning(
            plan, ended.output, ended.cpu_seconds, ended.peak_gib, ended.calibration_seconds
        )


def run_alpa(checkout: Path, *arguments: str, columns: int = 80) -> Finished:
    """Run `alpa` with the code of `checkout`, on one thread, in a terminal of `columns`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": str(columns),
        }
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            lines = output.read().splitlines(keepends=True)
    calibrations = [float(line.split()[1]) for line in lines if line.startswith(CALIBRATION)]
    text = "".join(line for line in lines if not line.startswith(CALIBRATION))
    return Finished(
        process.returncode,
        text,
        used.ru_utime + used.ru_stime - sum(calibrations),
        used.ru_maxrss / 2**20,
        sum(calibrations) / max(1, len(calibrations)),
    )


def main() -> int:
    """The process of one command: calibrate, run it as `alpa` does, and calibrate once more."""
    print(CALIBRATION, calibration_loop(), flush=True)
    # The package of the checkout that PYTHONPATH names.
    from alpa_strategy.cli import main as alpa

    code = alpa(sys.argv[1:])
    # The speed of a machine that others use differs from minute to minute.
    print(CALIBRATION, calibration_loop(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
