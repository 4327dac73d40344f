"""Sharding of a user's autograd.Function, by the ops that it runs on meta tensors, forward and
backward.

A Function that works element by element (straight-through estimators, gradient reversal,
activations) may be sharded along every dim. Its ops prove that; no data is used. Other Functions
run in full on every device, unless they have rules by `register_sharding`.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alpa_strategy.cost.saved_tensors import differentiated, tensors_in, without_data
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.sharding.notation import RuleMatch, Split

aten = torch.ops.aten

# Ops that work element by element though ATen does not tag them so.
_COPIES = (
    aten.detach,
    aten.clone,
    aten.alias,
    aten._to_copy,
    aten.copy_,
    aten.zeros_like,
    aten.ones_like,
)
# Ops that change nothing if the shape stays the same.
_SAME_IF_SHAPE_IS = (aten.view, aten._unsafe_view, aten.expand)


def elementwise_dims(call: OpCall, axis_size: int) -> RuleMatch | None:
    """Return the ways to shard a Function that works element by element over `axis_size` devices.

    A dim may be sharded if every device runs the same ops with the same constants as the full
    Function. None if the Function does not work element by element, needs tensors with data, or
    draws random numbers.
    """
    full_record = _recorded(call)
    if full_record is None or full_record.shape is None or full_record.draws:
        return None
    splits = []
    for dim, size in enumerate(full_record.shape):
        lengths = set(chunk_sizes(size, axis_size))
        if 0 in lengths:
            continue
        shards = [_recorded(_cut(call, dim, length)) for length in lengths]
        if all(_same_steps(shard_record, full_record) for shard_record in shards):
            operand_dims = []
            for meta in call.operands:
                is_scalar = not meta.shape
                operand_dims.append(None if is_scalar else dim)
            splits.append(Split(tuple(operand_dims), (dim,) * len(call.results)))
    # No `carries`: a user's backward need not be linear.
    return RuleMatch(tuple(splits), origin="pointwise")


def _same_steps(shard_record: "_Recorder | None", full_record: "_Recorder") -> bool:
    """Whether a shard runs the same ops as the full tensors do."""
    if shard_record is None or shard_record.shape is None:
        return False
    return shard_record.steps == full_record.steps


def may_draw(call: OpCall) -> bool:
    """Whether the Function draws random numbers, or cannot run on meta tensors."""
    recorded = _recorded(call)
    return recorded is None or recorded.draws


def _cut(call: OpCall, dim: int, length: int) -> OpCall:
    """Return the call with size `length` of dim `dim` in every tensor; numbers, of shape (), are
    unchanged.
    """

    def cut(meta: TensorMeta) -> TensorMeta:
        if not meta.shape:
            return meta
        return meta.with_shape((*meta.shape[:dim], length, *meta.shape[dim + 1 :]))

    return replace(
        call, operands=tuple(map(cut, call.operands)), results=tuple(map(cut, call.results))
    )


@lru_cache(maxsize=4096)
def _recorded(call: OpCall) -> "_Recorder | None":
    """Record the ops of the call, forward and backward; None if it needs tensors with data."""
    with torch.inference_mode(False), torch.enable_grad():
        with torch.device("meta"):
            operands = without_data(call)
        # All results and operands must have the same shape, but for operands without dims.
        operand_shapes = {meta.shape for meta in call.operands if meta.shape}
        shapes = operand_shapes | {meta.shape for meta in call.results}
        recorder = _Recorder(shapes.pop() if len(shapes) == 1 else None)
        try:
            with recorder:
                results = tensors_in(call.call(*operands))
            differentiated(operands, results, recorder)
        except Exception:
            # The user's code needs data; the error may be of any type.
            return None
    return recorder


class _Recorder(TorchDispatchMode):
    """Records every op with its constants, and whether one draws random numbers."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        # becomes None at the first op that does not work element by element on this shape
        self.shape = shape
        self.steps: list[tuple[Any, str]] = []
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        arguments = tree_leaves((args, kwargs))
        operand_shapes = [tuple(tensor.shape) for tensor in tensors_in(arguments)]
        result_shapes = [tuple(tensor.shape) for tensor in tensors_in(results)]
        if func.overloadpacket in _SAME_IF_SHAPE_IS and operand_shapes == result_shapes:
            return results
        if not self._is_elementwise(func, operand_shapes, result_shapes):
            self.shape = None
        constants = [value for value in arguments if not isinstance(value, Tensor)]
        self.steps.append((func, str(constants)))
        return results

    def _is_elementwise(
        self,
        func: Any,
        operand_shapes: list[tuple[int, ...]],
        result_shapes: list[tuple[int, ...]],
    ) -> bool:
        """Whether an op works element by element on tensors of shape `self.shape`, and on numbers
        (shape ()).

        A number is an operand or a constant: no op that makes one passes.

        Args:
            func: the op.
            operand_shapes, result_shapes: of its call.
        """
        if torch.Tag.pointwise not in func.tags and func.overloadpacket not in _COPIES:
            return False
        has_other_shapes = bool(set(operand_shapes) - {self.shape, ()})
        if self.shape not in operand_shapes or has_other_shapes:
            return False
        return set(result_shapes) == {self.shape}
