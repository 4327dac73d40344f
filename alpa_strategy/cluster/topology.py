"""Clusters whose links differ: the bandwidth that a group of devices reaches, and device orders.

A node's devices may have direct links (`links`, bytes/s between each two: the hybrid cube mesh of a
DGX-1), and devices or nodes may share an uplink (`Level`: NVLink pairs, PCIe switches, racks with
oversubscribed uplinks). The costs of a collective then depend on which devices are neighbours on a
mesh axis. No process groups here.
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

# Devices of a node with a matrix of links, at most: every subset of a group is tried.
MAX_LINKED = 16

Order = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Blocks of devices, or of nodes, each of which has an uplink."""

    name: str
    # members of the blocks: `devices` (of every node) or `nodes`
    unit: str
    # how many consecutive members are a block, or the members of each block
    blocks: int | tuple[Order, ...]
    # of an uplink, seconds per message
    latency: float
    # of an uplink, bytes/s per direction for all messages together
    bandwidth: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; inverse of `read_levels`, of one level."""
        return {
            "name": self.name,
            self.unit: self.blocks,
            "latency": self.latency,
            "bandwidth": self.bandwidth,
        }

    def block_of(self, count: int) -> list[int]:
        """Return the block of each of `count` devices or nodes.

        Raises:
            ClusterError: one of them is in no block, or in two.
        """
        if isinstance(self.blocks, int):
            return [i // self.blocks for i in range(count)]
        block_of_member: dict[int, int] = {}
        for number, block in enumerate(self.blocks):
            for member in block:
                block_of_member[member] = number
        has_duplicates = sum(map(len, self.blocks)) != len(block_of_member)
        if has_duplicates or not block_of_member.keys() >= set(range(count)):
            raise ClusterError(
                f"the level {self.name!r} does not have each of {count} {self.unit} in one block",
                f"list 0 to {count - 1} once each, or say how many consecutive ones are a block",
            )
        return [block_of_member[i] for i in range(count)]


def read_levels(fields: Fields) -> tuple[Level, ...]:
    """Read the `levels` of a cluster file.

    Raises:
        ClusterError: names the field that is missing or wrong.
    """
    levels = []
    for index, data in enumerate(fields.items("levels", "a list of levels", ())):
        known = ("name", "nodes", "devices", "latency", "bandwidth")
        level = Fields(data, known, fields.file, f"{fields.prefix}levels.{index}.")
        unit = "devices" if "devices" in level.data else "nodes"
        blocks = _read_blocks(level, unit)
        name = level.text("name", "what the level is called, for example rack")
        latency = level.number(
            "latency", "seconds per message that leaves a block, for example 20e-6", zero=True
        )
        bandwidth = level.number(
            "bandwidth", "bytes/s per direction of a block's way out, for example 50e9"
        )
        levels.append(Level(name, unit, blocks, latency, bandwidth))
    return tuple(levels)


def _read_blocks(level: Fields, unit: str) -> int | tuple[Order, ...]:
    """Return the field `unit` of a level: how many consecutive units are a block, or each block's
    units.

    Raises:
        ClusterError: the field is neither.
    """
    expected = "how many consecutive ones are a block, or the members of each: [[0, 2], [1, 3]]"
    if not isinstance(level.value(unit, expected), list | tuple):
        return level.integer(unit, expected, maximum=MAX_DEVICES)
    blocks = level.items(unit, expected)
    are_valid = bool(blocks) and all(map(_is_block, blocks))
    return tuple(map(tuple, level.valid(unit, blocks, are_valid, expected)))


def _is_block(block: Any) -> bool:
    """Whether it is a list of whole numbers >= 0."""
    if not isinstance(block, list | tuple):
        return False
    if any(type(member) is not int for member in block):
        return False
    return min(block, default=0) >= 0


def read_links(fields: Fields) -> tuple[tuple[float, ...], ...]:
    """Read the matrix `intra_node.links` of a cluster file: [device, device] bytes/s; () if none.

    Raises:
        ClusterError: it is not a symmetric matrix of rates with a diagonal of 0.
    """
    if "links" not in fields.data:
        return ()
    expected = (
        f"bytes/s between each two devices of a node (at most {MAX_LINKED}), 0 where no link of"
        " their own is"
    )
    rows = fields.items("links", expected)
    try:
        matrix = np.array(rows, dtype=float)
        is_valid = _is_link_matrix(matrix)
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        raise ClusterError(
            f"cluster file {fields.file}: field {fields.prefix}links is no such matrix", expected
        )
    return tuple(tuple(map(float, row)) for row in rows)


def _is_link_matrix(matrix: np.ndarray) -> bool:
    """Whether it can be used: square with at most `MAX_LINKED` rows, symmetric, with a diagonal of
    0, and rates between `SMALLEST` and `LARGEST`, or 0 where there is no link.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] > MAX_LINKED:
        return False
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        return False
    if (matrix != matrix.T).any() or matrix.diagonal().any():
        return False
    smallest = matrix[matrix > 0].min(initial=1.0)
    return matrix.max(initial=0.0) <= LARGEST and smallest >= SMALLEST


@dataclass(frozen=True)
class GroupLink:
    """The link of a group of devices for its collectives."""

    # seconds per message
    latency: float
    # bytes/s
    bandwidth: float
    # bytes/s of its all-to-alls, in which pairs without a direct link go through the host
    exchange: float
    # the most devices of one group in a node
    together: int


class Topology:
    """The devices of a cluster by their global ranks, node by node.

    Args:
        num_nodes: number of nodes.
        per_node: devices of a node.
        inside: latency and bandwidth between any two devices of a node; if there are `links`,
            through the host.
        node: latency and bandwidth of a node's uplink.
        links: [device, device] bytes/s within a node, 0 without a direct link; (): all are alike.
        levels: uplinks that several devices or nodes share.

    Raises:
        ClusterError: `links` or a level do not cover the devices.
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
        self._num_nodes = num_nodes
        self._per_node = per_node
        self._inside = inside
        if links and len(links) < per_node:
            raise ClusterError(
                f"intra_node.links joins {len(links)} devices, a node has {per_node}",
                "give a row for every device",
            )
        self._links = np.array(links, dtype=float)[:per_node, :per_node] if links else None
        # unit -> `Level.block_of` of each of its levels
        self._blocks: dict[str, list[list[int]]] = {"nodes": [], "devices": []}
        ranks = np.arange(num_nodes * per_node)
        # of each level: block of each device, latency and bandwidth of a block's uplink
        self._uplinks = [(ranks // per_node, *node)]
        for level in levels:
            block_of = level.block_of(num_nodes if level.unit == "nodes" else per_node)
            self._blocks[level.unit].append(block_of)
            if level.unit == "nodes":
                blocks = np.repeat(block_of, per_node)
            else:
                # Blocks of every node, with numbers that differ between nodes.
                blocks = np.array(block_of * num_nodes) + len(ranks) * (ranks // per_node)
            _, consecutive = np.unique(blocks, return_inverse=True)
            self._uplinks.append((consecutive, level.latency, level.bandwidth))
        self._reached: dict[Order, float] = {}
        self._split_halves: dict[Order, tuple[tuple[float, ...], Order]] = {}

    def way(self, groups: Sequence[Order]) -> GroupLink:
        """Return the link of groups that communicate at the same time: the slowest group's. Groups
        of one device have infinite rates.
        """
        in_nodes: list[Order] = []
        for group in groups:
            in_nodes += self._by_node(group)
        bandwidth = math.inf
        exchange = math.inf
        for members in set(in_nodes):
            if len(members) > 1:
                bandwidth = min(bandwidth, self._reach(members))
                exchange = min(exchange, self._exchange(members))

        latency, _ = self._inside
        for block_of, uplink_latency, uplink_bandwidth in self._uplinks:
            # How many groups share the uplink of each block that they leave.
            num_crossing: Counter[int] = Counter()
            for group in groups:
                blocks = {int(block_of[rank]) for rank in group}
                if len(blocks) > 1:
                    num_crossing.update(blocks)
            if num_crossing:
                latency = max(latency, uplink_latency)
                share = uplink_bandwidth / max(num_crossing.values())
                bandwidth = min(bandwidth, share)
                exchange = min(exchange, share)
        return GroupLink(latency, bandwidth, exchange, max(map(len, in_nodes)))

    def messages(self, sizes: Mapping[tuple[int, int], float]) -> tuple[float, float]:
        """Return (seconds of latency, seconds for the bytes without it) of messages in flight at
        the same time.

        The bytes take as long as on the slowest of: direct links, the devices' links to all others,
        and the uplinks of blocks, out and in. Messages of a device to itself take no time.

        Args:
            sizes: (source, target) -> bytes.
        """
        pairs = [pair for pair in sizes if pair[0] != pair[1]]
        if not pairs:
            return 0.0, 0.0
        # [messages]
        source, target = np.array(pairs).T
        size = np.array([sizes[pair] for pair in pairs], dtype=float)

        # Bytes/s of the direct link of each message, 0 without one.
        direct = np.zeros(len(size))
        if self._links is not None:
            is_inside = source // self._per_node == target // self._per_node
            direct = self._links[source % self._per_node, target % self._per_node] * is_inside
        is_shared = direct == 0
        seconds = float((size[~is_shared] / direct[~is_shared]).max(initial=0.0))

        latency, inside_bandwidth = self._inside
        # (sending end, receiving end, which messages count, bandwidth of an end)
        limits = [(source, target, is_shared, inside_bandwidth)]
        for block_of, uplink_latency, uplink_bandwidth in self._uplinks:
            leaves = block_of[source] != block_of[target]
            if leaves.any():
                latency = max(latency, uplink_latency)
            limits.append((block_of[source], block_of[target], leaves, uplink_bandwidth))
        for sending, receiving, counts, bandwidth in limits:
            for end in (sending, receiving):
                busiest = np.bincount(end[counts], size[counts]).max(initial=0.0)
                seconds = max(seconds, float(busiest) / bandwidth)
        return latency, seconds

    def orders(self) -> list[Order]:
        """Return the orders of the devices that may be better than others, the numbered one first.

        A device's position is read as a number whose digits are its blocks: rack, node of the rack,
        half of the node, ... Every significance of the digits gives an order: the members of a
        block are next to each other, or spread over larger blocks. Devices next to each other are
        the last mesh axis, or a stage.
        """
        node_digits = _digits(self._blocks["nodes"], self._num_nodes)
        device_digits = self._device_digits()
        numbered = tuple(range(self._num_nodes * self._per_node))
        orders = {numbered: None}
        node_significances = permutations(range(len(node_digits[0])))
        device_significances = permutations(range(len(device_digits[0])))
        for first, second in product(node_significances, device_significances):
            nodes = _sorted_by_digits(node_digits, first)
            devices = _sorted_by_digits(device_digits, second)
            order = [node * self._per_node + device for node in nodes for device in devices]
            orders[tuple(order)] = None
        return list(orders)

    def _device_digits(self) -> list[list[int]]:
        """Return `_digits` of a node's devices: of their halves, halves of these and so on; of the
        levels if there are no links.
        """
        if self._links is None:
            return _digits(self._blocks["devices"], self._per_node)
        _, halved = self._halved(tuple(range(self._per_node)))
        # Position of each device among the halves.
        positions = np.argsort(halved)
        num_times = (self._per_node & -self._per_node).bit_length() - 1
        levels = []
        for times in range(1, num_times + 1):
            size = self._per_node >> times
            levels.append((positions // size).tolist())
        return _digits(levels, self._per_node)

    def _halved(self, members: Order) -> tuple[tuple[float, ...], Order]:
        """Return a node's devices in the order of the fastest halves, with the rates of these.

        Args:
            members: devices of one node.

        Returns:
            (rates, order). Rates are negative bytes/s that the slower half reaches, of the halves,
            of their halves and so on. Without links, or for an odd number of devices: no rates,
            and the order of `members`.
        """
        if self._links is None or len(members) % 2 or len(members) == 1:
            return (), members
        if members in self._split_halves:
            return self._split_halves[members]
        candidates = []
        for half in combinations(members, len(members) // 2):
            # The others are the same splits, halves exchanged.
            if half[0] != members[0]:
                break
            other = tuple(m for m in members if m not in half)
            candidates.append((-min(self._reach(half), self._reach(other)), half, other))
        best_rate = min(candidates)[0]
        halves = []
        for rate, half, other in candidates:
            if rate == best_rate:
                half_rates, half_order = self._halved(half)
                other_rates, other_order = self._halved(other)
                worst = tuple(map(max, zip(half_rates, other_rates, strict=True)))
                halves.append(((rate, *worst), (*half_order, *other_order)))
        self._split_halves[members] = min(halves)
        return self._split_halves[members]

    def _by_node(self, group: Order) -> Iterator[Order]:
        """Yield the devices of a group by node, as numbered within the node, ascending.

        The nodes have the order in which the group reaches them; those without any are left out.
        """
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(rank // self._per_node, []).append(rank % self._per_node)
        return (tuple(sorted(members)) for members in by_node.values())

    def _reach(self, members: Order) -> float:
        """Return the bytes/s of a ring that is as fast as the best gather among devices of a node;
        of one device, or without links, the node's bandwidth.

        A set S of devices must send the data of its |S| members to the others over the links that
        leave it. There are trees that reach the slowest set's rate (Edmonds; ForestColl,
        arXiv:2402.06787, theorem 1). The links of a ring as fast have n - 1 times that. For a
        switch it is the link's rate. It is at least that of the path through the host.
        """
        if self._links is None or len(members) == 1:
            return self._inside[1]
        if members not in self._reached:
            links = self._links[np.ix_(members, members)]
            n = len(members)
            # [sets, n]: whether device i is in the set, of all sets but the empty and the full one.
            sets = np.arange(1, 2**n - 1)
            is_inside = (sets[:, None] >> np.arange(n)) & 1 == 1
            leaving = np.einsum(
                "si,ij,sj->s", is_inside.astype(float), links, (~is_inside).astype(float)
            )
            rate = float((leaving / is_inside.sum(1)).min()) * (n - 1)
            self._reached[members] = max(rate, self._inside[1])
        return self._reached[members]

    def _exchange(self, members: Order) -> float:
        """Return the bytes/s of an all-to-all among devices of a node: over the pairs' direct
        links (pairs without one use the host), or all through the host if that is faster.
        """
        _, host_bandwidth = self._inside
        if self._links is None:
            return host_bandwidth
        links = self._links[np.ix_(members, members)]
        linked = links[links > 0]
        # The most peers of a device to which it has no direct link.
        num_unlinked = (links == 0).sum(1).max() - 1
        slowest = num_unlinked / host_bandwidth
        if linked.size:
            slowest = max(1 / float(linked.min()), slowest)
        return max((len(members) - 1) / slowest, host_bandwidth)


def _digits(levels: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the digits of each of `count` devices or nodes: its block at each level, the largest
    blocks first, then its position.

    Each is numbered within the next larger block.

    Args:
        levels: the block of each, level by level in any order.
    """
    from_largest = sorted(levels, key=lambda blocks: len(set(blocks)))
    # The blocks of each, the largest first, and itself.
    paths = []
    for member in range(count):
        blocks = [block_of[member] for block_of in from_largest]
        paths.append((*blocks, member))

    # path of a block -> its number within the larger one
    numbers: dict[Order, int] = {}
    num_blocks_in: Counter[Order] = Counter()
    for path in sorted(paths):
        for depth in range(1, len(path) + 1):
            block = path[:depth]
            if block not in numbers:
                larger = path[: depth - 1]
                numbers[block] = num_blocks_in[larger]
                num_blocks_in[larger] += 1

    digits = []
    for path in paths:
        digits.append([numbers[path[:depth]] for depth in range(1, len(path) + 1)])
    return digits


def _sorted_by_digits(digits: Sequence[Sequence[int]], significance: Order) -> list[int]:
    """Return the indices of devices or nodes sorted by their digits.

    Args:
        digits: of each, as of `_digits`.
        significance: positions of the digits that are compared, the most significant first.
    """

    def key(member: int) -> list[int]:
        return [digits[member][i] for i in significance]

    return sorted(range(len(digits)), key=key)
