"""Cross-mesh resharding as data: who sends which box of a tensor to whom on another mesh, and how
long that takes.

Every destination device needs the box that its layout says. That box is cut into the grid of its
intersections with the source devices' boxes; each piece is sent once, by the least loaded of the
devices that hold it (Alpa, section 6). Destination devices that hold the same box may each receive
a part of it and gather the rest among themselves ("local all-gather"). No process groups here:
`comm/messages.py` carries plans out.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from alpa_strategy.cluster.spec import ClusterSpec, Link
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import Layout

Box = tuple[tuple[int, int], ...]  # (start, stop) per dim, in the global tensor


@dataclass(frozen=True)
class MeshSide:
    """One end of a transfer: `ranks` (row-major on a mesh of `shape`) hold a tensor as `layout`
    says.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    layout: Layout  # one of `R`, `S<d>` per mesh axis

    def boxes(self, tensor_shape: Sequence[int]) -> dict[int, Box]:
        """Rank -> the box of a tensor of `tensor_shape` that it holds."""
        boxes = (
            self.layout.slices(tensor_shape, self.shape, at)
            for at in product(*map(range, self.shape))
        )
        return dict(zip(self.ranks, boxes, strict=True))


@dataclass(frozen=True)
class Piece:
    """`box` goes from rank `source` to rank `target` (a copy within the device when they are the
    same).
    """

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

    # shape, dtype: of the whole tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: MeshSide  # where it lies after it
    # layout right after the messages; where it differs from `target.layout`, all-gathers on the
    # target's mesh follow
    received: Layout
    pieces: tuple[Piece, ...]  # in one order on all ranks: by target, then by box
    # source_boxes, received_boxes: rank -> box
    source_boxes: Mapping[int, Box]
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
        shape: of the whole tensor, of `dtype`, on the target's side.
        local_gather: whether devices of the target that hold the same box share its reception and
            gather it themselves.

    Raises:
        PlanError: a side holds summands (`P`); they must be reduced first.
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
    """The faster of the plans with and without local all-gather on `cluster`."""
    direct = plan_transfer(shape, dtype, source, target)
    gathered = plan_transfer(shape, dtype, source, target, local_gather=True)
    if not gathered.gathers:
        return direct
    return (
        gathered
        if transfer_seconds(gathered, cluster) < transfer_seconds(direct, cluster)
        else direct
    )


def _shared_layout(shape: tuple[int, ...], target: MeshSide) -> Layout:
    """`target.layout` with every replicated axis turned into a shard of a dim that still has enough
    elements.
    """
    placements = list(target.layout)
    # The smallest share of each dim; a cut of n needs n elements, so that no device is left without
    # work.
    smallest = list(shape)
    for placement, size in zip(placements, target.shape, strict=True):
        if isinstance(placement, Shard):
            smallest[placement.dim] //= size
    for axis, (placement, size) in enumerate(zip(placements, target.shape, strict=True)):
        if size == 1 or not isinstance(placement, Replicate):
            continue
        # A cut by this axis comes before those of later axes: it must not change what they hold.
        taken = {later.dim for later in placements[axis + 1 :] if isinstance(later, Shard)}
        possible = []
        for dim, smallest_size in enumerate(smallest):
            if smallest_size >= size and dim not in taken:
                possible.append(dim)
        if not possible:
            continue
        # An even cut first, then the largest dim: chunks stay long runs of memory.
        dim = min(
            possible,
            key=lambda d: (smallest[d] % size != 0, d if smallest[d] % size == 0 else -smallest[d]),
        )
        placements[axis] = Shard(dim)
        smallest[dim] //= size
    return Layout(placements)


def _share_out(wanted: list[Piece], holders: list[int]) -> list[Piece]:
    """With a sender for each among its holders: the largest first, each to the least loaded
    (Graham's rule).

    Boxes of near-equal chunks are of near-equal size, for which that is optimal.
    """
    load = dict.fromkeys(holders, 0)
    pieces = []
    for piece in sorted(wanted, key=lambda piece: (-piece.num_elements, piece.target, piece.box)):
        sender = min(holders, key=lambda holder: (load[holder], holder))
        load[sender] += piece.num_elements
        pieces.append(replace(piece, source=sender))
    return pieces


def transfer_seconds(plan: TransferPlan, cluster: ClusterSpec) -> float:
    """Time of a transfer on idle links: the slowest link, device or way out, plus the gathers on
    the target's mesh.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    for piece in plan.pieces:
        if piece.source != piece.target:
            sizes[piece.source, piece.target] += piece.num_elements * plan.dtype.itemsize
    latency, seconds = cluster.topology.messages(sizes)
    # A device starts its messages one after the other.
    started = max(
        (n for ends in zip(*sizes, strict=True) for n in Counter(ends).values()), default=0
    )
    return started * latency + seconds + _gather_seconds(plan, cluster)


def _gather_seconds(plan: TransferPlan, cluster: ClusterSpec) -> float:
    """Time of the all-gathers from `received` to the target's layout, innermost axis first."""
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
        way = cluster.topology.way(
            list(map(tuple, np.moveaxis(ranks, axis, -1).reshape(-1, size).tolist()))
        )
        volume = (size - 1) / size * math.prod(after) * plan.dtype.itemsize
        seconds += way.latency + volume / way.bandwidth
    return seconds


def boundary_link(
    source_submesh: tuple[int, int],
    target_submesh: tuple[int, int],
    cluster: ClusterSpec,
    crosses_nodes: bool,
) -> Link:
    """What a boundary between two submeshes (n_nodes, n_devices) has where all links are alike;
    layouts unknown.

    Every byte goes once; the links of both ends work side by side: one per node between nodes, one
    per device inside.
    crosses_nodes: whether the submeshes lie on different nodes.
    """
    link, ends = (cluster.inter_node, 0) if crosses_nodes else (cluster.intra_node, 1)
    parallel = min(source_submesh[ends], target_submesh[ends])
    return Link(link.latency, link.bandwidth * parallel)


# --- Channels: which values go from which stage to which other, forward and back. Data for the
# pipeline's runtime.
#
# A value that several stages need goes to each of them straight from the stage that makes it, over
# as many stages as lie between; to a mesh that has it already for an earlier stage, it goes from
# that one. No process groups.


@dataclass(frozen=True)
class StageSpec:
    """What every rank knows of every stage."""

    ranks: tuple[
        int, ...
    ]  # global ranks, ascending; two stages have the same ranks or no rank in common
    mesh_shape: tuple[int, ...]
    # value -> layout in which the stage wants it (`R`, `S<d>`), perhaps for a later one on its mesh
    received: Mapping[int, Layout] = field(default_factory=dict)
    sent: Mapping[int, Layout] = field(
        default_factory=dict
    )  # value -> layout in which the stage makes it
    # index of a batch tensor -> layout in which the stage wants a micro-batch of it
    batch: Mapping[int, Layout] = field(default_factory=dict)
    escaping: tuple[
        int, ...
    ] = ()  # values that leave the step from here, whole on every device of the stage
    # buffer name -> escaping value that replaces it after each micro-batch
    buffer_updates: Mapping[str, int] = field(default_factory=dict)

    def side(self, layout: Layout) -> MeshSide:
        """The stage's end of a transfer, where a value lies in `layout`."""
        return MeshSide(self.mesh_shape, self.ranks, layout)


@dataclass(frozen=True)
class Channel:
    """The values that stage `source` hands to stage `target` with every micro-batch, one bundle."""

    source: int
    target: int
    values: tuple[int, ...]
    forward: tuple[TransferPlan, ...]
    differentiable: tuple[int, ...]  # those of `values` that have a gradient
    backward: tuple[TransferPlan, ...]  # the way back of these gradients


def plan_channels(
    stages: Sequence[StageSpec],
    metas: Sequence[TensorMeta],
    given: Collection[int] = (),
    cluster: ClusterSpec | None = None,
) -> tuple[Channel, ...]:
    """All channels, ordered by (source, target): the same on all ranks.

    Args:
        stages: in pipeline order.
        metas: of every value, in one micro-batch, at global shapes.
        given: values that need no channel: every rank has them before the first micro-batch.
        cluster: where given, local all-gathers are used where they are faster on its links.

    Raises:
        PlanError: a stage needs a value that no earlier stage sends.
    """
    needs: dict[tuple[int, int], list[int]] = {}
    for target, stage in enumerate(stages):
        for value in stage.received:
            if value in given:
                continue
            source = _source(value, stages, target)
            if source is None:
                raise PlanError(
                    f"stage {target} needs value {value}, which no earlier stage sends",
                    "plan again",
                )
            needs.setdefault((source, target), []).append(value)

    def plan(value: int, start: MeshSide, end: MeshSide) -> TransferPlan:
        moved = metas[value].shape, metas[value].dtype, start, end
        return plan_transfer(*moved) if cluster is None else best_transfer(*moved, cluster)

    channels = []
    for source, target in sorted(needs):
        values = tuple(sorted(needs[source, target]))
        held = {**stages[source].received, **stages[source].sent}
        starts = {v: stages[source].side(held[v]) for v in values}
        ends = {v: stages[target].side(stages[target].received[v]) for v in values}
        differentiable = tuple(v for v in values if metas[v].requires_grad)
        forward = tuple(plan(v, starts[v], ends[v]) for v in values)
        backward = tuple(plan(v, ends[v], starts[v]) for v in differentiable)
        channels.append(Channel(source, target, values, forward, differentiable, backward))
    return tuple(channels)


def _source(value: int, stages: Sequence[StageSpec], target: int) -> int | None:
    """The stage that hands `value` to stage `target`: its maker, or the first that got it on the
    target's mesh.
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
