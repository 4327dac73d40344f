"""Cross-mesh resharding as data: the p2p transfers of a tensor to another mesh, and their time.

Every target device needs the box of the tensor that its layout specifies. The box is split into its
intersections with the source devices' boxes. Each piece is sent once, by the least loaded of the
devices that store it (Alpa, section 6). Target devices that store the same box may each receive a
chunk of it and gather the rest among themselves ("local all-gather"). No process groups here:
`comm/messages.py` executes the plans.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from alpa_strategy.cluster.devices import Link
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import Layout

# (start, stop) per dim, in the full tensor
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MeshSide:
    """One end of a transfer: a mesh, and the layout of a tensor on it."""

    shape: tuple[int, ...]
    # row-major on the mesh
    ranks: tuple[int, ...]
    # one of `R`, `S<d>` per mesh axis
    layout: Layout

    def boxes(self, tensor_shape: Sequence[int]) -> dict[int, Box]:
        """Return rank -> the box that it stores of a tensor of `tensor_shape`."""
        boxes = (
            self.layout.slices(tensor_shape, self.shape, at)
            for at in product(*map(range, self.shape))
        )
        return dict(zip(self.ranks, boxes, strict=True))


@dataclass(frozen=True)
class Piece:
    """`box` is sent from rank `source` to rank `target`; a local copy if they are the same."""

    source: int
    target: int
    box: Box

    @property
    def num_elements(self) -> int:
        """Elements of its box."""
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class TransferPlan:
    """How one tensor gets from one mesh to another."""

    # of the full tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: MeshSide
    # layout right after the messages; if it differs from `target.layout`, all-gathers on the
    # target's mesh follow
    received: Layout
    # in the same order on all ranks: by target, then by box
    pieces: tuple[Piece, ...]
    # rank -> box that it sends from
    source_boxes: Mapping[int, Box]
    # rank -> box that it receives
    received_boxes: Mapping[int, Box]

    @property
    def gathers(self) -> bool:
        """Whether all-gathers on the target's mesh follow the messages."""
        return self.received != self.target.layout


def plan_transfer(
    shape: Sequence[int],
    dtype: torch.dtype,
    source: MeshSide,
    target: MeshSide,
    local_gather: bool = False,
) -> TransferPlan:
    """Plan a transfer; deterministic, hence the same on all ranks.

    Args:
        shape: of the full tensor, of `dtype`.
        local_gather: whether devices of the target that store the same box each receive a chunk of
            it, and gather it among themselves.

    Raises:
        PlanError: a side has partial values (`P`); they must be reduced first.
    """
    shape = tuple(shape)
    for side in (source, target):
        if any(isinstance(placement, Partial) for placement in side.layout):
            raise PlanError(
                f"a tensor in layout {side.layout} cannot cross between meshes",
                "reduce it before the boundary",
            )
    received = _shared_layout(shape, target) if local_gather else target.layout
    source_boxes = source.boxes(shape)
    received_boxes = MeshSide(target.shape, target.ranks, received).boxes(shape)
    holders: dict[Box, list[int]] = {}
    for rank, box in source_boxes.items():
        holders.setdefault(box, []).append(rank)
    pieces: list[Piece] = []
    for box, ranks in holders.items():
        wanted: list[Piece] = []
        for rank, needed in received_boxes.items():
            piece = tuple(
                (max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, needed, strict=True)
            )
            if any(start >= stop for start, stop in piece):  # nothing in common
                continue
            if rank in ranks:
                pieces.append(Piece(rank, rank, piece))
            else:  # nothing of it is on `rank`: the boxes of one side are equal or disjoint
                wanted.append(Piece(ranks[0], rank, piece))  # or from another of them
        pieces += _share_out(wanted, ranks)
    pieces.sort(key=lambda piece: (piece.target, piece.box))
    return TransferPlan(shape, dtype, target, received, tuple(pieces), source_boxes, received_boxes)


def best_transfer(
    shape: Sequence[int],
    dtype: torch.dtype,
    source: MeshSide,
    target: MeshSide,
    cluster: ClusterSpec,
) -> TransferPlan:
    """Return the faster of the plans with and without local all-gather on `cluster`. Raises: as
    `plan_transfer`.
    """
    direct = plan_transfer(shape, dtype, source, target)
    gathered = plan_transfer(shape, dtype, source, target, local_gather=True)
    if not gathered.gathers:
        return direct
    is_faster = transfer_seconds(gathered, cluster) < transfer_seconds(direct, cluster)
    return gathered if is_faster else direct


def _shared_layout(shape: tuple[int, ...], target: MeshSide) -> Layout:
    """Return `target.layout` with every replicated axis turned into a shard of a dim.

    If none has enough elements left, the axis stays replicated.
    """
    placements = list(target.layout)
    # The smallest chunk of each dim. Sharding over n devices needs n elements, so that no device is
    # left without work.
    smallest = list(shape)
    for placement, size in zip(placements, target.shape, strict=True):
        if isinstance(placement, Shard):
            smallest[placement.dim] //= size
    for axis, (placement, size) in enumerate(zip(placements, target.shape, strict=True)):
        if size == 1 or not isinstance(placement, Replicate):
            continue
        # This axis shards before later axes do: it must not change their chunks.
        taken = {later.dim for later in placements[axis + 1 :] if isinstance(later, Shard)}
        possible = []
        for dim, smallest_size in enumerate(smallest):
            if smallest_size >= size and dim not in taken:
                possible.append(dim)
        if not possible:
            continue
        # The first dim that divides evenly, else the largest one: chunks stay long runs of memory.
        even = [dim for dim in possible if smallest[dim] % size == 0]
        dim = even[0] if even else max(possible, key=smallest.__getitem__)
        placements[axis] = Shard(dim)
        smallest[dim] //= size
    return Layout(placements)


def _share_out(wanted: list[Piece], holders: list[int]) -> list[Piece]:
    """Assign a sender among `holders` to each piece.

    The largest first, each to the least loaded (Graham's rule). Boxes of near-equal chunks are of
    near-equal size, for which that is optimal.
    """
    load = dict.fromkeys(holders, 0)
    pieces = []
    for piece in sorted(wanted, key=lambda piece: (-piece.num_elements, piece.target, piece.box)):
        sender = min(holders, key=lambda holder: (load[holder], holder))
        load[sender] += piece.num_elements
        pieces.append(replace(piece, source=sender))
    return pieces


def transfer_seconds(plan: TransferPlan, cluster: ClusterSpec) -> float:
    """Return the seconds of a transfer on idle links.

    Those of the slowest link, device or uplink, plus the gathers on the target's mesh.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    for piece in plan.pieces:
        if piece.source != piece.target:
            sizes[piece.source, piece.target] += piece.num_elements * plan.dtype.itemsize
    latency, seconds = cluster.topology.messages(sizes)
    # A device starts its messages one after the other.
    num_sent = Counter(source for source, _ in sizes)
    num_received = Counter(target for _, target in sizes)
    most_messages = max([*num_sent.values(), *num_received.values()], default=0)
    return most_messages * latency + seconds + _gather_seconds(plan, cluster)


def _gather_seconds(plan: TransferPlan, cluster: ClusterSpec) -> float:
    """Return the seconds of the all-gathers from `plan.received` to the target's layout, innermost
    axis first.
    """
    target = plan.target
    ranks = np.array(target.ranks).reshape(target.shape)
    seconds = 0.0
    placements = list(plan.received)
    for axis in reversed(range(len(target.shape))):
        if placements[axis] == target.layout[axis]:
            continue
        placements[axis] = target.layout[axis]
        after = Layout(placements).local_shape(plan.shape, target.shape, (0,) * len(target.shape))
        size = target.shape[axis]
        groups = np.moveaxis(ranks, axis, -1).reshape(-1, size).tolist()
        way = cluster.topology.way(list(map(tuple, groups)))
        volume = (size - 1) / size * math.prod(after) * plan.dtype.itemsize
        seconds += way.latency + volume / way.bandwidth
    return seconds


def boundary_link(
    source_submesh: tuple[int, int],
    target_submesh: tuple[int, int],
    cluster: ClusterSpec,
    crosses_nodes: bool,
) -> Link:
    """Return the link between two submeshes, if all links are alike; layouts are unknown.

    Every byte is sent once. The links of both ends work in parallel: one per node between nodes,
    one per device inside a node.

    Args:
        source_submesh, target_submesh: (nodes, devices per node).
        crosses_nodes: whether the submeshes are on different nodes.
    """
    if crosses_nodes:
        link = cluster.inter_node
        num_parallel = min(source_submesh[0], target_submesh[0])
    else:
        link = cluster.intra_node
        num_parallel = min(source_submesh[1], target_submesh[1])
    return Link(link.latency, link.bandwidth * num_parallel)


# --- Channels: the values that stages send each other, forward and backward. Data for the
# pipeline's runtime.
#
# A value that several stages need is sent to each of them directly by the stage that computes it,
# however many stages are in between. A mesh that has received it for an earlier stage passes it on
# to its later stages.


@dataclass(frozen=True)
class StageSpec:
    """A stage as all ranks know it."""

    # global ranks, ascending; two stages have the same ranks or no rank in common
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    # value -> layout in which the stage receives it (`R`, `S<d>`), perhaps for a later stage on its
    # mesh
    received: Mapping[int, Layout] = field(default_factory=dict)
    # value -> layout in which the stage computes it
    sent: Mapping[int, Layout] = field(default_factory=dict)
    # index of a batch tensor -> layout in which the stage reads a micro-batch of it
    batch: Mapping[int, Layout] = field(default_factory=dict)
    # values that leave the step from this stage, full on each of its devices
    escaping: tuple[int, ...] = ()
    # buffer name -> escaping value that replaces it after each micro-batch
    buffer_updates: Mapping[str, int] = field(default_factory=dict)

    def side(self, layout: Layout) -> MeshSide:
        """Return the stage's end of a transfer of a value in `layout`."""
        return MeshSide(self.mesh_shape, self.ranks, layout)


@dataclass(frozen=True)
class Channel:
    """The values that stage `source` sends to stage `target` with every micro-batch, one bundle."""

    source: int
    target: int
    values: tuple[int, ...]
    # one per value
    forward: tuple[TransferPlan, ...]
    # those of `values` that have a gradient
    differentiable: tuple[int, ...]
    # one per gradient, from `target` to `source`
    backward: tuple[TransferPlan, ...]


def plan_channels(
    stages: Sequence[StageSpec],
    metas: Sequence[TensorMeta],
    external: Collection[int] = (),
    cluster: ClusterSpec | None = None,
) -> tuple[Channel, ...]:
    """Return all channels, ordered by (source, target): the same on all ranks.

    Args:
        stages: in pipeline order.
        metas: of every value, in one micro-batch, at global shapes.
        external: values that need no channel: every rank has them before the first micro-batch.
        cluster: local all-gathers are used if they are faster on its links; None: never.

    Raises:
        PlanError: a stage needs a value that no earlier stage sends.
    """
    needs: dict[tuple[int, int], list[int]] = {}
    for target, stage in enumerate(stages):
        for value in stage.received:
            if value in external:
                continue
            source = _source(value, stages, target)
            if source is None:
                raise PlanError(
                    f"stage {target} needs value {value}, which no earlier stage sends",
                    "plan again",
                )
            needs.setdefault((source, target), []).append(value)

    def plan(value: int, start: MeshSide, end: MeshSide) -> TransferPlan:
        meta = metas[value]
        if cluster is None:
            return plan_transfer(meta.shape, meta.dtype, start, end)
        return best_transfer(meta.shape, meta.dtype, start, end, cluster)

    channels = []
    for source, target in sorted(needs):
        values = tuple(sorted(needs[source, target]))
        source_layouts = {**stages[source].received, **stages[source].sent}
        starts = {v: stages[source].side(source_layouts[v]) for v in values}
        ends = {v: stages[target].side(stages[target].received[v]) for v in values}
        differentiable = tuple(v for v in values if metas[v].requires_grad)
        forward = tuple(plan(v, starts[v], ends[v]) for v in values)
        backward = tuple(plan(v, ends[v], starts[v]) for v in differentiable)
        channels.append(Channel(source, target, values, forward, differentiable, backward))
    return tuple(channels)


def _source(value: int, stages: Sequence[StageSpec], target: int) -> int | None:
    """Return the stage that sends `value` to stage `target`.

    The one that computes it, also if it is on the same mesh, or else the first one on the target's
    mesh that received it. None if no earlier stage sends it.
    """
    maker = next((s for s in reversed(range(target)) if value in stages[s].sent), None)
    if maker is None or stages[maker].ranks == stages[target].ranks:
        return maker
    between = range(maker + 1, target)
    on_mesh = (
        s
        for s in between
        if stages[s].ranks == stages[target].ranks and value in stages[s].received
    )
    return next(on_mesh, maker)
