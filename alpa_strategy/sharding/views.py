"""Rules of ops that only rearrange elements: views, permutations, concatenation and splitting.

A view pairs groups of operand dims with groups of result dims that hold the same elements in the same order. A group of
one dim on each side may be cut anyhow; of a larger group only the leading dims, and only into equal chunks.
"""

from __future__ import annotations

from functools import cache

import torch

from alpa_strategy.ir.op import OpCall
from alpa_strategy.sharding.binding import bind, dims_of, slots
from alpa_strategy.sharding.splits import Found, Split, split_from_dims

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
    "view_copy",
    "view_as",
    "reshape_as",
)


@cache
def dim_groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[DimGroup, ...]:
    """Smallest groups (source dims, target dims) of equal element count, in order; dims of size 1 are left out.

    Both shapes must have the same number of elements (> 0), else ValueError.
    """
    left = [d for d, size in enumerate(source) if size != 1]
    right = [d for d, size in enumerate(target) if size != 1]
    groups: list[DimGroup] = []
    i = j = 0
    while i < len(left) and j < len(right):
        first_i, first_j = i, j
        count_left, count_right = source[left[i]], target[right[j]]
        while count_left != count_right:
            if count_left < count_right:
                i += 1
                if i == len(left):
                    raise ValueError(f"{source} cannot be viewed as {target}")
                count_left *= source[left[i]]
            else:
                j += 1
                if j == len(right):
                    raise ValueError(f"{source} cannot be viewed as {target}")
                count_right *= target[right[j]]
        i, j = i + 1, j + 1
        groups.append((tuple(left[first_i:i]), tuple(right[first_j:j])))
    if i < len(left) or j < len(right):
        raise ValueError(f"{source} cannot be viewed as {target}")
    return tuple(groups)


def _model(call: OpCall, dim: int) -> list[tuple[int, int | None]]:
    """`view_as`, `expand_as`: the operand that only gives its shape is cut like the result."""
    return [(s.index, dim) for s in slots(call)[1:]]


def view(call: OpCall) -> Found:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: from the shapes alone."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    if 0 in source:
        return Found(origin="view")
    splits = []
    for left, right in dim_groups(source, target):
        even = len(left) > 1 or len(right) > 1
        split = split_from_dims(call, [(operand, left[0]), *_model(call, right[0])], [right[0]], even=even)
        if split is not None:
            splits.append(split)
    return Found(tuple(splits), (frozenset({operand}),), True, "view")


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def permutation(call: OpCall) -> Found:
    """Ops that reorder dims (transpose, permute, t, movedim, ...): the order is read off a run on a meta tensor."""
    operand = slots(call)[0].index
    rank = len(call.operands[operand].shape)
    probe = torch.empty(_PRIMES[:rank], device="meta")
    target = call.call(probe).shape
    splits = _pairs(call, operand, [(_PRIMES.index(size), dim) for dim, size in enumerate(target)])
    return Found(splits, (frozenset({operand}),), True, "view")


def _pairs(call: OpCall, operand: int, pairs: list[tuple[int, int]], even: bool = False) -> tuple[Split, ...]:
    found = (split_from_dims(call, [(operand, i)], [j] * len(call.results), even=even) for i, j in pairs)
    return tuple(s for s in found if s is not None)


def expand(call: OpCall) -> Found:
    """expand: dims that are not expanded map one to one; an expanded dim is cut in the result only."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    offset = len(target) - len(source)
    splits = []
    for dim, size in enumerate(target):
        own = dim - offset
        kept = own >= 0 and source[own] == size
        split = split_from_dims(call, [(operand, own if kept else None), *_model(call, dim)], [dim])
        if split is not None and size > 1:
            splits.append(split)
    return Found(tuple(splits), (frozenset({operand}),), True, "view")


def repeat(call: OpCall) -> Found:
    """repeat, tile: dims that are not repeated."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    offset = len(target) - len(source)
    pairs = [(dim - offset, dim) for dim in range(offset, len(target)) if source[dim - offset] == target[dim]]
    return Found(_pairs(call, operand, pairs), (frozenset({operand}),), True, "view")


def repeat_interleave(call: OpCall) -> Found:
    """repeat_interleave by a number: the repeated dim is cut evenly (each chunk repeats its own), others anyhow."""
    operand, dim = slots(call)[0].index, bind(call)["dim"]
    rank = len(call.operands[operand].shape)
    if dim is None:
        if rank != 1:
            return Found(origin="view")
        dim = 0
    others = _pairs(call, operand, [(d, d) for d in range(rank) if d != dim % rank])
    return Found(
        (*others, *_pairs(call, operand, [(dim % rank, dim % rank)], even=True)), (frozenset({operand}),), True, "view"
    )


def keep_other_dims(call: OpCall, argument: str = "dim", removed: bool = False) -> Found:
    """Ops that cut or pick along one dim (split, chunk, select, unbind): all other dims map one to one.

    `removed`: the dim is absent from the results.
    """
    operand = slots(call)[0].index
    rank = len(call.operands[operand].shape)
    dim = dims_of(bind(call)[argument], rank)[0]
    pairs = [(d, d - (1 if removed and d > dim else 0)) for d in range(rank) if d != dim]
    return Found(_pairs(call, operand, pairs), (frozenset({operand}),), True, "view")


def slice_(call: OpCall) -> Found:
    """slice, narrow: a dim whose size does not change maps one to one."""
    operand = slots(call)[0].index
    source, target = call.operands[operand].shape, call.results[0].shape
    dim = bind(call)["dim"] % len(source)
    pairs = [(d, d) for d in range(len(source)) if d != dim or source[d] == target[d]]
    return Found(_pairs(call, operand, pairs), (frozenset({operand}),), True, "view")


def pad(call: OpCall) -> Found:
    """pad: dims that get no padding."""
    operand = slots(call)[0].index
    rank, padding = len(call.operands[operand].shape), bind(call)["pad"]
    padded = {rank - 1 - i // 2 for i, amount in enumerate(padding) if amount != 0}
    bound = bind(call)
    zero = bound.get("mode", "constant") != "constant" or not bound.get("value")
    free = [(d, d) for d in range(rank) if d not in padded]
    return Found(_pairs(call, operand, free), (frozenset({operand}),) if zero else (), True, "view")


def moving(call: OpCall, argument: str = "dims") -> Found:
    """flip, roll: dims along which nothing moves."""
    operand = slots(call)[0].index
    rank = len(call.operands[operand].shape)
    moved = dims_of(bind(call)[argument], rank)
    return Found(
        _pairs(call, operand, [(d, d) for d in range(rank) if d not in moved]), (frozenset({operand}),), True, "view"
    )


def concatenate(call: OpCall) -> Found:
    """cat: every dim but the concatenated one, cut in all operands; linear in all operands together."""
    operands = tuple(s.index for s in slots(call))
    rank = len(call.results[0].shape)
    if any(len(call.operands[i].shape) != rank for i in operands):  # legacy empty tensors
        return Found(origin="view")
    dim = bind(call)["dim"] % rank
    splits = (split_from_dims(call, [(i, d) for i in operands], [d]) for d in range(rank) if d != dim)
    return Found(tuple(s for s in splits if s is not None), (frozenset(operands),), True, "view")


def stack(call: OpCall) -> Found:
    """stack: every operand dim, shifted past the new one."""
    operands = tuple(s.index for s in slots(call))
    rank = len(call.results[0].shape)
    dim = bind(call)["dim"] % rank
    splits = (split_from_dims(call, [(i, d) for i in operands], [d + (1 if d >= dim else 0)]) for d in range(rank - 1))
    return Found(tuple(s for s in splits if s is not None), (frozenset(operands),), True, "view")
