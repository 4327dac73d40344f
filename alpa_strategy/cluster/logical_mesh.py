"""Logical meshes and the time of collectives on their axes (docs/formulas.md#costs).

A logical mesh lays devices out as a 1-D or 2-D grid in row-major order: the last mesh axis runs
over neighbouring devices. The time of a collective on an axis is read from a measured table if
there is one. Else it follows from the axis' link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_strategy.cluster.devices import Host, Link

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")


@dataclass(frozen=True)
class CommTable:
    """Measured seconds of one collective on one kind of group."""

    # one of COLLECTIVES
    kind: str
    # devices in the group
    size: int
    # distance between neighbouring ranks of the group
    stride: int
    # (bytes of the full tensor on the axis, seconds), ascending
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a logical mesh: its size and what collectives cost on it."""

    size: int
    # distance between neighbouring ranks of the axis
    stride: int
    link: Link
    tables: tuple[CommTable, ...] = ()
    # seconds that the further devices of a ring add to the link's latency
    ring: float = 0.0
    # seconds that the further levels of a tree add to the link's latency
    tree: float = 0.0
    # bytes/s of all-to-alls if it is not the link's (devices with links of their own); else 0
    exchange: float = 0.0

    def seconds(self, kind: str, num_bytes: float) -> float:
        """Return the seconds of a collective of `COLLECTIVES` (docs/formulas.md#costs).

        From the measured table by interpolation if there is one, else alpha + beta * volume. A p2p
        message goes unsharded from one device to its neighbour on the axis. An axis of one device
        costs nothing.

        Args:
            num_bytes: of the full tensor on the axis.
        """
        if self.size == 1:
            return 0.0
        for table in self.tables:
            if table.kind == kind and table.points:
                return interpolate_seconds(table.points, num_bytes)

        if kind == "all_reduce":
            # An all-reduce by a ring goes around twice.
            hops = min(self.tree, 2 * self.ring)
        elif kind == "p2p":
            hops = 0.0
        else:
            hops = self.ring
        bandwidth = self.link.bandwidth
        if kind == "all_to_all" and self.exchange:
            bandwidth = self.exchange
        return self.link.latency + hops + volume_factor(kind, self.size) * num_bytes / bandwidth


@dataclass(frozen=True)
class LogicalMesh:
    """A grid of devices, with one MeshAxis per dim of `shape`."""

    shape: tuple[int, ...]
    axes: tuple[MeshAxis, ...]
    # as `ClusterSpec.overlap`
    overlap: float = 0.0
    # a device's share of its node's host memory; None: nothing can be offloaded
    host: Host | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.shape)


def volume_factor(kind: str, size: int) -> float:
    """Return the bytes that one device moves per byte of the full tensor (docs/formulas.md#costs).

    Args:
        kind: of collective, one of `COLLECTIVES`.
        size: devices on the mesh axis.
    """
    others = (size - 1) / size
    moved = {
        "all_gather": others,
        "reduce_scatter": others,
        "all_reduce": 2 * others,
        "all_to_all": (size - 1) / size**2,
        "p2p": 1.0,
    }
    return moved[kind]


def interpolate_seconds(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Read a measured table at `num_bytes`.

    Piecewise linear inside, never decreasing. Beyond its end as between the last two points, or in
    proportion to the bytes if these do not rise. Below the first point its time holds: that is
    latency.

    Args:
        points: (bytes, seconds), bytes ascending.
    """
    sizes = [size for size, _ in points]
    seconds = _non_decreasing(points)
    if num_bytes <= sizes[-1]:
        return float(np.interp(num_bytes, sizes, seconds))
    slope = seconds[-1] / sizes[-1]
    if len(points) > 1 and seconds[-1] > seconds[-2]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + slope * (num_bytes - sizes[-1])


def without_outliers(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points, with seconds lowered to what noise, which only ever adds time, does not
    explain.

    A message costs no more than a larger one. It costs at most 1.5 times as much as sending it in
    pieces of the next smaller size would (1.5, since caches favour small messages).

    Args:
        points: (bytes, seconds), bytes ascending.
    """
    seconds = _non_decreasing(points)
    for i in range(1, len(points)):
        size = points[i][0]
        smaller_size = points[i - 1][0]
        seconds[i] = min(seconds[i], 1.5 * seconds[i - 1] * size / smaller_size)
    return tuple((size, value) for (size, _), value in zip(points, seconds, strict=True))


def _non_decreasing(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the seconds of `points` (bytes, seconds), each lowered to the least of all larger
    messages.
    """
    from_largest = [value for _, value in reversed(points)]
    return np.minimum.accumulate(from_largest)[::-1].tolist()


def factorisations(num_devices: int) -> list[tuple[int, ...]]:
    """Return (n,), then every (a, b) with a * b = n and a, b > 1, a ascending."""
    pairs = [(a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0]
    return [(num_devices,), *pairs]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides of a logical mesh: the last axis runs over neighbouring devices."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
