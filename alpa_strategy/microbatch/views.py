"""Where rows go in views, `cat`, `split` and slices when a dim holds several runs of rows, one after the other.

A dim with `segments` k is [k, n]: k runs of n rows (or rows times something), each of which is cut into equal parts.
`torch.cat([a, b])` has k = 2, [T, B] flattened has k = T. Device meshes have no such layout; micro-batches can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.sharding.binding import bind, slots

RowCut = tuple[int, int]  # dim, segments

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy")
_SPLITS = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")


def _name(call: OpCall) -> str:
    if not isinstance(call.target, torch._ops.OpOverload) or call.target.namespace != "aten":
        return ""
    return call.target._schema.name.split("::")[1]


def regroups_dims(call: OpCall) -> bool:
    """Whether the op may merge or split dims, so that rows in several runs do not stay where single runs do."""
    return _name(call) in (*_VIEWS, "view_as", "reshape_as")


def row_views(call: OpCall, cuts: Sequence[RowCut | None], num_parts: int) -> tuple[RowCut, ...] | None:
    """Where the results have their rows when the operands have them at `cuts` (None: whole); None: not as rows."""
    name, first = _name(call), cuts[0]
    if name in _VIEWS and len(cuts) == 1 and first is not None and call.target._overloadname != "dtype":
        found = _viewed(call.operands[0].shape, call.results[0].shape, first, num_parts)
        return None if found is None else (found,)
    if name in ("cat", "concat"):
        return _joined(call, cuts)
    if name in _SPLITS and first is not None and _dim(call) == first[0]:
        return _picked(call, first, [result.shape[first[0]] for result in call.results])
    if name in ("slice", "narrow") and first is not None and _dim(call) == first[0]:
        start = _start(call)
        run = call.operands[0].shape[first[0]] // first[1]
        if start is None or start % run:
            return None
        return _picked(call, first, [call.results[0].shape[first[0]]])
    return None


def _dim(call: OpCall) -> int:
    return bind(call)["dim"] % len(call.operands[slots(call)[0].index].shape)


def _start(call: OpCall) -> int | None:
    """First index of a slice along its dim; None when it is not a plain run."""
    bound = bind(call)
    if bound.get("step", 1) != 1 or isinstance(bound["start"], Slot):
        return None
    size = call.operands[0].shape[_dim(call)]
    start = bound["start"] or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _viewed(source: tuple[int, ...], target: tuple[int, ...], cut: RowCut, num_parts: int) -> RowCut | None:
    """[before, n, after] in both shapes: n are the rows, `before` is what dims and segments in front of them hold."""
    dim, segments = cut
    before = math.prod(source[:dim]) * segments
    front = 1
    for j, size in enumerate(target):
        if before % front == 0 and size % (before // front) == 0 and size > 1:
            runs = before // front
            rows_and_after = size // runs
            if rows_and_after % num_parts == 0 and rows_and_after > 0:
                return j, runs
        front *= size
        if front > before:
            return None
    return None


def _joined(call: OpCall, cuts: Sequence[RowCut | None]) -> tuple[RowCut, ...] | None:
    dim = bind(call)["dim"] % len(call.results[0].shape)
    operands = [(slot.index, cuts[slot.index]) for slot in slots(call)]
    if any(cut is None or cut[0] != dim for _, cut in operands):
        return None
    runs = {call.operands[i].shape[dim] // cut[1] for i, cut in operands}
    return ((dim, sum(cut[1] for _, cut in operands)),) if len(runs) == 1 else None


def _picked(call: OpCall, cut: RowCut, sizes: list[int]) -> tuple[RowCut, ...] | None:
    """Parts of the cut dim: whole runs only."""
    run = call.operands[0].shape[cut[0]] // cut[1]
    if any(size % run or size == 0 for size in sizes):
        return None
    return tuple((cut[0], size // run) for size in sizes)


def sizes_along(call: OpCall, operands: tuple[TensorMeta, ...], num_microbatches: int) -> dict[str, Any] | None:
    """Size arguments of a split or slice along a dim that is cut; None when there are none to change."""
    name = _name(call)
    if name not in (*_SPLITS, "slice", "narrow"):
        return None
    dim = _dim(call)
    if operands[0].shape[dim] == call.operands[0].shape[dim]:
        return None
    bound = bind(call)
    if name in ("slice", "narrow"):
        start, size = _start(call) or 0, call.results[0].shape[dim]
        changes = {"start": start // num_microbatches}
        if name == "slice":
            return {**changes, "end": (start + size) // num_microbatches}
        return {**changes, "length": size // num_microbatches}
    changed = {}
    for argument in ("split_size", "split_sizes"):
        if argument in bound:
            value = bound[argument]
            many = isinstance(value, tuple)
            changed[argument] = tuple(v // num_microbatches for v in value) if many else value // num_microbatches
    return changed
