"""Checks a trace against Chrome's format, as Perfetto's importer reads it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

# Fields of every event by its phase (Trace Event Format): complete, metadata, async, flow.
FIELDS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id", "args"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id", "bp"},
}


def read_trace(path: Path) -> dict[str, Any]:
    """Return the JSON data of a compressed trace."""
    with gzip.open(path, "rt") as file:
        return json.load(file)


def check_trace(trace: dict[str, Any]) -> None:
    """Raise AssertionError unless the trace has the format, and complete events nest."""
    events = trace["traceEvents"]
    assert events
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    open_ids: dict[Any, int] = {}
    flows: dict[Any, float] = {}
    for event in events:
        phase = event["ph"]
        assert set(event) == FIELDS[phase], event
        assert isinstance(event["name"], str)
        assert event["name"]
        for field in ("ts", "dur"):
            assert event.get(field, 0) >= 0, event
        for field in ("pid", "tid"):
            assert isinstance(event[field], int), event
        if phase == "X":
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            tracks[event["pid"], event["tid"]].append((start, end))
        if phase == "b":
            assert event["id"] not in open_ids
            open_ids[event["id"]] = event["ts"]
        if phase == "e":
            assert event["ts"] >= open_ids.pop(event["id"])
        if phase == "s":
            flows[event["id"]] = event["ts"]
        if phase == "f":
            assert event["ts"] >= flows.pop(event["id"])
    assert not open_ids
    assert not flows
    for intervals in tracks.values():
        check_nesting(intervals)
    named = set()
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            named.add(event["pid"])
    assert named >= {event["pid"] for event in events}


def check_nesting(intervals: list[tuple[int, int]]) -> None:
    """Raise AssertionError if two intervals overlap without one being within the other."""
    stack: list[int] = []
    for start, end in sorted(intervals, key=lambda each: (each[0], -each[1])):
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1], (start, end, stack[-1])
        stack.append(end)
