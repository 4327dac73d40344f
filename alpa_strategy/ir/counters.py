"""Numbers made of the step's counters: how each is made, and what stands for it in a captured graph.

The graph holds such a number as an argument (`LateFloat`, `LateInt`) in the place where Python's number stood, so that
dtypes and rounding are those of a plain number. Its value is computed when the program runs, on every rank alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.ir.op import OpCall

COUNTERS = "<counters>"  # what a program's buffers call the values of the counters, by name

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}


@dataclass(frozen=True, repr=False)
class CounterRef:
    """A counter (`batch_idx`, `global_step`, `current_epoch`), or what `function` makes of such: args are CounterRefs
    and numbers.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> CounterRef:
        """`function(*args)`."""
        return cls(getattr(function, "__name__", repr(function)), function, args)

    @property
    def counters(self) -> frozenset[str]:
        """The counters that it is made of."""
        if self.function is None:
            return frozenset({self.name})
        return frozenset().union(*(arg.counters for arg in self.args if isinstance(arg, CounterRef)))

    def value(self, counters: Mapping[str, int]) -> Any:
        """The number for these values of the counters."""
        if self.function is None:
            return counters[self.name]
        return calculate(self.function, *(a.value(counters) if isinstance(a, CounterRef) else a for a in self.args))

    def __str__(self) -> str:
        if self.function is None:
            return self.name
        if self.name in _INFIX and len(self.args) == 2:
            left, right = (f"({arg})" if getattr(arg, "function", None) else f"{arg}" for arg in self.args)
            return f"{left} {_INFIX[self.name]} {right}"
        return f"{self.name}({', '.join(map(str, self.args))})"

    __repr__ = __str__


def calculate(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; a number of NumPy's as one of Python's."""
    result = function(*args)
    return result.item() if isinstance(result, np.generic) else result


class LateNumber:
    """What an op's argument is while nobody knows the counters. As a number it is an example, the same for all: rules
    and trials may compute with it. Equal to what is made in the same way only."""

    made: CounterRef
    example: Any

    def __new__(cls, made: CounterRef) -> Any:
        late = super().__new__(cls, cls.example)  # type: ignore[call-arg]  # of float or int
        late.made = made
        return late

    def __getnewargs__(self) -> tuple[CounterRef]:
        return (self.made,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.made == self.made

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return f"<{self.made!r}>"


class LateFloat(LateNumber, float):  # type: ignore[misc]  # pickled by what it is made of
    """See `LateNumber`."""

    example = 0.7310585786300049


class LateInt(LateNumber, int):  # type: ignore[misc]
    """See `LateNumber`."""

    example = 3


def late(made: CounterRef, example: Any) -> LateInt | LateFloat:
    """The argument for a number made so, of the same type as `example`."""
    return LateInt(made) if isinstance(example, int) else LateFloat(made)


def _set_arithmetic() -> None:
    """Arithmetic with a late number gives a late number."""

    def made(function: Callable[..., Any], *args: Any) -> LateInt | LateFloat:
        example = calculate(function, *(arg.example if isinstance(arg, LateNumber) else arg for arg in args))
        return late(CounterRef.of(function, tuple(a.made if isinstance(a, LateNumber) else a for a in args)), example)

    def set_both(name: str, function: Callable[..., Any]) -> None:
        setattr(LateNumber, f"__{name}__", lambda self, other: made(function, self, other))
        setattr(LateNumber, f"__r{name}__", lambda self, other: made(function, other, self))

    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]:
        set_both(name, getattr(operator, name))
    LateNumber.__neg__ = lambda self: made(operator.neg, self)  # type: ignore[operator]


_set_arithmetic()


def is_late(call: OpCall) -> bool:
    """Whether an argument of the call is a late number."""
    return any(isinstance(leaf, LateNumber) for leaf in pytree.tree_leaves((call.args, call.kwargs)))


def at_counters(call: OpCall, counters: Mapping[str, int]) -> OpCall:
    """The call with the numbers that its late ones are for these values of the counters."""
    if not is_late(call):
        return call

    def value(arg: Any) -> Any:
        return arg.made.value(counters) if isinstance(arg, LateNumber) else arg

    return replace(call, args=pytree.tree_map(value, call.args), kwargs=pytree.tree_map(value, call.kwargs))


# In the trace

_LIBRARY = torch.library.Library("alpa", "FRAGMENT")
_LIBRARY.define(
    "step_number(int index, *, ScalarType dtype, Device device) -> Tensor", tags=torch.Tag.nondeterministic_seeded
)
_LIBRARY.impl(
    "step_number",
    lambda index, *, dtype, device: torch.empty((), dtype=dtype, device=device),
    "CompositeExplicitAutograd",
)
STEP_NUMBER = torch.ops.alpa.step_number.default  # stands for a number in the trace; nothing knows its value


def dtype_beside(tensors: list[Tensor], number: float) -> torch.dtype:
    """The dtype of an element-wise op of `tensors` and a Python number."""
    own = torch.int64 if isinstance(number, int) else torch.get_default_dtype()
    with_dims, without = ([t.dtype for t in tensors if bool(t.ndim) is dims] for dims in (True, False))
    with _disable_current_modes():  # the question is no op of the step
        ranks = [reduce(torch.promote_types, dtypes) for dtypes in (with_dims, without) if dtypes]
        return reduce(_combined, [*ranks, own])


def _combined(higher: torch.dtype, lower: torch.dtype) -> torch.dtype:
    """torch's `combine_categories`: the lower rank counts only where it is of a higher kind."""
    if higher.is_complex or higher.is_floating_point:
        return higher
    return torch.promote_types(higher, lower) if higher == torch.bool or lower.is_floating_point else higher
