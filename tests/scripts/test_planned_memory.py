"""What is planned of memory is what a step's storages need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "planned_memory.py"


def test_planned_bytes_are_those_of_the_storages_that_are_alive(tmp_path):
    command = [sys.executable, str(SCRIPT), "--models", "gpt", "--precisions", "bf16-mixed"]
    command += ["--plans", "kept", "4 micro-batches, recomputed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ratios = [
        float(line.split(", ")[-1].split()[0])
        for line in done.stdout.splitlines()
        if "alive" in line
    ]
    assert len(ratios) == 2, done.stderr[-2000:]
    assert done.returncode == 0
    assert min(ratios) > 0.95, done.stdout
