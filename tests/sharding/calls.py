"""OpCalls of calls on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from alpa_strategy.ir.op import OpCall, call_on


def call_and_operands(target: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, list[torch.Tensor]]:
    """The OpCall of `target(*args, **kwargs)`, and the tensors among its arguments (one given twice
    is two).
    """
    call, operands = call_on(target, args, kwargs)
    return call, list(operands)


def make_call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    """The OpCall of a call on tensors."""
    return call_on(target, args, kwargs)[0]
