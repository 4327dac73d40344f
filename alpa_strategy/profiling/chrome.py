"""The merged trace as a file for Perfetto and chrome://tracing: a process per rank."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from alpa_strategy.files import replacing
from alpa_strategy.profiling.ranges import MESSAGE
from alpa_strategy.profiling.rank_trace import Slice
from alpa_strategy.profiling.waiting import RankRecord, flights

# Category of collectives between their launch and the end of their wait.
IN_FLIGHT = "in flight"

_HIDDEN_DETAILS = ("until", "waits_for")


def write_trace(path: Path, records: Sequence[RankRecord], about: dict[str, Any]) -> None:
    """Write the trace of all ranks as compressed JSON.

    Args:
        path: of the file, such as `trace.json.gz`.
        records: of the ranks, on one clock.
        about: about the run, for the file's metadata.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path, durable=False) as temporary, gzip.open(temporary, "wt") as file:
        json.dump(chrome_trace(records, about), file, separators=(",", ":"))


def chrome_trace(records: Sequence[RankRecord], about: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of all ranks in Chrome's format. Times begin with the first slice.

    Args:
        records: of all ranks.
        about: facts that are shown with the trace.
    """
    starts = [record.slices[0].start for record in records if record.slices]
    base = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for record in records:
        events += _of_rank(record, base)
    events += _arrows(records, base)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _of_rank(record: RankRecord, base: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: names of its tracks, slices, and collectives in flight.

    Args:
        base: nanoseconds at which the trace begins.
    """
    name = f"rank {record.rank}"
    if record.stages:
        noun = "stage" if len(record.stages) == 1 else "stages"
        name += f", {noun} {', '.join(map(str, record.stages))}"
    tracks = list(dict.fromkeys(trace_slice.track for trace_slice in record.slices))
    # The host's threads come first.
    tracks.sort()
    numbers = {track: number for number, track in enumerate(tracks)}
    yield _metadata("process_name", record.rank, 0, {"name": name})
    yield _metadata("process_sort_index", record.rank, 0, {"sort_index": record.rank})
    for track, number in numbers.items():
        yield _metadata("thread_name", record.rank, number, {"name": track})
        yield _metadata("thread_sort_index", record.rank, number, {"sort_index": number})

    for trace_slice in record.slices:
        yield {
            "ph": "X",
            **_head(
                trace_slice.name, trace_slice.category, record.rank, numbers[trace_slice.track]
            ),
            "ts": _microseconds(trace_slice.start - base),
            "dur": _microseconds(trace_slice.end - trace_slice.start),
            "args": _arguments(trace_slice),
        }
    for number, (launch, wait) in enumerate(flights(record)):
        head = _head(launch.name, IN_FLIGHT, record.rank, numbers[launch.track])
        identity = f"{record.rank}.{number}"
        start = _microseconds(launch.start - base)
        yield {"ph": "b", **head, "id": identity, "ts": start, "args": _arguments(launch)}
        yield {"ph": "e", **head, "id": identity, "ts": _microseconds(wait.end - base)}


def _arrows(records: Sequence[RankRecord], base: int) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each message's sender to its receivers: two events each. Messages that
    only one side recorded are left out.

    Args:
        base: nanoseconds at which the trace begins.
    """
    sent: dict[Any, list[tuple[int, Slice]]] = {}
    for record in records:
        for trace_slice in record.slices:
            if trace_slice.category == MESSAGE and "sends" in trace_slice.details:
                sent.setdefault(tuple(trace_slice.details["sends"]), []).append(
                    (record.rank, trace_slice)
                )
    number = 0
    for record in records:
        seen: dict[Any, int] = {}
        for trace_slice in record.slices:
            if trace_slice.category != MESSAGE or "receives" not in trace_slice.details:
                continue
            key = tuple(trace_slice.details["receives"])
            index = seen.get(key, 0)
            seen[key] = index + 1
            senders = [(rank, sender) for rank, sender in sent.get(key, ())]
            if index >= len(senders):
                continue
            rank, sender = senders[index]
            number += 1
            start = _microseconds(sender.start - base)
            end = _microseconds(max(trace_slice.end - 1, sender.start) - base)
            head = {"cat": "message", "name": "message", "id": number}
            yield {"ph": "s", **head, "pid": rank, "tid": 0, "ts": start}
            yield {"ph": "f", "bp": "e", **head, "pid": record.rank, "tid": 0, "ts": end}


def _head(name: str, category: str, rank: int, track: int) -> dict[str, Any]:
    return {"name": name, "cat": category, "pid": rank, "tid": track}


def _metadata(name: str, rank: int, track: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "ts": 0, "args": arguments}


def _arguments(trace_slice: Slice) -> dict[str, Any]:
    return {key: value for key, value in trace_slice.details.items() if key not in _HIDDEN_DETAILS}


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
