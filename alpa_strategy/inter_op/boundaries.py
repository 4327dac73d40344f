"""Seconds of the messages between stages: which links they take, and how long."""

import math
from collections.abc import Sequence

import numpy as np

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.sharding.cross_mesh import boundary_link

# Where two stages meet: the device after the sender's last one, and the receiver's first one; None:
# one mesh is both.
Joint = tuple[int, int] | None


def boundary_tables(
    job: StageCostTask,
    meshes: Sequence[tuple[int, int]],
    fits: np.ndarray,
    joints: Sequence[Joint],
    pairs: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return `boundary` and `link_at` of `StageTables`.

    A pair of submeshes without a link at a joint gets the slowest link that it has at any joint; 0
    seconds if it has none.

    Args:
        job: the step and its cluster.
        meshes: (nodes, devices per node) of each submesh.
        fits: that of `StageTables`.
        joints: of each number of devices, or stages, that may be left; None where two stages do not
            meet or share a mesh: 0 seconds.
        pairs: (sender's submesh, receiver's submesh), as indices of `meshes`, that are needed.
    """
    cluster = job.cluster
    kinds: list[Joint] = list(joints)
    if cluster.is_uniform:
        # It only matters whether the joint is between two nodes.
        kinds = [_uniform_kind(cluster, joint) for joint in joints]
    number_of_kind = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}

    no_link = np.zeros((len(meshes), len(meshes), 2))
    links_of_kinds = []
    for kind in number_of_kind:
        if kind is None:
            links_of_kinds.append(no_link)
        else:
            links_of_kinds.append(_links(cluster, meshes, fits, kind, pairs))
    # [kind, submesh, submesh, 2]
    links = np.stack(links_of_kinds)

    # If there are no such two stages at a joint, they get the slowest link: then fewer kinds
    # differ.
    slowest = np.nan_to_num(np.fmax.reduce(links, axis=0))
    links = np.where(np.isnan(links), slowest, links)
    links, number_of_links = np.unique(links, axis=0, return_inverse=True)

    # [link, cut, submesh, submesh]
    latency = links[:, None, ..., 0]
    seconds_per_byte = links[:, None, ..., 1]
    # [cut, direction, 1, 1]
    num_bytes = job.crossing_bytes[:, :, None, None]
    boundary = (num_bytes > 0).sum(1) * latency + num_bytes.sum(1) * seconds_per_byte
    link_at = number_of_links.ravel()[[number_of_kind[kind] for kind in kinds]]
    return boundary, link_at


def _uniform_kind(cluster: ClusterSpec, joint: Joint) -> tuple[int, int]:
    """Return (0, 1) for a joint between two nodes, (0, 0) for one in a node or None."""
    if joint is None:
        return 0, 0
    last_sender = joint[0] - 1
    first_receiver = joint[1]
    per_node = cluster.devices_per_node
    return 0, int(last_sender // per_node != first_receiver // per_node)


def _links(
    cluster: ClusterSpec,
    meshes: Sequence[tuple[int, int]],
    fits: np.ndarray,
    joint: tuple[int, int],
    pairs: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Return latency in seconds and seconds per byte of a message at a joint: [sender's submesh,
    receiver's submesh, 2]; nan for pairs that are not needed or that do not fit there.

    Args:
        meshes, fits, pairs: as of `boundary_tables`.
        joint: the device after the sender's last one, and the receiver's first one; of a uniform
            cluster one of `_uniform_kind`.
    """
    num_devices = cluster.num_devices
    links = np.full((len(meshes), len(meshes), 2), np.nan)
    for sender, receiver in pairs:
        if cluster.is_uniform:
            crosses_nodes = bool(joint[1])
            link = boundary_link(meshes[sender], meshes[receiver], cluster, crosses_nodes)
        else:
            sender_size = math.prod(meshes[sender])
            receiver_size = math.prod(meshes[receiver])
            sender_start = joint[0] - sender_size
            receiver_start = joint[1]
            if sender_start < 0 or receiver_start + receiver_size > num_devices:
                continue
            sender_fits = fits[num_devices - sender_start, sender]
            receiver_fits = fits[num_devices - receiver_start, receiver]
            if not (sender_fits and receiver_fits):
                continue
            link = cluster.between((sender_start, sender_size), (receiver_start, receiver_size))
        links[sender, receiver] = link.latency, 1 / link.bandwidth
    return links
