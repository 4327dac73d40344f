"""The examination of a GPU runs on a CPU too, at small sizes: whatever it finds there must be
right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_exam.py"
PARTS = {
    "environment",
    "equality",
    "speed",
    "memory",
    "programs",
    "hugging_face",
    "checkpoint",
    "offload",
    "nccl",
    "ranks",
    "streams",
    "roofline",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_exam_passes_on_a_cpu(tmp_path):
    out = tmp_path / "exam.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--out", str(out)]
    command += ["--seconds", "1700", "--patience", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    rows = json.loads(out.read_text(encoding="utf-8"))
    failed = [
        f"{row['part']} {row['item']}: {row['text']}" for row in rows if row["verdict"] == "failed"
    ]
    assert failed == []
    assert done.returncode == 0, done.stdout[-3000:]
    assert {row["part"] for row in rows} - {
        "float8"
    } == PARTS  # with torchao, or that it is missing
    assert sum(row["verdict"] == "ok" for row in rows) > 50


def test_the_wrapper_takes_the_interpreter_that_it_is_given(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho interpreted "$@"\n')
    interpreter.chmod(0o755)
    command = ["bash", str(SCRIPT.with_suffix(".sh")), "--device", "cpu"]
    environment = {**os.environ, "PYTHON": str(interpreter)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout == "interpreted scripts/gpu_exam.py --device cpu\n", done.stderr
