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

from alpa_strategy.capture.products import product_of
from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.intra_op.options import OpOptions
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.sharding.redistribute import reshard_steps, reshard_table

# Sources and targets of a value's resharding.
ValueEnds = tuple[tuple[DualLayout, ...], tuple[DualLayout, ...]]
# That a sum may be divided into: each part is a kernel and a message of its own.
PARTS = (2, 4)


def making_seconds(
    step: StepGraph, ops: Sequence[OpOptions], value: int, sources: Sequence[DualLayout]
) -> np.ndarray:
    """Return [source] the least seconds of the matmul that makes a value for one reader alone; 0 if
    there is none.
    """
    maker = step.makers.get(value)
    leaves = value in step.escaping or value in step.sent
    if (
        maker is None
        or len(step.consumers.get(value, ())) != 1
        or leaves
        or not _is_plain(step, maker)
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
        matmul = product_of(step.ops[reader].call)
        if matmul is None or matmul.rows != position:
            return np.zeros(len(targets))
        taken = [inputs[position] for inputs in ops[reader].inputs]
        # Half of a product's backward is the gradient of its weight.
        total += _least(
            targets, taken, (ops[reader].compute_seconds - ops[reader].forward_seconds) / 2
        )
    return total


def _is_plain(step: StepGraph, op: int) -> bool:
    """Return whether an op is a matmul with a weight of two dims."""
    matmul = product_of(step.ops[op].call)
    return matmul is not None and len(step.ops[op].call.operands[matmul.weight].shape) == 2


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
    """Return (forward, backward) seconds of a value's `reshard_table` that cost no time, [source,
    target].
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
    sums_values, sums_gradients = _sums(ends, mesh.shape)
    gained = _gained(making, meta, ends, mesh).max(axis=0)
    of_gradients = np.where(sums_gradients, np.minimum(backward, weights), 0.0)
    return mesh.overlap * np.where(sums_values, gained, 0.0), mesh.overlap * of_gradients


def best_parts(
    making: float, meta: TensorMeta, source: DualLayout, target: DualLayout, mesh: LogicalMesh
) -> int:
    """Return the best number of chunks in which the result of a matmul is summed; 1: it is not
    split.

    Args:
        making: seconds of the matmul.
    """
    ends = (source,), (target,)
    if not _sums(ends, mesh.shape)[0].item() or not mesh.overlap:
        return 1
    gains = _gained(np.array([making]), meta, ends, mesh).ravel()
    return PARTS[int(gains.argmax())] if gains.max() > 0 else 1


def _gained(making: np.ndarray, meta: TensorMeta, ends: ValueEnds, mesh: LogicalMesh) -> np.ndarray:
    """Return [PARTS, source, target] the seconds saved if matmul and sum are executed in that many
    chunks instead of one after the other.
    """

    def summing(count: int) -> np.ndarray:
        return reshard_table(*ends, meta.num_bytes // count, meta.requires_grad, mesh)[0]

    gains = []
    for count in PARTS:
        matmul_chunk, sum_chunk = making[:, None] / count, summing(count)
        together = matmul_chunk + (count - 1) * np.maximum(matmul_chunk, sum_chunk) + sum_chunk
        gains.append(np.maximum(making[:, None] + summing(1) - together, 0.0))
    return np.stack(gains)


@lru_cache(maxsize=4096)
def _sums(ends: ValueEnds, mesh_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return [source, target] whether the only collective is one sum over one axis: (of the values,
    of their gradients).
    """
    sources, targets = ends
    values = _may_be_one_sum(_sides(sources, "value"), _sides(targets, "value"))
    for p, q in np.argwhere(values):
        steps = reshard_steps(sources[p], targets[q], mesh_shape)
        moved = [step.src.value for step in steps if step.src.value != step.dst.value]
        values[p, q] = moved == [Partial()]

    # Gradients go the other way.
    gradients = _may_be_one_sum(_sides(targets, "grad"), _sides(sources, "grad")).T
    for p, q in np.argwhere(gradients):
        steps = reshard_steps(sources[p], targets[q], mesh_shape)
        moved = [step.dst.grad for step in steps if step.src.grad != step.dst.grad]
        gradients[p, q] = moved == [Partial()]
    return values, gradients


def _sides(layouts: Sequence[DualLayout], side: str) -> list[list[Placement]]:
    """Return [layout, axis] the placements of values, or of gradients ("grad")."""
    placements = []
    for layout in layouts:
        placements.append([getattr(placement, side) for placement in layout])
    return placements


def _may_be_one_sum(
    before: Sequence[Sequence[Placement]], after: Sequence[Sequence[Placement]]
) -> np.ndarray:
    """Return [before, after] whether partial values become something else on one axis and nothing
    changes on the others. Steps that do more are more than one.
    """
    number: dict[Placement, int] = {Partial(): 0}

    def numbered(layouts: Sequence[Sequence[Placement]]) -> np.ndarray:
        """Return [layout, axis] a number for each placement."""
        numbers = []
        for layout in layouts:
            numbers.append([number.setdefault(placement, len(number)) for placement in layout])
        return np.array(numbers)

    old, new = numbered(before), numbered(after)
    changed = old[:, None] != new[None]
    is_sum = (changed & (old == 0)[:, None]).any(axis=2)
    is_one_sum: np.ndarray = is_sum & (changed.sum(axis=2) == 1)
    return is_one_sum
