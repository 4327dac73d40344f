"""Cases of sharding rules: a call with data, and the functions that make such data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.op import OpCall, call_on

aten = torch.ops.aten

# add(name, target, *args, expect=..., **kwargs): adds the call `target(*args, **kwargs)` as a case.
Add = Callable[..., None]


def call_of(target: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, tuple[Tensor, ...]]:
    """The OpCall of `target(*args, **kwargs)` and its tensor operands (a tensor given twice is two
    operands).
    """
    return call_on(target, args, kwargs)


@dataclass(frozen=True)
class Case:
    """A call with its data. `sharded`: some of the strategies (on 2 devices) that the call must
    have.
    """

    name: str
    call: OpCall
    operands: tuple[Tensor, ...]
    sharded: tuple[str, ...]


_GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    """Floating data in (-1, 1) that requires a gradient."""
    return (torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 2 - 1).requires_grad_()


def u(*shape: int) -> Tensor:
    """Floating data in (0.05, 0.95) that requires a gradient."""
    return (
        torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 0.9 + 0.05
    ).requires_grad_()


def i(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=_GENERATOR)


def m(*shape: int) -> Tensor:
    """A mask with some True in every row."""
    mask = torch.rand(shape, generator=_GENERATOR) < 0.6
    mask[..., 0] = True
    return mask


def c(*shape: int) -> Tensor:
    """Floating data without gradient."""
    return f(*shape).detach()
