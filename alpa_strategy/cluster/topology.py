"""Clusters whose links differ: which devices share which way, what a group of them reaches, in
which order they lie.

A node's devices may have links of their own (`links`, bytes/s between each two: the hybrid cube
mesh of a DGX-1), and devices or nodes may share a way out (`Level`: NVLink pairs, PCIe switches,
racks with oversubscribed uplinks). What a collective costs then depends on *which* devices are
neighbours on a mesh axis. Plain arithmetic, no process groups.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from alpa_strategy.cluster.load import LARGEST, MAX_DEVICES, SMALLEST, Fields
from alpa_strategy.errors import ClusterError

MAX_LINKED = 16  # devices of a node with a matrix of links: every subset of a group is looked at

Order = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Blocks of devices, or of nodes, that share a way out."""

    name: str
    unit: str  # what is counted, `devices` (of every node) or `nodes`
    blocks: int | tuple[Order, ...]  # how many consecutive ones are a block, or the blocks' members
    # latency, bandwidth: of a block's way out: seconds, and bytes/s per direction for all that
    # cross it together
    latency: float
    bandwidth: float

    def to_dict(self) -> dict[str, Any]:
        """Inverse of `read_levels`, of one level."""
        return {
            "name": self.name,
            self.unit: self.blocks,
            "latency": self.latency,
            "bandwidth": self.bandwidth,
        }

    def block_of(self, count: int) -> list[int]:
        """The block of each of `count` devices or nodes.

        Raises:
            ClusterError: one of them is in no block, or in two.
        """
        if isinstance(self.blocks, int):
            return [i // self.blocks for i in range(count)]
        found = {member: b for b, block in enumerate(self.blocks) for member in block}
        if sum(map(len, self.blocks)) != len(found) or any(i not in found for i in range(count)):
            raise ClusterError(
                f"the level {self.name!r} does not have each of {count} {self.unit} in one block",
                f"list 0 to {count - 1} once each, or say how many consecutive ones are a block",
            )
        return [found[i] for i in range(count)]


def read_levels(fields: Fields) -> tuple[Level, ...]:
    """The `levels` of a cluster file; ClusterError names the one that cannot be read."""
    found = []
    for index, data in enumerate(fields.items("levels", "a list of levels", ())):
        known = ("name", "nodes", "devices", "latency", "bandwidth")
        level = Fields(data, known, fields.file, f"{fields.prefix}levels.{index}.")
        unit = "devices" if "devices" in level.data else "nodes"
        expected = "how many consecutive ones are a block, or the members of each: [[0, 2], [1, 3]]"
        blocks: int | tuple[Order, ...]
        if isinstance(level.value(unit, expected), list | tuple):
            given = level.items(unit, expected)
            whole = all(
                isinstance(b, list | tuple) and all(type(i) is int and i >= 0 for i in b)
                for b in given
            )
            blocks = tuple(map(tuple, level.valid(unit, given, whole and bool(given), expected)))
        else:
            blocks = level.integer(unit, expected, maximum=MAX_DEVICES)
        name = level.text("name", "what the level is called, for example rack")
        latency = level.number(
            "latency", "seconds per message that leaves a block, for example 20e-6", zero=True
        )
        bandwidth = level.number(
            "bandwidth", "bytes/s per direction of a block's way out, for example 50e9"
        )
        found.append(Level(name, unit, blocks, latency, bandwidth))
    return tuple(found)


def read_links(fields: Fields) -> tuple[tuple[float, ...], ...]:
    """The matrix `intra_node.links` of a cluster file, the same in both directions, in bytes/s; ()
    without one.
    """
    if "links" not in fields.data:
        return ()
    expected = f"bytes/s between each two devices of a node (at most {MAX_LINKED}), 0 where no link of their own is"
    rows = fields.items("links", expected)
    try:
        matrix = np.array(rows, dtype=float)
        good = (
            matrix.ndim == 2
            and matrix.shape[0] == matrix.shape[1] <= MAX_LINKED
            and np.isfinite(matrix).all()
        )
        good = (
            good
            and (matrix >= 0).all()
            and (matrix == matrix.T).all()
            and not matrix.diagonal().any()
        )
        good = (
            good
            and matrix.max(initial=0.0) <= LARGEST
            and matrix[matrix > 0].min(initial=1.0) >= SMALLEST
        )
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ClusterError(
            f"cluster file {fields.file}: field {fields.prefix}links is no such matrix", expected
        )
    return tuple(tuple(map(float, row)) for row in rows)


@dataclass(frozen=True)
class GroupLink:
    """What a group of devices has for its collectives: seconds per message, bytes/s."""

    latency: float
    bandwidth: float
    # bytes/s of its all-to-alls, where pairs without a link of their own go through the host
    exchange: float
    together: int  # the most devices of one group in a node


class Topology:
    """The devices of a cluster by their global ranks, node by node.

    Args:
        inside: latency and bandwidth between any two devices of a node, through the host where
            there are `links`.
        node: of a node's way out, as `Level`.
        links: [device, device] bytes/s within a node, 0 where there is none; (): all are alike.
    """

    def __init__(
        self,
        num_nodes: int,
        per_node: int,
        inside: tuple[float, float],
        node: tuple[float, float],
        links: Sequence[Sequence[float]],
        levels: Sequence[Level],
    ) -> None:
        self._num_nodes, self._per_node, self._inside = num_nodes, per_node, inside
        if links and len(links) < per_node:
            raise ClusterError(
                f"intra_node.links joins {len(links)} devices, a node has {per_node}",
                "give a row for every device",
            )
        self._links = np.array(links, dtype=float)[:per_node, :per_node] if links else None
        self._blocks: dict[str, list[list[int]]] = {
            "nodes": [],
            "devices": [],
        }  # by unit: of its levels, as `block_of`
        ranks = np.arange(num_nodes * per_node)
        # Block of each device, latency and bandwidth out of it.
        self._ways = [(ranks // per_node, *node)]
        for level in levels:
            of_unit = level.block_of(num_nodes if level.unit == "nodes" else per_node)
            self._blocks[level.unit].append(of_unit)
            if level.unit == "nodes":
                blocks = np.repeat(of_unit, per_node)
            else:
                blocks = np.array(of_unit * num_nodes) + len(ranks) * (ranks // per_node)
            self._ways.append(
                (np.unique(blocks, return_inverse=True)[1], level.latency, level.bandwidth)
            )
        self._reached: dict[Order, float] = {}
        self._cut: dict[Order, tuple[tuple[float, ...], Order]] = {}

    def way(self, groups: Sequence[Order]) -> GroupLink:
        """What groups of devices have that communicate at the same time: the slowest group's."""
        latency, bandwidth, exchange, crossed = self._inside[0], math.inf, math.inf, math.inf
        parts = [part for group in groups for part in self._parts(group)]
        for part in {part for part in parts if len(part) > 1}:
            bandwidth = min(bandwidth, self._reach(part))
            exchange = min(exchange, self._exchange(part))
        for blocks, beyond, shared in self._ways:
            crossing = Counter(
                b
                for group in groups
                if len(met := {int(blocks[r]) for r in group}) > 1
                for b in met
            )
            if crossing:
                latency = max(latency, beyond)
                crossed = min(crossed, shared / max(crossing.values()))
        return GroupLink(
            latency, min(bandwidth, crossed), min(exchange, crossed), max(map(len, parts))
        )

    def messages(self, sizes: Mapping[tuple[int, int], float]) -> tuple[float, float]:
        """(latency, seconds) of messages that are under way at the same time: (source, target) ->
        bytes.

        The slowest of: a link of two devices alone, a device's way to all others, a block's shared
        way out or in.
        """
        moved = [
            (source, target, size) for (source, target), size in sizes.items() if source != target
        ]
        if not moved:
            return 0.0, 0.0
        source, target = np.array([pair[:2] for pair in moved]).T
        size = np.array([pair[2] for pair in moved], dtype=float)
        own = np.zeros(len(size))
        if self._links is not None:
            inside = source // self._per_node == target // self._per_node
            own = self._links[source % self._per_node, target % self._per_node] * inside
        latency, is_shared = self._inside[0], own == 0
        seconds = float((size[~is_shared] / own[~is_shared]).max(initial=0.0))
        limits = [(source, target, is_shared, self._inside[1])]
        for blocks, beyond, shared in self._ways:
            leaves = blocks[source] != blocks[target]
            latency = max(latency, beyond) if leaves.any() else latency
            limits.append((blocks[source], blocks[target], leaves, shared))
        for out, into, counts, bandwidth in limits:
            for end in (out, into):
                busiest = np.bincount(end[counts], size[counts]).max(initial=0.0)
                seconds = max(seconds, float(busiest) / bandwidth)
        return latency, seconds

    def orders(self) -> list[Order]:
        """Orders of the devices that are worth a look, as they are numbered among them.

        A device's place is read as a number whose digits are its blocks: rack, node of the rack,
        half of the node, ...
        Every significance of the digits gives an order: blocks next to each other, or spread over
        what is beyond. What lies next to each other is the last mesh axis, or a stage.
        """
        outside = _digits(self._blocks["nodes"], self._num_nodes)
        if self._links is not None:
            places = np.argsort(
                self._halved(tuple(range(self._per_node)))[1]
            )  # of each device among the halves
            sizes = (
                self._per_node >> times
                for times in range(1, (self._per_node & -self._per_node).bit_length())
            )
            inside = _digits(
                [(places // size).tolist() for size in sizes], self._per_node
            )  # halves, their halves, ...
        else:
            inside = _digits(self._blocks["devices"], self._per_node)
        found = {tuple(range(self._num_nodes * self._per_node)): None}
        for first, second in product(
            permutations(range(len(outside[0]))), permutations(range(len(inside[0])))
        ):
            nodes = sorted(
                range(self._num_nodes), key=lambda node: [outside[node][i] for i in first]
            )
            devices = sorted(
                range(self._per_node), key=lambda device: [inside[device][i] for i in second]
            )
            found[tuple(node * self._per_node + device for node in nodes for device in devices)] = (
                None
            )
        return list(found)

    def _halved(self, members: Order) -> tuple[tuple[float, ...], Order]:
        """The members such that both halves, their halves, and so on reach the most; and what they
        reach, negated.
        """
        if self._links is None or len(members) % 2 or len(members) == 1:
            return (), members
        if members in self._cut:
            return self._cut[members]
        found = []
        for half in combinations(members, len(members) // 2):
            if half[0] != members[0]:
                break
            other = tuple(m for m in members if m not in half)
            found.append((-min(self._reach(half), self._reach(other)), half, other))
        least = min(found)[0]
        halves = []
        for reach, half, other in found:
            if reach == least:
                (below, first), (beside, second) = self._halved(half), self._halved(other)
                worst = tuple(map(max, zip(below, beside, strict=True)))
                halves.append(((reach, *worst), (*first, *second)))
        self._cut[members] = min(halves)
        return self._cut[members]

    def _parts(self, group: Order) -> Iterator[Order]:
        """A group's devices node by node, as numbered within the node."""
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(rank // self._per_node, []).append(rank % self._per_node)
        return (tuple(sorted(part)) for part in by_node.values())

    def _reach(self, members: Order) -> float:
        """Bytes/s of a ring that would be as fast as the best way to gather among devices of a
        node.

        A set of devices S must bring what its |S| members have to the others over the links that
        leave it; trees that reach the slowest set's rate exist (Edmonds; ForestColl, arXiv
        2402.06787, theorem 1). A switch gives its link.
        """
        if self._links is None or len(members) == 1:
            return self._inside[1]
        if members not in self._reached:
            links = self._links[np.ix_(members, members)]
            n = len(members)
            inside = np.array(
                [[(s >> i) & 1 for i in range(n)] for s in range(1, 2**n - 1)], dtype=bool
            )  # [sets, n]
            leaving = np.einsum("si,ij,sj->s", inside.astype(float), links, (~inside).astype(float))
            found = float((leaving / inside.sum(1)).min()) * (n - 1)
            self._reached[members] = max(found, self._inside[1])
        return self._reached[members]

    def _exchange(self, members: Order) -> float:
        """Bytes/s of an all-to-all: a pair's own link carries its part, what has none goes through
        the host.
        """
        if self._links is None:
            return self._inside[1]
        links = self._links[np.ix_(members, members)]
        linked = links[links > 0]
        alone = (links == 0).sum(1).max() - 1  # of one device: peers without a link
        slowest = max(1 / float(linked.min()) if linked.size else 0.0, alone / self._inside[1])
        return max((len(members) - 1) / slowest, self._inside[1])


def _digits(levels: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Of each of `count` devices or nodes: its block at each level, counted within the larger one,
    and its place there.

    levels: the block of each, level by level in any order.
    """
    from_outside = sorted(levels, key=lambda blocks: len(set(blocks)))
    keys = [(*(blocks[i] for blocks in from_outside), i) for i in range(count)]
    number: dict[Order, int] = {}  # of a block (its way in from outside) within the larger one
    blocks_in: Counter[Order] = Counter()
    for key in sorted(keys):
        for depth in range(1, len(key) + 1):
            if key[:depth] not in number:
                number[key[:depth]] = blocks_in[key[: depth - 1]]
                blocks_in[key[: depth - 1]] += 1
    return [[number[key[:depth]] for depth in range(1, len(key) + 1)] for key in keys]
