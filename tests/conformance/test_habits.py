"""What a step says, writes and fills besides computing is what it is under DDP, rank by rank; a
pipeline refuses it by its line.
"""

from __future__ import annotations

import pytest
from conformance.bench import RANKS, differences
from conformance.habits import HABITS, outcomes, refusals


@pytest.fixture(scope="module")
def both(pool, tmp_path_factory):
    """Outcomes of all habits by rank, under DDP and here."""
    folders = [str(tmp_path_factory.mktemp(kind)) for kind in ("ddp", "alpa")]
    expected = pool.run(RANKS, outcomes, "ddp", folders[0], timeout=300)
    per_rank = pool.run(RANKS, outcomes, "alpa", folders[1], timeout=500)
    return expected, per_rank


@pytest.mark.parametrize("name", HABITS)
def test_as_under_ddp(both, name: str) -> None:
    under_ddp, under_alpa = both
    expected = [rank[name] for rank in under_ddp]
    results = [rank[name] for rank in under_alpa]
    assert not differences(expected, results)
    is_seen = ("said", "warned", "lines", "count", "by name")
    effects = [any(expected[0]["held"]), *(expected[0][key] for key in is_seen)]
    assert any(effects) or name == "text that decides"


# One of each kind of effect; capture/test_side_effects.py has more of them.
REFUSED = ("f-string", "logging", "lines of a file", "list of a class", "counter of a class")
REFUSED += ("meter by name", "text that decides")


@pytest.mark.parametrize(
    "names",
    [REFUSED, pytest.param(tuple(HABITS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_pipeline_refuses_by_the_line(pool, tmp_path, names: tuple[str, ...]) -> None:
    for rank in pool.run(RANKS, refusals, str(tmp_path), names, timeout=300):
        for name, text in rank.items():
            assert text.startswith("CaptureError"), (name, text)
            assert "habits.py:" in text or "changes" in text, (name, text)
