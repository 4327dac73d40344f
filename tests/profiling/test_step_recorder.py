"""Ranks of several hosts come onto one clock, and rank 0 gets what all have recorded."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from alpa_strategy.profiling import recorder
from alpa_strategy.profiling.ranges import STEP
from alpa_strategy.profiling.rank_trace import Slice
from alpa_strategy.profiling.waiting import RankRecord

# Rank 1's and rank 2's host is an hour ahead.
AHEAD = 3600 * 10**9
# On a busy machine a rank may wait long for its turn.
MOST_ERROR = 5 * 10**8


def records_of_two_hosts() -> tuple[int, list[tuple[int, int]]]:
    """Clock offset of this rank, and on rank 0 the (rank, start) of all records."""
    rank = int(os.environ["RANK"])
    ahead = AHEAD if rank else 0
    recorder.clock_name = lambda: f"host {min(rank, 1)}"
    recorder.time = SimpleNamespace(time_ns=lambda: time.time_ns() + ahead)
    try:
        offset = recorder.clock_offset()
        slices = [Slice("step 0", STEP, 7 + offset, 9 + offset, "host")]
        records = recorder.gather_records(RankRecord(rank, (0,), slices, offset))
    finally:
        recorder.time = time
    return offset, [(record.rank, record.slices[0].start) for record in records]


def test_clocks_are_compared_by_host(pool) -> None:
    (first, gathered), (second, none), (third, _) = pool.run(3, records_of_two_hosts)
    assert first == 0
    assert abs(second - AHEAD) < MOST_ERROR
    assert third == second
    assert gathered == [(0, 7), (1, 7), (2, 7)]
    assert none == []
