"""One `alpa plan` in a process and an empty folder of its own, and what it took."""

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
        arguments = [recipe, "--cluster", cluster, *overrides, "-o", str(out)]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "plan", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            first_line, _, text = output.read().partition("\n")
        calibration_seconds = float(first_line.rpartition(" ")[2])
        plan = None if process.returncode else json.loads(out.read_text())
        cpu_seconds = used.ru_utime + used.ru_stime - calibration_seconds
        return Planning(plan, text, cpu_seconds, used.ru_maxrss / 2**20, calibration_seconds)


def main() -> int:
    """The process of one planning: calibrate, then plan as `alpa` does."""
    print("calibration", calibration_loop(), flush=True)
    # The package of the checkout that PYTHONPATH names.
    from alpa_strategy.cli import main as alpa

    return alpa(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
