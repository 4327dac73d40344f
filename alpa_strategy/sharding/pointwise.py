"""Rules of pointwise ops, of ops that work along some dims, and of reductions, from their schema and arguments.

All three read as index notation with broadcasting: every dim of the (broadcast) operands that the op does not work
along is parallel; a dim that is summed is contracted.
"""

from __future__ import annotations

from alpa_strategy.ir.op import OpCall, Slot
from alpa_strategy.sharding.binding import bind, dims_of, flat_tensor_arguments, slots
from alpa_strategy.sharding.splits import SUM, Found, Split, split_from_dims


def _broadcast_dims(call: OpCall, operands: tuple[int, ...], rank: int, dim: int) -> list[tuple[int, int | None]]:
    """Where dim `dim` of the broadcast shape of `rank` dims lies in each operand (None where it is broadcast)."""
    found: list[tuple[int, int | None]] = []
    for operand in operands:
        shape = call.operands[operand].shape
        own = dim - (rank - len(shape))
        found.append((operand, own if own >= 0 and shape[own] != 1 else None))
    return found


def aligned(
    call: OpCall, whole: tuple[int, ...] = (), linear: tuple[tuple[int, ...], ...] = (), carries: bool = True
) -> Found:
    """Results have the operands' broadcast shape, and only the dims in `whole` must not be cut."""
    operands = tuple(s.index for s in slots(call))
    rank = len(call.results[0].shape)
    splits = []
    for dim in range(rank):
        dims = _broadcast_dims(call, operands, rank, dim)
        if dim in whole or all(d is None for _, d in dims):
            continue
        split = split_from_dims(call, dims, [dim] * len(call.results))
        if split is not None:
            splits.append(split)
    return Found(tuple(splits), linear_sets(call, linear), carries, "pointwise")


def linear_sets(call: OpCall, linear: tuple[tuple[int, ...], ...]) -> tuple[frozenset[int], ...]:
    """Sets of tensor argument positions -> sets of operands; dropped where one is no tensor or is used twice."""
    flat = flat_tensor_arguments(call)
    found = []
    for positions in linear:
        if positions == (-1,):  # all tensor arguments together
            positions = tuple(range(len(flat)))
        chosen = [flat[p] for p in positions if p < len(flat)]
        others = {f.index for p, f in enumerate(flat) if isinstance(f, Slot) and p not in positions}
        if chosen and all(isinstance(c, Slot) for c in chosen):
            operands = frozenset(c.index for c in chosen if isinstance(c, Slot))
            if not operands & others:
                found.append(operands)
    return tuple(found)


def along(call: OpCall, argument: str = "dim", all_if_none: bool = True) -> Found:
    """Ops that work along the dims in `argument` and keep the shape, or change it only there (softmax, topk)."""
    bound = bind(call)
    rank = len(call.results[0].shape)
    value = bound[argument]
    whole = () if not all_if_none and value in (None, ()) else dims_of(value, rank)
    return aligned(call, whole=whole, carries=False)


def reduction(call: OpCall, kind: str, argument: str = "dim") -> Found:
    """Reductions over the dims in `argument` (None: all). kind: `sum`, `mean`, or `other` (reduced dims stay whole)."""
    bound = bind(call)
    operand = slots(call)[0].index
    shape = call.operands[operand].shape
    rank = len(shape)
    reduced = dims_of(bound.get(argument), rank)
    keep = bool(bound.get("keepdim")) or len(call.results[0].shape) == rank
    splits: list[Split] = []
    position = 0
    for dim in range(rank):
        if dim not in reduced:
            splits += _one(call, operand, dim, dim if keep else position)
            position += 1
        elif kind != "other" and shape[dim] > 1:
            splits += _one(call, operand, dim, SUM, "fraction" if kind == "mean" else None)
    linear = () if kind == "other" else (frozenset({operand}),)
    return Found(tuple(splits), linear, carries=True, origin="reduction")


def _one(call: OpCall, operand: int, dim: int, mark: int | str, implementation: str | None = None) -> list[Split]:
    split = split_from_dims(call, [(operand, dim)], [mark] * len(call.results), implementation=implementation)
    return [] if split is None else [split]


_REDUCTION_NAMES = {0: "none", 1: "mean", 2: "sum"}


def elementwise_loss(call: OpCall) -> Found:
    """Losses with a `reduction` argument: none, mean or sum. Weights broadcast; input and target must not.

    (ATen's backward of a mean over broadcast operands counts the elements of one operand only, so it cannot be split;
    `torch.nn.functional` expands both before it calls ATen.)
    """
    first, second = (call.operands[s.index].shape for s in slots(call)[:2])
    if first != second:
        return Found(origin="reduction")
    kind = _REDUCTION_NAMES[bind(call)["reduction"]]
    if kind == "none":
        return aligned(call, carries=False)
    operands = tuple(s.index for s in slots(call))
    rank = max(len(call.operands[i].shape) for i in operands)
    splits = []
    for dim in range(rank):
        dims = _broadcast_dims(call, operands, rank, dim)
        if any(d is not None for _, d in dims):
            implementation = "fraction" if kind == "mean" else None
            split = split_from_dims(call, dims, [SUM], implementation=implementation)
            if split is not None:
                splits.append(split)
    return Found(tuple(splits), origin="reduction")
