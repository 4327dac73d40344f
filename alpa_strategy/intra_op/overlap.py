"""Products beside collectives: which ops they are, and how much of tensor parallelism's sums they
hide.

Between two layers cut over an axis, the backward sums the gradient of their input over its devices,
and the forward the result of the second. Devices have no other work meanwhile but the products
themselves (`lower/overlapped_matmul.py`):

    backward   the input's gradient first, its sum begins, the weights' gradients beside it
    forward    samples in a few chunks: one is summed while the next is multiplied
               (`StagePlan.num_chunks`)

What runs beside compute costs no time as far as the cluster's `overlap` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Placement

from alpa_strategy.capture.ops import segmented_linear
from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.intra_op.options import OpOptions
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta, bind
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.sharding.redistribute import reshard_steps, reshard_table

aten = torch.ops.aten

ValueEnds = tuple[
    tuple[DualLayout, ...], tuple[DualLayout, ...]
]  # sources and targets of a value's resharding
PARTS = (2, 4)  # that a sum may be divided into: each part is a kernel and a message of its own

# Names of the arguments input [*rows, k], weight and bias; whether the weight is [k, n], else
# [*segments, n, k].
_PRODUCTS: dict[Any, tuple[str, str, str | None, bool]] = {
    aten.linear.default: ("input", "weight", "bias", False),
    segmented_linear: ("x", "weight", "bias", False),
    aten.mm.default: ("self", "mat2", None, True),
    aten.matmul.default: ("self", "other", None, True),
    aten.addmm.default: ("mat1", "mat2", "self", True),
}


@dataclass(frozen=True)
class Product:
    """Of rows with a weight."""

    # rows, weight, bias: numbers of the op's operands
    rows: int
    weight: int
    bias: int | None
    is_transposed: bool  # whether the weight is [k, n], else [*segments, n, k]


def product_of(call: OpCall) -> Product | None:
    """The product that an op is, None where it is something else."""
    if call.target not in _PRODUCTS:
        return None
    rows, weight, bias, is_transposed = _PRODUCTS[call.target]
    arguments = bind(call)
    x = _operand_number(arguments[rows])
    w = _operand_number(arguments[weight])
    b = _operand_number(arguments.get(bias)) if bias else None
    if x is None or w is None:
        return None
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None

    num_segment_dims = 1 if call.target is segmented_linear else 0
    has_rows = len(call.operands[x].shape) >= 2
    is_matrix = len(call.operands[w].shape) == 2 + num_segment_dims
    is_vector = b is None or len(call.operands[b].shape) <= 1 + num_segment_dims
    if not (has_rows and is_matrix and is_vector):
        return None
    return Product(x, w, b, is_transposed)


def _operand_number(argument: Any) -> int | None:
    """Return the number of the operand that an argument is; None if it is no tensor."""
    return argument.index if isinstance(argument, Slot) else None


def making_seconds(
    step: StepGraph, ops: Sequence[OpOptions], value: int, sources: Sequence[DualLayout]
) -> np.ndarray:
    """[source] seconds, at the least, of the product that makes a value for one reader alone; 0
    where there is none.
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
    """[target] least seconds of the gradients of all weights that a value is multiplied with; 0 if
    others read it.
    """
    total = np.zeros(len(targets))
    for reader, position in step.consumers.get(value, ()):
        found = product_of(step.ops[reader].call)
        if found is None or found.rows != position:
            return np.zeros(len(targets))
        taken = [inputs[position] for inputs in ops[reader].inputs]
        # Half of a product's backward is the gradient of its weight.
        total += _least(
            targets, taken, (ops[reader].compute_seconds - ops[reader].forward_seconds) / 2
        )
    return total


def _is_plain(step: StepGraph, op: int) -> bool:
    found = product_of(step.ops[op].call)
    return found is not None and len(step.ops[op].call.operands[found.weight].shape) == 2


def _least(
    layouts: Sequence[DualLayout], of_strategies: Sequence[DualLayout], seconds: np.ndarray
) -> np.ndarray:
    """[layout] the least seconds of the strategies that have it, 0 where none has."""
    least: dict[DualLayout, float] = {}
    for layout, each in zip(of_strategies, seconds, strict=True):
        least[layout] = min(least.get(layout, np.inf), float(each))
    return np.array([least.get(layout, 0.0) for layout in layouts])


def hidden(
    step: StepGraph, ops: Sequence[OpOptions], value: int, ends: ValueEnds, mesh: LogicalMesh
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of a value's `reshard_table` that cost no time, [source,
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
    """In how many parts the result of a product that takes `making` seconds is best summed; 1: as a
    whole.
    """
    ends = (source,), (target,)
    if not _sums(ends, mesh.shape)[0].item() or not mesh.overlap:
        return 1
    gains = _gained(np.array([making]), meta, ends, mesh).ravel()
    return PARTS[int(gains.argmax())] if gains.max() > 0 else 1


def _gained(making: np.ndarray, meta: TensorMeta, ends: ValueEnds, mesh: LogicalMesh) -> np.ndarray:
    """[PARTS, source, target] seconds less than one after the other: matmul and sum in that many
    chunks each.
    """

    def summing(count: int) -> np.ndarray:
        return reshard_table(*ends, meta.num_bytes // count, meta.requires_grad, mesh)[0]

    gains = []
    for count in PARTS:
        each, part = making[:, None] / count, summing(count)
        together = each + (count - 1) * np.maximum(each, part) + part
        gains.append(np.maximum(making[:, None] + summing(1) - together, 0.0))
    return np.stack(gains)


@lru_cache(maxsize=4096)
def _sums(ends: ValueEnds, mesh_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[source, target] whether all that is moved is one sum over one axis: of the values, of their
    gradients.
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
    """[layout, axis] the placements of values, or of gradients ("grad")."""
    found = []
    for layout in layouts:
        found.append([getattr(placement, side) for placement in layout])
    return found


def _may_be_one_sum(
    before: Sequence[Sequence[Placement]], after: Sequence[Sequence[Placement]]
) -> np.ndarray:
    """[before, after] whether partial values become something else on one axis and nothing changes
    on the others: steps that do more, or take another way, are more than one.
    """
    number: dict[Placement, int] = {Partial(): 0}

    def numbered(layouts: Sequence[Sequence[Placement]]) -> np.ndarray:
        """[layout, axis] a number for each placement."""
        found = []
        for layout in layouts:
            found.append([number.setdefault(placement, len(number)) for placement in layout])
        return np.array(found)

    old, new = numbered(before), numbered(after)
    changed = old[:, None] != new[None]
    is_sum = (changed & (old == 0)[:, None]).any(axis=2)
    found: np.ndarray = is_sum & (changed.sum(axis=2) == 1)
    return found
