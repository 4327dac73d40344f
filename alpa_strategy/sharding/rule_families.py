"""Families of rules, read off an op's schema and arguments: pointwise ops, ops along some dims,
reductions, and views; at the end, rules of single ops that depend on more than index letters
(losses, BatchNorm, factories).

The first three read as index notation with broadcasting: every dim of the (broadcast) operands that
the op does not work along is parallel; a dim that is summed is contracted. A view only rearranges
elements: it pairs groups of operand dims with groups of result dims that hold the same elements in
the same order. A group of one dim on each side may be cut anyhow; of a larger group only the
leading dims, and only into equal chunks.
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
    split_from_dims,
)

FIRST, EACH = ((0,),), ((0,), (1,))


def broadcast_dim(call: OpCall, operand: int, dim: int, rank: int) -> int | None:
    """The operand's own dim at `dim` of the `rank` dims that it is broadcast to; None where it is 1
    or absent.
    """
    shape = call.operands[operand].shape
    # Shapes are aligned to the right.
    operand_dim = dim - (rank - len(shape))
    if operand_dim < 0 or shape[operand_dim] == 1:
        return None
    return operand_dim


def aligned(
    call: OpCall,
    whole: tuple[int, ...] = (),
    linear: tuple[tuple[int, ...], ...] = (),
    carries: bool = True,
) -> RuleMatch:
    """Results have the operands' broadcast shape, and only the dims in `whole` must not be cut."""
    operands = [s.index for s in slots(call)]
    rank = max((len(call.operands[i].shape) for i in operands), default=0)
    splits = []
    for dim in range(rank):
        dims = [(i, broadcast_dim(call, i, dim, rank)) for i in operands]
        if dim not in whole and any(own is not None for _, own in dims):
            splits.append(split_from_dims(call, dims, [dim] * len(call.results)))
    return RuleMatch(splits, linear_sets(call, linear), carries, "pointwise")


def linear_sets(call: OpCall, linear: tuple[tuple[int, ...], ...]) -> tuple[frozenset[int], ...]:
    """Sets of tensor argument positions -> sets of operands; dropped where one is no tensor or is
    used twice.
    """
    flat = flat_tensor_arguments(call)
    found = []
    for positions in linear:
        if positions == (-1,):  # all tensor arguments together
            positions = tuple(range(len(flat)))
        chosen = [flat[p] for p in positions if p < len(flat)]
        others = set()
        for position, argument in enumerate(flat):
            if isinstance(argument, Slot) and position not in positions:
                others.add(argument.index)
        if chosen and all(isinstance(c, Slot) for c in chosen):
            operands = frozenset(c.index for c in chosen if isinstance(c, Slot))
            if not operands & others:
                found.append(operands)
    return tuple(found)


def along(call: OpCall, where: Any = "dim", linear: tuple[tuple[int, ...], ...] = ()) -> RuleMatch:
    """Ops that work along some dims and keep the shape, or change it only there (softmax, topk).

    where: the dim or dims (None: all), or the argument that names them.
    """
    value = bind(call)[where] if isinstance(where, str) else where
    return aligned(
        call, whole=dims_of(value, len(call.results[0].shape)), linear=linear, carries=False
    )


def reduction(
    call: OpCall,
    kind: str,
    where: str | int = "dim",
    linear: tuple[tuple[int, ...], ...] | None = None,
) -> RuleMatch:
    """Reductions over the argument `dim` (None: all), also of what two operands make together
    (linalg_vecdot).

    kind: `sum`, `mean`, `nansum` (a sum, but not of partial sums), or `other` (reduced dims stay
    whole).
    where: the dim, or the argument that names it.
    """
    bound, rank = bind(call), max(len(call.operands[s.index].shape) for s in slots(call))
    reduced = dims_of(bound.get(where) if isinstance(where, str) else where, rank)
    keep = bool(bound.get("keepdim")) or len(call.results[0].shape) == rank
    mark = {"mean": "@fraction", "other": "!"}.get(kind, "")
    indices = []
    result = []
    for d in range(rank):
        if d not in reduced:
            indices.append(f"x{d}")
            result.append(f"x{d}")
            continue
        indices.append(f"k{d}{mark}")
        if keep:
            result.append(f"one{d}!")
    terms = [indices[rank - len(call.operands[s.index].shape) :] for s in slots(call)]
    splits = read(line_of(terms, result, len(call.results)), call) or ()
    if linear is None:
        linear = () if kind in ("nansum", "other") else FIRST
    return RuleMatch(splits, linear_sets(call, linear), carries=True, origin="reduction")


def elementwise_loss(call: OpCall) -> RuleMatch:
    """Losses with a `reduction` argument: none, mean or sum. Weights broadcast; input and target
    must not.

    (ATen's backward of a mean over broadcast operands counts the elements of one operand only, so
    it cannot be split;
    `torch.nn.functional` expands both before it calls ATen.)
    """
    first, second = (call.operands[s.index].shape for s in slots(call)[:2])
    if first != second:
        return RuleMatch(origin="reduction")  # see above
    reduction = bind(call)["reduction"]  # 0: none, 1: mean, 2: sum
    if reduction == 0:
        return aligned(call, carries=False)
    term = "[*b@fraction]?" if reduction == 1 else "[*b]?"
    line = ", ".join([term] * len(flat_tensor_arguments(call))) + " -> []"
    return RuleMatch(read(line, call) or (), origin="reduction")


DimGroup = tuple[tuple[int, ...], tuple[int, ...]]

# Ops (without namespace and overload) that give a tensor another shape and nothing else.
RESHAPES = (
    *(
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "view_as",
        "reshape_as",
    ),
    *(
        "view_copy",
        "squeeze_copy",
        "unsqueeze_copy",
        "ravel",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
    ),
)


@cache
def dim_groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[DimGroup, ...]:
    """Smallest groups (source dims, target dims) of equal element count, in order; dims of size 1
    are left out.

    Both shapes must have the same number of elements (> 0), else ValueError.
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
    return tuple(
        (tuple(left[i:k]), tuple(right[j:m])) for (i, j), (k, m) in pairwise([(0, 0), *ends])
    )


def _model(call: OpCall, dim: int) -> list[tuple[int, int | None]]:
    """`view_as`, `expand_as`: the operand that only gives its shape is cut like the result."""
    return [(s.index, dim) for s in slots(call)[1:]]


def view(call: OpCall) -> RuleMatch:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: from the shapes alone."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    if 0 in source:
        return RuleMatch(origin="view")  # no elements, no groups
    splits = []
    for left, right in dim_groups(source, target):
        even = (
            len(left) > 1 or len(right) > 1
        )  # [heads * width] -> [heads, width]: whole heads only
        splits.append(
            split_from_dims(
                call, [(operand, left[0]), *_model(call, right[0])], [right[0]], even=even
            )
        )
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def permutation(call: OpCall) -> RuleMatch:
    """Ops that reorder dims (transpose, permute, t, movedim, ...): the order is read off a run on a
    meta tensor.
    """
    operand = slots(call)[0].index
    rank = len(call.operands[operand].shape)
    probe = torch.empty(_PRIMES[:rank], device="meta")  # every dim has a size of its own
    target = call.call(probe).shape
    return _moved(call, [(_PRIMES.index(size), dim) for dim, size in enumerate(target)])


def _source(call: OpCall) -> tuple[int, ...]:
    """Shape of the first operand."""
    return call.operands[slots(call)[0].index].shape


def _moved(
    call: OpCall, pairs: Iterable[tuple[int, int]], even: Iterable[tuple[int, int]] = ()
) -> RuleMatch:
    """The first operand's dims as dims of all results, `even` ones in equal chunks only; linear."""
    operand, results = slots(call)[0].index, len(call.results)
    splits = [split_from_dims(call, [(operand, i)], [j] * results) for i, j in pairs]
    splits += [split_from_dims(call, [(operand, i)], [j] * results, even=True) for i, j in even]
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


def expand(call: OpCall) -> RuleMatch:
    """expand: dims that are not expanded map one to one; an expanded dim is cut in the result
    only.
    """
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    offset = len(target) - len(source)
    splits = []
    for dim, size in enumerate(target):
        own = dim - offset
        kept = own >= 0 and source[own] == size
        if size > 1:
            splits.append(
                split_from_dims(call, [(operand, own if kept else None), *_model(call, dim)], [dim])
            )
    return RuleMatch(splits, (frozenset({operand}),), True, "view")


def repeat(call: OpCall) -> RuleMatch:
    """repeat, tile: dims that are not repeated."""
    source, target = _source(call), call.results[0].shape
    offset = len(target) - len(source)
    kept = [dim for dim in range(offset, len(target)) if source[dim - offset] == target[dim]]
    return _moved(call, [(dim - offset, dim) for dim in kept])


def repeat_interleave(call: OpCall) -> RuleMatch:
    """repeat_interleave by a number: the repeated dim is cut evenly (each chunk repeats its own),
    others anyhow.
    """
    dim, rank = bind(call)["dim"], len(_source(call))
    if dim is None:
        if rank != 1:
            return RuleMatch(origin="view")
        dim = 0
    return _moved(
        call, [(d, d) for d in range(rank) if d != dim % rank], even=[(dim % rank, dim % rank)]
    )


def keep_other_dims(call: OpCall, *where: str | int, removed: bool = False) -> RuleMatch:
    """Ops that cut, pick or move along some dims (split, select, flip, diagonal): all other dims
    map one to one.

    where: the dims, or the arguments that name them (None: all); "dim" if not given.
    removed: those dims are absent from the results, or come last.
    """
    rank, bound = len(_source(call)), bind(call)
    worked = {
        d
        for w in where or ("dim",)
        for d in dims_of(bound[w] if isinstance(w, str) else min(w, rank - 1), rank)
    }
    others = [d for d in range(rank) if d not in worked]
    return _moved(call, zip(others, range(rank) if removed else others, strict=False))


def slice_(call: OpCall, axis_size: int) -> RuleMatch:
    """slice, narrow: a dim whose size does not change maps one to one; and `[:-1]` of equal chunks,
    where all but the
    last keep theirs (logits against shifted labels)."""
    source, target, bound = _source(call), call.results[0].shape, bind(call)
    dim = bound["dim"] % len(source)
    unchanged = [d for d in range(len(source)) if d != dim]
    if source[dim] == target[dim]:
        unchanged = list(range(len(source)))
    found = _moved(call, [(d, d) for d in unchanged])
    if (
        bound["start"] in (None, 0)
        and target[dim] == source[dim] - 1
        and source[dim] % axis_size == 0
    ):
        found = replace(found, extra=(AxisStrategy((shard(dim),), (shard(dim),)),))
    return found


def pad(call: OpCall) -> RuleMatch:
    """pad: dims that get no padding."""
    bound, rank = bind(call), len(_source(call))
    padded = {rank - 1 - i // 2 for i, amount in enumerate(bound["pad"]) if amount != 0}
    # Another value than zero would be added by every device of a partial sum.
    zero = bound.get("mode", "constant") != "constant" or not bound.get("value")
    found = _moved(call, [(d, d) for d in range(rank) if d not in padded])
    return found if zero else replace(found, linear=())


def linear_only(call: OpCall, *linear: tuple[int, ...]) -> RuleMatch:
    """Ops whose elements go anywhere, or are summed: no dim can be cut, but they are linear (in all
    if not given).
    """
    return RuleMatch((), linear_sets(call, linear or ((-1,),)), True, "view")


def concatenate(call: OpCall, dim: int | None = None) -> RuleMatch:
    """cat, stack and relatives: every dim but the concatenated one, cut in all operands; linear in
    all together.

    dim: of the result, the argument `dim` if not given. Operands may lack it, and one before it as
    well (dstack).
    """
    operands = tuple(s.index for s in slots(call))
    rank = len(call.results[0].shape)
    dim = bind(call)["dim"] % rank if dim is None else min(dim, rank - 1)
    splits = []
    for d in range(rank):
        lacking = [rank - len(call.operands[i].shape) for i in operands]
        own = [
            (i, d - max(0, lacks - (d < dim))) for i, lacks in zip(operands, lacking, strict=True)
        ]
        if d != dim and all(0 <= o < len(call.operands[i].shape) for i, o in own):
            splits.append(split_from_dims(call, own, [d]))
    return RuleMatch(splits, (frozenset(operands),), True, "view")


def diag_embed(call: OpCall) -> RuleMatch:
    """diag_embed: all dims but the last, which becomes the diagonal of two new ones."""
    bound, rank = bind(call), len(call.results[0].shape)
    others = [d for d in range(rank) if d not in {bound["dim1"] % rank, bound["dim2"] % rank}]
    return _moved(call, enumerate(others))


def rot90(call: OpCall) -> RuleMatch:
    """rot90: dims that are not rotated; of the two that are, the one that is not reversed."""
    bound, rank = bind(call), len(call.results[0].shape)
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
    """trapezoid, trapz, cumulative_trapezoid: dims that are not integrated along; linear in values
    and places.
    """
    ranks = [len(call.operands[s.index].shape) for s in slots(call)]
    if len(set(ranks)) == 1 < len(ranks):  # a place for every value
        return reduction(call, "other", linear=EACH)
    found = keep_other_dims(call, removed=len(call.results[0].shape) < ranks[0])
    return replace(found, linear=linear_sets(call, EACH), origin="reduction")


# --- Rules of single ops.


def cross_entropy(call: OpCall) -> RuleMatch:
    """Rows are summed; the class dim is cut with three all-reduces of a float per row (max, sum of
    exp, target).
    """
    bound = bind(call)
    logits, target = bound["logits"].index, bound["target"].index
    shape = call.operands[logits].shape
    probabilities = call.operands[target].dtype.is_floating_point
    splits: tuple[Split | None, ...] = ()
    if len(shape) > 1:
        splits = (
            read(f"[n, c!, *d], {'[n, c!, *d]' if probabilities else '[n, *d]'}, [c!]? -> []", call)
            or ()
        )
    weight = bound["weight"]
    if not probabilities and not (weight is not None and call.operands[weight.index].requires_grad):
        class_dim = 0 if len(shape) == 1 else 1
        num_rows = call.operands[logits].num_elements // shape[class_dim]
        collective = InnerCollective("all_reduce", 4 * num_rows, "forward")  # [rows] in fp32
        how = {"implementation": "vocab_cross_entropy", "collectives": (collective,) * 3}
        splits += (split_from_dims(call, [(logits, class_dim)], [WHOLE], **how),)
    return RuleMatch(splits)


def batch_norm_train(call: OpCall) -> RuleMatch:
    """Channels are independent; rows share their statistics: sums and counts are reduced, forward
    and backward.
    """
    names = ("x", "weight", "bias", "running_mean", "running_var")
    present = {name: bind(call)[name].index for name in names if isinstance(bind(call)[name], Slot)}
    if len(call.operands[present["x"]].shape) < 2:
        return RuleMatch()
    num_channels = call.operands[present["x"]].shape[1]
    statistics = [0] * (len(call.results) - 1)  # x [rows, channels, *s], statistics [channels]
    channels = split_from_dims(
        call, [(i, 1 if name == "x" else 0) for name, i in present.items()], [1, *statistics]
    )
    collectives = (
        InnerCollective("all_reduce", 4 * (2 * num_channels + 1), "forward"),
        InnerCollective("all_reduce", 4 * 2 * num_channels, "backward"),
    )
    how = {"implementation": "batch_norm_sync", "collectives": collectives}
    rows = split_from_dims(call, [(present["x"], 0)], [0, *[WHOLE for _ in statistics]], **how)
    return RuleMatch((channels, rows))


def fourier(call: OpCall) -> RuleMatch:
    """fft and its relatives: linear, and the dims that are not transformed are independent."""
    dims, sizes = bind(call)["dim"], bind(call).get("s")
    if dims is None and sizes is not None:
        dims = tuple(range(-len(sizes), 0))
    return replace(along(call, dims, FIRST), origin="notation")


def factory(call: OpCall) -> RuleMatch:
    """full, zeros: any dim may be made in shards. new_zeros and the like read only a dtype: any
    layout will do.
    """
    result_shards = [shard(d) for d in range(len(call.results[0].shape))]
    num_operands = len(call.operands)
    strategies = [
        AxisStrategy((INVARIANT,) * num_operands, (placement,)) for placement in result_shards
    ]
    operand_rank = len(call.operands[0].shape) if call.operands else 0
    for d in range(operand_rank):
        placement = shard(d)
        strategies.append(AxisStrategy((placement,), (INVARIANT,)))
        if placement in result_shards:
            strategies.append(AxisStrategy((placement,), (placement,)))
    return RuleMatch(extra=tuple(strategies))


def renorm(call: OpCall) -> RuleMatch:
    """renorm: each slice along `dim` is scaled by itself."""
    rank = len(call.results[0].shape)
    return aligned(call, whole=tuple(d for d in range(rank) if d != bind(call)["dim"] % rank))


def histogram(call: OpCall) -> RuleMatch:
    """histogram with given bins: counts add up unless they are divided by their sum."""
    bound = bind(call)
    values = bound["self"].index
    weight = [bound["weight"].index] if isinstance(bound["weight"], Slot) else []
    dims = range(0 if bound["density"] else len(call.operands[values].shape))
    return RuleMatch(
        [split_from_dims(call, [(i, d) for i in (values, *weight)], [SUM, WHOLE]) for d in dims]
    )


def cross(call: OpCall) -> RuleMatch:
    """cross: along `dim`, or along the first dim of size 3."""
    dim = bind(call)["dim"]
    return along(call, call.results[0].shape.index(3) if dim is None else dim, linear=EACH)
