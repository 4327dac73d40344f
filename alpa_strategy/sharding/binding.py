"""Arguments of an op call by name, and calls rebuilt with other arguments. Knows schemas, not sharding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta


@cache
def _parameters(target: Any) -> tuple[tuple[str, bool, Any, bool], ...]:
    """(name, is a tensor argument, default, keyword only) of every argument of a target."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(
            # `Tensor?` and `Tensor[]` as well.
            (a.name, "Tensor" in str(a.type), a.default_value if a.has_default_value() else None, a.kwarg_only)
            for a in target._schema.arguments
        )
    return tuple(
        (
            p.name,
            "Tensor" in str(p.annotation),
            None if p.default is inspect.Parameter.empty else p.default,
            p.kind is inspect.Parameter.KEYWORD_ONLY,
        )
        for p in inspect.signature(target).parameters.values()
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=16384)
def bind(call: OpCall) -> Mapping[str, Any]:
    """Argument name -> value (Slots, constants, tuples), defaults filled in, in schema order."""
    bound = {}
    keywords = dict(call.kwargs)
    for position, (name, _, default, keyword_only) in enumerate(_parameters(call.target)):
        if name in keywords:
            bound[name] = keywords[name]
        elif not keyword_only and position < len(call.args):
            bound[name] = call.args[position]
        else:
            bound[name] = _frozen(default)
    return MappingProxyType(bound)  # remembered and shared: read only


def call_on(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[OpCall, tuple[Tensor, ...]]:
    """The OpCall of `target(*args, **kwargs)`, which is run, and its tensor operands (one given twice is two)."""
    operands: list[Tensor] = []

    def freeze(value: Any) -> Any:
        if isinstance(value, Tensor):
            operands.append(value)
            return Slot(len(operands) - 1)
        return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value

    frozen, frozen_kwargs = freeze(tuple(args)), tuple(sorted((name, freeze(value)) for name, value in kwargs.items()))
    result = target(*args, **kwargs)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    metas = [TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in (*operands, *results)]
    n = len(operands)
    call = OpCall(target, frozen, frozen_kwargs, tuple(metas[:n]), tuple(metas[n:]), not isinstance(result, Tensor))
    return call, tuple(operands)


def tensor_arguments(call: OpCall) -> tuple[Any, ...]:
    """Values of the tensor arguments in schema order: a Slot, None, a tuple of those, or a scalar in their place."""
    bound = bind(call)
    return tuple(bound[name] for name, is_tensor, _, _ in _parameters(call.target) if is_tensor)


def flat_tensor_arguments(call: OpCall) -> tuple[Any, ...]:
    """`tensor_arguments` with lists of tensors flattened."""
    flat: list[Any] = []
    for value in tensor_arguments(call):
        flat += value if isinstance(value, tuple) else (value,)
    return tuple(flat)


def slots(call: OpCall) -> tuple[Slot, ...]:
    """The tensor operands in schema order, lists flattened, absent ones left out. A slot used twice is there twice."""
    return tuple(v for v in flat_tensor_arguments(call) if isinstance(v, Slot))


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Non-negative dims from an int, a tuple of ints, or None / () meaning all."""
    if value is None or value == ():
        return tuple(range(rank))
    values = value if isinstance(value, tuple) else (value,)
    return tuple(sorted(v % rank for v in values)) if rank else ()  # ATen takes dim 0 and -1 of a scalar


def rebuild(
    call: OpCall,
    operands: tuple[TensorMeta, ...],
    results: tuple[TensorMeta, ...],
    changes: Mapping[str, Any],
) -> OpCall:
    """The same call on other operands, with the arguments named in `changes` replaced where they were given."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for position, (name, _, _, keyword_only) in enumerate(_parameters(call.target)):
        if name not in changes:
            continue
        if not keyword_only and position < len(args):
            args[position] = changes[name]
        else:
            kwargs[name] = changes[name]
    return OpCall(call.target, tuple(args), tuple(sorted(kwargs.items())), operands, results, call.returns_tuple)
