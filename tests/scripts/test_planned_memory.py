"""What is planned of memory is what a step's storages need."""

from __future__ import annotations

from pathlib import Path

from template import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "planned_memory.py"


def test_planned_bytes_are_those_of_the_storages_that_are_alive(tmp_path):
    command = [str(SCRIPT), "--models", "gpt", "--precisions", "bf16-mixed"]
    command += ["--plans", "4 micro-batches, recomputed"]
    done = run_script(command, tmp_path, timeout=300)
    ratios = [
        float(line.split(", ")[-1].split()[0])
        for line in done.stdout.splitlines()
        if "alive" in line
    ]
    assert len(ratios) == 1, done.stderr[-2000:]
    assert done.returncode == 0
    assert min(ratios) > 0.95, done.stdout
