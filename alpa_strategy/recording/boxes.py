"""Boxes of deferred tensors: a rank that stores a shard computes, and reads from files, only that.

`read_box` follows the recorded ops backwards from the box. A copy or cast needs the same box of its
operand, a concatenation the boxes of some operands, a file the bytes of the box. If an op mixes
elements in another way, all of its result is computed, as `Recorder.materialize` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.recording.recorded_op import RealTensor, RecordedOp, View, view_of
from alpa_strategy.recording.recorder import Recorder

aten = torch.ops.aten

# Ops whose result has at each index the operand's value, perhaps in another dtype.
COPIES = frozenset({aten.clone.default, aten._to_copy.default})
DIVISIBLE = COPIES | {aten.copy_.default, aten.cat.default, aten.stack.default}

# Bytes of a full tensor's rows that are read at once.
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Box:
    """A range of indices in each dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def replace(self, dim: int, start: int, size: int) -> "Box":
        """Return the box with another range in one dim."""
        starts = list(self.starts)
        sizes = list(self.sizes)
        starts[dim] = start
        sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    def without(self, dim: int) -> "Box":
        """Return the box without a dim."""
        starts = self.starts[:dim] + self.starts[dim + 1 :]
        sizes = self.sizes[:dim] + self.sizes[dim + 1 :]
        return Box(starts, sizes)


def read_box(recorder: Recorder, tensor: Tensor, offsets: Sequence[int], sizes: Any) -> Tensor:
    """Return the values of a box of a deferred tensor, perhaps a view of a file.

    Args:
        recorder: of the tensor.
        tensor: deferred.
        offsets: index of the box's first element, by dim.
        sizes: of the box.

    Raises:
        CheckpointError: a file cannot be read.
    """
    box = Box(tuple(offsets), tuple(sizes))
    with torch.no_grad(), _disable_current_modes():
        return _Reader(recorder).box_of(recorder.describe(tensor), box, len(recorder.lines))


def read_into(recorder: Recorder, tensor: Tensor, offsets: Sequence[int], target: Tensor) -> None:
    """Read a box of a deferred tensor into memory, in blocks of its first dim.

    Pages of mapped files count as this process's memory while they are mapped.

    Args:
        recorder: of the tensor.
        tensor: deferred.
        offsets: index of the box's first element, by dim.
        target: with the box's shape, on any device.

    Raises:
        CheckpointError: a file cannot be read.
    """
    num_rows = target.shape[0] if target.dim() else 1
    block = num_rows
    if target.dim() and _can_be_divided(recorder, tensor):
        row_bytes = max(1, tensor[:1].numel() * tensor.element_size())
        block = max(1, BLOCK_BYTES // row_bytes)

    with torch.no_grad():
        if block >= num_rows:
            target.copy_(read_box(recorder, tensor, offsets, target.shape))
            return
        for start in range(0, num_rows, block):
            rows = target[start : start + block]
            first = (offsets[0] + start, *offsets[1:])
            rows.copy_(read_box(recorder, tensor, first, rows.shape))


def _can_be_divided(recorder: Recorder, tensor: Tensor) -> bool:
    """Whether a box can be read without computing more than it: no op needs its full result for
    it.
    """
    ops = [func for func in recorder.functions_of(tensor) if hasattr(func, "_schema")]
    return DIVISIBLE.issuperset(ops)


class _Reader:
    """Computes boxes of recorded tensors."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def box_of(self, operand: Any, box: Box, end: int) -> Tensor:
        """Return a box of an operand as it was before line `end`."""
        if isinstance(operand, RealTensor):
            return _cut(operand.value(), box)

        line = self._recorder.last_writer(operand.storage, end)
        if line is None or not line.writes[operand.storage]:
            # Never written, or written in pieces.
            return _cut(self._recorder.value_at(operand, end), box)
        if not hasattr(line.func, "_schema"):
            content = line.func()
            return _cut(view_of(content.untyped_storage(), operand), box)

        compute = self._function_of(line)
        if compute is None:
            return _cut(self._recorder.value_at(operand, end), box)
        before = self._recorder.index_of_writer(operand.storage, end)
        return _through(operand, box, _result_of(line), lambda part: compute(line, part, before))

    def _function_of(self, line: RecordedOp) -> Callable[[RecordedOp, Box, int], Tensor] | None:
        """Return the method that computes a box of an op's result; None if there is none."""
        if line.func in COPIES:
            return self._copied
        if line.func is aten.copy_.default and _sizes(line.args[1]) == _sizes(line.args[0]):
            return self._copied_into
        if line.func is aten.cat.default:
            return self._concatenated
        if line.func is aten.stack.default:
            return self._stacked
        return None

    def _copied(self, line: RecordedOp, box: Box, end: int) -> Tensor:
        """Return the slice `box` of a recorded op that copies its first operand."""
        return self.box_of(line.args[0], box, end).to(_result_of(line).dtype)

    def _copied_into(self, line: RecordedOp, box: Box, end: int) -> Tensor:
        """Return the slice `box` of a recorded `copy_`."""
        return self.box_of(line.args[1], box, end).to(_result_of(line).dtype)

    def _concatenated(self, line: RecordedOp, box: Box, end: int) -> Tensor:
        """Return the slice `box` of a recorded `cat`, made of slices of its operands as they were
        before line `end`.
        """
        result = _result_of(line)
        dim = _argument(line, 1, "dim", 0) % len(result.size)
        first = box.starts[dim]
        last = first + box.sizes[dim]

        parts = []
        position = 0
        for operand in line.args[0]:
            length = _sizes(operand)[dim]
            start = max(first - position, 0)
            stop = min(last - position, length)
            if start < stop:
                part = box.replace(dim, start, stop - start)
                parts.append(self.box_of(operand, part, end).to(result.dtype))
            position += length
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _stacked(self, line: RecordedOp, box: Box, end: int) -> Tensor:
        """Return the slice `box` of a recorded `stack`, made of slices of its operands as they were
        before line `end`.
        """
        result = _result_of(line)
        dim = _argument(line, 1, "dim", 0) % len(result.size)
        part = box.without(dim)
        first = box.starts[dim]
        operands = line.args[0][first : first + box.sizes[dim]]
        new = torch.empty(box.sizes, dtype=result.dtype)
        for target, operand in zip(new.unbind(dim), operands, strict=True):
            target.copy_(self.box_of(operand, part, end))
        return new


def _result_of(line: RecordedOp) -> View:
    """Return the tensor that an op makes or overwrites."""
    result = line.results[0]
    if result is None:
        target: View = line.args[0]
        return target
    return result


def _argument(line: RecordedOp, position: int, name: str, default: int) -> int:
    """Return an integer argument of a recorded op, by position or name."""
    if len(line.args) > position:
        return int(line.args[position])
    return int(line.kwargs.get(name, default))


def _sizes(operand: Any) -> tuple[int, ...]:
    """Return the sizes of a recorded operand."""
    if isinstance(operand, RealTensor):
        return tuple(operand.tensor.shape)
    return tuple(operand.size)


def _cut(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box."""
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


# A view and the tensor in whose storage it is


def _through(view: View, box: Box, base: View, compute: Callable[[Box], Tensor]) -> Tensor:
    """Return a box of `view`, by boxes of `base`, which has all elements of the same storage.

    Args:
        view: of the storage.
        box: of the view.
        base: another view of the storage.
        compute: returns the values of a box of `base`.
    """
    if 0 in box.sizes:
        return torch.empty(box.sizes, dtype=view.dtype)
    if view == base:
        return compute(box)

    if view.dtype == base.dtype:
        translated = _translated(view, box, base)
        if translated is not None:
            box_of_base, order = translated
            return compute(box_of_base).permute(order).reshape(box.sizes)
        if base.size and _is_contiguous(base):
            return _through_rows(view, box, base, compute)

    everything = compute(Box((0,) * len(base.size), base.size))
    base_tensor = torch.empty_strided(base.size, base.stride, dtype=base.dtype).copy_(everything)
    offset = view.offset - base.offset * base.dtype.itemsize // view.dtype.itemsize
    storage = base_tensor.untyped_storage()
    moved = View(view.storage, view.size, view.stride, offset, view.dtype)
    return _cut(view_of(storage, moved), box)


def _translated(view: View, box: Box, base: View) -> tuple[Box, list[int]] | None:
    """Return the box of `base` with the elements of a box of `view`, and the order of its dims
    that has the dims of `view` first; None if they are no box of `base`.
    """
    offset = view.offset - base.offset
    for start, stride in zip(box.starts, view.stride, strict=True):
        offset += start * stride

    # Index of the first element.
    starts = [0] * len(base.size)
    long_dims = [dim for dim, size in enumerate(base.size) if size > 1]
    for dim in sorted(long_dims, key=lambda dim: -base.stride[dim]):
        if base.stride[dim] == 0:
            return None
        starts[dim], offset = divmod(offset, base.stride[dim])
        if not 0 <= starts[dim] < base.size[dim]:
            return None
    if offset != 0:
        return None

    sizes = [1] * len(base.size)
    order: list[int] = []
    for size, stride in zip(box.sizes, view.stride, strict=True):
        if size == 1:
            continue
        matching = [dim for dim in long_dims if base.stride[dim] == stride]
        matching = [dim for dim in matching if dim not in order]
        if not matching or starts[matching[0]] + size > base.size[matching[0]]:
            return None
        sizes[matching[0]] = size
        order.append(matching[0])
    order += [dim for dim in range(len(base.size)) if dim not in order]
    return Box(tuple(starts), tuple(sizes)), order


def _through_rows(view: View, box: Box, base: View, compute: Callable[[Box], Tensor]) -> Tensor:
    """Return a box of `view`, by the indices of the first dim of a contiguous `base` between its
    first and its last element.
    """
    first = view.offset - base.offset
    length = 0
    for start, size, stride in zip(box.starts, box.sizes, view.stride, strict=True):
        first += start * stride
        length += (size - 1) * stride

    row = base.stride[0]
    start_row = first // row
    num_rows = (first + length) // row + 1 - start_row
    rows = Box((0,) * len(base.size), base.size).replace(0, start_row, num_rows)
    values = compute(rows).contiguous()
    return values.as_strided(
        box.sizes, view.stride, values.storage_offset() + first - start_row * row
    )


def _is_contiguous(view: View) -> bool:
    """Return whether the view's elements follow one another in memory."""
    stride = 1
    for size, view_stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1 and view_stride != stride:
            return False
        stride *= size
    return True
