"""Index notation, how a rule is read for one call. What it says is explained to users by
`register_sharding`.

    "[*b, k], [n, k], +[n]? -> [*b, n]"

Beyond that: arguments that are lists are flattened; a result that lacks an index which another
result has does not depend on it; the length of `*b` is that of the argument of the same name, if
there is one (`*normalized_shape`), else found from the operands' ranks; cutting `v@name` needs the
local implementation `name`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
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

Key = tuple[str, int]  # index name, position inside its group (0 for single indices)


@dataclass(frozen=True)
class Index:
    """One index (or group of indices) of a term."""

    name: str
    group: bool = False
    whole: bool = False
    even: bool = False
    implementation: str | None = None


@dataclass(frozen=True)
class Term:
    """One tensor of a signature."""

    indices: tuple[Index, ...]
    optional: bool = False
    added: bool = False


@dataclass(frozen=True)
class Signature:
    """A parsed rule."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]


_TERM = re.compile(r"\s*(\+?)\[([^\]]*)\](\??)\s*(?:,|$)")
_INDEX = re.compile(r"(\*?)([A-Za-z_][A-Za-z_0-9]*)(!?)(=?)(?:@([a-z_]+))?")


def _parse_terms(text: str, rule: str) -> tuple[Term, ...]:
    found, position = [], 0
    while position < len(text) and text[position:].strip():
        match = _TERM.match(text, position)
        if match is None:
            raise ShardingError(
                f"cannot read the sharding rule {rule!r} at {text[position:]!r}",
                "see sharding/notation.py",
            )
        indices = []
        for part in filter(None, (p.strip() for p in match[2].split(","))):
            index = _INDEX.fullmatch(part)
            if index is None:
                raise ShardingError(
                    f"{part!r} is no index in the sharding rule {rule!r}",
                    "see sharding/notation.py",
                )
            star, name, whole, even, implementation = index.groups()
            indices.append(Index(name, bool(star), bool(whole), bool(even), implementation))
        found.append(Term(tuple(indices), bool(match[3]), bool(match[1])))
        position = match.end()
    return tuple(found)


@cache
def parse(rule: str) -> Signature:
    """Read a rule; ShardingError says where it cannot be read."""
    left, arrow, right = rule.partition("->")
    if not arrow:
        raise ShardingError(
            f"the sharding rule {rule!r} has no '->'", "write '[operand], ... -> [result], ...'"
        )
    return Signature(_parse_terms(left, rule), _parse_terms(right, rule))


def line_of(operands: Iterable[Iterable[str]], result: Iterable[str], num_results: int = 1) -> str:
    """A rule from lists of indices; all results alike."""
    result_term = f"[{', '.join(result)}]"
    return (
        ", ".join(f"[{', '.join(term)}]" for term in operands)
        + " -> "
        + ", ".join([result_term] * num_results)
    )


def _group_lengths(pairs: list[tuple[Term, int]], arguments: Mapping[str, Any]) -> dict[str, int]:
    """Length of every group, from arguments of the same name, else from ranks (the longest, others
    broadcast to it).
    """
    lengths: dict[str, int] = {}
    for term, _ in pairs:
        for index in term.indices:
            if index.group and isinstance(arguments.get(index.name), tuple):
                lengths[index.name] = len(arguments[index.name])
    while True:  # each round, terms with one unknown group tell its length
        found: dict[str, int] = {}
        for term, rank in pairs:
            groups = [index.name for index in term.indices if index.group]
            unknown = {name for name in groups if name not in lengths}
            if len(unknown) == 1:
                num_single = len(term.indices) - len(groups)
                num_known = num_single + sum(lengths.get(name, 0) for name in groups)
                name = unknown.pop()
                found[name] = max(found.get(name, 0), rank - num_known)
        if not found:
            return lengths
        lengths |= found


def _keys(term: Term, lengths: Mapping[str, int]) -> list[tuple[Key, Index]]:
    keys: list[tuple[Key, Index]] = []
    for index in term.indices:
        count = lengths.get(index.name, 0) if index.group else 1
        keys += [((index.name, i), index) for i in range(count)]
    return keys


def read(rule: str, call: OpCall) -> "tuple[Split, ...] | None":
    """The splits that `rule` gives for `call`; None when the call's ranks do not fit the rule."""
    signature = parse(rule)
    arguments = flat_tensor_arguments(call)
    if any(a is not None for a in arguments[len(signature.operands) :]):
        return None
    present: list[tuple[Term, int]] = []
    for term, argument in zip(signature.operands, arguments, strict=False):
        if isinstance(argument, Slot):
            present.append((term, argument.index))
        elif argument is not None or not term.optional:
            return None
    if len(signature.results) != len(call.results):
        return None
    lengths = _group_lengths([(t, len(call.operands[i].shape)) for t, i in present], bind(call))

    # Which dim of which tensor has each index; dims of size 1 are broadcast, nothing of them can be
    # cut.
    order: dict[Key, list[Index]] = {}
    operand_dims: list[tuple[int, Term, dict[Key, int]]] = []
    for term, operand in present:
        keys, shape = _keys(term, lengths), call.operands[operand].shape
        if len(shape) > len(keys):
            return None
        keys = keys[
            len(keys) - len(shape) :
        ]  # aligned to the right: a tensor may lack leading dims of a group
        operand_dims.append(
            (operand, term, {key: dim for dim, (key, _) in enumerate(keys) if shape[dim] != 1})
        )
        for key, index in keys:
            order.setdefault(key, []).append(index)
    result_dims: list[dict[Key, int]] = []
    for term, meta in zip(signature.results, call.results, strict=True):
        keys = _keys(term, lengths)
        if len(keys) != len(meta.shape):
            return None
        result_dims.append({key: dim for dim, (key, _) in enumerate(keys) if meta.shape[dim] != 1})
        for key, index in keys:
            if key in order:
                order[key].append(index)

    # One split per index that may be cut.
    splits = []
    for key, indices in order.items():
        if any(i.whole for i in indices) or not any(key in dims for _, _, dims in operand_dims):
            continue
        contracted = not any(key in dims for dims in result_dims)
        implementation = next((i.implementation for i in indices if i.implementation), None)
        if contracted and any(term.added and key not in dims for _, term, dims in operand_dims):
            implementation = "bias_on_first"
        split = split_from_dims(
            call,
            ((operand, dims.get(key)) for operand, _, dims in operand_dims),
            [dims.get(key, SUM if contracted else WHOLE) for dims in result_dims],
            even=any(i.even for i in indices),
            implementation=implementation,
        )
        if split is not None:
            splits.append(split)
    return tuple(splits)


# --- Split: one index of an op's work divided over one mesh axis, before it is known which tensors
# need gradients.
#
# Every family of rules (index notation, views, pointwise, reductions) ends in `RuleMatch`;
# `to_strategies` is the one place that turns it into dual placements, checks sizes and removes
# duplicates.


SUM = "P"  # result marker: every device holds a term of the sum
WHOLE = "R"  # result marker: every device ends up with the whole result


@dataclass(frozen=True)
class Split:
    """One way to divide an op's work over the devices of an axis."""

    # per operand the dim that is cut; None: every device needs all of it (`R*` if it gets a
    # gradient)
    operands: tuple[int | None, ...]
    results: tuple[int | str, ...]  # per result the dim that is cut, or `SUM`, or `WHOLE`
    # the cut dims must be divisible by the axis size (grouped dims, heads that share keys, conv
    # groups)
    even: bool = False
    # implementation, collectives: as in AxisStrategy
    implementation: str | None = None
    collectives: tuple[InnerCollective, ...] = ()


@dataclass(frozen=True)
class RuleMatch:
    """What a rule says about one call."""

    splits: Sequence[
        Split | None
    ] = ()  # the ways to divide the work; None (see `split_from_dims`) is none
    # sets of operands in which the op is jointly linear: all of a set may be `P`, the result is
    # then `P`
    linear: tuple[frozenset[int], ...] = ()
    # offer `R*` on all operands -> `R*`: the work is repeated, the gradient stays partial. Right
    # for every op (backward is linear in the gradient); offered only where it can save a
    # collective: for what is often applied to parameters before they meet the data (casts, views,
    # tables, statistics).
    carries: bool = False
    origin: str = "notation"  # `rule_origin`'s answer
    extra: tuple[
        AxisStrategy, ...
    ] = ()  # strategies that are no splits (of tensors made from nothing)


def split_from_dims(
    call: OpCall,
    dims: Iterable[tuple[int, int | None]],
    results: Sequence[int | str],
    **rest: object,
) -> Split | None:
    """A Split from (operand index, dim) pairs; None when an operand used twice would have to be cut
    in two ways.
    """
    chosen: dict[int, int | None] = {}
    for operand, dim in dims:
        if chosen.setdefault(operand, dim) != dim:  # x * x.t()
            return None
    return Split(tuple(chosen.get(i) for i in range(len(call.operands))), tuple(results), **rest)  # type: ignore[arg-type]


def _fits(call: OpCall, split: Split, axis_size: int) -> bool:
    """Every cut dim has an element for each device; uneven cuts only where all cut dims are equally
    long.
    """
    sizes = [
        m.shape[d] for m, d in zip(call.operands, split.operands, strict=True) if d is not None
    ]
    sizes += [
        m.shape[d] for m, d in zip(call.results, split.results, strict=True) if isinstance(d, int)
    ]
    if split.even:
        return all(size % axis_size == 0 for size in sizes)
    return len(set(sizes)) == 1 and sizes[0] >= axis_size


def _keeps(sources: Iterable[TensorMeta], targets: Iterable[TensorMeta]) -> bool:
    """False when summands would be rounded to a narrower type on the way, or cut to integers."""
    source_steps = [_step_around_one(meta.dtype) for meta in sources]
    target_steps = [_step_around_one(meta.dtype) for meta in targets]
    finest_source = min((step for step in source_steps if step is not None), default=None)
    if finest_source is None:
        return True
    return all(step is not None and step <= finest_source for step in target_steps)


def _step_around_one(dtype: torch.dtype) -> float | None:
    """Distance between neighbouring numbers around 1; None for integers and booleans."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).eps
    return None


def to_strategies(call: OpCall, found: RuleMatch, axis_size: int) -> tuple[AxisStrategy, ...]:
    """All strategies of `found` on an axis of `axis_size` devices, the repeated one first."""
    # Whether a gradient flows through each in this call: a parameter in argmax gets none.
    result_grads = [meta.requires_grad for meta in call.results]
    has_backward = any(result_grads)
    operand_grads = [has_backward and meta.requires_grad for meta in call.operands]
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
        inputs = tuple(operand(i, d) for i, d in enumerate(split.operands))
        outputs = tuple(map(result, split.results))
        strategies.append(AxisStrategy(inputs, outputs, split.implementation, split.collectives))
    with_grads = [
        [meta for meta in metas if meta.requires_grad] for metas in (call.results, call.operands)
    ]
    if found.carries and any(operand_grads) and _keeps(*with_grads):  # partial gradients
        inputs, outputs = (
            tuple(REPLICATE if g else INVARIANT for g in each)
            for each in (operand_grads, result_grads)
        )
        strategies.append(AxisStrategy(inputs, outputs))
    if found.linear and _keeps(call.operands, call.results):
        for chosen in found.linear:
            if any(call.operands[i].dtype == torch.bool for i in chosen):
                continue  # booleans have no sum
            inputs = tuple(
                PARTIAL if i in chosen else operand(i, None) for i in range(len(call.operands))
            )
            strategies.append(AxisStrategy(inputs, (PARTIAL,) * len(call.results)))
    for strategy in found.extra:  # every sharded dim has an element for each device
        pairs = zip(
            (*strategy.inputs, *strategy.outputs), (*call.operands, *call.results), strict=True
        )
        if all(
            dual.shard_dim is None or meta.shape[dual.shard_dim] >= axis_size
            for dual, meta in pairs
        ):
            strategies.append(strategy)
    return tuple(dict.fromkeys(strategies))


def repeated(call: OpCall) -> AxisStrategy:
    """The strategy that is always valid: every device of the axis does the same work."""
    return AxisStrategy((INVARIANT,) * len(call.operands), (INVARIANT,) * len(call.results))
