"""The host's work for a step stays near the plain Trainer's: docs/gpu.md has the figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_host.py"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_step_costs_the_host_what_the_plain_trainer_does(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--most", "1.15"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
