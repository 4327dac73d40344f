"""Split: one index of an op's work divided over one mesh axis, before it is known which tensors need gradients.

Every family of rules (index notation, views, pointwise, reductions) ends in `Found`; `to_strategies` is the one place
that turns it into dual placements, checks sizes and removes duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from alpa_strategy.ir.op import AxisStrategy, InnerCollective, OpCall, TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement, shard

SUM = "P"  # result marker: every device holds a term of the sum
WHOLE = "R"  # result marker: every device ends up with the whole result


@dataclass(frozen=True)
class Split:
    """One way to divide an op's work over the devices of an axis.

    Attributes:
        operands: per operand the dim that is cut; None: every device needs all of it (`R*` if it gets a gradient).
        results: per result the dim that is cut, or `SUM`, or `WHOLE`.
        even: the cut dims must be divisible by the axis size (grouped dims, heads that share keys, conv groups).
        implementation, collectives: as in AxisStrategy.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | str, ...]
    even: bool = False
    implementation: str | None = None
    collectives: tuple[InnerCollective, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a rule says about one call.

    Attributes:
        splits: the ways to divide the work; None (see `split_from_dims`) is none.
        linear: sets of operands in which the op is jointly linear: all of a set may be `P`, the result is then `P`.
        carries: offer `R*` on all operands -> `R*`: the work is repeated, the gradient stays partial. Right for every
            op (backward is linear in the gradient); offered only where it can save a collective: for what is often
            applied to parameters before they meet the data (casts, views, tables, statistics).
        origin: `rule_origin`'s answer.
        extra: strategies that are no splits (of tensors made from nothing).
    """

    splits: Sequence[Split | None] = ()
    linear: tuple[frozenset[int], ...] = ()
    carries: bool = False
    origin: str = "notation"
    extra: tuple[AxisStrategy, ...] = ()


def split_from_dims(
    call: OpCall, dims: Iterable[tuple[int, int | None]], results: Sequence[int | str], **rest: object
) -> Split | None:
    """A Split from (operand index, dim) pairs; None when an operand used twice would have to be cut in two ways."""
    chosen: dict[int, int | None] = {}
    for operand, dim in dims:
        if chosen.setdefault(operand, dim) != dim:  # x * x.t()
            return None
    return Split(tuple(chosen.get(i) for i in range(len(call.operands))), tuple(results), **rest)  # type: ignore[arg-type]


def _fits(call: OpCall, split: Split, axis_size: int) -> bool:
    """Every cut dim has an element for each device; uneven cuts only where all cut dims are equally long."""
    sizes = [m.shape[d] for m, d in zip(call.operands, split.operands, strict=True) if d is not None]
    sizes += [m.shape[d] for m, d in zip(call.results, split.results, strict=True) if isinstance(d, int)]
    if split.even:
        return all(size % axis_size == 0 for size in sizes)
    return len(set(sizes)) == 1 and sizes[0] >= axis_size


def _keeps(sources: Iterable[TensorMeta], targets: Iterable[TensorMeta]) -> bool:
    """False when summands would be rounded to a narrower type on the way, or cut to integers."""
    # Of a dtype, the distance of its numbers around 1; of whole numbers and booleans none.
    before, after = (
        [torch.finfo(m.dtype).eps if m.dtype.is_floating_point or m.dtype.is_complex else None for m in metas]
        for metas in (sources, targets)
    )
    return all(b is not None and b <= a for a in before if a is not None for b in after)


def to_strategies(call: OpCall, found: Found, axis_size: int) -> tuple[AxisStrategy, ...]:
    """All strategies of `found` on an axis of `axis_size` devices, the repeated one first."""
    # Whether a gradient flows through each in this call: a parameter in argmax gets none.
    result_grads = [meta.requires_grad for meta in call.results]
    operand_grads = [any(result_grads) and meta.requires_grad for meta in call.operands]
    strategies = [repeated(call)]

    def operand(index: int, dim: int | None) -> DualPlacement:
        if dim is not None:
            return shard(dim)
        return REPLICATE if operand_grads[index] else INVARIANT

    def result(mark: int | str) -> DualPlacement:
        if isinstance(mark, int):
            return shard(mark)
        return PARTIAL if mark == SUM else INVARIANT

    for split in found.splits:
        if split is None or not _fits(call, split, axis_size):
            continue
        strategies.append(
            AxisStrategy(
                tuple(operand(i, d) for i, d in enumerate(split.operands)),
                tuple(result(mark) for mark in split.results),
                split.implementation,
                split.collectives,
            )
        )
    with_grads = [[meta for meta in metas if meta.requires_grad] for metas in (call.results, call.operands)]
    if found.carries and any(operand_grads) and _keeps(*with_grads):  # partial gradients
        strategies.append(
            AxisStrategy(
                tuple(REPLICATE if g else INVARIANT for g in operand_grads),
                tuple(REPLICATE if g else INVARIANT for g in result_grads),
            )
        )
    if found.linear and _keeps(call.operands, call.results):
        for chosen in found.linear:
            if any(call.operands[i].dtype == torch.bool for i in chosen):
                continue  # booleans have no sum
            inputs = tuple(PARTIAL if i in chosen else operand(i, None) for i in range(len(call.operands)))
            strategies.append(AxisStrategy(inputs, (PARTIAL,) * len(call.results)))
    for strategy in found.extra:  # every sharded dim has an element for each device
        pairs = zip((*strategy.inputs, *strategy.outputs), (*call.operands, *call.results), strict=True)
        if all(dual.shard_dim is None or meta.shape[dual.shard_dim] >= axis_size for dual, meta in pairs):
            strategies.append(strategy)
    return tuple(dict.fromkeys(strategies))


def repeated(call: OpCall) -> AxisStrategy:
    """The strategy that is always valid: every device of the axis does the same work."""
    return AxisStrategy((INVARIANT,) * len(call.operands), (INVARIANT,) * len(call.results))
