"""Host memory, as far as planning knows it: how much of it a node has, and how fast its devices reach it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from alpa_strategy.cluster.load import Fields


@dataclass(frozen=True)
class Host:
    """A node's host memory, where parameters with their optimizer's state, and activations, may lie.

    link_bandwidth: bytes/s per direction of each device's way to it (PCIe, NVLink-C2C).
    memory_bytes, memory_bandwidth: what may be used of the node's memory, and bytes/s that its cores reach on it; the
    node's devices share both.
    """

    link_bandwidth: float
    memory_bytes: float
    memory_bandwidth: float

    def share(self, num_devices: int) -> Host:
        """What one of so many devices has of it."""
        memory, bandwidth = self.memory_bytes / num_devices, self.memory_bandwidth / num_devices
        return replace(self, memory_bytes=memory, memory_bandwidth=bandwidth)


def read_host(fields: Fields) -> Host | None:
    """The section `host` of a cluster file; None where there is none."""
    if "host" not in fields:
        return None
    names = tuple(Host.__dataclass_fields__)
    host = fields.section("host", names, f"a section with {', '.join(names)}")
    return Host(
        link_bandwidth=host.number("link_bandwidth", "bytes/s between a device and host memory, for example 25e9"),
        memory_bytes=host.number("memory_bytes", "bytes of a node's host memory that may be used, for example 1e12"),
        memory_bandwidth=host.number("memory_bandwidth", "bytes/s of a node's host memory, for example 200e9"),
    )
