"""The climb over numbers of micro-batches: it finds the best of one valley with few looks, and no
clock is in it.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.planner.microbatch_search import SearchResult, search_microbatches

COUNTS = [2**k for k in range(10, -1, -1)]


def looks(
    seconds: dict[int, float], counts=COUNTS, bound=lambda count: 0.0, known=math.inf, devices=8
):
    """(counts looked at, submeshes given to each look) where `seconds` holds what is found; others
    do not fit.
    """
    given_to: list[frozenset[int] | None] = []

    def look(count, used):
        given_to.append(used)
        return SearchResult(seconds[count], frozenset({1})) if count in seconds else SearchResult()

    return search_microbatches(counts, devices, bound, look, known), given_to


@given(st.integers(0, 10), st.integers(1, 64))
def test_the_bottom_of_a_valley_is_found(bottom, devices):
    seconds = {count: 1.0 + abs(i - bottom) for i, count in enumerate(COUNTS)}
    visited, given_to = looks(seconds, devices=devices)
    whole = [count for count, used in zip(visited, given_to, strict=True) if used is None]
    assert COUNTS[bottom] == whole[-1]
    assert len(whole) <= 2  # all submeshes are priced where it begins and where it ends


def test_what_does_not_fit_leads_to_more_micro_batches():
    visited, _ = looks({1024: 3.0, 512: 2.0})
    assert visited[0] < 512
    assert {512, 1024} <= set(visited)
    assert min(visited) == visited[0]  # fewer would need even more memory


def test_one_bump_on_the_way_to_more_micro_batches_is_passed():
    """Twice as many are slower, four times as many need no recomputation any more."""
    visited, _ = looks({64: 4.0, 128: 4.1, 256: 3.0, 512: 3.5, 1024: 3.6}, devices=8)
    assert visited == [64, 128, 256, 512, 256]


def test_counts_that_cannot_win_are_skipped_by_their_bound():
    seconds = {count: 10.0 + count / 1000 for count in COUNTS}

    def bound(count: int) -> float:
        return 9.0 if count < 16 else 10.0

    visited, _ = looks(seconds, bound=bound, known=9.5)
    assert visited
    assert max(visited) < 16
    assert looks(seconds, bound=lambda count: 10.0, known=9.5)[0] == []


@pytest.mark.parametrize("count", [1, 7])
def test_one_number(count):
    assert looks({count: 1.0}, counts=[count])[0] == [count]
    assert looks({}, counts=[count])[0] == [count]
