"""ClusterSpec: the nodes, devices and links that a plan is made for, declared in YAML or measured.

Collectives of a logical mesh cost what follows from the links that they cross
(`logical_mesh.py`). No process groups here.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alpa_strategy.cluster.devices import DeviceSpec, Host, Link
from alpa_strategy.cluster.load import MAX_DEVICES, Fields, read_cluster_yaml
from alpa_strategy.cluster.logical_mesh import (
    CommTable,
    LogicalMesh,
    MeshAxis,
    factorisations,
    strides,
)
from alpa_strategy.cluster.sections import (
    EXPECTED_LINK,
    EXPECTED_ORDER,
    LINK_FIELDS,
    changed_fields,
    read_device,
    read_host,
    read_link,
    read_order,
    read_table,
)
from alpa_strategy.cluster.topology import Level, Order, Topology, read_levels, read_links
from alpa_strategy.errors import ClusterError


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of `num_nodes` x `devices_per_node` equal devices."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: Link
    # its bandwidth is per node, shared by the groups that cross nodes at the same time
    inter_node: Link
    tables: tuple[CommTable, ...] = ()
    # whether the job measures devices and links before it plans
    measured: bool = False
    # share, 0 to 1, of the communication that overlaps with compute (gradients reduced in buckets)
    # and costs no time; 0 if collectives take the devices' cores, or if it is not known
    overlap: float = 0.0
    # [device, device] bytes/s between devices of a node that have a direct link, else 0; those
    # without one are connected by `intra_node`
    links: tuple[tuple[float, ...], ...] = ()
    # blocks of devices or nodes that share an uplink
    levels: tuple[Level, ...] = ()
    # order of the devices in meshes: `searched`, `numbered`, or their ranks
    order: str | Order = "searched"
    # host memory of each node; None: nothing is offloaded
    host: Host | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "ClusterSpec":
        """Read a YAML file.

        Args:
            path: of the file, or the name of one in configs/clusters.
            overrides: dotted field -> value that replaces the file's, such as `{"num_nodes": 2}`.

        Raises:
            ClusterError: names the field that is missing, unknown or wrong.
        """
        return cls.from_dict(*read_cluster_yaml(path, overrides))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "(given as data)") -> "ClusterSpec":
        """Read plain data; inverse of `to_dict`.

        With `measured: true`, the fields `name`, `num_nodes` and `devices_per_node` are enough: the
        rest has nominal values until it is measured.

        Args:
            source: name of the data in messages.

        Raises:
            ClusterError: names `source` and the field that is missing, unknown or wrong.
        """
        fields = Fields(data, CLUSTER_FIELDS, source)
        measured = fields.value("measured", "true or false", False)
        fields.valid("measured", measured, isinstance(measured, bool), "true or false")
        nominal = NOMINAL.to_dict() if measured else {}
        tables = fields.items("tables", "a list of measured tables", ())
        num_nodes = fields.integer(
            "num_nodes", "the number of nodes, a whole number >= 1", maximum=MAX_DEVICES
        )
        per_node = "devices in each node, a whole number >= 1; at most a million in the cluster"
        spec = cls(
            name=fields.text("name", "a name for the cluster"),
            num_nodes=num_nodes,
            devices_per_node=fields.integer(
                "devices_per_node", per_node, maximum=MAX_DEVICES / num_nodes
            ),
            device=read_device(fields, nominal.get("device")),
            intra_node=read_link(fields, "intra_node", nominal.get("intra_node")),
            inter_node=read_link(fields, "inter_node", nominal.get("inter_node")),
            tables=tuple(read_table(table, source, index) for index, table in enumerate(tables)),
            measured=measured,
            overlap=fields.number("overlap", "a share, 0 to 1", 0.0, zero=True, maximum=1.0),
            links=_read_intra_node_links(fields),
            levels=read_levels(fields),
            order=read_order(fields),
            host=read_host(fields),
        )
        spec._check_devices()
        return spec

    def _check_devices(self) -> None:
        """Raise ClusterError unless links, levels and the order are those of all devices."""
        if not self.is_uniform:
            # Building it checks that links and levels cover the devices.
            _ = self.topology
        if isinstance(self.order, str):
            return
        if sorted(self.order) != list(range(self.num_devices)):
            raise ClusterError(
                f"order does not list the ranks 0 to {self.num_devices - 1}, each once",
                f"write {EXPECTED_ORDER}",
            )

    @property
    def is_uniform(self) -> bool:
        """Whether all devices of a node are alike, and all nodes."""
        return not self.links and not self.levels

    @cached_property
    def topology(self) -> Topology:
        """The devices by their ranks, and the links between them."""
        return Topology(
            self.num_nodes,
            self.devices_per_node,
            (self.intra_node.latency, self.intra_node.bandwidth),
            (self.inter_node.latency, self.inter_node.bandwidth),
            self.links,
            self.levels,
        )

    @cached_property
    def _order(self) -> Order:
        """Global ranks in the order in which meshes take them."""
        return tuple(range(self.num_devices)) if isinstance(self.order, str) else self.order

    def ranks_of(self, first: int, count: int) -> Order:
        """Return the global ranks of the mesh of `count` devices from position `first` on.

        () if these are the consecutive ranks from `first` on.
        """
        ranks = self._order[first : first + count]
        return () if ranks == tuple(range(first, first + count)) else ranks

    def between(self, source: tuple[int, int], target: tuple[int, int]) -> Link:
        """Return latency and bandwidth of a tensor that is sent from one mesh to another.

        Every byte is sent once. Each device sends and receives as much as the others of its mesh,
        in order. Between a mesh and itself nothing is sent: the bandwidth is infinite.

        Args:
            source, target: (position of the first device, number of devices) of each mesh.
        """
        if (source, target) not in self._cache:
            source_first, source_size = source
            target_first, target_size = target
            # Equal chunks, each of which goes from one device to one other.
            num_chunks = math.lcm(source_size, target_size)
            messages: Counter[tuple[int, int]] = Counter()
            for chunk in range(num_chunks):
                sender = self._order[source_first + chunk * source_size // num_chunks]
                receiver = self._order[target_first + chunk * target_size // num_chunks]
                messages[sender, receiver] += 1
            latency, seconds = self.topology.messages(messages)
            bandwidth = num_chunks / seconds if seconds else math.inf
            self._cache[source, target] = Link(latency, bandwidth)
        return self._cache[source, target]

    @cached_property
    def _cache(self) -> dict[tuple, Any]:
        """Results of `between` and `logical_mesh` by their arguments."""
        return {}

    def in_order(self, ranks: Order) -> "ClusterSpec":
        """Return the cluster with its devices in the order `ranks`."""
        if self.is_uniform and ranks == tuple(range(self.num_devices)):
            return self
        return replace(self, order=ranks)

    def orders(self) -> "list[ClusterSpec]":
        """Return the cluster in every device order in which a plan may be fastest.

        One if its links do not differ, or if its order is set. An order is left out if another one
        is as good: there each mesh has links that are as good on every axis, and to the next mesh.
        """
        if self.is_uniform or self.order != "searched":
            return [self]
        best: list[tuple[ClusterSpec, _Offers]] = []
        for order in self.topology.orders():
            cluster = replace(self, order=order)
            offers = cluster._offers()
            if any(_as_good(offers, others) for _, others in best):
                continue
            best = [
                (other, other_offers)
                for other, other_offers in best
                if not _as_good(other_offers, offers)
            ]
            best.append((cluster, offers))
        return [cluster for cluster, _ in best]

    def _offers(self) -> "_Offers":
        """Return (nodes, devices per node) of each submesh size -> axis sizes and rates of its
        meshes, one array (`_offer`) for every logical shape.

        Under (0, size): the link between neighbouring meshes of `size` devices, as an axis whose
        latency is that of all messages one after the other, and whose exchange rate is the slowest
        link's; no entry if there are no neighbours.
        """
        submeshes = []
        for num_devices in range(2, self.devices_per_node + 1):
            if self.devices_per_node % num_devices == 0:
                submeshes.append((1, num_devices))
        for num_nodes in range(2, self.num_nodes + 1):
            if self.num_nodes % num_nodes == 0:
                submeshes.append((num_nodes, self.devices_per_node))

        offers: _Offers = {}
        for submesh in submeshes:
            offers[submesh] = []
            for shape in self.logical_shapes(submesh):
                axes = self.logical_mesh(shape, submesh).axes
                offers[submesh].append(
                    _offer(*((axis.size, axis.link, axis.exchange) for axis in axes))
                )
        for size in (1, *map(math.prod, submeshes)):
            firsts = range(0, self.num_devices - 2 * size + 1, size)
            links = [self.between((first, size), (first + size, size)) for first in firsts]
            if not links:
                continue
            one_after_another = Link(
                latency=sum(link.latency for link in links),
                bandwidth=1 / sum(1 / link.bandwidth for link in links),
            )
            slowest = min(link.bandwidth for link in links)
            offers[0, size] = [_offer((size, one_after_another, slowest))]
        return offers

    def logical_mesh(
        self, shape: tuple[int, ...], submesh: tuple[int, int] | None = None
    ) -> LogicalMesh:
        """Return the logical mesh of `shape` on a submesh of the cluster.

        An axis whose groups cross nodes uses the inter-node link. The groups that leave one node at
        the same time share it. A group with several devices in a node is a ring that leaves each
        node once, so it also needs the intra-node link's bandwidth. If links differ, costs are the
        worst of all positions that the mesh may have.

        Args:
            submesh: (nodes, devices per node); None: the full cluster.

        Raises:
            ClusterError: `shape` does not have the submesh's number of devices, or the cluster has
                no such submesh.
        """
        shape = tuple(shape)
        num_nodes, per_node = self._submesh(submesh)
        num_devices = num_nodes * per_node
        if not shape or min(shape) < 1 or math.prod(shape) != num_devices:
            raise ClusterError(
                f"logical mesh {shape} does not have the {num_devices} devices of"
                f" {num_nodes} x {per_node}",
                f"use one of {', '.join(map(str, factorisations(num_devices)))}",
            )
        key = (shape, num_nodes, per_node)
        if key not in self._cache:
            grids = [
                np.array(ranks).reshape(shape) for ranks in self._positions(num_nodes, per_node)
            ]
            axes = tuple(self._axis(grids, axis) for axis in range(len(shape)))
            host = self.host and self.host.share(self.devices_per_node)
            self._cache[key] = LogicalMesh(shape, axes, self.overlap, host)
        return self._cache[key]

    def _positions(self, num_nodes: int, per_node: int) -> Iterator[Sequence[int]]:
        """Yield the global ranks of a submesh of `num_nodes` nodes with `per_node` devices.

        At one position if all links are alike; else at every multiple of its size in the device
        order.
        """
        if self.is_uniform:
            ranks: list[int] = []
            for node in range(num_nodes):
                first = node * self.devices_per_node
                ranks += range(first, first + per_node)
            yield ranks
            return
        size = num_nodes * per_node
        for first in range(0, self.num_devices - size + 1, size):
            yield self._order[first : first + size]

    def _axis(self, grids: Sequence[np.ndarray], axis: int) -> MeshAxis:
        """Return axis number `axis` of a mesh whose ranks are one of `grids`: the slowest one."""
        shape = grids[0].shape
        size = shape[axis]
        stride = strides(shape)[axis]
        group_links = []
        for grid in grids:
            groups = np.moveaxis(grid, axis, -1).reshape(-1, size).tolist()
            group_links.append(self.topology.way(tuple(map(tuple, groups))))
        link = Link(
            latency=max(link.latency for link in group_links),
            bandwidth=min(link.bandwidth for link in group_links),
        )

        # Tables are measured on ranks that follow each other.
        is_contiguous = int(grids[0].flat[-1]) + 1 == grids[0].size
        tables: tuple[CommTable, ...] = ()
        if self.is_uniform and is_contiguous:
            tables = tuple(
                table for table in self.tables if (table.size, table.stride) == (size, stride)
            )

        # Devices of a group that are in the same node, and nodes, rounded up.
        together = min(link.together for link in group_links)
        num_nodes = -(-size // together)
        inside_hop = self.intra_node.hop
        across_hop = self.inter_node.hop
        ring = inside_hop * (size - num_nodes) + across_hop * (num_nodes - 1)
        # Up the tree and down again.
        tree = 2 * (inside_hop * math.log2(together) + across_hop * math.log2(num_nodes))
        exchange = float(min(link.exchange for link in group_links))
        return MeshAxis(size, stride, link, tables, ring, tree, exchange)

    def logical_shapes(self, submesh: tuple[int, int] | None = None) -> list[tuple[int, ...]]:
        """Return every 1-D and 2-D factorisation of the submesh's number of devices.

        (n,) first, then (a, b) with a, b > 1.
        """
        num_nodes, per_node = self._submesh(submesh)
        return factorisations(num_nodes * per_node)

    def digest(self) -> str:
        """Return a hash of everything that costs depend on.

        Of nodes, devices per node, device name and memory in GiB alone if `measured`: the measured
        figures vary by run.
        """
        data: Any = self.to_dict()
        if self.measured:
            memory_gib = round(self.device.memory_bytes / 2**30)
            data = (self.num_nodes, self.devices_per_node, self.device.name, memory_gib)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON or YAML; inverse of `from_dict`. Most fields that have their
        defaults are left out.
        """
        data = changed_fields(self, "tables", "measured")

        device = changed_fields(self.device, "efficiency")
        device["peak_flops"] = dict(self.device.peak_flops)
        if self.device.efficiencies:
            device["efficiencies"] = {
                kind: dict(shares) for kind, shares in self.device.efficiencies
            }
        data["device"] = device

        data["intra_node"] = changed_fields(self.intra_node)
        data["inter_node"] = changed_fields(self.inter_node)
        if self.links:
            data["intra_node"]["links"] = data.pop("links")

        data["tables"] = [changed_fields(table) for table in self.tables]
        if self.levels:
            data["levels"] = [level.to_dict() for level in self.levels]
        if self.host is not None:
            data["host"] = dict(vars(self.host))
        return data

    def _submesh(self, submesh: tuple[int, int] | None) -> tuple[int, int]:
        """Return (nodes, devices per node) of a submesh, or of the full cluster for None.

        Raises:
            ClusterError: the submesh is no part of the cluster.
        """
        num_nodes, per_node = submesh or (self.num_nodes, self.devices_per_node)
        has_nodes = 1 <= num_nodes <= self.num_nodes
        has_devices = 1 <= per_node <= self.devices_per_node
        if not has_nodes or not has_devices:
            raise ClusterError(
                f"submesh {num_nodes} x {per_node} is not part of {self.name} ({self.num_nodes} x"
                f" {self.devices_per_node})",
                "give (nodes, devices per node) within the cluster",
            )
        return num_nodes, per_node


# `links` is a field of the section `intra_node`.
CLUSTER_FIELDS = tuple(name for name in ClusterSpec.__dataclass_fields__ if name != "links")

# One core of a current server CPU with gloo over loopback: the figures of a `measured` cluster
# before it is measured.
NOMINAL = ClusterSpec(
    name="nominal",
    num_nodes=1,
    devices_per_node=1,
    device=DeviceSpec(
        "cpu (nominal)", 4 * 2**30, 10e9, (("float32", 60e9), ("float64", 30e9)), 5e-6, 0.8
    ),
    intra_node=Link(120e-6, 2e9),
    inter_node=Link(200e-6, 1e9),
    measured=True,
)


def _read_intra_node_links(fields: Fields) -> tuple[tuple[float, ...], ...]:
    """Return the matrix `intra_node.links`, [device, device] bytes/s; () if the file has none."""
    if "intra_node" not in fields.data:
        return ()
    return read_links(fields.section("intra_node", LINK_FIELDS, EXPECTED_LINK))


# (nodes, devices per node) -> meshes, each as `_offer` describes it
_Offers = dict[tuple[int, int], list[np.ndarray]]


def _offer(*axes: tuple[int, Link, float]) -> np.ndarray:
    """Describe a mesh of axes (size, link, exchange rate) as sorted rows [axes, 5]: size,
    bandwidth, -latency, exchange rate, -size.

    A larger number is a better one, apart from sizes: these are there with both signs, so that an
    axis of another size is never better.
    """
    numbers = []
    for size, link, exchange in axes:
        numbers.append((size, link.bandwidth, -link.latency, exchange, -size))
    return np.array(sorted(numbers))


def _as_good(offers: _Offers, others: _Offers) -> bool:
    """Whether every mesh of `offers` has one among `others` whose axes are each as good."""
    for submesh, meshes in offers.items():
        for mesh in meshes:
            if not any(_is_at_least(other, mesh) for other in others[submesh]):
                return False
    return True


def _is_at_least(other: np.ndarray, mesh: np.ndarray) -> bool:
    """Whether each number of `other` is as large as that of `mesh`, but for rounding errors."""
    if other.shape != mesh.shape:
        return False
    return bool((mesh <= other + 1e-9 * abs(other)).all())
