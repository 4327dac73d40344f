"""In-place ops and `out=` ops made functional: what a call writes into, and the op that computes what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from alpa_strategy.capture.builder import Builder
from alpa_strategy.capture.rewrite import bound_arguments
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ValueRef
from alpa_strategy.ir.op import TensorMeta

aten = torch.ops.aten
Detached = Callable[[], ValueRef]  # makes the old value without its gradient

_FUNCTIONAL_FORMS = {  # where the name or overload differs from that of the in-place op
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}
_RANDOM_FILLS = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
}
_HIDDEN_WRITES = {  # write into running statistics without saying so in their schema
    aten.native_batch_norm.default,
    aten._batch_norm_impl_index.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


@dataclass(frozen=True)
class Write:
    """One call of an op that writes: into the tensor of node `into`; `is_out`: by an `out=` argument."""

    into: fx.Node
    target: OpOverload
    is_out: bool

    @property
    def name(self) -> str:
        """The op's, without its namespace: `add_`."""
        return self.target._schema.name.split("::")[1]


def write_of(node: fx.Node, target: OpOverload, source: str) -> Write | None:
    """What the call writes; None for an op that writes nothing.

    Raises:
        CaptureError: for writes that cannot be followed.
    """
    refused = CaptureError(
        f"{target} ({source}) writes into its arguments in a way that capture does not follow",
        "use the form that returns a new tensor",
    )
    if target in _HIDDEN_WRITES:
        raise refused
    written = _written(target)
    if not written:
        return None
    if written == ("out",) and isinstance(node.kwargs.get("out"), fx.Node):
        return Write(node.kwargs["out"], target, True)
    is_in_place = written == (target._schema.arguments[0].name,) and target._schema.name.endswith("_")
    if not is_in_place or not isinstance(node.args[0], fx.Node):
        raise refused
    return Write(node.args[0], target, False)


@lru_cache(maxsize=4096)
def _written(target: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the op writes into."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@lru_cache(maxsize=256)
def _without_out(target: OpOverload) -> OpOverload | None:
    """The overload with the same arguments except `out`."""
    packet = target._overloadpacket
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(a.name, str(a.type)) for a in overload._schema.arguments] == wanted and not _written(overload):
            return overload
    return None


def new_value(
    builder: Builder, write: Write, args: tuple[Any, ...], kwargs: dict[str, Any], meta: TensorMeta, detached: Detached
) -> ValueRef:
    """Emit what the call writes into a tensor of `meta`, whose dtype `as_written` gives it.

    Raises:
        CaptureError: for an op that has no form without writing.
    """
    emit, target, name = builder.emit, write.target, write.name
    if write.is_out:
        overload = _without_out(target)
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    elif name in ("copy_", "fill_") and isinstance(args[1], ValueRef):
        source = args[1]
        if builder.meta(source).dtype != meta.dtype:
            source = emit(aten.to.dtype, source, meta.dtype)
        return source if builder.meta(source).shape == meta.shape else emit(aten.expand.default, source, meta.shape)
    elif name in ("fill_", "zero_"):
        return emit(aten.full_like.default, args[0], args[1] if name == "fill_" else 0)
    elif name in _RANDOM_FILLS:  # the old content does not matter, so no gradient goes to it
        given = bound_arguments(target, args, kwargs)
        given.pop("generator", None)
        _, *numbers = given.values()
        functional = _FUNCTIONAL_FORMS.get(target) or getattr(getattr(aten, name[:-1]), target._overloadname)
        return emit(functional, detached(), *numbers)
    else:
        packet = getattr(aten, name[:-1], None) or getattr(aten, name.strip("_"), None)
        overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None:
        raise CaptureError(
            f"the in-place op {name} ({builder.source}) has no form that returns a new tensor",
            "compute the new value with ordinary ops",
        )
    return emit(overload, *args, **kwargs)


def as_written(builder: Builder, write: Write, new: ValueRef, meta: TensorMeta) -> ValueRef:
    """The new value in the dtype of the tensor that it is written to (`meta`)."""
    if builder.meta(new).dtype != meta.dtype:
        new = builder.emit(aten.to.dtype, new, meta.dtype)
    if builder.meta(new).shape != meta.shape:
        raise CaptureError(
            f"{write.name} changes the shape of a tensor in place ({builder.source})",
            "use the form that returns a new tensor",
        )
    return new
