"""OpCalls from real tensors, for the tests of costs: the op is run once to learn its results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta


def tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor to build a call from; `grad` counts for floats only."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.rand(shape, dtype=dtype).requires_grad_(grad)


def meta_of(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(value.shape), value.dtype, value.requires_grad)


def call_of(target: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, list[torch.Tensor]]:
    """The call `target(*args, **kwargs)` and its tensor operands in slot order."""
    operands: list[torch.Tensor] = []

    def freeze(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            operands.append(arg)
            return Slot(len(operands) - 1)
        if isinstance(arg, list | tuple):
            return tuple(freeze(item) for item in arg)
        return arg

    frozen = freeze(args)
    frozen_kwargs = tuple(sorted((name, freeze(value)) for name, value in kwargs.items()))
    out = target(*args, **kwargs)
    results = tuple(meta_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
    metas = tuple(meta_of(operand) for operand in operands)
    return OpCall(
        target, frozen, frozen_kwargs, metas, results, not isinstance(out, torch.Tensor)
    ), operands


def call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    return call_of(target, *args, **kwargs)[0]
