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
        """Move all times to rank 0's clock."""
        for each in self.slices:
            each.start -= self.clock_offset
            each.end -= self.clock_offset
        self.clock_offset = 0


def flights(record: RankRecord) -> Iterator[tuple[Slice, Slice]]:
    """Yield (launch, wait) of the collectives that were launched before they were waited for."""
    launched: dict[str, deque[Slice]] = defaultdict(deque)
    for each in record.slices:
        if each.category != COLLECTIVE:
            continue
        name = each.details.get("waits_for")
        if name is None:
            launched[each.name].append(each)
        elif launched[name]:
            # Equal collectives are waited for in the order of their launches.
            yield launched[name].popleft(), each


def mark_waiting(records: Sequence[RankRecord]) -> None:
    """Set `until` in the details of collectives and receives: when the last device was there.

    Args:
        records: of all ranks, on one clock.
    """
    last: dict[Hashable, int] = {}
    counts: dict[Hashable, int] = defaultdict(int)
    keys: list[tuple[Slice, Hashable]] = []
    for record in records:
        waits = {id(launch): wait for launch, wait in flights(record)}
        numbers: dict[Hashable, int] = defaultdict(int)
        for each in record.slices:
            key, comes = _key(each)
            if key is None:
                continue
            number = numbers[key, comes]
            numbers[key, comes] += 1
            full_key: Hashable = (key, number)
            if comes:
                last[full_key] = max(last.get(full_key, each.start), each.start)
                counts[full_key] += 1
            if each.category == COLLECTIVE or not comes:
                keys.append((each, full_key))
            if id(each) in waits:
                keys.append((waits[id(each)], full_key))
    for each, full_key in keys:
        # A collective of which ranks are missing is not compared.
        members = each.details.get("members", ())
        is_complete = counts[full_key] >= len(members)
        if full_key in last and is_complete:
            each.details["until"] = last[full_key]


def _key(each: Slice) -> tuple[Hashable | None, bool]:
    """Return what a slice belongs to on all ranks, and whether it is what others wait for."""
    if each.category == COLLECTIVE and "waits_for" not in each.details:
        members = tuple(each.details.get("members", ()))
        return (each.name, members) if members else None, True
    if each.category == MESSAGE and "sends" in each.details:
        return tuple(each.details["sends"]), True
    if each.category == MESSAGE and "receives" in each.details:
        return tuple(each.details["receives"]), False
    return None, False
