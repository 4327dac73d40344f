"""One `alpa plan` in a process and an empty folder of its own, and what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Planning:
    """What a process of `alpa plan` gave.

    Attributes:
        plan: the plan file, None where there is none.
        output: what it printed, errors included.
        cpu_seconds, peak_gib: of the process.
    """

    plan: dict[str, Any] | None
    output: str
    cpu_seconds: float
    peak_gib: float


def run_plan(checkout: Path, recipe: str, cluster: str, *overrides: str) -> Planning:
    """Plan `recipe` (a name or a file) on `cluster` with the code of `checkout`, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-m",
            "alpa_strategy",
            "plan",
            recipe,
            "--cluster",
            cluster,
            *overrides,
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                [*command, "-o", str(out)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            text = output.read()
        plan = None if process.returncode else json.loads(out.read_text())
        return Planning(plan, text, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)
