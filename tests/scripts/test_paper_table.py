"""What the stored results of scripts/paper_table.py must hold: no baseline is faster, what is off
has its reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
paper_table = pytest.importorskip("paper_table")
RESULTS = json.loads(paper_table.RESULTS.read_text(encoding="utf-8"))


def test_the_solved_plan_is_at_least_as_fast_as_every_other():
    assert RESULTS
    for key, entry in RESULTS.items():
        others = []
        for c in paper_table.COLUMNS[1:]:
            if (v := entry.get(c)) is not None:
                others.append(v["seconds"])
        assert all(entry["solved"]["seconds"] <= seconds for seconds in others), key


def test_what_is_off_the_papers_figure_has_its_reason():
    assert [line for line in paper_table.complaints(RESULTS) if "not explained" in line] == []


def test_a_restricted_plan_that_is_faster_is_taken():
    slow, fast = {"seconds": 2.0}, {"seconds": 1.0}
    entry = paper_table.at_least_as_good({"solved": slow, "intra": fast, "inter": None})
    assert entry["solved"] == fast | {"from": "intra"}
