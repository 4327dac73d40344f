"""A short run of the fuzzer: the reader of every format refuses what is damaged, in its own words
and in time.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Damaged checkpoints are in checkpoint/test_planted.py as well.
WITHOUT_CHECKPOINTS = (
    "plan",
    "cluster",
    "recipe",
    "op times",
    "measured cluster",
    "unfinished planning",
)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (100, ("--formats", *WITHOUT_CHECKPOINTS)),
        pytest.param(300, (), marks=pytest.mark.slow),
    ],
    ids=["without checkpoints", "all"],
)
def test_damaged_files_are_refused(count, options):
    script = str(ROOT / "scripts" / "fuzz.py")
    command = [sys.executable, script, "--cases", str(count), "--seed", "77", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert f"{count} passed, 0 failed" in done.stdout
