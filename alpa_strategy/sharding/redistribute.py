"""Resharding as a plan: the single-axis steps from one dual layout to another, and their costs.

The gradient of a resharding takes the same steps in reverse, each from `dst.grad` to `src.grad`.

When two axes shard the same dim, the later axis shards the chunks of the earlier one. So the
earlier axis may change only while the later one does not shard that dim. If the layouts require it,
a step through a replicated value is inserted. Of all valid orders the one that moves the fewest
bytes is used (shrink first, gather last). Bytes weigh more on earlier axes, whose devices are
farther apart. No process groups here.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.cluster.logical_mesh import LogicalMesh, volume_factor
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, DualLayout, DualPlacement, shard

_EARLIER_AXIS_WEIGHT = 4.0
# Of a collective, in full tensors: of equal volumes, the fewer collectives are used.
_CALL_WEIGHT = 1e-3
# Of a step, in full tensors.
_LOCAL_WEIGHT = 1e-6


@dataclass(frozen=True)
class AxisStep:
    """One axis of a tensor changes its dual placement."""

    axis: int
    # before the step
    src: DualPlacement
    # after the step
    dst: DualPlacement
    # share of the full tensor that the devices of a group on this axis store together
    share: float

    def collectives(self, differentiable: bool = True) -> tuple[tuple[str, str], ...]:
        """Return the (kind, phase) of each collective; phase is `forward` or `backward`."""
        return _collectives_between(self.src, self.dst, differentiable)


@lru_cache(maxsize=4096)
def _collectives_between(
    src: DualPlacement, dst: DualPlacement, differentiable: bool
) -> tuple[tuple[str, str], ...]:
    """Return the (kind, phase) of each collective from `src` to `dst` on one axis; phase is
    `forward` or `backward`, the latter if the tensor is differentiable.
    """
    collectives = []
    forward = placement_collective(src.value, dst.value)
    if forward is not None:
        collectives.append((forward, "forward"))
    # The gradient goes from the result's placement to the operand's.
    backward = placement_collective(dst.grad, src.grad)
    if differentiable and backward is not None:
        collectives.append((backward, "backward"))
    return tuple(collectives)


def placement_collective(src: Placement, dst: Placement) -> str | None:
    """Return the name of the collective from `src` to `dst` on one axis, None if there is none.

    Local are: equal placements, R -> S (slice), R -> P (zeros on all devices but the first), S -> P
    (zeros around the shard).
    """
    match src, dst:
        case Shard(dim=a), Shard(dim=b):
            return None if a == b else "all_to_all"
        case Shard(), Replicate():
            return "all_gather"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
    return None


@lru_cache(maxsize=1 << 16)
def reshard_steps(
    src: DualLayout, dst: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[AxisStep, ...]:
    """Return the single-axis steps from `src` to `dst`, which the gradient takes in reverse.

    The cheapest valid sequence, by Dijkstra's algorithm over the few layouts in between.
    """
    # layout -> weighted bytes moved by the cheapest sequence to it so far
    best: dict[DualLayout, float] = {src: 0.0}
    # Of equal costs the sequence that was found first counts: the same one on every rank.
    order = itertools.count()
    queue: list[tuple[float, int, DualLayout, tuple[AxisStep, ...]]] = [(0.0, next(order), src, ())]
    while queue:
        cost, _, layout, steps = heapq.heappop(queue)
        if layout == dst:
            return steps
        if cost > best[layout]:
            # A cheaper sequence was found after this one was queued.
            continue
        for axis, old in enumerate(layout):
            # In between only unsharded values are of use.
            for new in dict.fromkeys((dst[axis], INVARIANT, REPLICATE)):
                # No later axis may shard the chunks that are moved. Values and gradients shard the
                # same dims.
                moved = {old.shard_dim, new.shard_dim} - {None}
                if new == old or any(later.shard_dim in moved for later in layout[axis + 1 :]):
                    continue
                reached = (*layout[:axis], new, *layout[axis + 1 :])
                share = _share(layout, mesh_shape, axis)
                reached_cost = cost + share * _moved(old, new, axis, mesh_shape)
                reached_cost += _call_cost(old, new)
                if reached_cost < best.get(reached, float("inf")):
                    step = AxisStep(axis, old, new, share)
                    best[reached] = reached_cost
                    heapq.heappush(queue, (reached_cost, next(order), reached, (*steps, step)))
    raise AssertionError("every layout can be reached through the replicated one")


@lru_cache(maxsize=4096)
def _moved(src: DualPlacement, dst: DualPlacement, axis: int, mesh_shape: tuple[int, ...]) -> float:
    """Return the weighted bytes moved by a step on an axis, as a multiple of those that the axis
    stores together.

    Forward and backward count alike.
    """
    weight = _EARLIER_AXIS_WEIGHT ** (len(mesh_shape) - 1 - axis)
    kinds = _collectives_between(src, dst, True)
    return weight * sum(volume_factor(kind, mesh_shape[axis]) for kind, _ in kinds)


def _call_cost(src: DualPlacement, dst: DualPlacement) -> float:
    """Return the cost of a step that does not depend on the bytes that it moves."""
    return _LOCAL_WEIGHT + _CALL_WEIGHT * len(_collectives_between(src, dst, True))


@lru_cache(maxsize=4096)
def reshard_table(
    sources: tuple[DualLayout, ...],
    targets: tuple[DualLayout, ...],
    num_bytes: int,
    differentiable: bool,
    mesh: LogicalMesh,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (forward, backward) seconds of every source -> target.

    Read-only arrays [sources, targets]. Collectives do not depend on the tensor's size: they are
    counted once per set of layouts. For a tensor only the few distinct terms (collective, axis,
    share of the tensor) are priced.

    Args:
        num_bytes: of the full tensor.
        differentiable: whether the tensor gets a gradient; backward is 0 otherwise.
    """
    terms, counts = _counted_table(sources, targets, mesh.shape)
    seconds = np.array(
        [mesh.axes[axis].seconds(kind, num_bytes * share) for kind, axis, share in terms]
    )
    # [forward or backward, sources, targets]
    tables = counts @ seconds
    if not differentiable:
        tables[1] = 0.0
    # The cache shares them between all callers.
    tables.flags.writeable = False
    return tables[0], tables[1]


@lru_cache(maxsize=1 << 13)
def _counted_table(
    sources: tuple[DualLayout, ...], targets: tuple[DualLayout, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[tuple[str, int, float]], np.ndarray]:
    """Return the distinct terms (kind, axis, share of the full bytes) of a table of reshardings,
    and how often each occurs.

    Counts are [forward or backward, sources, targets, terms].
    """
    index: dict[tuple[str, int, float], int] = {}
    positions: list[tuple[int, int, int, int]] = []
    for (p, src), (q, dst) in itertools.product(enumerate(sources), enumerate(targets)):
        for phase, collectives in enumerate(_collectives(src, dst, mesh_shape)):
            for term in collectives:
                positions.append((phase, p, q, index.setdefault(term, len(index))))
    # Thousands of tables are cached: in bytes, as no resharding takes more than a few steps.
    counts = np.zeros((2, len(sources), len(targets), len(index)), dtype=np.uint8)
    np.add.at(counts, tuple(np.array(positions, dtype=int).reshape(-1, 4).T), 1)
    return list(index), counts


@lru_cache(maxsize=1 << 16)
def _collectives(
    src: DualLayout, dst: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, float], ...], tuple[tuple[str, int, float], ...]]:
    """Return the (forward, backward) collectives of a resharding from layout `src` to `dst`.

    Each is (kind, mesh axis, share of the full tensor's bytes).
    """
    # Dims are numbered as they first occur: which dims they are changes no collective, and results
    # are cached for fewer layouts.
    numbers: dict[int, int] = {}
    numbered = []
    for placement in src + dst:
        if placement.shard_dim is not None:
            placement = shard(numbers.setdefault(placement.shard_dim, len(numbers)))
        numbered.append(placement)
    if tuple(numbered) != src + dst:
        num_axes = len(src)
        return _collectives(tuple(numbered[:num_axes]), tuple(numbered[num_axes:]), mesh_shape)

    by_phase: dict[str, list[tuple[str, int, float]]] = {"forward": [], "backward": []}
    for step in reshard_steps(src, dst, mesh_shape):
        for kind, phase in step.collectives():
            by_phase[phase].append((kind, step.axis, step.share))
    return tuple(by_phase["forward"]), tuple(by_phase["backward"])


def _share(layout: Sequence[DualPlacement], mesh_shape: Sequence[int], axis: int) -> float:
    """Return the share of the full tensor that the devices of a group on one axis store
    together.
    """
    share = 1.0
    for other, placement in enumerate(layout):
        if other != axis and placement.shard_dim is not None:
            share /= mesh_shape[other]
    return share


class AxisSum(NamedTuple):
    """A sum over the devices of one mesh axis, or of all axes at once."""

    axes: tuple[int, ...]

    # The dim of which every device gets a shard of the sum; None: it gets all of it.
    dim: int | None


# (axis, placement before, placement after) of a tensor on one mesh axis.
Move = tuple[int, Placement, Placement]


def sums_of(moves: Sequence[Move], mesh_shape: tuple[int, ...]) -> tuple[AxisSum, ...]:
    """Return the sums over devices that `moves` are: one per move, or one over all axes at once.

    () if they do anything else.
    """
    for _, before, after in moves:
        if before != Partial() or not isinstance(after, Replicate | Shard):
            return ()
    summed_in_full = {axis for axis, _, after in moves if after == Replicate()}
    larger_axes = {axis for axis, size in enumerate(mesh_shape) if size != 1}
    if len(summed_in_full) == len(moves) > 1 and summed_in_full >= larger_axes:
        return (AxisSum(tuple(sorted(summed_in_full)), None),)
    sums = []
    for axis, _, after in moves:
        sums.append(AxisSum((axis,), after.dim if isinstance(after, Shard) else None))
    return tuple(sums)


def value_sums(
    source: DualLayout, target: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[AxisSum, ...]:
    """Return the sums that bring values from `source` to `target`; () if more is done, or
    nothing.
    """
    moves = []
    for step in reshard_steps(source, target, mesh_shape):
        if mesh_shape[step.axis] > 1 and step.src.value != step.dst.value:
            moves.append((step.axis, step.src.value, step.dst.value))
    return sums_of(moves, mesh_shape)


def gradient_sums(
    source: DualLayout, target: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[AxisSum, ...]:
    """Return the sums that bring gradients back from `target` to `source`; () if more is done, or
    nothing.
    """
    moves = []
    for step in reversed(reshard_steps(source, target, mesh_shape)):
        if mesh_shape[step.axis] > 1 and step.dst.grad != step.src.grad:
            moves.append((step.axis, step.dst.grad, step.src.grad))
    return sums_of(moves, mesh_shape)
