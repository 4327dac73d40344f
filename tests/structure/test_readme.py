"""The plan that the documentation shows is what the planner prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_table_is_what_the_planner_prints() -> None:
    page = (ROOT / "docs" / "how_planning_works.md").read_text(encoding="utf-8")
    section = page.partition("## Read the table")[2]
    match = re.search(r"`alpa (plan [^`]+)`.*?```text\n(.*?)```", section, re.DOTALL)
    assert match is not None
    command, picture = match.groups()
    done = subprocess.run(
        [sys.executable, "-m", "alpa_strategy", *command.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "96"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines, printed = picture.splitlines(), (line.rstrip() for line in done.stdout.splitlines())
    shown = [line for line in lines[: lines.index("...")] if line]
    missing = [
        line for line in shown if line not in printed
    ]  # in this order: `printed` is an iterator
    assert not missing[:1]
    assert len(shown) > 30
