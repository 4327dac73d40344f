"""Resharding as a plan: dual layout -> dual layout as single-axis steps, and what they cost. No process groups.

The gradient of a resharding takes the same steps backwards, each from `dst.grad` to `src.grad`. When two axes shard the
same dim, the later axis cuts the chunks of the earlier one, so the earlier may change only while the later does not
shard that dim; where layouts force it, a step through a replicated value is put in between. Among the valid orders the
one that moves the fewest bytes is taken (shrink first, gather last), bytes on earlier axes, whose devices lie further
apart, weighing more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.cluster.spec import LogicalMesh, volume_factor
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, DualLayout, DualPlacement, shard, value_layout

_EARLIER_AXIS_WEIGHT = 4.0
_CALL_WEIGHT = 1e-3  # in full tensors: of equal volumes, take the fewer collectives
_LOCAL_WEIGHT = 1e-6


@dataclass(frozen=True)
class AxisStep:
    """One axis of a tensor changes its dual placement.

    Attributes:
        axis: the mesh axis.
        src, dst: its dual placement before and after.
        shape: the full tensor as the devices of that axis see it: local to the other axes' placements at that moment
            (the largest chunk where chunks are uneven).
    """

    axis: int
    src: DualPlacement
    dst: DualPlacement
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"axis {self.axis}: {self.src} -> {self.dst} {list(self.shape)}"


def placement_collective(src: Placement, dst: Placement) -> str | None:
    """Name of the collective that brings a value from `src` to `dst` on one axis, None where it is local.

    Local are: equal placements, R -> S (slice), R -> P (device 0 keeps, the others hold zeros), S -> P (zeros around).
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


def reshard_steps(
    src: DualLayout, dst: DualLayout, shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[AxisStep, ...]:
    """The single-axis steps that bring a tensor of global `shape` from `src` to `dst` (and its gradient back)."""
    current = list(src)
    steps = []
    for axis, placement in _axis_changes(tuple(src), tuple(dst), tuple(mesh_shape)):
        others = value_layout((*current[:axis], INVARIANT, *current[axis + 1 :]))
        largest = others.local_shape(shape, mesh_shape, (0,) * len(mesh_shape))
        steps.append(AxisStep(axis, current[axis], placement, largest))
        current[axis] = placement
    return tuple(steps)


def step_collectives(step: AxisStep, itemsize: int, differentiable: bool) -> tuple[tuple[str, int, str], ...]:
    """(kind, bytes of the full tensor on the axis, phase) per collective; `backward` ones only when differentiable."""
    num_bytes = itemsize * math.prod(step.shape)
    forward = placement_collective(step.src.value, step.dst.value)
    # The gradient goes the other way: from where the result's lies to where the operand's is wanted.
    backward = placement_collective(step.dst.grad, step.src.grad) if differentiable else None
    found = ((forward, "forward"), (backward, "backward"))
    return tuple((kind, num_bytes, phase) for kind, phase in found if kind is not None)


@lru_cache(maxsize=4096)
def reshard_table(
    sources: tuple[DualLayout, ...],
    targets: tuple[DualLayout, ...],
    num_bytes: int,
    differentiable: bool,
    mesh: LogicalMesh,
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of every source -> target, arrays [len(sources), len(targets)]; do not write to them.

    Which collectives run does not depend on the tensor's size: the counts are made once per set of layouts, and a
    tensor only prices the few distinct (collective, axis, share of the tensor) terms.
    """
    terms, forward, backward = _counted_table(sources, targets, mesh.shape)
    seconds = np.array([mesh.axes[axis].seconds(kind, num_bytes * share) for kind, axis, share in terms])
    zeros = np.zeros((len(sources), len(targets)))
    # [sources, targets, terms] @ [terms]
    tables = (forward @ seconds if terms else zeros, backward @ seconds if terms and differentiable else zeros)
    for table in tables:
        table.flags.writeable = False  # shared by everybody who asks
    return tables


@lru_cache(maxsize=1024)
def _counted_table(
    sources: tuple[DualLayout, ...], targets: tuple[DualLayout, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[tuple[str, int, float]], np.ndarray, np.ndarray]:
    """Distinct terms, and how often each occurs forward and backward: arrays [sources, targets, terms]."""
    index: dict[tuple[str, int, float], int] = {}
    entries: tuple[list[tuple[int, int, int]], ...] = ([], [])
    for (p, src), (q, dst) in itertools.product(enumerate(sources), enumerate(targets)):
        for phase, collectives in enumerate(_collectives(src, dst, mesh_shape)):
            for term in collectives:
                entries[phase].append((p, q, index.setdefault(term, len(index))))
    counts = []
    for found in entries:
        count = np.zeros((len(sources), len(targets), len(index)))
        if found:
            np.add.at(count, tuple(np.array(found).T), 1.0)
        counts.append(count)
    return list(index), counts[0], counts[1]


@lru_cache(maxsize=1 << 16)
def _collectives(
    src: DualLayout, dst: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, float], ...], tuple[tuple[str, int, float], ...]]:
    """(kind, axis, share of the whole tensor's bytes) of the forward and of the backward collectives."""
    number: dict[int, int] = {}  # of dims as they first occur: which dims they are changes no collective
    named = tuple(p if p.shard_dim is None else shard(number.setdefault(p.shard_dim, len(number))) for p in src + dst)
    if named != src + dst:
        return _collectives(named[: len(src)], named[len(src) :], mesh_shape)
    current = list(src)
    forward, backward = [], []
    for axis, placement in _axis_changes(src, dst, mesh_shape):
        share, before = _share(current, mesh_shape, axis), current[axis]
        if (kind := placement_collective(before.value, placement.value)) is not None:
            forward.append((kind, axis, share))
        if (kind := placement_collective(placement.grad, before.grad)) is not None:
            backward.append((kind, axis, share))
        current[axis] = placement
    return tuple(forward), tuple(backward)


@lru_cache(maxsize=1 << 16)
def _axis_changes(
    src: DualLayout, dst: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[tuple[int, DualPlacement], ...]:
    """Cheapest valid sequence of (axis, its new dual placement): Dijkstra over the few layouts in between."""
    best: dict[DualLayout, float] = {src: 0.0}  # layout -> bytes moved on the cheapest way to it so far
    order = itertools.count()  # ties go to the sequence found first: the same on every rank
    queue: list[tuple[float, int, DualLayout, tuple[tuple[int, DualPlacement], ...]]] = [(0.0, next(order), src, ())]
    while queue:
        cost, _, layout, changes = heapq.heappop(queue)
        if layout == dst:
            return changes
        if cost > best[layout]:
            continue  # a cheaper way was found after this one was queued
        for axis, old in enumerate(layout):
            for new in dict.fromkeys((dst[axis], INVARIANT, REPLICATE)):  # on the way only whole values help
                # No later axis may cut the chunks that are moved (values and gradients shard the same dims).
                moved = {old.shard_dim, new.shard_dim} - {None}
                if new == old or any(later.shard_dim in moved for later in layout[axis + 1 :]):
                    continue
                reached = (*layout[:axis], new, *layout[axis + 1 :])
                reached_cost = cost + _change_cost(layout, axis, new, mesh_shape)
                if reached_cost < best.get(reached, float("inf")):
                    best[reached] = reached_cost
                    heapq.heappush(queue, (reached_cost, next(order), reached, (*changes, (axis, new))))
    raise AssertionError("every layout can be reached through the replicated one")


def _change_cost(layout: Sequence[DualPlacement], axis: int, new: DualPlacement, mesh_shape: tuple[int, ...]) -> float:
    """Bytes moved by one change, in whole tensors, weighted; forward and backward count alike."""
    cost = _LOCAL_WEIGHT
    share, size = _share(layout, mesh_shape, axis), mesh_shape[axis]
    weight = _EARLIER_AXIS_WEIGHT ** (len(mesh_shape) - 1 - axis)
    for src, dst in ((layout[axis].value, new.value), (new.grad, layout[axis].grad)):
        kind = placement_collective(src, dst)
        if kind is not None:
            cost += _CALL_WEIGHT + weight * share * volume_factor(kind, size)
    return cost


def _share(layout: Sequence[DualPlacement], mesh_shape: Sequence[int], axis: int) -> float:
    """Share of the whole tensor that the devices of one axis hold together."""
    share = 1.0
    for other, placement in enumerate(layout):
        if other != axis and placement.shard_dim is not None:
            share /= mesh_shape[other]
    return share
