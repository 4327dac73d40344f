"""The submeshes that a stage may have: parts of one node, or whole nodes (Alpa, section 5.2)."""

from __future__ import annotations

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec

FEW = 4  # nodes, or devices of a single node, of which every number is tried


def submeshes(cluster: ClusterSpec) -> tuple[tuple[int, int], ...]:
    """(n_nodes, n_devices) ascending: powers of two and divisors within a node, then (k, all devices of a node).

    On a single node of few devices every number is tried, so that 1 + 3 is possible. Of many nodes, powers of two and
    divisors of the number of nodes.
    """
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    inside = _sizes(per_node, every=nodes == 1 and per_node <= FEW)
    across = _sizes(nodes, every=nodes <= FEW)
    return (*((1, n) for n in inside), *((k, per_node) for k in across if k > 1))


def stage_fits(cluster: ClusterSpec, candidates: tuple[tuple[int, int], ...]) -> np.ndarray:
    """[devices left, submesh] whether a stage may start there when stages take devices in order.

    A part of a node lies in one node, whole nodes begin at a node: device ranges are contiguous, and links are
    as priced.
    """
    total, per_node = cluster.num_devices, cluster.devices_per_node
    fits = np.zeros((total + 1, len(candidates)), dtype=bool)
    for left in range(1, total + 1):
        offset = (total - left) % per_node
        for index, (nodes, devices) in enumerate(candidates):
            fits[left, index] = offset == 0 if nodes > 1 else offset + devices <= per_node
    return fits


def _sizes(limit: int, every: bool) -> list[int]:
    if every:
        return list(range(1, limit + 1))
    return [n for n in range(1, limit + 1) if limit % n == 0 or n & (n - 1) == 0]
