"""What one op call is to the planner: its target, its arguments, and the metadata of the tensors
around it.

An `OpCall` holds no tensors and no graph nodes, is hashable, and is therefore the key under which
strategies, costs and saved-tensor findings are remembered: identical layers share all of it. At the
end: its arguments, by name or new.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.placement import DualPlacement


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and differentiability of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.num_elements * self.dtype.itemsize

    def with_shape(self, shape: tuple[int, ...]) -> "TensorMeta":
        """The same kind of tensor in another shape."""
        return TensorMeta(tuple(shape), self.dtype, self.requires_grad)


@dataclass(frozen=True)
class Slot:
    """Stands in an op's arguments for its `index`-th tensor operand."""

    index: int


def map_slots(arg: Any, fn: Callable[[Slot], Any]) -> Any:
    """Replace every `Slot` in a nested argument by `fn(slot)`; tuples stay tuples."""
    if isinstance(arg, Slot):
        return fn(arg)
    if isinstance(arg, tuple):
        return tuple(map_slots(item, fn) for item in arg)
    return arg


@dataclass(frozen=True)
class OpCall:
    """One call of one op."""

    # an ATen `OpOverload`, or a function of `alpa_strategy.capture.ops` that capture put in its
    # place
    target: Any
    args: tuple[
        Any, ...
    ]  # positional; nested tuples whose leaves are `Slot`s and constants (lists became tuples)
    kwargs: tuple[tuple[str, Any], ...]  # sorted (name, value) pairs, same leaves
    operands: tuple[TensorMeta, ...]  # of the tensor operands, `Slot(i)` refers to `operands[i]`
    results: tuple[TensorMeta, ...]  # of the tensor results
    returns_tuple: bool = (
        False  # True when the op returns a tuple or list of tensors rather than one tensor
    )

    @property
    def target_name(self) -> str:
        """For example `aten.linear.default`."""
        return target_name(self.target)

    def call(self, *operands: Any) -> Any:
        """Call the target with `operands` (real or fake tensors) in place of the slots."""

        def operand_of(slot: Slot) -> Any:
            return operands[slot.index]

        args = map_slots(self.args, operand_of)
        kwargs = {name: map_slots(value, operand_of) for name, value in self.kwargs}
        return self.target(*args, **kwargs)

    def on(self, device: torch.device) -> "OpCall":
        """The same call as `device` is to make it: `arange` and its like have no operand that says
        where.

        A 1x1 convolution gets holes in its kernel, which has none, on CPUs: so PyTorch gives it to
        oneDNN. It would let one thread make a matrix product of less than 16 rows, half as fast
        (fp32, AVX-512).
        """
        if device.type != "cpu":
            arguments = getattr(getattr(self.target, "_schema", None), "arguments", ())
            takes_device = not self.operands and any(
                argument.name == "device" for argument in arguments
            )
            return (
                replace(self, kwargs=tuple(sorted((*self.kwargs, ("device", device)))))
                if takes_device
                else self
            )
        if (
            aten_name(self.target) not in ("conv1d", "conv2d", "conv3d")
            or not torch.backends.mkldnn.is_available()
        ):
            return self
        given = bind(self)
        weight = self.operands[given["weight"].index]
        if weight.dtype != torch.float32 or math.prod(weight.shape[2:]) > 1:
            return self
        return replace(
            self,
            args=tuple({**given, "dilation": (2,) * len(weight.shape[2:])}.values()),
            kwargs=(),
        )


@dataclass(frozen=True)
class CustomOp:
    """What is known of an op that stands for the user's Python code."""

    shared_name: str  # name in plans, the same in every process; torch's own may end in a number
    function: type[torch.autograd.Function]  # the autograd.Function behind it


# By op: nothing is stuck onto torch's OpOverload objects.
CUSTOM_OPS: dict[torch._ops.OpOverload, CustomOp] = {}


def target_name(target: Any) -> str:
    """Stable printable name of an op target, the same in every process."""
    if isinstance(target, torch._ops.OpOverload):
        return CUSTOM_OPS[target].shared_name if target in CUSTOM_OPS else str(target)
    return f"{target.__module__.rpartition('.')[2]}.{target.__qualname__}"


def aten_name(target: Any) -> str:
    """The name of ATen's op, without namespace and overload: `add`; empty where the target is none
    of ATen's.
    """
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_aten else ""


@dataclass(frozen=True)
class InnerCollective:
    """A collective that a strategy's local implementation runs itself, on its axis (for
    costing).
    """

    kind: str  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    num_bytes: int  # bytes of the full tensor on the axis
    phase: str  # `forward` or `backward`


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run an op on one mesh axis: the layouts it takes and gives there."""

    inputs: tuple[DualPlacement, ...]  # of each tensor operand
    outputs: tuple[DualPlacement, ...]  # of each tensor result
    # name in `alpa_strategy.lower.local_ops`, where the plain op on local shards would not be right
    implementation: str | None = None
    # what the implementation communicates; no part of the text form
    collectives: tuple[InnerCollective, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        text = f"{','.join(map(str, self.inputs))}->{','.join(map(str, self.outputs))}"
        return f"{text}@{self.implementation}" if self.implementation else text

    @classmethod
    def parse(cls, text: str) -> "AxisStrategy":
        """Read the text form (collectives are not part of it: they only matter to costs)."""
        text, _, implementation = text.partition("@")
        left, _, right = text.partition("->")
        sides = [
            tuple(DualPlacement.parse(p) for p in side.split(",") if p) for side in (left, right)
        ]
        return cls(sides[0], sides[1], implementation or None)


@dataclass(frozen=True)
class LocalCall:
    """An op as one device runs it."""

    call: OpCall  # the call with local operand and result shapes and local size arguments
    implementation: str | None = (
        None  # name in `alpa_strategy.lower.local_ops`, or None for the plain op
    )
    axes: tuple[int, ...] = ()  # the mesh axes over which `implementation` works
    # the mesh axes whose devices must draw different numbers (the others: the same); None for ops
    # that draw none
    random_axes: tuple[int, ...] | None = None


@cache
def _parameters(target: Any) -> tuple[tuple[str, bool, Any, bool], ...]:
    """(name, is a tensor argument, default, keyword only) of every argument of a target."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(
            # `Tensor?` and `Tensor[]` as well.
            (
                a.name,
                "Tensor" in str(a.type),
                a.default_value if a.has_default_value() else None,
                a.kwarg_only,
            )
            for a in target._schema.arguments
        )
    return tuple(
        (
            p.name,
            "Tensor" in str(p.annotation),
            None if p.default is p.empty else p.default,
            p.kind is p.KEYWORD_ONLY,
        )
        for p in inspect.signature(target).parameters.values()
    )


def frozen(value: Any) -> Any:
    """Lists become tuples, recursively."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def with_slots(value: Any, kind: type, operands: list[Any]) -> Any:
    """`frozen`, with Slots in place of what is of `kind`, each added to `operands` (one given twice
    is two).
    """
    if isinstance(value, kind):
        operands.append(value)
        return Slot(len(operands) - 1)
    return (
        tuple(with_slots(v, kind, operands) for v in value)
        if isinstance(value, list | tuple)
        else value
    )


def bound_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Argument name -> value, defaults filled in, in schema order."""
    bound = {}
    for position, (name, _, default, keyword_only) in enumerate(_parameters(target)):
        if name in kwargs:
            bound[name] = kwargs[name]
        elif not keyword_only and position < len(args):
            bound[name] = args[position]
        else:
            bound[name] = frozen(default)
    return bound


@lru_cache(maxsize=16384)
def bind(call: OpCall) -> Mapping[str, Any]:
    """`bound_arguments` of a call: Slots, constants, tuples."""
    return MappingProxyType(
        bound_arguments(call.target, call.args, dict(call.kwargs))
    )  # shared: read only


def call_on(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, tuple[Tensor, ...]]:
    """The OpCall of `target(*args, **kwargs)`, which is run, and its tensor operands."""
    operands: list[Tensor] = []
    own_args = with_slots(tuple(args), Tensor, operands)
    own_kwargs = tuple(
        (name, with_slots(value, Tensor, operands)) for name, value in sorted(kwargs.items())
    )
    result = target(*args, **kwargs)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    metas = [TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in (*operands, *results)]
    n = len(operands)
    call = OpCall(
        target,
        own_args,
        own_kwargs,
        tuple(metas[:n]),
        tuple(metas[n:]),
        not isinstance(result, Tensor),
    )
    return call, tuple(operands)


def flat_tensor_arguments(call: OpCall) -> tuple[Any, ...]:
    """Values of the tensor arguments in schema order, lists flattened: a Slot, None, or a scalar in
    their place.
    """
    flat: list[Any] = []
    for name, is_tensor, _, _ in _parameters(call.target):
        if is_tensor:
            value = bind(call)[name]
            flat += value if isinstance(value, tuple) else (value,)
    return tuple(flat)


def slots(call: OpCall) -> tuple[Slot, ...]:
    """The tensor operands in schema order, lists flattened, absent ones left out. A slot used twice
    is there twice.
    """
    return tuple(v for v in flat_tensor_arguments(call) if isinstance(v, Slot))


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Non-negative dims from an int, a tuple of ints, or None / () meaning all."""
    if value is None or value == ():
        return tuple(range(rank))
    values = value if isinstance(value, tuple) else (value,)
    return (
        tuple(sorted(v % rank for v in values)) if rank else ()
    )  # ATen takes dim 0 and -1 of a scalar


def rebuild(
    call: OpCall,
    operands: tuple[TensorMeta, ...],
    results: tuple[TensorMeta, ...],
    changes: Mapping[str, Any],
) -> OpCall:
    """The same call on other operands, with the arguments named in `changes` replaced where they
    were given.
    """
    args, kwargs = list(call.args), dict(call.kwargs)
    for position, (name, _, _, keyword_only) in enumerate(_parameters(call.target)):
        if name not in changes:
            continue
        if not keyword_only and position < len(args):
            args[position] = changes[name]
        else:
            kwargs[name] = changes[name]
    return OpCall(
        call.target,
        tuple(args),
        tuple(sorted(kwargs.items())),
        operands,
        results,
        call.returns_tuple,
    )
