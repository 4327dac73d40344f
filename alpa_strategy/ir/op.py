"""One op call as data: its target, its arguments, and the metadata of its operands and results.

An `OpCall` has no tensors and no graph nodes and is hashable. It is the key of cached strategies,
costs and saved tensors, so identical layers share them. The end of this file has functions that
read and replace arguments by name.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.placement import DualPlacement


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in cluster files and plans, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


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

    # An ATen `OpOverload`, or the function of `alpa_strategy.capture.ops` that replaces it.
    target: Any

    # Positional arguments. Lists became tuples; the leaves are `Slot`s and constants.
    args: tuple[Any, ...]

    # (name, value) pairs sorted by name, with the same leaves.
    kwargs: tuple[tuple[str, Any], ...]

    # Metadata of the tensor operands; `Slot(i)` refers to `operands[i]`.
    operands: tuple[TensorMeta, ...]

    # Metadata of the tensor results.
    results: tuple[TensorMeta, ...]

    # Whether the op returns a tuple or list of tensors rather than one tensor.
    returns_tuple: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields: planning looks calls up by the million."""
        metas = self.operands, self.results
        return hash((self.target, self.args, self.kwargs, metas, self.returns_tuple))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: another process has other hashes."""
        state = dict(vars(self))
        state.pop("_hash", None)
        return state

    @property
    def target_name(self) -> str:
        """Printable name, for example `aten.linear.default`."""
        return target_name(self.target)

    @property
    def is_deterministic(self) -> bool:
        """Whether the op is one of PyTorch's that draw no random numbers."""
        if not isinstance(self.target, torch._ops.OpOverload) or self.target.namespace != "aten":
            return False
        return torch.Tag.nondeterministic_seeded not in self.target.tags

    def call(self, *operands: Any) -> Any:
        """Call the target with `operands` (real or fake tensors) in place of the slots."""

        def operand_of(slot: Slot) -> Any:
            return operands[slot.index]

        args = map_slots(self.args, operand_of)
        kwargs = {name: map_slots(value, operand_of) for name, value in self.kwargs}
        return self.target(*args, **kwargs)

    def on(self, device: torch.device) -> "OpCall":
        """Return the same call, for execution on `device`.

        Factories such as `arange` have no operand on the device, so they get it as an argument.
        """
        if device.type == "cpu":
            return self

        schema = getattr(self.target, "_schema", None)
        arguments = getattr(schema, "arguments", ())
        has_device_argument = any(argument.name == "device" for argument in arguments)
        if self.operands or not has_device_argument:
            return self
        kwargs = (*self.kwargs, ("device", device))
        return replace(self, kwargs=tuple(sorted(kwargs)))


class DerivedTarget(ABC):
    """A target that is made of another call; a callable of tensors alone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in plans and programs, the same in every process."""

    @property
    @abstractmethod
    def num_operands(self) -> int:
        """Number of tensor arguments."""


@dataclass(frozen=True)
class CustomOp:
    """An op that stands for the user's Python code."""

    # Name in plans, the same in every process. Torch's name may end in a number.
    shared_name: str

    # The autograd.Function behind it.
    function: type[torch.autograd.Function]


# A table, because torch's OpOverload objects get no attributes of ours.
CUSTOM_OPS: dict[torch._ops.OpOverload, CustomOp] = {}


def target_name(target: Any) -> str:
    """Return a printable name of an op target, the same in every process."""
    if isinstance(target, torch._ops.OpOverload):
        return CUSTOM_OPS[target].shared_name if target in CUSTOM_OPS else str(target)
    if isinstance(target, DerivedTarget):
        return target.name
    module_name = target.__module__.rpartition(".")[2]
    return f"{module_name}.{target.__qualname__}"


def aten_name(target: Any) -> str:
    """Return the name of an ATen op without namespace and overload, such as `add`.

    Empty if the target is not one of ATen's.
    """
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_aten else ""


@dataclass(frozen=True)
class InnerCollective:
    """A collective that a strategy's local implementation runs on its axis, for costs."""

    # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    kind: str

    # Bytes of the full tensor on the axis.
    num_bytes: int

    # `forward` or `backward`
    phase: str


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run an op on one mesh axis: the placements of its operands and results."""

    # One per tensor operand.
    inputs: tuple[DualPlacement, ...]

    # One per tensor result.
    outputs: tuple[DualPlacement, ...]

    # Name in `alpa_strategy.lower.local_ops`, if the plain op on local shards would be wrong.
    implementation: str | None = None

    # The implementation's communication; no part of the text form.
    collectives: tuple[InnerCollective, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        text = f"{','.join(map(str, self.inputs))}->{','.join(map(str, self.outputs))}"
        return f"{text}@{self.implementation}" if self.implementation else text

    @classmethod
    def parse(cls, text: str) -> "AxisStrategy":
        """Return the strategy of a text such as `S0,R*->S0`, without collectives. A name after `@`
        is the implementation.

        Raises:
            ShardingError: a placement is none.
        """
        text, _, implementation = text.partition("@")
        left, _, right = text.partition("->")
        inputs = tuple(DualPlacement.parse(part) for part in left.split(",") if part)
        outputs = tuple(DualPlacement.parse(part) for part in right.split(",") if part)
        return cls(inputs, outputs, implementation or None)


@dataclass(frozen=True)
class LocalCall:
    """An op as one device runs it."""

    # The call with local shapes of operands and results, and local size arguments.
    call: OpCall

    # Name in `alpa_strategy.lower.local_ops`, or None for the plain op.
    implementation: str | None = None

    # The mesh axes over which `implementation` works.
    axes: tuple[int, ...] = ()

    # The mesh axes whose devices must draw different random numbers; along the others they draw
    # the same ones. None for ops that draw none.
    random_axes: tuple[int, ...] | None = None


@cache
def _parameters(target: Any) -> tuple[tuple[str, bool, Any, bool], ...]:
    """Return (name, is a tensor argument, default, keyword only) of every argument of a target."""
    parameters = []
    if isinstance(target, torch._ops.OpOverload):
        for argument in target._schema.arguments:
            # `Tensor?` and `Tensor[]` as well.
            is_tensor = "Tensor" in str(argument.type)
            default = argument.default_value if argument.has_default_value() else None
            parameters.append((argument.name, is_tensor, default, argument.kwarg_only))
        return tuple(parameters)

    if isinstance(target, DerivedTarget):
        return tuple((f"x{index}", True, None, False) for index in range(target.num_operands))

    for parameter in inspect.signature(target).parameters.values():
        is_tensor = "Tensor" in str(parameter.annotation)
        default = None if parameter.default is parameter.empty else parameter.default
        is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        parameters.append((parameter.name, is_tensor, default, is_keyword_only))
    return tuple(parameters)


def frozen(value: Any) -> Any:
    """Return `value` with tuples in place of lists, recursively."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def with_slots(value: Any, kind: type, operands: list[Any]) -> Any:
    """Return `frozen(value)` with a Slot in place of each object of type `kind`.

    The objects are appended to `operands`. One that occurs twice is appended twice.
    """
    if isinstance(value, kind):
        operands.append(value)
        return Slot(len(operands) - 1)
    if isinstance(value, list | tuple):
        return tuple(with_slots(item, kind, operands) for item in value)
    return value


def bound_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return argument name -> value, defaults filled in, in schema order."""
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
    """Return argument name -> value of a call, defaults filled in: Slots, constants and tuples of
    these.

    The mapping is read-only, because all callers share it.
    """
    return MappingProxyType(bound_arguments(call.target, call.args, dict(call.kwargs)))


def call_on(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpCall, tuple[Tensor, ...]]:
    """Run `target(*args, **kwargs)`, and return its OpCall and its tensor operands."""
    operands: list[Tensor] = []
    args_with_slots = with_slots(tuple(args), Tensor, operands)
    kwargs_with_slots = []
    for name, value in sorted(kwargs.items()):
        kwargs_with_slots.append((name, with_slots(value, Tensor, operands)))

    returned = target(*args, **kwargs)
    returns_tuple = not isinstance(returned, Tensor)
    results = tuple(returned) if returns_tuple else (returned,)
    call = OpCall(
        target,
        args_with_slots,
        tuple(kwargs_with_slots),
        tuple(map(_meta_of, operands)),
        tuple(map(_meta_of, results)),
        returns_tuple,
    )
    return call, tuple(operands)


def _meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def flat_tensor_arguments(call: OpCall) -> tuple[Any, ...]:
    """Return the values of the tensor arguments in schema order, lists flattened.

    A value is a Slot, None, or a scalar in place of a tensor.
    """
    flat: list[Any] = []
    for name, is_tensor, _, _ in _parameters(call.target):
        if is_tensor:
            value = bind(call)[name]
            flat += value if isinstance(value, tuple) else (value,)
    return tuple(flat)


def slots(call: OpCall) -> tuple[Slot, ...]:
    """Return the tensor operands in schema order, lists flattened, absent ones left out.

    A slot that is used twice is returned twice.
    """
    return tuple(value for value in flat_tensor_arguments(call) if isinstance(value, Slot))


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Return the non-negative dims of an op's `dim` argument, ascending.

    Args:
        value: an int, a tuple of ints, or None or () for all dims.
        rank: number of dims of the tensor.
    """
    if value is None or value == ():
        return tuple(range(rank))
    # ATen allows dim 0 and -1 of a scalar.
    if not rank:
        return ()
    dims = value if isinstance(value, tuple) else (value,)
    return tuple(sorted(dim % rank for dim in dims))


def rebuild(
    call: OpCall,
    operands: tuple[TensorMeta, ...],
    results: tuple[TensorMeta, ...],
    changes: Mapping[str, Any],
) -> OpCall:
    """Return the same call on other operands.

    Args:
        operands, results: their metadata.
        changes: argument name -> its new value; names that the target lacks are ignored.
    """
    args = list(call.args)
    kwargs = dict(call.kwargs)
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
