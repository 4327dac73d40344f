"""ClusterSpec: the nodes, devices and links that a plan is made for. Declared in YAML or measured;
no process groups.

A logical mesh lays the same devices out as a 1-D or 2-D grid in row-major order: the last mesh axis
runs over neighbouring devices. What a collective costs on an axis follows from the links that it
crosses, or measured tables.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from alpa_strategy.cluster.load import MAX_DEVICES, Fields, read_cluster_yaml
from alpa_strategy.cluster.topology import Level, Order, Topology, read_levels, read_links
from alpa_strategy.errors import ClusterError

ORDERS = ("searched", "numbered")
_ORDER = "searched, numbered, or a list of all ranks"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")


@dataclass(frozen=True)
class Link:
    """latency in seconds per message, bandwidth in bytes/s per direction."""

    latency: float
    bandwidth: float
    hop: float = (
        0.0  # seconds that a collective adds for each further device of a ring, or level of a tree
    )


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]  # dtype name (`float32`, `bfloat16`, ...) -> FLOP/s
    launch_seconds: float
    efficiency: float = (
        1.0  # the share of peak that large matrix products reach (measurement or experience, 0..1)
    )
    # how much longer an op takes while all devices of the job compute than while one does (>= 1;
    # ranks that share CPU cores). The other figures are those of one device alone.
    slowdown: float = 1.0
    # efficiency of kinds of products (`PRODUCT_KINDS`) by dtype, where it is another
    efficiencies: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    # processors among which a product's tiles are dealt out (SMs), 0: tiles are not looked at
    compute_units: int = 0

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    def efficiency_of(self, kind: str, dtype: str) -> float:
        """The share of `dtype`'s peak that large products of a kind reach."""
        own = dict(self.efficiencies)
        if kind == "attention_backward" and kind not in own:
            kind = "attention"
        return dict(own.get(kind, ())).get(dtype, self.efficiency)


@dataclass(frozen=True)
class Host:
    """A node's host memory, where parameters with their optimizer's state, and activations, may
    lie.
    """

    link_bandwidth: float  # bytes/s per direction of each device's way to it (PCIe, NVLink-C2C)
    # memory_bytes, memory_bandwidth: what may be used of the node's memory, and its cores' bytes/s;
    # devices share both
    memory_bytes: float
    memory_bandwidth: float

    def share(self, num_devices: int) -> "Host":
        """What one of so many devices has of it."""
        memory, bandwidth = self.memory_bytes / num_devices, self.memory_bandwidth / num_devices
        return replace(self, memory_bytes=memory, memory_bandwidth=bandwidth)


@dataclass(frozen=True)
class CommTable:
    """Measured seconds of one collective on a group of `size` devices with `stride` between
    neighbours.
    """

    kind: str
    size: int
    stride: int
    points: tuple[
        tuple[int, float], ...
    ]  # (bytes of the full tensor on the axis, seconds), ascending


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a logical mesh: its size and what collectives cost on it."""

    size: int
    stride: int
    link: Link
    tables: tuple[CommTable, ...] = ()
    # ring, tree: seconds that the further devices of a ring and levels of a tree add to the link's
    # latency
    ring: float = 0.0
    tree: float = 0.0
    exchange: float = (
        0.0  # bytes/s of all-to-alls where it is not the link's (devices with links of their own)
    )

    def seconds(self, kind: str, num_bytes: float) -> float:
        """Time of collective `kind`; `num_bytes` are those of the full tensor on the axis
        (docs/formulas.md#costs).

        From the measured table by interpolation where there is one, else alpha + beta * volume. A
        p2p message goes whole from one device to its neighbour on the axis. An axis of one device
        costs nothing.
        """
        if self.size == 1:
            return 0.0
        for table in self.tables:
            if table.kind == kind and table.points:
                return interpolate_seconds(table.points, num_bytes)
        hops = {"all_reduce": min(self.tree, 2 * self.ring), "p2p": 0.0}.get(kind, self.ring)
        bandwidth = self.exchange if kind == "all_to_all" and self.exchange else self.link.bandwidth
        return self.link.latency + hops + volume_factor(kind, self.size) * num_bytes / bandwidth


@dataclass(frozen=True)
class LogicalMesh:
    """A grid of devices: `shape` and one MeshAxis per mesh axis; `overlap`: the cluster's."""

    shape: tuple[int, ...]
    axes: tuple[MeshAxis, ...]
    overlap: float = 0.0
    host: Host | None = None  # a device's share of its node's; None: there is no way to it

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)


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
    # share of the communication beside which devices compute (gradients reduced in buckets) that
    # costs no time; 0 where collectives take the devices' own cores, or it is not known
    overlap: float = 0.0
    # bytes/s between each two devices of a node that have a link of their own; `intra_node` is what
    # the others have
    links: tuple[tuple[float, ...], ...] = ()
    levels: tuple[Level, ...] = ()  # blocks of devices or nodes that share a way out
    order: str | Order = "searched"  # of devices in meshes: `searched`, `numbered`, or their ranks
    host: Host | None = None  # of each node; None: nothing is offloaded

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "ClusterSpec":
        """Read a YAML file (or the name of one in configs/clusters); ClusterError names missing or
        unknown fields.

        `overrides` are laid over the file: dotted field -> value, for example `{"num_nodes": 2}`.
        """
        return cls.from_dict(*read_cluster_yaml(path, overrides))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "(given as data)") -> "ClusterSpec":
        """Inverse of `to_dict`. Strict: ClusterError names `source` and the field that is missing,
        unknown or wrong.

        With `measured: true`, `name`, `num_nodes` and `devices_per_node` will do: the rest is
        nominal until measured.
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
            device=_read_device(fields, nominal.get("device")),
            intra_node=_read_link(fields, "intra_node", nominal.get("intra_node")),
            inter_node=_read_link(fields, "inter_node", nominal.get("inter_node")),
            tables=tuple(_read_table(table, source, index) for index, table in enumerate(tables)),
            measured=measured,
            overlap=fields.number("overlap", "a share, 0 to 1", 0.0, zero=True, maximum=1.0),
            links=read_links(fields.section("intra_node", LINK_FIELDS, _LINK))
            if "intra_node" in fields.data
            else (),
            levels=read_levels(fields),
            order=_read_order(fields),
            host=_read_host(fields),
        )
        if not spec.is_uniform:
            _ = spec.topology  # ClusterError where links or levels do not cover its devices
        if not isinstance(spec.order, str) and sorted(spec.order) != list(range(spec.num_devices)):
            raise ClusterError(
                f"order does not list the ranks 0 to {spec.num_devices - 1}, each once",
                f"write {_ORDER}",
            )
        return spec

    @property
    def is_uniform(self) -> bool:
        """Whether all devices of a node are alike, and all nodes."""
        return not self.links and not self.levels

    @cached_property
    def topology(self) -> Topology:
        """The devices by their ranks, and the links between them."""
        inside, node = (
            (link.latency, link.bandwidth) for link in (self.intra_node, self.inter_node)
        )
        return Topology(
            self.num_nodes, self.devices_per_node, inside, node, self.links, self.levels
        )

    @cached_property
    def _order(self) -> Order:
        return tuple(range(self.num_devices)) if isinstance(self.order, str) else self.order

    def ranks_of(self, first: int, count: int) -> Order:
        """Global ranks of the mesh of `count` devices from place `first` on; (): those from `first`
        on.
        """
        ranks = self._order[first : first + count]
        return () if ranks == tuple(range(first, first + count)) else ranks

    def between(self, source: tuple[int, int], target: tuple[int, int]) -> Link:
        """What a tensor has on its way between meshes, given as (first place, devices): every byte
        goes once, each
        device sends and receives as much as the others of its mesh, in order."""
        if (source, target) not in self._known:
            parts = math.lcm(source[1], target[1])  # each goes from one device to one
            places = [
                (source[0] + i * source[1] // parts, target[0] + i * target[1] // parts)
                for i in range(parts)
            ]
            latency, seconds = self.topology.messages(
                Counter((self._order[a], self._order[b]) for a, b in places)
            )
            self._known[source, target] = Link(latency, parts / seconds if seconds else math.inf)
        return self._known[source, target]

    @cached_property
    def _known(self) -> dict[tuple, Any]:
        """What `between` and `logical_mesh` gave, by their arguments."""
        return {}

    def in_order(self, ranks: Order) -> "ClusterSpec":
        """The cluster with its devices in an order that is given."""
        if self.is_uniform and ranks == tuple(range(self.num_devices)):
            return self
        return replace(self, order=ranks)

    def orders(self) -> "list[ClusterSpec]":
        """The cluster in every order of its devices that some mesh is better off in than in the
        others.

        One where its links do not differ, or its order is given. Orders are left out whose every
        mesh has in another
        order links that are as good on each axis, and to the mesh after it: no plan is faster in
        them.
        """
        if self.is_uniform or self.order != "searched":
            return [self]
        kept: list[tuple[ClusterSpec, _Offers]] = []
        for order in self.topology.orders():
            found = replace(self, order=order)
            offers = found._offers()
            if not any(_as_good(offers, other) for _, other in kept):
                kept = [(c, other) for c, other in kept if not _as_good(other, offers)] + [
                    (found, offers)
                ]
        return [found for found, _ in kept]

    def _offers(self) -> "_Offers":
        """What the meshes of each submesh size have: per logical shape its axes' sizes and rates,
        smallest first.

        Under (0, size) what messages from mesh to mesh have that lie in a row: all one after the
        other, the slowest.
        """
        inside = [
            (1, n) for n in range(2, self.devices_per_node + 1) if self.devices_per_node % n == 0
        ]
        beyond = [
            (n, self.devices_per_node)
            for n in range(2, self.num_nodes + 1)
            if self.num_nodes % n == 0
        ]
        found = {
            submesh: [
                _offer(
                    *((a.size, a.link, a.exchange) for a in self.logical_mesh(shape, submesh).axes)
                )
                for shape in self.logical_shapes(submesh)
            ]
            for submesh in inside + beyond
        }
        for size in (1, *map(math.prod, inside + beyond)):
            rows = range(0, self.num_devices - 2 * size + 1, size)
            links = [self.between((first, size), (first + size, size)) for first in rows]
            if links:
                all_together = Link(
                    sum(link.latency for link in links),
                    1 / sum(1 / link.bandwidth for link in links),
                )
                found[0, size] = [
                    _offer((size, all_together, min(link.bandwidth for link in links)))
                ]
        return found

    def logical_mesh(
        self, shape: tuple[int, ...], submesh: tuple[int, int] | None = None
    ) -> LogicalMesh:
        """The logical mesh of `shape` on a submesh (n_nodes, n_devices) of the cluster (default:
        all of it).

        An axis whose groups cross nodes uses the inter-node link; the groups that cross out of one
        node at the same time share it. A group with several devices in a node is a ring that leaves
        each node once, so it also needs the intra-node link's bandwidth. Where links differ, costs
        are the worst at the mesh's possible places.
        """
        shape = tuple(shape)
        num_nodes, per_node = self._submesh(submesh)
        if not shape or min(shape) < 1 or math.prod(shape) != num_nodes * per_node:
            raise ClusterError(
                f"logical mesh {shape} does not have the {num_nodes * per_node} devices of"
                f" {num_nodes} x {per_node}",
                f"use one of {', '.join(map(str, factorisations(num_nodes * per_node)))}",
            )
        if (shape, num_nodes, per_node) not in self._known:
            places: list[Sequence[int]]
            if self.is_uniform:
                places = [
                    [
                        node * self.devices_per_node + i
                        for node in range(num_nodes)
                        for i in range(per_node)
                    ]
                ]
            else:
                size = num_nodes * per_node
                places = [
                    self._order[i : i + size] for i in range(0, self.num_devices - size + 1, size)
                ]
            axes = tuple(
                self._axis([np.array(ranks).reshape(shape) for ranks in places], i)
                for i in range(len(shape))
            )
            host = self.host and self.host.share(self.devices_per_node)
            self._known[shape, num_nodes, per_node] = LogicalMesh(shape, axes, self.overlap, host)
        return self._known[shape, num_nodes, per_node]

    def _axis(self, grids: Sequence[np.ndarray], axis: int) -> MeshAxis:
        """An axis of a mesh that lies on one of `grids` of ranks."""
        shape = grids[0].shape
        size, stride = shape[axis], strides(shape)[axis]
        lines = [np.moveaxis(grid, axis, -1).reshape(-1, size).tolist() for grid in grids]
        ways = [self.topology.way(tuple(map(tuple, each))) for each in lines]
        link = Link(max(way.latency for way in ways), min(way.bandwidth for way in ways))
        is_measured = (
            self.is_uniform and int(grids[0].flat[-1]) + 1 == grids[0].size
        )  # side by side
        tables = tuple(
            t for t in self.tables if is_measured and (t.size, t.stride) == (size, stride)
        )
        together = min(way.together for way in ways)  # devices of a group that lie in a node
        nodes, inside, across = (
            -(-size // together),
            self.intra_node.hop,
            self.inter_node.hop,
        )  # nodes: rounded up
        ring = inside * (size - nodes) + across * (nodes - 1)
        tree = 2 * (inside * math.log2(together) + across * math.log2(nodes))  # up and down again
        return MeshAxis(
            size, stride, link, tables, ring, tree, float(min(way.exchange for way in ways))
        )

    def logical_shapes(self, submesh: tuple[int, int] | None = None) -> list[tuple[int, ...]]:
        """Every 1-D and 2-D factorisation of the submesh's device count: (n,), then (a, b) with a,
        b > 1.
        """
        num_nodes, per_node = self._submesh(submesh)
        return factorisations(num_nodes * per_node)

    def digest(self) -> str:
        """Hash of everything that costs depend on, measured figures excluded when `measured` (times
        vary by run).
        """
        data: Any = self.to_dict()
        if self.measured:  # which machine it is, not how fast it was this morning
            memory_gib = round(self.device.memory_bytes / 2**30)
            data = (self.num_nodes, self.devices_per_node, self.device.name, memory_gib)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML; inverse of `from_dict`."""
        data = _data(self, "tables", "measured")
        device = _data(self.device, "efficiency") | {"peak_flops": dict(self.device.peak_flops)}
        if self.device.efficiencies:
            device["efficiencies"] = {
                kind: dict(shares) for kind, shares in self.device.efficiencies
            }
        links = {"links": data.pop("links")} if self.links else {}
        levels = {"levels": [level.to_dict() for level in self.levels]} if self.levels else {}
        ends = {"intra_node": _data(self.intra_node) | links, "inter_node": _data(self.inter_node)}
        host = {} if self.host is None else {"host": dict(vars(self.host))}
        return data | {
            "device": device,
            **ends,
            "tables": [_data(table) for table in self.tables],
            **levels,
            **host,
        }

    def _submesh(self, submesh: tuple[int, int] | None) -> tuple[int, int]:
        whole = (self.num_nodes, self.devices_per_node)
        num_nodes, per_node = submesh or whole
        if not (1 <= num_nodes <= whole[0] and 1 <= per_node <= whole[1]):
            raise ClusterError(
                f"submesh {num_nodes} x {per_node} is not part of {self.name} ({whole[0]} x"
                f" {whole[1]})",
                "give (nodes, devices per node) within the cluster",
            )
        return num_nodes, per_node


CLUSTER_FIELDS = tuple(
    name for name in ClusterSpec.__dataclass_fields__ if name != "links"
)  # of `intra_node`
DEVICE_FIELDS = tuple(DeviceSpec.__dataclass_fields__)
HOST_FIELDS = tuple(Host.__dataclass_fields__)
LINK_FIELDS = ("latency", "bandwidth", "hop", "links")
_LINK = "a section with latency (s) and bandwidth (bytes/s)"
PRODUCT_KINDS = ("matmul", "convolution", "attention", "attention_backward")
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "int8")

# One core of a current server CPU with gloo over loopback: only what a `measured` cluster is before
# it is measured.
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


def _read_device(fields: Fields, nominal: dict[str, Any] | None) -> DeviceSpec:
    device = fields.section(
        "device", DEVICE_FIELDS, f"a section with {', '.join(DEVICE_FIELDS)}", nominal
    )
    peaks = device.section(
        "peak_flops", DTYPES, "FLOP/s by dtype, for example {float16: 125e12, float32: 15.7e12}"
    )
    if not peaks.data:
        device.number("peak_flops", "FLOP/s of at least one dtype, for example {float32: 15.7e12}")
    efficiency = "the share of peak that large matrix products reach, above 0 and at most 1"
    return DeviceSpec(
        name=device.text("name", "the device's name"),
        memory_bytes=device.integer(
            "memory_bytes", "the device's memory in bytes, for example 16e9"
        ),
        memory_bandwidth=device.number(
            "memory_bandwidth", "bytes/s of the device's memory, for example 900e9"
        ),
        peak_flops=tuple(
            (dtype, peaks.number(dtype, "FLOP/s, for example 125e12")) for dtype in peaks.data
        ),
        launch_seconds=device.number(
            "launch_seconds", "seconds to start one op, for example 5e-6", zero=True
        ),
        efficiency=device.number("efficiency", efficiency, 1.0, maximum=1.0),
        slowdown=device.number(
            "slowdown", "how much slower an op is while all devices compute, for example 1.5", 1.0
        ),
        efficiencies=_read_efficiencies(device),
        compute_units=device.integer("compute_units", "how many SMs it has", 0, minimum=0),
    )


def _read_efficiencies(device: Fields) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    expected = (
        "shares of peak by kind of product and dtype, for example {convolution: {float32: 0.5}}"
    )
    kinds = device.section("efficiencies", PRODUCT_KINDS, expected, {})
    found = []
    for kind in kinds.data:
        shares = kinds.section(kind, DTYPES, expected)
        found.append(
            (
                kind,
                tuple(
                    (dtype, shares.number(dtype, expected, maximum=1.0)) for dtype in shares.data
                ),
            )
        )
    return tuple(found)


def _read_order(fields: Fields) -> str | Order:
    order = fields.value("order", _ORDER, ORDERS[0])
    is_list = isinstance(order, list | tuple) and all(type(rank) is int for rank in order)
    return tuple(order) if is_list else fields.valid("order", order, order in ORDERS, _ORDER)


def _read_link(fields: Fields, key: str, nominal: dict[str, Any] | None) -> Link:
    link = fields.section(
        key, LINK_FIELDS if key == "intra_node" else LINK_FIELDS[:3], _LINK, nominal
    )
    return Link(
        latency=link.number("latency", "seconds per message, for example 10e-6", zero=True),
        bandwidth=link.number("bandwidth", "bytes/s per direction, for example 25e9"),
        hop=link.number("hop", "seconds per further device, for example 1e-6", 0.0, zero=True),
    )


def _read_host(fields: Fields) -> Host | None:
    if "host" not in fields.data:
        return None
    host = fields.section("host", HOST_FIELDS, f"a section with {', '.join(HOST_FIELDS)}")
    return Host(
        link_bandwidth=host.number(
            "link_bandwidth", "bytes/s between a device and host memory, for example 25e9"
        ),
        memory_bytes=host.number(
            "memory_bytes", "bytes of a node's host memory that may be used, for example 1e12"
        ),
        memory_bandwidth=host.number(
            "memory_bandwidth", "bytes/s of a node's host memory, for example 200e9"
        ),
    )


def _data(record: Any, *always: str) -> dict[str, Any]:
    """Fields by name, without those that have their default: a new field leaves the digests of
    other clusters alone.
    """
    given = {field.name: (getattr(record, field.name), field.default) for field in fields(record)}
    return {
        name: value
        for name, (value, default) in given.items()
        if name in always or value != default
    }


def _read_table(data: Any, source: str, index: int) -> CommTable:
    fields = Fields(data, ("kind", "size", "stride", "points"), source, f"tables.{index}.")
    kind = fields.text("kind", f"one of {', '.join(COLLECTIVES)}")
    points = fields.items("points", "[[bytes, seconds], ...] with bytes ascending")
    pairs = [tuple(p) for p in points if isinstance(p, list | tuple) and len(p) == 2]
    numbers = all(
        isinstance(x, int | float) and math.isfinite(x) and x >= 0 for pair in pairs for x in pair
    )
    ascending = numbers and all(a[0] < b[0] for a, b in pairwise(pairs))
    if kind not in COLLECTIVES or not pairs or len(pairs) != len(points) or not ascending:
        raise ClusterError(
            f"cluster file {source}: field tables.{index} holds no readable measurements of"
            f" {kind!r}",
            f"kind is one of {', '.join(COLLECTIVES)}; points are [[bytes, seconds], ...] with"
            " bytes ascending",
        )
    return CommTable(
        kind=kind,
        size=fields.integer("size", "devices in the group"),
        stride=fields.integer("stride", "distance between neighbouring ranks of the group"),
        points=tuple((int(size), float(seconds)) for size, seconds in pairs),
    )


# --- Orders of devices.


_Offers = dict[tuple[int, int], list[np.ndarray]]


def _offer(*axes: tuple[int, Link, float]) -> np.ndarray:
    """A mesh of axes (size, link, exchange) as numbers [axes, 5], each of which is the better the
    larger it is.

    Those of another size are not better: sizes stand there with both signs.
    """
    return np.array(
        sorted((size, link.bandwidth, -link.latency, rate, -size) for size, link, rate in axes)
    )


def _as_good(offers: _Offers, other: _Offers) -> bool:
    """Whether every mesh of `offers` has one among `other` whose axes are each as good."""
    return all(
        any(
            mine.shape == each.shape and (mine <= each + 1e-9 * abs(each)).all()
            for each in other[submesh]
        )
        for submesh, meshes in offers.items()
        for mine in meshes
    )


# --- Arithmetic of mesh axes: what a collective moves, how a measured table is read. Plain numbers
# in and out.


def volume_factor(kind: str, size: int) -> float:
    """Bytes that one device moves per byte of the full tensor on an axis of `size` devices
    (docs/formulas.md#costs).
    """
    part = (size - 1) / size
    moved = {
        "all_gather": part,
        "reduce_scatter": part,
        "all_reduce": 2 * part,
        "all_to_all": (size - 1) / size**2,
    }
    return 1.0 if kind == "p2p" else moved[kind]


def interpolate_seconds(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Read a measured table at `num_bytes`: piecewise linear inside, linear beyond its end, never
    decreasing.

    Below the first point the first time holds: it is latency. `points` are (bytes, seconds), bytes
    ascending.
    """
    sizes = [size for size, _ in points]
    seconds = np.minimum.accumulate([value for _, value in reversed(points)])[::-1].tolist()
    if num_bytes <= sizes[-1]:
        return float(np.interp(num_bytes, sizes, seconds))
    slope = seconds[-1] / sizes[-1]
    if len(points) > 1 and seconds[-1] > seconds[-2]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + slope * (num_bytes - sizes[-1])


def without_outliers(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Measured (bytes, seconds), bytes ascending, with what only noise explains taken out. Noise
    only ever adds time.

    A message costs no more than a larger one, and at most half as much again as sending it in
    pieces of the size before would (again, since caches favour small ones).
    """
    seconds = np.minimum.accumulate([value for _, value in reversed(points)])[::-1].tolist()
    for i in range(1, len(points)):
        seconds[i] = min(seconds[i], 1.5 * seconds[i - 1] * points[i][0] / points[i - 1][0])
    return tuple((size, value) for (size, _), value in zip(points, seconds, strict=True))


def factorisations(num_devices: int) -> list[tuple[int, ...]]:
    """(n,), then every (a, b) with a * b = n and a, b > 1, a ascending."""
    pairs = [(a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0]
    return [(num_devices,), *pairs]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a logical mesh: the last axis runs over neighbouring devices."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
