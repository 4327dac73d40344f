"""ClusterSpec: the nodes, devices and links that a plan is made for. Declared in YAML or measured; no process groups.

A logical mesh lays the same devices out as a 1-D or 2-D grid in row-major order: the last mesh axis runs over
neighbouring devices. What a collective costs on a mesh axis follows from the links that the axis crosses, or from
measured tables where there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")


@dataclass(frozen=True)
class Link:
    """latency in seconds per message, bandwidth in bytes/s per direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device. peak_flops: dtype name (`float32`, `bfloat16`, ...) -> FLOP/s.

    efficiency is the share of peak that large matrix products reach (from measurement or experience, 0..1).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    launch_seconds: float
    efficiency: float = 1.0


@dataclass(frozen=True)
class CommTable:
    """Measured seconds of one collective on a group of `size` devices with `stride` between neighbours."""

    kind: str
    size: int
    stride: int
    points: tuple[tuple[int, float], ...]  # (bytes of the full tensor on the axis, seconds), ascending


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a logical mesh: its size and what collectives cost on it."""

    size: int
    stride: int
    link: Link
    tables: tuple[CommTable, ...] = ()

    def seconds(self, kind: str, num_bytes: float) -> float:
        """Time of collective `kind`; `num_bytes` are those of the full tensor on the axis (design section 6).

        From the measured table by interpolation where there is one, else alpha + beta * volume.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LogicalMesh:
    """A grid of devices: `shape` and one MeshAxis per mesh axis."""

    shape: tuple[int, ...]
    axes: tuple[MeshAxis, ...]

    @property
    def num_devices(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of `num_nodes` x `devices_per_node` equal devices."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: Link
    inter_node: Link  # bandwidth per node, shared by the groups that cross nodes at the same time
    tables: tuple[CommTable, ...] = ()
    measured: bool = False

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @classmethod
    def load(cls, path: str | Path) -> ClusterSpec:
        """Read a YAML file (or the name of one in configs/clusters); ClusterError names missing or unknown fields."""
        raise NotImplementedError

    def logical_mesh(self, shape: tuple[int, ...], submesh: tuple[int, int] | None = None) -> LogicalMesh:
        """The logical mesh of `shape` on a submesh (n_nodes, n_devices) of the cluster (default: all of it)."""
        raise NotImplementedError

    def logical_shapes(self, submesh: tuple[int, int] | None = None) -> list[tuple[int, ...]]:
        """Every 1-D and 2-D factorisation of the submesh's device count: (n,), then (a, b) with a, b > 1."""
        raise NotImplementedError

    def digest(self) -> str:
        """Hash of everything that costs depend on, measured tables excluded when `measured` (times vary by run)."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML; inverse of `from_dict`."""
        raise NotImplementedError
