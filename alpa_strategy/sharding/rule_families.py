"""Families of rules that follow from an op's schema and arguments.

Pointwise ops, ops along some dims, reductions, and views. At the end, rules of single ops that
depend on more than index letters (losses, BatchNorm, factories).

The first three are like index notation with broadcasting: every dim of the (broadcast) operands
that the op does not work along is parallel, a dim that is summed is contracted. A view only
rearranges elements: it pairs groups of operand dims with groups of result dims that have the same
elements in the same order. A group of one dim on each side may be sharded into any chunks. Of a
larger group only the leading dims may be sharded, and only into equal chunks.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from alpa_strategy.ir.op import (
    AxisStrategy,
    InnerCollective,
    OpCall,
    Slot,
    aten_name,
    bind,
    dims_of,
    flat_tensor_arguments,
    slots,
)
from alpa_strategy.ir.placement import INVARIANT, shard
from alpa_strategy.sharding.notation import (
    SUM,
    WHOLE,
    RuleMatch,
    Split,
    line_of,
    read,
    reduced_indices,
    split_from_dims,
)

# Sets of tensor arguments in which an op is jointly linear, see `linear_sets`: in the first one,
FIRST = ((0,),)
# or in each of the first two.
EACH = ((0,), (1,))


def broadcast_dim(call: OpCall, operand: int, dim: int, rank: int) -> int | None:
    """Return the operand's dim at `dim` of the `rank` dims that it is broadcast to.

    None if its size is 1, or if the operand lacks it.
    """
    shape = call.operands[operand].shape
    # Shapes are aligned to the right.
    operand_dim = dim - (rank - len(shape))
    if operand_dim < 0 or shape[operand_dim] == 1:
        return None
    return operand_dim


def aligned(
    call: OpCall,
    unsharded: tuple[int, ...] = (),
    linear: tuple[tuple[int, ...], ...] = (),
    carries: bool = True,
) -> RuleMatch:
    """Rule of ops whose results have the operands' broadcast shape.

    Args:
        unsharded: dims of the broadcast shape, from 0, that must not be sharded.
        linear: as for `linear_sets`.
        carries: as `RuleMatch.carries`.
    """
    operands = [s.index for s in slots(call)]
    rank = max((len(call.operands[i].shape) for i in operands), default=0)
    splits = []
    for dim in range(rank):
        dims = [(i, broadcast_dim(call, i, dim, rank)) for i in operands]
        if dim not in unsharded and any(operand_dim is not None for _, operand_dim in dims):
            splits.append(split_from_dims(call, dims, [dim] * len(call.results)))
    return RuleMatch(splits, linear_sets(call, linear), carries, "pointwise")


def linear_sets(call: OpCall, linear: tuple[tuple[int, ...], ...]) -> tuple[frozenset[int], ...]:
    """Return the sets of operands for sets of tensor argument positions; (-1,) stands for all.

    A set is left out if one of its arguments is no tensor, or is used outside of the set as well.
    Positions that the call does not have are skipped; a set of these alone is left out.
    """
    flat = flat_tensor_arguments(call)
    sets = []
    for positions in linear:
        if positions == (-1,):
            positions = tuple(range(len(flat)))
        chosen = [flat[p] for p in positions if p < len(flat)]
        others = set()
        for position, argument in enumerate(flat):
            if isinstance(argument, Slot) and position not in positions:
                others.add(argument.index)
        if chosen and all(isinstance(c, Slot) for c in chosen):
            operands = frozenset(c.index for c in chosen if isinstance(c, Slot))
            if not operands & others:
                sets.append(operands)
    return tuple(sets)


def along(call: OpCall, where: Any = "dim", linear: tuple[tuple[int, ...], ...] = ()) -> RuleMatch:
    """Rule of ops that work along some dims and change the shape only there (softmax, topk).

    Args:
        where: the dim or dims (None: all), or the argument that names them.
    """
    dims = bind(call)[where] if isinstance(where, str) else where
    unsharded = dims_of(dims, len(call.results[0].shape))
    return aligned(call, unsharded=unsharded, linear=linear, carries=False)


def reduction(
    call: OpCall,
    kind: str,
    where: str | int = "dim",
    linear: tuple[tuple[int, ...], ...] | None = None,
) -> RuleMatch:
    """Rule of reductions over some dims, of one operand or of a product of two (linalg_vecdot).

    Args:
        kind: `sum`, `mean`, `nansum` (a sum, but not of partial sums), or `other` (reduced dims are
            not sharded).
        where: the dim, or the argument that names the dims (None: all).
        linear: as for `linear_sets`; None: what follows from `kind`.
    """
    bound = bind(call)
    rank = max(len(call.operands[s.index].shape) for s in slots(call))
    reduced = dims_of(bound.get(where) if isinstance(where, str) else where, rank)
    keep = bool(bound.get("keepdim")) or len(call.results[0].shape) == rank
    mark = {"mean": "@fraction", "other": "!"}.get(kind, "")
    indices, result = reduced_indices(rank, reduced, mark, keep)
    terms = [indices[rank - len(call.operands[s.index].shape) :] for s in slots(call)]
    splits = read(line_of(terms, result, len(call.results)), call) or ()
    if linear is None:
        linear = () if kind in ("nansum", "other") else FIRST
    return RuleMatch(splits, linear_sets(call, linear), carries=True, origin="reduction")


def elementwise_loss(call: OpCall) -> RuleMatch:
    """Rule of losses with a `reduction` argument: 0 none, 1 mean or 2 sum.

    Weights may be broadcast. Inputs and targets of different shapes have no split: ATen's backward
    of a mean over broadcast operands counts the elements of one operand only, so it cannot be
    sharded. `torch.nn.functional` expands both before it calls ATen.
    """
    first, second = (call.operands[s.index].shape for s in slots(call)[:2])
    if first != second:
        return RuleMatch(origin="reduction")
    reduction = bind(call)["reduction"]
    if reduction == 0:
        return aligned(call, carries=False)
    term = "[*b@fraction]?" if reduction == 1 else "[*b]?"
    line = ", ".join([term] * len(flat_tensor_arguments(call))) + " -> []"
    return RuleMatch(read(line, call) or (), origin="reduction")


DimGroup = tuple[tuple[int, ...], tuple[int, ...]]


# Ops (without namespace and overload) that give a tensor another shape and nothing else.
RESHAPES = (
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
    "view_copy",
    "squeeze_copy",
    "unsqueeze_copy",
    "ravel",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)


def is_reshape(call: OpCall) -> bool:
    """Whether the call is a view that may merge or split dims, and leaves the elements as they are.

    `view.dtype` changes them.
    """
    return aten_name(call.target) in RESHAPES and call.target._overloadname != "dtype"


@cache
def dim_groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[DimGroup, ...]:
    """Return the smallest groups (source dims, target dims) with equal numbers of elements.

    In order; dims of size 1 are left out. No shape may have a dim of size 0.

    Raises:
        ValueError: the shapes have different numbers of elements.
    """
    if math.prod(source) != math.prod(target):
        raise ValueError(f"{source} cannot be viewed as {target}")
    left = [d for d, size in enumerate(source) if size != 1]
    right = [d for d, size in enumerate(target) if size != 1]
    # Elements up to each dim, ascending: a group ends where both shapes have as many.
    up_to_left = [math.prod(source[: d + 1]) for d in left]
    up_to_right = [math.prod(target[: d + 1]) for d in right]
    both = [count for count in up_to_left if count in up_to_right]
    ends = [(up_to_left.index(count) + 1, up_to_right.index(count) + 1) for count in both]
    groups = []
    for (left_start, right_start), (left_end, right_end) in pairwise([(0, 0), *ends]):
        groups.append((tuple(left[left_start:left_end]), tuple(right[right_start:right_end])))
    return tuple(groups)


def _model(call: OpCall, dim: int) -> list[tuple[int, int | None]]:
    """`view_as`, `expand_as`: the operand that only gives its shape is sharded as the result is."""
    return [(s.index, dim) for s in slots(call)[1:]]


def view(call: OpCall) -> RuleMatch:
    """Rule of view, reshape, flatten, unflatten, squeeze, unsqueeze, from the shapes alone."""
    operand = slots(call)[0].index
    source = call.operands[operand].shape
    target = call.results[0].shape
    if 0 in source:
        # Without elements there are no groups.
        return RuleMatch(origin="view")
    splits = []
    for left, right in dim_groups(source, target):
        # [heads * width] -> [heads, width]: heads are not split.
        even = len(left) > 1 or len(right) > 1
        dims = [(operand, left[0]), *_model(call, right[0])]
        splits.append(split_from_dims(call, dims, [right[0]], even=even))
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def permutation(call: OpCall) -> RuleMatch:
    """Rule of ops that reorder dims (transpose, permute, t, movedim, ...).

    The order is found by a run on a meta tensor, of which every dim has another size.
    """
    operand = slots(call)[0].index
    rank = len(call.operands[operand].shape)
    probe = torch.empty(_PRIMES[:rank], device="meta")
    target = call.call(probe).shape
    return _moved(call, [(_PRIMES.index(size), dim) for dim, size in enumerate(target)])


def _source(call: OpCall) -> tuple[int, ...]:
    """Shape of the first operand."""
    return call.operands[slots(call)[0].index].shape


def _moved(
    call: OpCall, pairs: Iterable[tuple[int, int]], even: Iterable[tuple[int, int]] = ()
) -> RuleMatch:
    """Rule of linear ops whose results have dims of the first operand.

    Args:
        pairs: (dim of the operand, dim of all results).
        even: such pairs that may be sharded into equal chunks only.
    """
    operand, results = slots(call)[0].index, len(call.results)
    splits = [split_from_dims(call, [(operand, i)], [j] * results) for i, j in pairs]
    splits += [split_from_dims(call, [(operand, i)], [j] * results, even=True) for i, j in even]
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


def expand(call: OpCall) -> RuleMatch:
    """Rule of expand: an expanded dim is sharded in the result only, and others in both."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    offset = len(target) - len(source)
    splits = []
    for dim, size in enumerate(target):
        if size <= 1:
            continue
        source_dim = dim - offset
        is_expanded = source_dim < 0 or source[source_dim] != size
        operand_dim = None if is_expanded else source_dim
        splits.append(split_from_dims(call, [(operand, operand_dim), *_model(call, dim)], [dim]))
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


def repeat(call: OpCall) -> RuleMatch:
    """Rule of repeat, tile: dims that are not repeated may be sharded."""
    source, target = _source(call), call.results[0].shape
    offset = len(target) - len(source)
    unrepeated = [dim for dim in range(offset, len(target)) if source[dim - offset] == target[dim]]
    return _moved(call, [(dim - offset, dim) for dim in unrepeated])


def repeat_interleave(call: OpCall) -> RuleMatch:
    """Rule of repeat_interleave by a number: the repeated dim is sharded into equal chunks only."""
    dim = bind(call)["dim"]
    rank = len(_source(call))
    if dim is None:
        # The operand is flattened first.
        if rank != 1:
            return RuleMatch(origin="view")
        dim = 0
    repeated_dim = dim % rank
    others = [(d, d) for d in range(rank) if d != repeated_dim]
    return _moved(call, others, even=[(repeated_dim, repeated_dim)])


def keep_other_dims(call: OpCall, *where: str | int, removed: bool = False) -> RuleMatch:
    """Rule of ops that work along some dims (split, select, flip, diagonal): the others are kept.

    Args:
        where: the dims (larger ones count as the last), or the arguments that name them (None:
            all); without any, the argument `dim`.
        removed: whether those dims are absent from the results, or come last.
    """
    rank = len(_source(call))
    bound = bind(call)
    worked: set[int] = set()
    for dim_or_argument in where or ("dim",):
        if isinstance(dim_or_argument, str):
            dims = bound[dim_or_argument]
        else:
            dims = min(dim_or_argument, rank - 1)
        worked.update(dims_of(dims, rank))
    others = [d for d in range(rank) if d not in worked]
    return _moved(call, zip(others, range(rank) if removed else others, strict=False))


def slice_(call: OpCall, axis_size: int) -> RuleMatch:
    """Rule of slice, narrow: dims whose size does not change may be sharded.

    So may be the dim of `[:-1]` into equal chunks, of which all devices but the last keep theirs
    (logits against shifted labels).
    """
    source = _source(call)
    target = call.results[0].shape
    bound = bind(call)
    dim = bound["dim"] % len(source)
    unchanged = [d for d in range(len(source)) if d != dim]
    if source[dim] == target[dim]:
        unchanged = list(range(len(source)))
    match = _moved(call, [(d, d) for d in unchanged])
    drops_last = bound["start"] in (None, 0) and target[dim] == source[dim] - 1
    if drops_last and source[dim] % axis_size == 0:
        match = replace(match, extra=(AxisStrategy((shard(dim),), (shard(dim),)),))
    return match


def pad(call: OpCall) -> RuleMatch:
    """Rule of pad: dims that get no padding may be sharded."""
    bound = bind(call)
    rank = len(_source(call))
    padded = {rank - 1 - i // 2 for i, amount in enumerate(bound["pad"]) if amount != 0}
    # Another value than zero would be added by every device of a partial sum.
    is_linear = bound.get("mode", "constant") != "constant" or not bound.get("value")
    match = _moved(call, [(d, d) for d in range(rank) if d not in padded])
    return match if is_linear else replace(match, linear=())


def linear_only(call: OpCall, *linear: tuple[int, ...]) -> RuleMatch:
    """Rule of linear ops of which no dim can be sharded.

    Args:
        linear: sets of tensor argument positions, as for `linear_sets`; none: all together.
    """
    return RuleMatch((), linear_sets(call, linear or ((-1,),)), True, "view")


def concatenate(call: OpCall, dim: int | None = None) -> RuleMatch:
    """Rule of cat, stack and relatives: every dim but the concatenated one may be sharded.

    They are linear in all operands together.

    Args:
        dim: the concatenated dim of the result; None: the argument `dim`. Operands may lack it, and
            one before it as well (dstack).
    """
    operands = tuple(s.index for s in slots(call))
    rank = len(call.results[0].shape)
    dim = bind(call)["dim"] % rank if dim is None else min(dim, rank - 1)
    splits = []
    for d in range(rank):
        lacking = [rank - len(call.operands[i].shape) for i in operands]
        operand_dims = []
        for i, num_lacking in zip(operands, lacking, strict=True):
            operand_dims.append((i, d - max(0, num_lacking - (d < dim))))
        all_have_it = all(
            0 <= operand_dim < len(call.operands[i].shape) for i, operand_dim in operand_dims
        )
        if d != dim and all_have_it:
            splits.append(split_from_dims(call, operand_dims, [d]))
    return RuleMatch(splits, (frozenset(operands),), True, "view")


def diag_embed(call: OpCall) -> RuleMatch:
    """Rule of diag_embed: all dims but the last, which becomes the diagonal of two new ones."""
    bound = bind(call)
    rank = len(call.results[0].shape)
    others = [d for d in range(rank) if d not in {bound["dim1"] % rank, bound["dim2"] % rank}]
    return _moved(call, enumerate(others))


def rot90(call: OpCall) -> RuleMatch:
    """Rule of rot90: dims that are not rotated; of the two that are, the one not reversed."""
    bound = bind(call)
    rank = len(call.results[0].shape)
    first, second = (d % rank for d in bound["dims"])
    turned = {
        0: [(first, first), (second, second)],
        1: [(first, second)],
        2: [],
        3: [(second, first)],
    }
    pairs = [(d, d) for d in range(rank) if d not in (first, second)] + turned[bound["k"] % 4]
    return _moved(call, pairs)


def trapezoid(call: OpCall) -> RuleMatch:
    """Rule of trapezoid, trapz, cumulative_trapezoid: dims that are not integrated along.

    Linear in the values, and in the positions at which they are.
    """
    ranks = [len(call.operands[s.index].shape) for s in slots(call)]
    has_position_of_each_value = len(set(ranks)) == 1 < len(ranks)
    if has_position_of_each_value:
        return reduction(call, "other", linear=EACH)
    match = keep_other_dims(call, removed=len(call.results[0].shape) < ranks[0])
    return replace(match, linear=linear_sets(call, EACH), origin="reduction")


# --- Rules of single ops.


def cross_entropy(call: OpCall) -> RuleMatch:
    """Rule of cross_entropy_sum: samples are summed, or the class dim is sharded.

    Sharded classes need three all-reduces of a float per row: maximum, sum of exponentials, and
    the target's logit.
    """
    bound = bind(call)
    logits = bound["logits"].index
    target = bound["target"].index
    shape = call.operands[logits].shape
    has_probabilities = call.operands[target].dtype.is_floating_point
    splits: tuple[Split | None, ...] = ()
    if len(shape) > 1:
        target_term = "[n, c!, *d]" if has_probabilities else "[n, *d]"
        splits = read(f"[n, c!, *d], {target_term}, [c!]? -> []", call) or ()
    weight = bound["weight"]
    weight_needs_grad = weight is not None and call.operands[weight.index].requires_grad
    if not has_probabilities and not weight_needs_grad:
        class_dim = 0 if len(shape) == 1 else 1
        num_rows = call.operands[logits].num_elements // shape[class_dim]
        # [rows] in float32.
        collective = InnerCollective("all_reduce", 4 * num_rows, "forward")
        split = split_from_dims(
            call,
            [(logits, class_dim)],
            [WHOLE],
            implementation="vocab_cross_entropy",
            collectives=(collective,) * 3,
        )
        splits += (split,)
    return RuleMatch(splits)


def batch_norm_train(call: OpCall) -> RuleMatch:
    """Rule of batch norm in training: channels are independent, samples share their statistics.

    Sharded samples need all-reduces of sums and counts, forward and backward. An input of less
    than two dims has no strategy.
    """
    names = ("x", "weight", "bias", "running_mean", "running_var")
    bound = bind(call)
    present = {name: bound[name].index for name in names if isinstance(bound[name], Slot)}
    x = present["x"]
    if len(call.operands[x].shape) < 2:
        return RuleMatch()
    num_channels = call.operands[x].shape[1]
    num_statistics = len(call.results) - 1

    # x [samples, channels, *s], all others [channels]
    channel_dims = [(operand, 0) for name, operand in present.items() if name != "x"]
    channel_dims.insert(0, (x, 1))
    channels = split_from_dims(call, channel_dims, [1, *[0] * num_statistics])
    samples = split_from_dims(
        call,
        [(x, 0)],
        [0, *[WHOLE] * num_statistics],
        implementation="batch_norm_sync",
        collectives=(
            InnerCollective("all_reduce", 4 * (2 * num_channels + 1), "forward"),
            InnerCollective("all_reduce", 4 * 2 * num_channels, "backward"),
        ),
    )
    return RuleMatch((channels, samples))


def fourier(call: OpCall) -> RuleMatch:
    """Rule of fft and relatives: linear; dims that are not transformed are independent."""
    bound = bind(call)
    dims = bound["dim"]
    sizes = bound.get("s")
    if dims is None and sizes is not None:
        dims = tuple(range(-len(sizes), 0))
    return replace(along(call, dims, FIRST), origin="notation")


def factory(call: OpCall) -> RuleMatch:
    """Rule of full, zeros: shards of any dim may be made.

    new_zeros and relatives read only the operand's dtype: it may be sharded along any dim.
    """
    result_shards = [shard(d) for d in range(len(call.results[0].shape))]
    num_operands = len(call.operands)
    unsharded = (INVARIANT,) * num_operands
    strategies = [AxisStrategy(unsharded, (placement,)) for placement in result_shards]
    operand_rank = len(call.operands[0].shape) if call.operands else 0
    for d in range(operand_rank):
        placement = shard(d)
        strategies.append(AxisStrategy((placement,), (INVARIANT,)))
        if placement in result_shards:
            strategies.append(AxisStrategy((placement,), (placement,)))
    return RuleMatch(extra=tuple(strategies))


def renorm(call: OpCall) -> RuleMatch:
    """Rule of renorm: each slice along `dim` is scaled by itself."""
    rank = len(call.results[0].shape)
    others = list(range(rank))
    others.remove(bind(call)["dim"] % rank)
    return aligned(call, unsharded=tuple(others))


def histogram(call: OpCall) -> RuleMatch:
    """Rule of histogram with given bins: counts are summed, unless they are normalised."""
    bound = bind(call)
    operands = [bound["self"].index]
    if isinstance(bound["weight"], Slot):
        operands.append(bound["weight"].index)
    if bound["density"]:
        # Counts are divided by their sum.
        return RuleMatch([])
    splits = []
    for dim in range(len(call.operands[operands[0]].shape)):
        splits.append(split_from_dims(call, [(i, dim) for i in operands], [SUM, WHOLE]))
    return RuleMatch(splits)


def cross(call: OpCall) -> RuleMatch:
    """Rule of cross: along `dim`, or along the first dim of size 3."""
    dim = bind(call)["dim"]
    if dim is None:
        dim = call.results[0].shape.index(3)
    return along(call, dim, linear=EACH)
