"""Index notation: how a sharding rule is parsed, and read for one call.

    "[*b, k], [n, k], +[n]? -> [*b, n]"

`register_sharding` explains the notation to users. In addition:

- Arguments that are lists are flattened.
- A result that lacks an index which another result has does not depend on it.
- The length of `*b` is that of the argument of the same name, if there is one
  (`*normalized_shape`). Else it follows from the operands' ranks.
- Sharding `v@name` requires the local implementation `name`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import (
    AxisStrategy,
    InnerCollective,
    OpCall,
    Slot,
    TensorMeta,
    bind,
    flat_tensor_arguments,
)
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement, shard

# (index name, position inside its group; 0 for single indices)
Key = tuple[str, int]


@dataclass(frozen=True)
class Index:
    """One index, or group of indices, of a term."""

    name: str
    # `*b`: stands for any number of dims
    group: bool = False
    # `k!`: its dims must not be sharded
    unsharded: bool = False
    # `h=`: its dims may be sharded into equal chunks alone
    even: bool = False
    # `v@name`: local implementation that is required if it is sharded
    implementation: str | None = None


@dataclass(frozen=True)
class Term:
    """One tensor of a signature."""

    indices: tuple[Index, ...]
    # `[n]?`: the argument may be None
    optional: bool = False
    # `+[n]`: it is added to the result, as a bias is
    added: bool = False


@dataclass(frozen=True)
class Signature:
    """A parsed rule."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]


_TERM = re.compile(r"\s*(\+?)\[([^\]]*)\](\??)\s*(?:,|$)")
_INDEX = re.compile(r"(\*?)([A-Za-z_][A-Za-z_0-9]*)(!?)(=?)(?:@([a-z_]+))?")


def _parse_terms(text: str, rule: str) -> tuple[Term, ...]:
    """Return the terms of one side of a rule.

    Raises:
        ShardingError: the text is not in the notation.
    """
    terms = []
    position = 0
    while position < len(text) and text[position:].strip():
        match = _TERM.match(text, position)
        if match is None:
            raise ShardingError(
                f"cannot read the sharding rule {rule!r} at {text[position:]!r}",
                "see sharding/notation.py",
            )
        added, indices, optional = match.groups()
        terms.append(Term(_parse_indices(indices, rule), bool(optional), bool(added)))
        position = match.end()
    return tuple(terms)


def _parse_indices(text: str, rule: str) -> tuple[Index, ...]:
    """Return the indices of a term, given without its brackets.

    Raises:
        ShardingError: one is not in the notation.
    """
    indices = []
    for part in text.split(","):
        part = part.strip()
        if not part:
            continue
        match = _INDEX.fullmatch(part)
        if match is None:
            raise ShardingError(
                f"{part!r} is no index in the sharding rule {rule!r}",
                "see sharding/notation.py",
            )
        star, name, unsharded, even, implementation = match.groups()
        indices.append(Index(name, bool(star), bool(unsharded), bool(even), implementation))
    return tuple(indices)


@cache
def parse(rule: str) -> Signature:
    """Parse a rule.

    Raises:
        ShardingError: it is not index notation; the message names the part that cannot be read.
    """
    left, arrow, right = rule.partition("->")
    if not arrow:
        raise ShardingError(
            f"the sharding rule {rule!r} has no '->'", "write '[operand], ... -> [result], ...'"
        )
    return Signature(_parse_terms(left, rule), _parse_terms(right, rule))


def line_of(operands: Iterable[Iterable[str]], result: Iterable[str], num_results: int = 1) -> str:
    """Write a rule from lists of indices; all results have the same ones."""
    operand_terms = [f"[{', '.join(term)}]" for term in operands]
    result_terms = [f"[{', '.join(result)}]"] * num_results
    return f"{', '.join(operand_terms)} -> {', '.join(result_terms)}"


def reduced_indices(
    rank: int, reduced: Collection[int], mark: str, keepdim: bool
) -> tuple[list[str], list[str]]:
    """Return the indices of an op that reduces some dims: (of the operand, of the result), such as
    (["x0", "k1!"], ["x0"]).

    Args:
        rank: of the operand.
        reduced: the dims.
        mark: what follows the index of a reduced dim, such as `!` if it must not be sharded.
        keepdim: whether reduced dims stay in the result, with size 1, as `one1!`.
    """
    operand = []
    result = []
    for dim in range(rank):
        if dim not in reduced:
            operand.append(f"x{dim}")
            result.append(f"x{dim}")
            continue
        operand.append(f"k{dim}{mark}")
        if keepdim:
            result.append(f"one{dim}!")
    return operand, result


def _group_lengths(pairs: list[tuple[Term, int]], arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return group of indices -> its length.

    From the argument of the same name if there is one. Else from ranks: the longest, others are
    broadcast to it. Groups whose length does not follow are missing.

    Args:
        pairs: terms with the ranks of their operands.
        arguments: of the call, by name.
    """
    lengths: dict[str, int] = {}
    for term, _ in pairs:
        for index in term.indices:
            argument = arguments.get(index.name)
            if index.group and isinstance(argument, tuple):
                lengths[index.name] = len(argument)

    # Each time, the length of a group follows from terms in which no other group is unknown.
    while True:
        remaining: dict[str, int] = {}
        for term, rank in pairs:
            groups = [index.name for index in term.indices if index.group]
            unknown = {name for name in groups if name not in lengths}
            if len(unknown) == 1:
                num_single = len(term.indices) - len(groups)
                num_known = num_single + sum(lengths.get(name, 0) for name in groups)
                name = unknown.pop()
                remaining[name] = max(remaining.get(name, 0), rank - num_known)
        if not remaining:
            return lengths
        lengths |= remaining


def _keys(term: Term, lengths: Mapping[str, int]) -> list[tuple[Key, Index]]:
    """Return (key, index) of each dim of a term: one for an index, `lengths[name]` for a group
    `*name`, none if that is missing.
    """
    keys: list[tuple[Key, Index]] = []
    for index in term.indices:
        count = lengths.get(index.name, 0) if index.group else 1
        keys += [((index.name, i), index) for i in range(count)]
    return keys


@dataclass
class _TermDims:
    """A term of a rule, and the dims of one call's tensor that its indices stand for."""

    term: Term
    # index -> dim. Dims of size 1 are left out: they are broadcast, nothing of them can be sharded.
    dims: dict[Key, int]


@dataclass
class _ReadRule:
    """A rule as it applies to one call."""

    # operand of the call -> its term; an operand that is used twice is in it twice
    operands: list[tuple[int, _TermDims]]
    results: list[_TermDims]
    # index of an operand -> how every term writes it
    indices: dict[Key, list[Index]]


def read(rule: str, call: OpCall) -> "tuple[Split, ...] | None":
    """Return the splits that `rule` gives for `call`, one for each index that may be sharded; None
    when the call's ranks do not fit it.

    Raises:
        ShardingError: as `parse`.
    """
    matched = _match(parse(rule), call)
    if matched is None:
        return None
    splits = []
    for key, indices in matched.indices.items():
        split = _split_of(key, indices, matched, call)
        if split is not None:
            splits.append(split)
    return tuple(splits)


def _match(signature: Signature, call: OpCall) -> _ReadRule | None:
    """Find the dims that the indices of a rule stand for; None when the ranks do not fit."""
    present = _present_operands(signature, call)
    if present is None or len(signature.results) != len(call.results):
        return None
    ranks = [(term, len(call.operands[operand].shape)) for term, operand in present]
    lengths = _group_lengths(ranks, bind(call))

    matched = _ReadRule([], [], {})
    for term, operand in present:
        keys = _keys(term, lengths)
        shape = call.operands[operand].shape
        num_lacking = len(keys) - len(shape)
        if num_lacking < 0:
            return None
        # Aligned to the right: a tensor may lack leading dims of a group.
        keys = keys[num_lacking:]
        matched.operands.append((operand, _TermDims(term, _dims_of_keys(keys, shape))))
        for key, index in keys:
            matched.indices.setdefault(key, []).append(index)
    for term, meta in zip(signature.results, call.results, strict=True):
        keys = _keys(term, lengths)
        if len(keys) != len(meta.shape):
            return None
        matched.results.append(_TermDims(term, _dims_of_keys(keys, meta.shape)))
        for key, index in keys:
            if key in matched.indices:
                matched.indices[key].append(index)
    return matched


def _present_operands(signature: Signature, call: OpCall) -> list[tuple[Term, int]] | None:
    """Return the terms with the indices of the operands that they describe; None if arguments are
    missing or too many.
    """
    arguments = flat_tensor_arguments(call)
    further = arguments[len(signature.operands) :]
    if any(argument is not None for argument in further):
        return None
    present: list[tuple[Term, int]] = []
    for term, argument in zip(signature.operands, arguments, strict=False):
        if isinstance(argument, Slot):
            present.append((term, argument.index))
        elif argument is not None or not term.optional:
            return None
    return present


def _dims_of_keys(keys: list[tuple[Key, Index]], shape: tuple[int, ...]) -> dict[Key, int]:
    """Return key -> dim of a term in a tensor of `shape`; broadcast dims (size 1) have none."""
    dims = {}
    for dim, (key, _) in enumerate(keys):
        if shape[dim] != 1:
            dims[key] = dim
    return dims


def _split_of(key: Key, indices: list[Index], rule: _ReadRule, call: OpCall) -> "Split | None":
    """Return the split of an op's work along one index; None if it cannot be sharded.

    Args:
        key: of the index.
        indices: all places at which the rule has it.
    """
    is_sharded_anywhere = any(key in operand.dims for _, operand in rule.operands)
    if any(index.unsharded for index in indices) or not is_sharded_anywhere:
        return None
    is_contracted = not any(key in result.dims for result in rule.results)
    implementation = next((i.implementation for i in indices if i.implementation), None)
    for _, operand in rule.operands:
        # Of results that are summed, only the first device may add the bias.
        if is_contracted and operand.term.added and key not in operand.dims:
            implementation = "bias_on_first"
    lacking = SUM if is_contracted else WHOLE
    return split_from_dims(
        call,
        [(index, operand.dims.get(key)) for index, operand in rule.operands],
        [result.dims.get(key, lacking) for result in rule.results],
        even=any(index.even for index in indices),
        implementation=implementation,
    )


# --- Splits of an op's work over one mesh axis, before it is known which tensors need gradients.
#
# Every family of rules (index notation, views, pointwise, reductions) returns a `RuleMatch`.
# `to_strategies` is the only place that turns it into dual placements, checks sizes and removes
# duplicates.


# Marks of a result in `Split.results`: every device has a partial value of the sum,
SUM = "P"
# or every device has the full result.
WHOLE = "R"


@dataclass(frozen=True)
class Split:
    """One way to divide an op's work over the devices of an axis."""

    # per operand the dim that is sharded; None: every device needs the full operand (`R*` if it
    # gets a gradient)
    operands: tuple[int | None, ...]
    # per result the dim that is sharded, or `SUM`, or `WHOLE`
    results: tuple[int | str, ...]
    # whether the sharded dims must be divisible by the axis size (grouped dims, heads that share
    # keys, convolution groups)
    even: bool = False
    # as in AxisStrategy
    implementation: str | None = None
    # as in AxisStrategy
    collectives: tuple[InnerCollective, ...] = ()


@dataclass(frozen=True)
class RuleMatch:
    """The result of a rule for one call."""

    # the ways to divide the work; None, as `split_from_dims` returns it, is ignored
    splits: Sequence[Split | None] = ()
    # sets of operands in which the op is jointly linear: when all operands of a set are `P`, so is
    # the result
    linear: tuple[frozenset[int], ...] = ()
    # whether `R*` on all operands -> `R*` is offered: the work is repeated, gradients stay partial
    # values. That is right for every op (backward is linear in the gradient). It is offered only if
    # it can save a collective: for ops that are often applied to parameters alone (casts, views,
    # tables, statistics).
    carries: bool = False
    # result of `rule_origin`
    origin: str = "notation"
    # strategies that are not splits (of tensors that are made from nothing)
    extra: tuple[AxisStrategy, ...] = ()


def split_from_dims(
    call: OpCall,
    dims: Iterable[tuple[int, int | None]],
    results: Sequence[int | str],
    even: bool = False,
    implementation: str | None = None,
    collectives: tuple[InnerCollective, ...] = (),
) -> Split | None:
    """Return a Split of the operands' dims.

    None when an operand that is used twice would have to be sharded in two ways, as in x * x.t().

    Args:
        dims: (operand index, dim) pairs; operands without a pair are not sharded.
        results: as `Split.results`.
        even, implementation, collectives: the fields of `Split`.
    """
    by_operand: dict[int, int | None] = {}
    for operand, dim in dims:
        if by_operand.setdefault(operand, dim) != dim:
            return None
    operand_dims = tuple(by_operand.get(i) for i in range(len(call.operands)))
    return Split(operand_dims, tuple(results), even, implementation, collectives)


def _fits(call: OpCall, split: Split, axis_size: int) -> bool:
    """Whether every sharded dim has an element for each device.

    All dims must have the same size, or all divide evenly if the split is even.
    """
    sizes = []
    for meta, dim in zip(call.operands, split.operands, strict=True):
        if dim is not None:
            sizes.append(meta.shape[dim])
    for meta, mark in zip(call.results, split.results, strict=True):
        if isinstance(mark, int):
            sizes.append(meta.shape[mark])
    if split.even:
        return all(size % axis_size == 0 for size in sizes)
    return len(set(sizes)) == 1 and sizes[0] >= axis_size


def _keeps_precision(sources: Iterable[TensorMeta], targets: Iterable[TensorMeta]) -> bool:
    """Whether partial values of `sources` are neither rounded nor truncated in `targets`."""
    source_steps = [_step_around_one(meta.dtype) for meta in sources]
    target_steps = [_step_around_one(meta.dtype) for meta in targets]
    known_steps = [step for step in source_steps if step is not None]
    if not known_steps:
        return True
    finest_source = min(known_steps)
    if None in target_steps:
        return False
    return max(filter(None, target_steps), default=0.0) <= finest_source


def _step_around_one(dtype: torch.dtype) -> float | None:
    """Distance between neighbouring numbers around 1; None for integers and booleans."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).eps
    return None


def to_strategies(call: OpCall, match: RuleMatch, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return all strategies of `match` on an axis of `axis_size` devices, the repeated one first.

    No duplicates. Ways to divide the work that do not fit the sizes of dims (`_fits`) are left out.
    """
    strategies = [repeated_strategy(call)]
    operand_grads = _operand_grads(call)
    for split in match.splits:
        if split is None or not _fits(call, split, axis_size):
            continue
        inputs = tuple(
            _placement(dim, has_grad)
            for dim, has_grad in zip(split.operands, operand_grads, strict=True)
        )
        outputs = tuple(map(_result_placement, split.results))
        strategies.append(AxisStrategy(inputs, outputs, split.implementation, split.collectives))
    strategies += _carried(call, match)
    strategies += _linear(call, match)
    strategies += [strategy for strategy in match.extra if _has_elements(call, strategy, axis_size)]
    return tuple(dict.fromkeys(strategies))


def _operand_grads(call: OpCall) -> list[bool]:
    """Whether a gradient flows to each operand in this call: a parameter in argmax gets none."""
    if not any(meta.requires_grad for meta in call.results):
        return [False] * len(call.operands)
    return [meta.requires_grad for meta in call.operands]


def _placement(dim: int | None, has_grad: bool) -> DualPlacement:
    """Return the placement sharded along `dim`, unsharded if it is None."""
    if dim is not None:
        return shard(dim)
    return _unsharded(has_grad)


def _unsharded(has_grad: bool) -> DualPlacement:
    """Return replicated with gradients that are partial values, or invariant for values without."""
    return REPLICATE if has_grad else INVARIANT


def _result_placement(mark: int | str) -> DualPlacement:
    """Return the placement that a result's mark means: a dim, or a sum."""
    if isinstance(mark, int):
        return shard(mark)
    return PARTIAL if mark == SUM else INVARIANT


def _carried(call: OpCall, match: RuleMatch) -> Iterator[AxisStrategy]:
    """Yield the strategy that carries partial values from operands to results, if the rule allows
    it, an operand has a gradient, and gradients keep their precision.
    """
    operand_grads = _operand_grads(call)
    if not match.carries or not any(operand_grads):
        return
    results_with_grad = [meta for meta in call.results if meta.requires_grad]
    operands_with_grad = [meta for meta in call.operands if meta.requires_grad]
    if _keeps_precision(results_with_grad, operands_with_grad):
        inputs = tuple(map(_unsharded, operand_grads))
        outputs = tuple(_unsharded(meta.requires_grad) for meta in call.results)
        yield AxisStrategy(inputs, outputs)


def _linear(call: OpCall, match: RuleMatch) -> Iterator[AxisStrategy]:
    """Yield a strategy on partial values for each set of operands in `match.linear`; none if the op
    would lose precision by that. Sets with booleans are skipped.
    """
    if not match.linear or not _keeps_precision(call.operands, call.results):
        return
    operand_grads = _operand_grads(call)
    for chosen in match.linear:
        # Booleans have no sum.
        if any(call.operands[i].dtype == torch.bool for i in chosen):
            continue
        inputs = [_unsharded(has_grad) for has_grad in operand_grads]
        for i in chosen:
            inputs[i] = PARTIAL
        yield AxisStrategy(tuple(inputs), (PARTIAL,) * len(call.results))


def _has_elements(call: OpCall, strategy: AxisStrategy, axis_size: int) -> bool:
    """Whether every dim that the strategy shards has an element for each device."""
    duals = (*strategy.inputs, *strategy.outputs)
    metas = (*call.operands, *call.results)
    for dual, meta in zip(duals, metas, strict=True):
        if dual.shard_dim is not None and meta.shape[dual.shard_dim] < axis_size:
            return False
    return True


def repeated_strategy(call: OpCall) -> AxisStrategy:
    """Return the strategy that is always valid: every device of the axis does the same work."""
    return AxisStrategy((INVARIANT,) * len(call.operands), (INVARIANT,) * len(call.results))
