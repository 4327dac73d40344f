"""What a user's autograd.Function does to tensors, seen by running it on shapes alone, forward and
backward.

One that works element by element (straight-through estimators, gradient reversal, activations) may
be cut along every
dim, which its ops prove: nothing is tried on data. Others run whole everywhere, unless
`register_sharding` says more.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alpa_strategy.cost.model import differentiated, tensors_in, without_data
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.sharding.notation import RuleMatch, Split

aten = torch.ops.aten

# Element by element though ATen's tags do not say so; and what changes nothing where the shape
# stays the same.
_COPIES = (
    aten.detach,
    aten.clone,
    aten.alias,
    aten._to_copy,
    aten.copy_,
    aten.zeros_like,
    aten.ones_like,
)
_SAME_IF_SHAPE_IS = (aten.view, aten._unsafe_view, aten.expand)


def elementwise_dims(call: OpCall, axis_size: int) -> RuleMatch | None:
    """The ways to cut a Function that works element by element over `axis_size` devices; None: it
    does not.

    A dim is cut where every device's share runs the very ops of the whole with the very constants.
    """
    whole = _recorded(call)
    if whole is None or whole.shape is None or whole.draws:
        return None
    splits = []
    for dim, size in enumerate(whole.shape):
        lengths = set(chunk_sizes(size, axis_size))
        if 0 in lengths:
            continue
        shards = [_recorded(_cut(call, dim, length)) for length in lengths]
        if all(_same_steps(shard_record, whole) for shard_record in shards):
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
    """Whether the Function draws random numbers, or cannot be asked: it does more than PyTorch has
    shapes for.
    """
    recorded = _recorded(call)
    return recorded is None or recorded.draws


def _cut(call: OpCall, dim: int, length: int) -> OpCall:
    def cut(meta: TensorMeta) -> TensorMeta:
        return (
            meta.with_shape((*meta.shape[:dim], length, *meta.shape[dim + 1 :]))
            if meta.shape
            else meta
        )

    return replace(
        call, operands=tuple(map(cut, call.operands)), results=tuple(map(cut, call.results))
    )


@lru_cache(maxsize=4096)
def _recorded(call: OpCall) -> "_Recorder | None":
    """What the call runs, forward and backward; None where tensors without data are not enough for
    it.
    """
    with torch.inference_mode(False), torch.enable_grad():
        with torch.device("meta"):
            operands = without_data(call)
        # All results and operands must have one shape but numbers (operands without dims).
        shapes = {meta.shape for meta in call.operands if meta.shape} | {
            meta.shape for meta in call.results
        }
        recorder = _Recorder(shapes.pop() if len(shapes) == 1 else None)
        try:
            with recorder:
                results = tensors_in(call.call(*operands))
            differentiated(operands, results, recorder)
        except Exception:  # the user's code, of any type: it wants data
            return None
    return recorder


class _Recorder(TorchDispatchMode):
    """Notes every op that autograd calls, with the constants that it was given, and whether one
    draws random numbers.

    `shape` becomes None at the first that is not element by element on it.
    """

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.shape = shape
        self.steps: list[tuple[Any, str]] = []
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        given = tree_leaves((args, kwargs))
        shapes = [tuple(x.shape) for x in tensors_in(given)]
        made = [tuple(x.shape) for x in tensors_in(results)]
        if func.overloadpacket in _SAME_IF_SHAPE_IS and shapes == made:
            return results
        # A number (shape []) beside the tensors is an operand or a constant: no op that makes one
        # passes.
        is_elementwise = torch.Tag.pointwise in func.tags or func.overloadpacket in _COPIES
        if (
            not is_elementwise
            or self.shape not in shapes
            or {*shapes} - {self.shape, ()}
            or {*made} != {self.shape}
        ):
            self.shape = None
        self.steps.append((func, str([x for x in given if not isinstance(x, Tensor)])))
        return results
