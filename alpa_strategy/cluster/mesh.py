"""Arithmetic of mesh axes: which links a group crosses, what a collective moves, how a measured table is read.

Plain numbers in and out; `spec.py` gives them their names.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


def volume_factor(kind: str, size: int) -> float:
    """Bytes that one device moves per byte of the full tensor on an axis of `size` devices (docs/formulas.md#costs)."""
    match kind:
        case "all_reduce":
            return 2 * (size - 1) / size
        case "all_gather" | "reduce_scatter":
            return (size - 1) / size
        case "all_to_all":
            return (size - 1) / size**2
        case "p2p":
            return 1.0
    raise ValueError(f"no such collective: {kind!r}")


def interpolate_seconds(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Read a measured table at `num_bytes`: piecewise linear inside, linear beyond its end, never decreasing.

    Below the first point the first time holds: it is latency. `points` are (bytes, seconds), bytes ascending.
    """
    sizes = [size for size, _ in points]
    seconds = _never_decreasing([value for _, value in points])
    if num_bytes <= sizes[0]:
        return seconds[0]
    if num_bytes > sizes[-1]:
        slope = seconds[-1] / sizes[-1]
        if len(points) > 1 and seconds[-1] > seconds[-2]:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + slope * (num_bytes - sizes[-1])
    right = bisect_left(sizes, num_bytes)
    left = right - 1
    share = (num_bytes - sizes[left]) / (sizes[right] - sizes[left])
    return seconds[left] + share * (seconds[right] - seconds[left])


def without_outliers(points: Sequence[tuple[int, float]], slack: float = 1.5) -> tuple[tuple[int, float], ...]:
    """Measured (bytes, seconds), bytes ascending, with what only noise explains taken out. Noise only ever adds time.

    A message costs no more than a larger one, and at most `slack` times as much as sending it in pieces of the size
    before would (slack, since caches favour small ones).
    """
    seconds = _never_decreasing([value for _, value in points])
    for i in range(1, len(points)):
        seconds[i] = min(seconds[i], slack * seconds[i - 1] * points[i][0] / points[i - 1][0])
    return tuple((size, value) for (size, _), value in zip(points, seconds, strict=True))


def _never_decreasing(seconds: Sequence[float]) -> list[float]:
    """Each time lowered to the least of those after it."""
    result = list(seconds)
    for i in range(len(result) - 2, -1, -1):
        result[i] = min(result[i], result[i + 1])
    return result


def crossing_groups(size: int, stride: int, num_devices: int, devices_per_node: int) -> tuple[int, int]:
    """How an axis meets the nodes: (groups that cross out of one node at the same time, devices of one group per node).

    Both are the worst over the nodes; (0, size) when every group lies inside a node.
    """
    if num_devices <= devices_per_node:
        return 0, size
    members: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank in range(num_devices):
        group = (rank // (stride * size), rank % stride)
        members[group][rank // devices_per_node] += 1
    crossing: dict[int, int] = defaultdict(int)
    for nodes in members.values():
        if len(nodes) > 1:
            for node in nodes:
                crossing[node] += 1
    if not crossing:
        return 0, size
    return max(crossing.values()), max(max(nodes.values()) for nodes in members.values())


def factorisations(num_devices: int) -> list[tuple[int, ...]]:
    """(n,), then every (a, b) with a * b = n and a, b > 1, a ascending."""
    pairs = [(a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0]
    return [(num_devices,), *pairs]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a logical mesh: the last axis runs over neighbouring devices."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
