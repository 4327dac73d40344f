"""Matmuls that overlap with collectives: which ops they are, and how much of tensor parallelism's
all-reduces they hide.

Between two layers that are sharded over an axis, the backward sums the gradient of their input over
its devices, and the forward the result of the second. Devices have no other work meanwhile but the
matmuls themselves (`lower/overlapped_matmul.py`):

    backward   the input's gradient first, its sum is launched, then the weights' gradients
    forward    samples in a few chunks: one is summed while the next is multiplied
               (`StagePlan.num_chunks`)

Overlapped communication costs no time, in the share that the cluster's `overlap` specifies.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch.distributed.tensor.placement_types import Partial, Placement

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.intra_op.matmul_sums import (
    is_in_segments,
    most_chunks,
    overlapping_matmul,
    sums_gradient,
)
from alpa_strategy.intra_op.options import OpOptions
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.sharding.redistribute import reshard_table

# (sources, targets) of a value's resharding: layouts in which it is made, and in which it is read.
ValueEnds = tuple[tuple[DualLayout, ...], tuple[DualLayout, ...]]

# Numbers of chunks into which a sum may be divided. Every chunk is a kernel and a message.
PARTS = (2, 4)


def making_seconds(
    step: StepGraph, ops: Sequence[OpOptions], value: int, sources: Sequence[DualLayout]
) -> np.ndarray:
    """Return [source] the least seconds of the matmul that makes a value for one reader alone; 0 if
    there is none.

    Args:
        ops: options of the step's ops.
        sources: layouts in which the value may be made.
    """
    maker = step.makers.get(value)
    leaves = value in step.escaping or value in step.sent
    if (
        maker is None
        or len(step.consumers.get(value, ())) != 1
        or leaves
        or not _is_matmul(step.ops[maker].call)
    ):
        return np.zeros(len(sources))
    return _least(
        sources, [outputs[0] for outputs in ops[maker].outputs], ops[maker].forward_seconds
    )


def weights_seconds(
    step: StepGraph, ops: Sequence[OpOptions], value: int, targets: Sequence[DualLayout]
) -> np.ndarray:
    """Return [target] the least seconds of the gradients of all weights that a value is multiplied
    with; 0 if other ops read it.
    """
    total = np.zeros(len(targets))
    for reader, position in step.consumers.get(value, ()):
        matmul = overlapping_matmul(step.ops[reader].call)
        if matmul is None or matmul.rows != position:
            return np.zeros(len(targets))
        taken = [inputs[position] for inputs in ops[reader].inputs]
        # Half of a product's backward is the gradient of its weight.
        total += _least(
            targets, taken, (ops[reader].compute_seconds - ops[reader].forward_seconds) / 2
        )
    return total


def _is_matmul(call: OpCall) -> bool:
    """Whether an op is a matmul whose result can be summed in chunks."""
    matmul = overlapping_matmul(call)
    return matmul is not None and not is_in_segments(call, matmul)


def _least(
    layouts: Sequence[DualLayout], of_strategies: Sequence[DualLayout], seconds: np.ndarray
) -> np.ndarray:
    """Return [layout] the least seconds of the strategies that have it; 0 if none has."""
    least: dict[DualLayout, float] = {}
    for layout, took in zip(of_strategies, seconds, strict=True):
        least[layout] = min(least.get(layout, np.inf), float(took))
    return np.array([least.get(layout, 0.0) for layout in layouts])


def hidden(
    step: StepGraph, ops: Sequence[OpOptions], value: int, ends: ValueEnds, mesh: LogicalMesh
) -> tuple[np.ndarray, np.ndarray]:
    """Return (forward, backward) seconds of a value's `reshard_table` that cost no time because
    they overlap with matmuls, [source, target].

    Args:
        ops: options of the step's ops.
        ends: sources and targets of the table.
    """
    meta = step.values[value]
    forward, backward = reshard_table(*ends, meta.num_bytes, meta.requires_grad, mesh)
    nothing = np.zeros_like(forward), np.zeros_like(backward)
    if not mesh.overlap:
        return nothing
    making = making_seconds(step, ops, value, ends[0])
    weights = weights_seconds(step, ops, value, ends[1])
    if not making.any() and not weights.any():
        return nothing
    gained = np.zeros_like(forward)
    if making.any():
        gained = _gained(making, meta, ends, mesh).max(axis=0)
    is_summed = _gradients_summed(ends, mesh.shape)
    of_gradients = np.where(is_summed, np.minimum(backward, weights), 0.0)
    return mesh.overlap * gained, mesh.overlap * of_gradients


def best_parts(
    making: float, meta: TensorMeta, source: DualLayout, target: DualLayout, mesh: LogicalMesh
) -> int:
    """Return the best number of chunks in which the result of a matmul is summed; 1: it is not
    split.

    Args:
        making: seconds of the matmul.
    """
    gains = _gained(np.array([making]), meta, ((source,), (target,)), mesh).ravel()
    return PARTS[int(gains.argmax())] if gains.max() > 0 else 1


def _gained(making: np.ndarray, meta: TensorMeta, ends: ValueEnds, mesh: LogicalMesh) -> np.ndarray:
    """Return [PARTS, source, target] the seconds saved if matmul and sum are executed in that many
    chunks instead of one after the other; 0 if they cannot be.

    Args:
        making: [source] seconds of the matmul.
        meta: of its full result.
    """

    def summing(count: int) -> np.ndarray:
        return reshard_table(*ends, meta.num_bytes // count, meta.requires_grad, mesh)[0]

    most = _most_chunks(ends, meta.shape, mesh.shape)
    gains = []
    for count in PARTS:
        matmul_chunk, sum_chunk = making[:, None] / count, summing(count)
        together = matmul_chunk + (count - 1) * np.maximum(matmul_chunk, sum_chunk) + sum_chunk
        gain = np.maximum(making[:, None] + summing(1) - together, 0.0)
        gains.append(np.where(most >= count, gain, 0.0))
    return np.stack(gains)


@lru_cache(maxsize=4096)
def _most_chunks(
    ends: ValueEnds, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> np.ndarray:
    """Return [source, target] the largest number of chunks in which a matmul's result is summed; 0
    if it is not summed between these layouts. The array is read-only.

    Args:
        ends: the layouts.
        shape: of the full result.
        mesh_shape: of the devices.
    """
    sources, targets = ends
    may_be_sum = _may_be_sum(_sides(sources, "value"), _sides(targets, "value"), mesh_shape)
    most = np.zeros(may_be_sum.shape, dtype=int)
    for p, q in np.argwhere(may_be_sum):
        most[p, q] = most_chunks(shape, sources[p], targets[q], mesh_shape)
    most.flags.writeable = False
    return most


@lru_cache(maxsize=4096)
def _gradients_summed(ends: ValueEnds, mesh_shape: tuple[int, ...]) -> np.ndarray:
    """Return [source, target] whether gradients go from the target layout to the source layout by
    a single sum over devices.
    """
    sources, targets = ends
    # Gradients go from the targets to the sources.
    is_sum = _may_be_sum(_sides(targets, "grad"), _sides(sources, "grad"), mesh_shape).T.copy()
    for p, q in np.argwhere(is_sum):
        is_sum[p, q] = sums_gradient(sources[p], targets[q], mesh_shape)
    is_sum.flags.writeable = False
    return is_sum


def _sides(layouts: Sequence[DualLayout], side: str) -> list[list[Placement]]:
    """Return [layout, axis] the placements of values, or of gradients ("grad")."""
    placements = []
    for layout in layouts:
        placements.append([getattr(placement, side) for placement in layout])
    return placements


def _may_be_sum(
    before: Sequence[Sequence[Placement]],
    after: Sequence[Sequence[Placement]],
    mesh_shape: tuple[int, ...],
) -> np.ndarray:
    """Return [before, after] whether partial values become something else, and nothing else
    changes. Other steps are no sum.

    Axes of one device do not count.
    """
    number: dict[Placement, int] = {Partial(): 0}

    def numbered(layouts: Sequence[Sequence[Placement]]) -> np.ndarray:
        """Return [layout, axis] a number for each placement."""
        numbers = []
        for layout in layouts:
            numbers.append([number.setdefault(placement, len(number)) for placement in layout])
        return np.array(numbers)

    old, new = numbered(before), numbered(after)
    changed = (old[:, None] != new[None]) & (np.array(mesh_shape) > 1)
    others_changed = (changed & (old != 0)[:, None]).any(axis=2)
    may_be_sum: np.ndarray = changed.any(axis=2) & ~others_changed
    return may_be_sum
