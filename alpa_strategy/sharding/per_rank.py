"""The sharding rule of an op that runs once for each rank's samples (`PerRank`).

The ranks may be divided: each device runs the op for some of them. And each rank's op may be
divided as its own rule says; all its dims are one further.
"""

from dataclasses import replace

from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.per_rank import PerRank
from alpa_strategy.ir.placement import INVARIANT, DualPlacement, shard
from alpa_strategy.sharding.notation import RuleMatch, Split


def per_rank_match(target: PerRank, inner: RuleMatch | None) -> RuleMatch:
    """Return the ways to divide an op that runs for each rank.

    Args:
        inner: result of the rule of `target.inner`; None if it has no rule: only the ranks are
            divided then.
    """
    num_results = len(target.inner.results)
    operand_dims: list[int | None] = []
    for is_mapped in target.mapped:
        operand_dims.append(0 if is_mapped else None)
    over_ranks = Split(tuple(operand_dims), (0,) * num_results, even=True)
    if inner is None:
        return RuleMatch((over_ranks,))

    splits = [over_ranks]
    for split in inner.splits:
        if split is not None:
            splits.append(_shifted_split(target, split))
    extra = tuple(_shifted_strategy(target, strategy) for strategy in inner.extra)
    return replace(inner, splits=tuple(splits), extra=extra)


def _shifted_split(target: PerRank, split: Split) -> Split:
    """Return `split` with dims counted after the ranks' dim of mapped operands and of results."""
    operands = []
    for dim, is_mapped in zip(split.operands, target.mapped, strict=True):
        if dim is not None and is_mapped:
            dim += 1
        operands.append(dim)
    results: list[int | str] = []
    for mark in split.results:
        results.append(mark + 1 if isinstance(mark, int) else mark)
    return replace(split, operands=tuple(operands), results=tuple(results))


def _shifted_strategy(target: PerRank, strategy: AxisStrategy) -> AxisStrategy:
    """Return the strategy with dims counted after the ranks' dim."""
    inputs = []
    for dual, is_mapped in zip(strategy.inputs, target.mapped, strict=True):
        inputs.append(_shifted(dual, 1) if is_mapped else dual)
    outputs = tuple(_shifted(dual, 1) for dual in strategy.outputs)
    return replace(strategy, inputs=tuple(inputs), outputs=outputs)


def inner_strategy(target: PerRank, strategy: AxisStrategy) -> AxisStrategy:
    """Return the strategy of `target.inner` on an axis on which the call has `strategy`.

    Along an axis that divides the ranks, each rank's op is unsharded.
    """
    inputs = []
    for dual, is_mapped in zip(strategy.inputs, target.mapped, strict=True):
        inputs.append(_shifted(dual, -1) if is_mapped else dual)
    outputs = tuple(_shifted(dual, -1) for dual in strategy.outputs)
    return replace(strategy, inputs=tuple(inputs), outputs=outputs)


def _shifted(dual: DualPlacement, by: int) -> DualPlacement:
    """Return the placement of a dim that is `by` further; unsharded for the dim of ranks."""
    if dual.shard_dim is None:
        return dual
    dim = dual.shard_dim + by
    return shard(dim) if dim >= 0 else INVARIANT
