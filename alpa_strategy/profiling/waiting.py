"""Who waits for whom: until when each collective and each message could not go on.

A collective can run when its last device has launched it, a message when it has been sent. What a
device spends in it before is waiting; the rest is communication.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from alpa_strategy.profiling.ranges import COLLECTIVE, MESSAGE
from alpa_strategy.profiling.rank_trace import Slice


@dataclass
class RankRecord:
    """What one rank has recorded."""

    rank: int

    # Indices of the stages that it runs.
    stages: tuple[int, ...]

    # Nested, see `rank_trace.nested`.
    slices: list[Slice]

    # Nanoseconds that its clock is ahead of rank 0's.
    clock_offset: int = 0

    def align(self) -> None:
        """Move all times to rank 0's clock, in place; `clock_offset` is 0 then."""
        for trace_slice in self.slices:
            trace_slice.start -= self.clock_offset
            trace_slice.end -= self.clock_offset
        self.clock_offset = 0


def flights(record: RankRecord) -> Iterator[tuple[Slice, Slice]]:
    """Yield (launch, wait) of the collectives that were launched before they were waited for.
    Launches and waits without the other are left out.
    """
    launched: dict[str, deque[Slice]] = defaultdict(deque)
    for trace_slice in record.slices:
        if trace_slice.category != COLLECTIVE:
            continue
        name = trace_slice.details.get("waits_for")
        if name is None:
            launched[trace_slice.name].append(trace_slice)
        elif launched[name]:
            # Equal collectives are waited for in the order of their launches.
            yield launched[name].popleft(), trace_slice


def mark_waiting(records: Sequence[RankRecord]) -> None:
    """Set `until` in the details of collectives and receives: when the last device was there.
    Collectives of which ranks are missing get none.

    Args:
        records: of all ranks, on one clock.
    """
    last: dict[Hashable, int] = {}
    counts: dict[Hashable, int] = defaultdict(int)
    keys: list[tuple[Slice, Hashable]] = []
    for record in records:
        waits = {id(launch): wait for launch, wait in flights(record)}
        numbers: dict[Hashable, int] = defaultdict(int)
        for trace_slice in record.slices:
            key, comes = _key(trace_slice)
            if key is None:
                continue
            number = numbers[key, comes]
            numbers[key, comes] += 1
            full_key: Hashable = (key, number)
            if comes:
                last[full_key] = max(last.get(full_key, trace_slice.start), trace_slice.start)
                counts[full_key] += 1
            if trace_slice.category == COLLECTIVE or not comes:
                keys.append((trace_slice, full_key))
            if id(trace_slice) in waits:
                keys.append((waits[id(trace_slice)], full_key))
    for trace_slice, full_key in keys:
        # A collective of which ranks are missing is not compared.
        members = trace_slice.details.get("members", ())
        is_complete = counts[full_key] >= len(members)
        if full_key in last and is_complete:
            trace_slice.details["until"] = last[full_key]


def _key(trace_slice: Slice) -> tuple[Hashable | None, bool]:
    """Return (key, whether other ranks wait for this slice). Slices of one collective or message
    have the same key on all ranks; None: other ranks have nothing to do with it.
    """
    if trace_slice.category == COLLECTIVE and "waits_for" not in trace_slice.details:
        members = tuple(trace_slice.details.get("members", ()))
        return (trace_slice.name, members) if members else None, True
    if trace_slice.category == MESSAGE and "sends" in trace_slice.details:
        return tuple(trace_slice.details["sends"]), True
    if trace_slice.category == MESSAGE and "receives" in trace_slice.details:
        return tuple(trace_slice.details["receives"]), False
    return None, False
