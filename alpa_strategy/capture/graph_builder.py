"""Builds the StepGraph: values numbered, ops inferred on fake tensors one by one; and views and
in-place ops made functional, single assignment out of a program that mutates tensors.

Identical calls (same target, arguments and operand metadata) are inferred once, so identical layers
cost nothing.

A `Storage` holds the current value of a whole tensor; a `View` is a chain of view ops from it.
Reading a stale view replays its chain; writing to a view scatters the new value back through the
chain. Dead write-backs are removed later.
`write_of` says what a call writes into (`x.op_(...)`, `op(..., out=x)`), `new_value` computes it
out of place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from alpa_strategy.cost.saved_tensors import without_data
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import Op, ValueRef
from alpa_strategy.ir.op import OpCall, TensorMeta, aten_name, bound_arguments, with_slots

aten = torch.ops.aten


@lru_cache(maxsize=1)
def _inference_mode() -> FakeTensorMode:
    return FakeTensorMode()


def run_fake(
    call: OpCall, run: Callable[[list[Tensor]], Any] | None = None, device: str = "cpu"
) -> Any:
    """Call on contiguous fake operands in grad mode; `run`, if given, is called with the operands
    instead.
    """
    # In grad mode, whatever the step's is: `requires_grad` of the results must come out as in
    # training.
    with _inference_mode(), torch.enable_grad():
        operands = without_data(call, device)
        return call.call(*operands) if run is None else run(operands)


@lru_cache(maxsize=4096)
def infer(call: OpCall) -> tuple[OpCall, tuple[int | None, ...]]:
    """Run a call on fake tensors.

    Returns:
        The call with the metadata of its tensor results, requires_grad included; and, for each item
        that it returns, its number among the tensors, or None if it is no tensor.
    """
    returned = run_fake(call)
    returns_tuple = isinstance(returned, tuple | list)
    metas: list[TensorMeta] = []
    numbers: list[int | None] = []
    for item in returned if returns_tuple else [returned]:
        if isinstance(item, Tensor):
            numbers.append(len(metas))
            metas.append(TensorMeta(tuple(item.shape), item.dtype, item.requires_grad))
        else:
            numbers.append(None)
    return replace(call, results=tuple(metas), returns_tuple=returns_tuple), tuple(numbers)


class Builder:
    """Grows values and ops. Arguments given to `emit` hold ValueRefs for tensors."""

    def __init__(self) -> None:
        self.values: list[TensorMeta] = []
        self.ops: list[Op] = []
        self.module = ""
        self.source = ""

    def add_value(self, meta: TensorMeta) -> ValueRef:
        """Add a value to the graph, and return its reference."""
        self.values.append(meta)
        return ValueRef(len(self.values) - 1)

    def meta(self, ref: ValueRef) -> TensorMeta:
        """Return the shape, dtype and `requires_grad` of a value."""
        return self.values[ref.index]

    def call_of(
        self, target: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> tuple[OpCall, list[ValueRef]]:
        """Return a call of the op `target` as an OpCall without results, and its operands: the
        ValueRefs in `args`, then those in `kwargs`, sorted by name.

        Equal calls on other tensors are equal OpCalls.
        """
        operands: list[ValueRef] = []
        slot_args = with_slots(tuple(args), ValueRef, operands)
        slot_kwargs = []
        for name, value in sorted((kwargs or {}).items()):
            slot_kwargs.append((name, with_slots(value, ValueRef, operands)))
        metas = tuple(map(self.meta, operands))
        return OpCall(target, slot_args, tuple(slot_kwargs), metas, ()), operands

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the op `target`, with ValueRefs among its arguments.

        Returns:
            A ValueRef, or a tuple of them if the op returns one; None in place of what is no
            tensor.
        """
        without_results, operands = self.call_of(target, args, kwargs)
        call, numbers = infer(without_results)
        refs = [self.add_value(meta) for meta in call.results]
        operand_values = tuple(ref.index for ref in operands)
        result_values = tuple(ref.index for ref in refs)
        self.ops.append(Op("", call, operand_values, result_values, self.module, self.source))

        items: list[ValueRef | None] = []
        for number in numbers:
            items.append(None if number is None else refs[number])
        return tuple(items) if call.returns_tuple else items[0]


def map_refs(tree: Any, fn: Callable[[ValueRef], Any]) -> Any:
    """Replace the ValueRefs of a pytree."""
    return pytree.tree_map_only(ValueRef, fn, tree)


@dataclass
class Storage:
    """A tensor that owns memory. `parameter`: its name, or ""; `is_outside`: no input of the graph,
    not written to.
    """

    value: ValueRef
    parameter: str = ""
    version: int = 0
    is_outside: bool = False


@dataclass(frozen=True)
class ViewStep:
    """One view op: `target(*args, **kwargs)` with `position` of args replaced by the tensor; `item`
    of its results.

    `position` is None when the tensor is not a plain argument: such a view can be read, but not
    changed.
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
    version: int = 0

    @property
    def is_detached(self) -> bool:
        """Whether no gradient goes from the view to its storage."""
        return any(step.target is aten.detach.default for step in self.chain)


class Memory:
    """Reads and writes views through a Builder."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def new(self, value: ValueRef, parameter: str = "") -> View:
        """Return a tensor with memory of its own, which has `value`."""
        return View(Storage(value, parameter), value)

    def derive(self, base: View, step: ViewStep, value: ValueRef) -> View:
        """Return the view that `step` makes of `base`, which was just read.

        Args:
            value: of the view.
        """
        return View(base.storage, value, (*base.chain, step), base.storage.version)

    def same(self, base: View) -> View:
        """Return another tensor on the memory of `base` (alias, no-op conversion)."""
        return View(base.storage, self.read(base), base.chain, base.storage.version)

    def read(self, view: View) -> ValueRef:
        """Return the view's present value. If its memory was written to since the last read, ops
        that compute it are emitted, or CaptureError is raised if one is not supported.
        """
        if view.version != view.storage.version:
            view.value = self._prefixes(view)[-1]
            view.version = view.storage.version
        return view.value

    def write(self, view: View, value: ValueRef) -> None:
        """Record that `value` (same shape and dtype) is written into `view`, and so into every
        tensor that shares its memory.

        Raises:
            CaptureError: the memory is that of a tensor outside of the graph that is no buffer, or
                an op that made the view is not supported.
        """
        if view.storage.is_outside:
            raise CaptureError(
                f"the step changes a tensor that is no buffer in place ({self.builder.source})",
                "register it: self.register_buffer(name, tensor, persistent=False)",
            )
        # The storage, then the view of it, the view of that, ...
        current = self._prefixes(view)[:-1] if view.chain else []
        changed = value
        for step, before in zip(reversed(view.chain), reversed(current), strict=True):
            changed = self._scatter(step, before, changed, bool(view.storage.parameter))
        view.storage.value = changed
        # All other views of it are stale now.
        view.storage.version += 1
        view.value, view.version = value, view.storage.version

    def _prefixes(self, view: View) -> list[ValueRef]:
        """Emit the ops of a view's chain on the present storage, and return the values along it:
        the storage first, the view itself last.

        A CaptureError if an op of the chain is not supported.
        """
        values = [view.storage.value]
        for step in view.chain:
            if step.position is None:
                raise self._unsupported(step.target)
            args = list(step.args)
            args[step.position] = values[-1]
            out = self.builder.emit(step.target, *args, **dict(step.kwargs))
            values.append(out if step.item is None else out[step.item])
        return values

    def _scatter(
        self, step: ViewStep, before: ValueRef, changed: ValueRef, is_parameter: bool
    ) -> ValueRef:
        """Emit `before` with the part viewed by `step` set to `changed`, or raise CaptureError.

        Args:
            is_parameter: whether a parameter's memory is changed, which has no gradient then.
        """
        emit, shape = self.builder.emit, list(self.builder.meta(before).shape)
        rest = [a for i, a in enumerate(step.args) if i != step.position]
        num_elements = self.builder.meta(changed).num_elements
        match aten_name(step.target):
            case (
                "view"
                | "reshape"
                | "flatten"
                | "unflatten"
                | "squeeze"
                | "unsqueeze"
                | "view_as"
                | "_unsafe_view"
            ):
                return emit(aten.reshape.default, changed, shape)
            case "transpose" | "swapaxes" | "swapdims":
                return emit(aten.transpose.int, changed, *rest)
            case "t" | "numpy_T" | "mT":
                return emit(aten.transpose.int, changed, -2, -1)
            case "permute":
                order = [d % len(shape) for d in rest[0]]
                return emit(
                    aten.permute.default, changed, [order.index(d) for d in range(len(order))]
                )
            case "select":
                return self._place(aten.select_scatter.default, before, changed, *rest)
            case "slice":
                return self._place(aten.slice_scatter.default, before, changed, *rest)
            case "narrow":
                dim, start, length = rest
                return self._place(
                    aten.slice_scatter.default, before, changed, dim, start, start + length
                )
            case "diagonal":
                return emit(aten.diagonal_scatter.default, before, changed, *rest)
            case "unbind":
                return self._place(
                    aten.select_scatter.default, before, changed, rest[0] if rest else 0, step.item
                )
            case "detach" if self.builder.meta(before).requires_grad and not is_parameter:
                raise CaptureError(
                    "a tensor that requires grad is changed through .detach() or .data"
                    f" ({self.builder.source})",
                    "change a detached clone instead: `y = x.detach().clone()`",
                )
            # The same elements in the same places.
            case "detach" | "alias" | "contiguous" | "to" | "positive" | "lift_fresh":
                return changed
            # Else elements were repeated: one write would go to several of them.
            case "expand" | "expand_as" if num_elements == self.builder.meta(before).num_elements:
                return emit(aten.reshape.default, changed, shape)
        raise self._unsupported(step.target)

    def _place(
        self, scatter: Any, before: ValueRef, changed: ValueRef, dim: int = 0, *where: Any
    ) -> ValueRef:
        """Emit `scatter`, and return the tensor with its new part.

        Complex numbers are scattered as pairs of real ones: autograd has no other scatter.

        Args:
            scatter: an op such as `slice_scatter`.
            before: the tensor.
            changed: the new values of its part.
            dim: along which the part was taken.
            where: the other arguments of `scatter`.
        """
        emit = self.builder.emit
        meta = self.builder.meta(before)
        if not meta.dtype.is_complex:
            return emit(scatter, before, changed, dim, *where)

        def as_real(ref: ValueRef) -> ValueRef:
            return emit(aten.view_as_real.default, emit(aten.resolve_conj.default, ref))

        # The pairs are a new last dim: count `dim` from the front.
        dim %= len(meta.shape)
        scattered = emit(scatter, as_real(before), as_real(changed), dim, *where)
        return emit(aten.view_as_complex.default, scattered)

    def _unsupported(self, target: Any) -> CaptureError:
        """Return the error for a write to memory of which a view by `target` is in use."""
        return CaptureError(
            f"a tensor is changed in place while a view of it made by {target} is in use"
            f" ({self.builder.source})",
            "use the op that returns a new tensor (without the trailing underscore), or clone()"
            " before changing",
        )


def storages_of(value: Any) -> set[int]:
    """Return the identities of the storages of all tensors in a pytree."""
    # Fake tensors have storages too, of no bytes.
    return {t.untyped_storage()._cdata for t in pytree.tree_leaves(value) if isinstance(t, Tensor)}


def sharing_node(result: Any, node: fx.Node) -> fx.Node | None:
    """Return the first operand of `node` whose memory a result uses; None if it has memory of its
    own. A tensor from outside of the graph counts if the op's schema says that a result is a view.

    Args:
        result: a traced (fake) tensor of the node.
    """
    storages, schema = storages_of(result), getattr(node.target, "_schema", None)
    is_view = schema is not None and any(
        returned.alias_info is not None for returned in schema.returns
    )
    for input_node in node.all_input_nodes:
        # Of a tensor that lies outside of the graph only the schema knows.
        if storages & storages_of(input_node.meta.get("val")) or (
            input_node.op == "get_attr" and is_view
        ):
            return input_node
    return None


_RANDOM_FILLS = [
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
]
_HIDDEN_WRITES = {  # write into running statistics without saying so in their schema
    aten.native_batch_norm.default,
    aten._batch_norm_impl_index.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


@dataclass(frozen=True)
class Write:
    """One call of an op that writes: into the tensor of node `into`; `is_out`: by an `out=`
    argument.
    """

    into: fx.Node
    target: OpOverload
    is_out: bool

    @property
    def name(self) -> str:
        """The op's, without its namespace: `add_`."""
        return self.target._schema.name.split("::")[1]


def write_of(node: fx.Node, target: OpOverload, source: str) -> Write | None:
    """Return the write of a call; None for an op that writes into none of its arguments.

    Args:
        node: of the call.
        target: its op.
        source: the user's line, for the message.

    Raises:
        CaptureError: it writes into something else than its first argument or `out`, or changes
            an argument's shape in place (`t_`).
    """
    refused = CaptureError(
        f"{target} ({source}) writes into its arguments in a way that capture does not follow",
        "use the form that returns a new tensor",
    )
    # F.batch_norm is fine: it is one op of the trace (`rewrite_norm`). `t_`: views of its argument
    # stay as they are.
    if target in _HIDDEN_WRITES or torch.Tag.inplace_view in target.tags:
        raise refused
    written = _written(target)
    if not written:
        return None
    out = node.kwargs.get("out")
    if written == ("out",) and isinstance(out, fx.Node):
        return Write(out, target, True)
    is_in_place = written == (target._schema.arguments[0].name,) and target._schema.name.endswith(
        "_"
    )
    if not is_in_place or not isinstance(node.args[0], fx.Node):
        raise refused
    return Write(node.args[0], target, False)


@lru_cache(maxsize=4096)
def _written(target: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that the op writes into."""
    return tuple(
        a.name
        for a in target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    )


@lru_cache(maxsize=256)
def _without_writing(packet: Any, target: OpOverload) -> OpOverload | None:
    """Return the overload of `packet` that writes to none of its arguments and has the arguments of
    `target` except `out`; None if there is none.

    Its name may be another one, as for `pow_`.
    """
    wanted = _arguments_of(target)
    for name in packet.overloads():
        overload = getattr(packet, name)
        if _arguments_of(overload) == wanted and not _written(overload):
            return overload
    return None


def _arguments_of(overload: OpOverload) -> list[tuple[str, str]]:
    """Return names and types of the arguments except `out`. The first one's name does not count:
    `dropout_` calls its `self`, `dropout` its `input`.
    """
    arguments = [argument for argument in overload._schema.arguments if argument.name != "out"]
    named = [(argument.name, str(argument.type)) for argument in arguments]
    return [("", kind) for _, kind in named[:1]] + named[1:]


def new_value(
    builder: Builder,
    write: Write,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: TensorMeta,
    detached: ValueRef,
) -> ValueRef:
    """Emit the value that a writing call gives to a tensor, and return it.

    Args:
        write: the call, which writes in place or to `out`.
        args: of the call, tensors as ValueRefs.
        kwargs: as `args`.
        meta: of the tensor that is written to. The value may have another dtype: see
            `in_its_dtype`.
        detached: the tensor's old value without its gradient.

    Raises:
        CaptureError: for an op that has no form without writing.
    """
    emit = builder.emit
    target = write.target
    name = write.name
    if write.is_out:
        overload = _without_writing(target._overloadpacket, target)
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    elif name in ("copy_", "fill_") and isinstance(args[1], ValueRef):
        source = args[1]
        if builder.meta(source).dtype != meta.dtype:
            source = emit(aten.to.dtype, source, meta.dtype)
        return (
            source
            if builder.meta(source).shape == meta.shape
            else emit(aten.expand.default, source, meta.shape)
        )
    elif name in ("fill_", "zero_"):
        return emit(aten.full_like.default, args[0], args[1] if name == "fill_" else 0)
    elif name in _RANDOM_FILLS:  # the old content does not matter, so no gradient goes to it
        arguments = bound_arguments(target, args, kwargs)
        arguments.pop("generator", None)
        _, *numbers = arguments.values()
        functional = _without_writing(
            aten.normal_functional if name == "normal_" else getattr(aten, name[:-1]), target
        )
        return emit(functional, detached, *numbers)
    else:
        packet = getattr(aten, name[:-1], None) or getattr(aten, name.strip("_"), None)
        overload = _without_writing(packet, target) if packet is not None else None
    if overload is None:
        raise CaptureError(
            f"the in-place op {name} ({builder.source}) has no form that returns a new tensor",
            "compute the new value with ordinary ops",
        )
    return emit(overload, *args, **kwargs)


def in_its_dtype(builder: Builder, write: Write, new: ValueRef, meta: TensorMeta) -> ValueRef:
    """Return the new value in the dtype of the tensor that it is written to.

    Args:
        write: the op in place, for the message.
        new: what it computes.
        meta: of the tensor that it changes.

    Raises:
        CaptureError: the new value has another shape.
    """
    if builder.meta(new).dtype != meta.dtype:
        new = builder.emit(aten.to.dtype, new, meta.dtype)
    if builder.meta(new).shape != meta.shape:
        raise CaptureError(
            f"{write.name} changes the shape of a tensor in place ({builder.source})",
            "use the form that returns a new tensor",
        )
    return new
