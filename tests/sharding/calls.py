"""OpCalls of calls on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta


def call_and_operands(target: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, list[torch.Tensor]]:
    """The OpCall of `target(*args, **kwargs)`, and the tensors among its arguments."""
    operands: list[torch.Tensor] = []

    def freeze(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            operands.append(arg)
            return Slot(len(operands) - 1)
        return tuple(map(freeze, arg)) if isinstance(arg, list | tuple) else arg

    frozen, frozen_kwargs = freeze(args), tuple(sorted((k, freeze(v)) for k, v in kwargs.items()))
    results = target(*args, **kwargs)
    outs = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    metas = [TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in (*operands, *outs)]
    n = len(operands)
    many = not isinstance(results, torch.Tensor)
    return OpCall(target, frozen, frozen_kwargs, tuple(metas[:n]), tuple(metas[n:]), many), operands


def make_call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    """The OpCall of a call on tensors."""
    return call_and_operands(target, *args, **kwargs)[0]
