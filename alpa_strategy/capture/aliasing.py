"""Views and in-place ops made functional: single assignment out of a program that mutates tensors.

A `Storage` holds the current value of a whole tensor; a `View` is a chain of view ops from it. Reading a stale view
replays its chain; writing to a view scatters the new value back through the chain. Dead write-backs are removed later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from alpa_strategy.capture.builder import Builder
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ValueRef

aten = torch.ops.aten


@dataclass
class Storage:
    """A tensor that owns memory. `origin` says what it is for messages: "parameter wte.weight", "" for a result."""

    value: ValueRef
    origin: str = ""
    version: int = 0


@dataclass(frozen=True)
class ViewStep:
    """One view op: `target(*args, **kwargs)` with `position` of args replaced by the tensor; `item` of its results.

    `position` is None when the tensor is not a plain argument: such a view can be read, but not changed.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    position: int | None
    item: int | None


@dataclass
class View:
    """A tensor of the program: its storage, the way there, and its value as of `version`."""

    storage: Storage
    value: ValueRef
    chain: tuple[ViewStep, ...] = ()
    version: int = field(default=0)


class Memory:
    """Reads and writes views through a Builder."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def new(self, value: ValueRef, origin: str = "") -> View:
        """A tensor with memory of its own."""
        return View(Storage(value, origin), value)

    def derive(self, base: View, step: ViewStep, value: ValueRef) -> View:
        """The view that `step` made of `base`, which was just read."""
        return View(base.storage, value, (*base.chain, step), base.storage.version)

    def same(self, base: View) -> View:
        """Another name of `base` (alias, no-op conversion)."""
        return View(base.storage, self.read(base), base.chain, base.storage.version)

    def read(self, view: View) -> ValueRef:
        """The view's value now: made anew where its memory was written to since it was read last."""
        if view.version != view.storage.version:
            view.value = self._prefixes(view)[-1]
            view.version = view.storage.version
        return view.value

    def write(self, view: View, value: ValueRef) -> None:
        """`view` now holds `value` (same shape and dtype), and so does every tensor that shares its memory."""
        current = self._prefixes(view)[:-1] if view.chain else []
        changed = value
        for step, before in zip(reversed(view.chain), reversed(current), strict=True):
            changed = self._scatter(step, before, changed)
        view.storage.value = changed
        view.storage.version += 1
        view.value, view.version = value, view.storage.version

    def _prefixes(self, view: View) -> list[ValueRef]:
        """Current values along the chain: storage first, the view itself last."""
        values = [view.storage.value]
        for step in view.chain:
            if step.position is None:
                raise self._unsupported(step.target)
            args = list(step.args)
            args[step.position] = values[-1]
            out = self.builder.emit(step.target, *args, **dict(step.kwargs))
            values.append(out if step.item is None else out[step.item])
        return values

    def _scatter(self, step: ViewStep, before: ValueRef, changed: ValueRef) -> ValueRef:
        """`before` with the part that `step` views replaced by `changed`."""
        emit, shape = self.builder.emit, list(self.builder.meta(before).shape)
        name = step.target._schema.name.split("::")[1]
        rest = [a for i, a in enumerate(step.args) if i != step.position]
        num_elements = self.builder.meta(changed).num_elements
        match name:
            case "view" | "reshape" | "flatten" | "unflatten" | "squeeze" | "unsqueeze" | "view_as" | "_unsafe_view":
                return emit(aten.reshape.default, changed, shape)
            case "transpose" | "swapaxes" | "swapdims":
                return emit(aten.transpose.int, changed, *rest)
            case "t" | "numpy_T" | "mT" | "matrix_H":
                return emit(aten.transpose.int, changed, -2, -1)
            case "permute":
                order = [d % len(shape) for d in rest[0]]
                return emit(aten.permute.default, changed, [order.index(d) for d in range(len(order))])
            case "select":
                return self._place(aten.select_scatter.default, before, changed, *rest)
            case "slice":
                return self._place(aten.slice_scatter.default, before, changed, *rest)
            case "narrow":
                dim, start, length = rest
                return self._place(aten.slice_scatter.default, before, changed, dim, start, start + length)
            case "diagonal":
                return emit(aten.diagonal_scatter.default, before, changed, *rest)
            case "split" | "split_with_sizes" | "chunk" | "tensor_split":
                return self._scatter_piece(step, before, changed)
            case "unbind":
                return self._place(aten.select_scatter.default, before, changed, rest[0] if rest else 0, step.item)
            case "detach" if self.builder.meta(before).requires_grad:
                raise CaptureError(
                    f"a tensor that requires grad is changed through .detach() or .data ({self.builder.source})",
                    "change a detached clone instead: `y = x.detach().clone()`",
                )
            case "detach" | "alias" | "contiguous" | "to" | "positive" | "lift_fresh":
                return changed
            case "expand" | "expand_as" if num_elements == self.builder.meta(before).num_elements:
                return emit(aten.reshape.default, changed, shape)
        raise self._unsupported(step.target)

    def _place(self, scatter: Any, before: ValueRef, changed: ValueRef, dim: int = 0, *where: Any) -> ValueRef:
        """`scatter` along `dim`; complex numbers as pairs of real ones, the only ones of which autograd knows it."""
        emit, meta = self.builder.emit, self.builder.meta(before)
        if not meta.dtype.is_complex:
            return emit(scatter, before, changed, dim, *where)
        whole, part = (emit(aten.view_as_real.default, emit(aten.resolve_conj.default, x)) for x in (before, changed))
        return emit(aten.view_as_complex.default, emit(scatter, whole, part, dim % len(meta.shape), *where))

    def _unsupported(self, target: Any) -> CaptureError:
        return CaptureError(
            f"a tensor is changed in place while a view of it made by {target} is in use ({self.builder.source})",
            "use the op that returns a new tensor (without the trailing underscore), or clone() before changing",
        )

    def _scatter_piece(self, step: ViewStep, before: ValueRef, changed: ValueRef) -> ValueRef:
        """A piece of split or chunk: its offset is the sum of the sizes before it."""
        args = list(step.args)
        args[step.position] = before
        pieces = self.builder.emit(step.target, *args, **dict(step.kwargs))
        dim_names = [a.name for a in step.target._schema.arguments]
        at = dim_names.index("dim")
        dim = args[at] if at < len(args) else dict(step.kwargs).get("dim", 0)
        sizes = [self.builder.meta(p).shape[dim] for p in pieces]
        start = sum(sizes[: step.item])
        return self._place(aten.slice_scatter.default, before, changed, dim, start, start + sizes[step.item])


def storage_of(value: Tensor) -> int:
    """What tensors that share memory have in common."""
    return value.untyped_storage()._cdata


def sharing_node(result: Any, operand_nodes: list[fx.Node]) -> fx.Node | None:
    """The operand whose memory a result uses, as the traced (fake) tensors know; None: memory of its own."""
    if not isinstance(result, Tensor):
        return None
    for node in operand_nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and storage_of(value) == storage_of(result):
            return node
    return None
