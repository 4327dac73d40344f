"""How one op splits over micro-batches: the sharding rules on one more axis, in time instead of over devices.

On that axis nothing is ever resharded, and `R` and `R*` are one state: gradients add up over the micro-batches anyway,
so whatever is whole has a gradient that is a summand. Nothing here knows of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from alpa_strategy.capture import ops
from alpa_strategy.sharding import axis_strategies, localize
from alpa_strategy.sharding.binding import bind, rebuild, slots
from alpa_strategy.sharding.layout import BROADCAST, PARTIAL, REPLICATE, DualPlacement, shard
from alpa_strategy.sharding.op import AxisStrategy, OpCall, Slot

aten = torch.ops.aten

_ADDING_OPS = (aten.addmm.default, aten.addmv.default, aten.baddbmm.default)  # the first operand is the one added
_CASTS = (aten.to.dtype, aten._to_copy.default)
_LINEAR_IN = {aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,)}
_ADDING_NUMBERS = (
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
)
_SIZED_RANDOM = "aten::randint"


@dataclass(frozen=True)
class TimeStrategy:
    """One way to run an op on micro-batches.

    Attributes:
        inputs, outputs: state per operand and result: `S<d>` (the micro-batch's part of the dim), `R` (whole, the same
            in all micro-batches), `P` (a summand).
        mean: the results are means over the micro-batch's part: they count for 1/M of the whole's.
        added: the operand that is added to a sum over micro-batches, so that each adds 1/M of it.
        added_number: position of the argument, a number, that is added to a sum over micro-batches: likewise.
        sequential: results that are running statistics, carried from one micro-batch to the next.
    """

    inputs: tuple[DualPlacement, ...]
    outputs: tuple[DualPlacement, ...]
    mean: bool = False
    added: int | None = None
    added_number: int | None = None
    sequential: tuple[int, ...] = ()


@lru_cache(maxsize=16384)
def time_strategies(call: OpCall, num_microbatches: int) -> tuple[TimeStrategy, ...]:
    """Every exact way to run `call` on micro-batches, the repeated one (everything whole) first."""
    if call.target is ops.batch_norm_train:
        return tuple(_batch_norm(call, num_microbatches))
    found = (*_from_rules(call, num_microbatches), *_time_only(call, num_microbatches))
    return tuple(dict.fromkeys(s for s in found if _cuts_evenly(call, s, num_microbatches)))


def _state(dual: DualPlacement) -> DualPlacement:
    return REPLICATE if dual == BROADCAST else dual


def _cuts_evenly(call: OpCall, strategy: TimeStrategy, num_microbatches: int) -> bool:
    pairs = zip((*strategy.inputs, *strategy.outputs), (*call.operands, *call.results), strict=True)
    return all(dual.shard_dim is None or meta.shape[dual.shard_dim] % num_microbatches == 0 for dual, meta in pairs)


def _from_rules(call: OpCall, num_microbatches: int) -> Iterator[TimeStrategy]:
    for strategy in axis_strategies(call, num_microbatches):
        if strategy.implementation not in (None, "fraction", "bias_on_first") or _needs_whole_gradient(call, strategy):
            continue
        inputs, outputs = tuple(map(_state, strategy.inputs)), tuple(map(_state, strategy.outputs))
        added = _added_operand(call) if strategy.implementation == "bias_on_first" else None
        yield TimeStrategy(inputs, outputs, strategy.implementation == "fraction", added)


def _needs_whole_gradient(call: OpCall, strategy: AxisStrategy) -> bool:
    """A whole result of divided operands whose gradient must be complete in every micro-batch: here it is a summand."""
    divided = any(
        meta.requires_grad and _state(dual) != REPLICATE
        for meta, dual in zip(call.operands, strategy.inputs, strict=True)
    )
    whole = any(
        meta.requires_grad and dual == REPLICATE for meta, dual in zip(call.results, strategy.outputs, strict=True)
    )
    return divided and whole


def _added_operand(call: OpCall) -> int | None:
    bound = bind(call)
    bias = next(iter(bound.values())) if call.target in _ADDING_OPS else bound.get("bias")
    return bias.index if isinstance(bias, Slot) else None


def _batch_norm(call: OpCall, num_microbatches: int) -> Iterator[TimeStrategy]:
    """Statistics are those of a micro-batch, as in plain gradient accumulation: the one documented exception."""
    yield TimeStrategy((REPLICATE,) * len(call.operands), (REPLICATE,) * len(call.results))
    x = bind(call)["x"].index
    if call.operands[x].shape[0] % num_microbatches == 0:
        statistics = tuple(range(1, len(call.results)))
        inputs = tuple(shard(0) if i == x else REPLICATE for i in range(len(call.operands)))
        yield TimeStrategy(inputs, (shard(0), *(REPLICATE for _ in statistics)), sequential=statistics)


def _time_only(call: OpCall, num_microbatches: int) -> Iterator[TimeStrategy]:
    """What a device mesh does not offer because it would not pay, or would round: here it costs nothing more."""
    whole = (REPLICATE,) * len(call.operands)
    if call.target in _CASTS and call.results[0].dtype.is_floating_point:
        yield TimeStrategy((PARTIAL,), (PARTIAL,))
    for position in _LINEAR_IN.get(call.target, ()):
        factor = call.args[position]
        if isinstance(factor, Slot) and sum(a == factor for a in call.args) == 1 and not dict(call.kwargs):
            inputs = tuple(PARTIAL if i == factor.index else REPLICATE for i in range(len(call.operands)))
            yield TimeStrategy(inputs, (PARTIAL,))
    if call.target in _ADDING_NUMBERS and len(call.operands) == 1 and call.results[0].dtype.is_floating_point:
        if isinstance(call.args[0], Slot):
            yield TimeStrategy((PARTIAL,), (PARTIAL,), added_number=1)
    if _is_sized_random(call):
        for dim in range(len(call.results[0].shape)):
            yield TimeStrategy(whole, (shard(dim),))
    if call.target is aten.repeat.default:
        for dim in _repeated_dims(call):
            yield TimeStrategy(whole, (shard(dim),))


def _is_sized_random(call: OpCall) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target._schema.name == _SIZED_RANDOM


def _repeated_dims(call: OpCall) -> list[int]:
    """Result dims that repeat a single element (or slice): every part of them is the same."""
    source, target = call.operands[slots(call)[0].index].shape, call.results[0].shape
    offset = len(target) - len(source)
    return [d for d in range(len(target)) if d < offset or source[d - offset] == 1]


def local_call(call: OpCall, strategy: TimeStrategy, num_microbatches: int) -> OpCall:
    """The call on one micro-batch: shapes divided, arguments that hold sizes rewritten."""
    local = localize(call, (AxisStrategy(strategy.inputs, strategy.outputs),), (num_microbatches,), (0,)).call
    results = local.results
    if strategy.added_number is not None:
        args = list(local.args)
        args[strategy.added_number] = args[strategy.added_number] / num_microbatches
        return OpCall(local.target, tuple(args), local.kwargs, local.operands, results, local.returns_tuple)
    if local == call:
        return call
    if _is_sized_random(call):
        return rebuild(call, local.operands, results, {"size": results[0].shape})
    if call.target is aten.repeat.default:
        source, target = local.operands[0].shape, results[0].shape
        offset = len(target) - len(source)
        repeats = tuple(size // (source[d - offset] if d >= offset else 1) for d, size in enumerate(target))
        return rebuild(call, local.operands, results, {"repeats": repeats})
    return local
