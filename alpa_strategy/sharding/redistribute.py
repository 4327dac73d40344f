"""Resharding as a plan: dual layout -> dual layout as single-axis steps, and what they cost. No
process groups.

The gradient of a resharding takes the same steps backwards, each from `dst.grad` to `src.grad`.
When two axes shard the same dim, the later axis cuts the chunks of the earlier one, so the earlier
may change only while the later does not shard that dim; where layouts force it, a step through a
replicated value is put in between. Among the valid orders the one that moves the fewest bytes is
taken (shrink first, gather last); bytes weigh more on earlier, distant axes.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.cluster.spec import LogicalMesh, volume_factor
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, DualLayout, DualPlacement, shard

_EARLIER_AXIS_WEIGHT = 4.0
_CALL_WEIGHT = 1e-3  # in full tensors: of equal volumes, take the fewer collectives
_LOCAL_WEIGHT = 1e-6


@dataclass(frozen=True)
class AxisStep:
    """One axis of a tensor changes its dual placement."""

    axis: int
    # src, dst: its dual placement before and after
    src: DualPlacement
    dst: DualPlacement
    share: float  # of the whole tensor, what the devices of that axis hold together at that moment

    def collectives(self, differentiable: bool = True) -> tuple[tuple[str, str], ...]:
        """(kind, phase) of each; `backward` ones only when differentiable."""
        return _collectives_between(self.src, self.dst, differentiable)


@lru_cache(maxsize=4096)
def _collectives_between(
    src: DualPlacement, dst: DualPlacement, differentiable: bool
) -> tuple[tuple[str, str], ...]:
    """See `AxisStep.collectives`."""
    forward = placement_collective(src.value, dst.value)
    # The gradient goes the other way: from where the result's lies to where the operand's is
    # wanted.
    backward = placement_collective(dst.grad, src.grad) if differentiable else None
    both = ((forward, "forward"), (backward, "backward"))
    return tuple((kind, phase) for kind, phase in both if kind is not None)


def placement_collective(src: Placement, dst: Placement) -> str | None:
    """Name of the collective that brings a value from `src` to `dst` on one axis, None where it is
    local.

    Local are: equal placements, R -> S (slice), R -> P (device 0 keeps, the others hold zeros), S
    -> P (zeros around).
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
    """The single-axis steps that bring a tensor from `src` to `dst` (and its gradient back).

    The cheapest valid sequence: Dijkstra over the few layouts in between.
    """
    best: dict[DualLayout, float] = {
        src: 0.0
    }  # layout -> bytes moved on the cheapest way to it so far
    order = itertools.count()  # ties go to the sequence found first: the same on every rank
    queue: list[tuple[float, int, DualLayout, tuple[AxisStep, ...]]] = [(0.0, next(order), src, ())]
    while queue:
        cost, _, layout, steps = heapq.heappop(queue)
        if layout == dst:
            return steps
        if cost > best[layout]:
            continue  # a cheaper way was found after this one was queued
        for axis, old in enumerate(layout):
            for new in dict.fromkeys(
                (dst[axis], INVARIANT, REPLICATE)
            ):  # on the way only whole values help
                # No later axis may cut the chunks that are moved (values and gradients shard the
                # same dims).
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
    """Bytes moved by a step on an axis, in tensors that the axis holds together, weighted; forward
    and backward count alike.
    """
    weight = _EARLIER_AXIS_WEIGHT ** (len(mesh_shape) - 1 - axis)
    kinds = _collectives_between(src, dst, True)
    return weight * sum(volume_factor(kind, mesh_shape[axis]) for kind, _ in kinds)


def _call_cost(src: DualPlacement, dst: DualPlacement) -> float:
    """What a step costs whatever it moves."""
    return _LOCAL_WEIGHT + _CALL_WEIGHT * len(_collectives_between(src, dst, True))


@lru_cache(maxsize=4096)
def reshard_table(
    sources: tuple[DualLayout, ...],
    targets: tuple[DualLayout, ...],
    num_bytes: int,
    differentiable: bool,
    mesh: LogicalMesh,
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of every source -> target, arrays [len(sources), len(targets)];
    do not write to them.

    Which collectives run does not depend on the tensor's size: the counts are made once per set of
    layouts, and a tensor only prices the few distinct (collective, axis, share of the tensor)
    terms.
    """
    terms, counts = _counted_table(sources, targets, mesh.shape)
    seconds = np.array(
        [mesh.axes[axis].seconds(kind, num_bytes * share) for kind, axis, share in terms]
    )
    tables = counts @ seconds  # [forward or backward, sources, targets]
    if not differentiable:
        tables[1] = 0.0
    tables.flags.writeable = False  # shared by everybody who asks
    return tables[0], tables[1]


@lru_cache(maxsize=1 << 13)
def _counted_table(
    sources: tuple[DualLayout, ...], targets: tuple[DualLayout, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[tuple[str, int, float]], np.ndarray]:
    """Distinct terms, and how often each occurs [forward or backward, sources, targets, terms]."""
    index: dict[tuple[str, int, float], int] = {}
    found = [
        (phase, p, q, index.setdefault(term, len(index)))
        for (p, src), (q, dst) in itertools.product(enumerate(sources), enumerate(targets))
        for phase, collectives in enumerate(_collectives(src, dst, mesh_shape))
        for term in collectives
    ]
    # Thousands of tables are kept: in bytes, as no resharding takes more than a few steps.
    counts = np.zeros((2, len(sources), len(targets), len(index)), dtype=np.uint8)
    np.add.at(counts, tuple(np.array(found, dtype=int).reshape(-1, 4).T), 1)
    return list(index), counts


@lru_cache(maxsize=1 << 16)
def _collectives(
    src: DualLayout, dst: DualLayout, mesh_shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, float], ...], tuple[tuple[str, int, float], ...]]:
    """(kind, axis, share of the whole tensor's bytes) of the forward and of the backward
    collectives.
    """
    number: dict[
        int, int
    ] = {}  # of dims as they first occur: which dims they are changes no collective
    named = tuple(
        p if p.shard_dim is None else shard(number.setdefault(p.shard_dim, len(number)))
        for p in src + dst
    )
    if named != src + dst:
        return _collectives(named[: len(src)], named[len(src) :], mesh_shape)
    found: dict[str, list[tuple[str, int, float]]] = {"forward": [], "backward": []}
    for step in reshard_steps(src, dst, mesh_shape):
        for kind, phase in step.collectives():
            found[phase].append((kind, step.axis, step.share))
    return tuple(found["forward"]), tuple(found["backward"])


def _share(layout: Sequence[DualPlacement], mesh_shape: Sequence[int], axis: int) -> float:
    """Share of the whole tensor that the devices of one axis hold together."""
    share = 1.0
    for other, placement in enumerate(layout):
        if other != axis and placement.shard_dim is not None:
            share /= mesh_shape[other]
    return share
