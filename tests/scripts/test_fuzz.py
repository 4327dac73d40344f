"""A short run of the fuzzer: the reader of every format refuses what is damaged, in its own words
and in time.
"""

from pathlib import Path

import pytest
from template import run_script

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
        (50, ("--formats", *WITHOUT_CHECKPOINTS)),
        pytest.param(300, (), marks=pytest.mark.slow),
    ],
    ids=["without checkpoints", "all"],
)
def test_damaged_files_are_refused(count, options):
    script = str(ROOT / "scripts" / "fuzz.py")
    command = [script, "--cases", str(count), "--seed", "77", *options]
    done = run_script(command, ROOT, timeout=500)
    assert done.returncode == 0, done.stdout
    assert f"{count} passed, 0 failed" in done.stdout
