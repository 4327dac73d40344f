"""StepCounter: what the step's Python sees of batch_idx, global_step and current_epoch while it is captured.

Arithmetic and functions of `math` and NumPy give another one, comparisons become guards, and where it meets a tensor,
its number becomes an argument of the graph that is computed at every step (ir/counters.py).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.blame import is_user_file, user_frame
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.counters import STEP_NUMBER, CounterRef, calculate, dtype_beside
from alpa_strategy.ir.guards import Guard, compare


class StepCounter:
    """Stands for a number made of the step's counters. `made`: how; `record` is told of every comparison.

    No subclass of int or float: C code takes the number of one unasked (`0.1 * counter`, `steps[counter]`).
    """

    __slots__ = ("made", "record", "value")

    def __init__(self, value: float, made: CounterRef, record: Callable[[Guard], None]) -> None:
        """A number that is `value` now."""
        self.value, self.made, self.record = value, made, record

    @property
    def __class__(self) -> type:  # for isinstance(batch_idx, int)
        return type(self.value)

    def _compare(self, op: str, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        right = (other.made, other.value) if type(other) is StepCounter else (other, other)
        outcome = compare(op, self.value, right[1])
        self.record(Guard(self.made, op, right[0], outcome))
        return outcome

    @property
    def seldom_changes(self) -> bool:
        """Whether a graph may be good for one value."""
        return self.made.counters == {"current_epoch"}

    def as_number(self) -> float:
        """The number as it is now: the graph is good for it alone. Only of one that seldom changes."""
        if not self.seldom_changes:
            self.refuse()
        self.record(Guard(self.made, "==", self.value, True))
        return self.value

    def refuse(self) -> NoReturn:
        """The number goes where it would be frozen into the graph."""
        raise CaptureError(
            f"{' and '.join(sorted(self.made.counters))}: a number made of it stands where the captured graph would "
            f"keep the value of the first step forever ({user_frame()})",
            "compute it with Python's operators and functions of `math` (no shapes, items of lists, sets or `range`) "
            "and use it element by element (`beta * x`, `x > limit`), compare it (`if self.global_step % 100 == 0`), "
            "or keep the number in a registered buffer that the step or a callback updates",
        )

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other)

    def __bool__(self) -> bool:
        return self._compare("!=", 0)

    def __hash__(self) -> int:
        return hash(self.as_number())  # sets and dicts ask for nothing more where it differs

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __int__(self) -> int:
        _ask(sys._getframe(1))
        return int(self.as_number())

    def __float__(self) -> float:
        _ask(sys._getframe(1))
        return float(self.as_number())

    def __index__(self) -> int:
        return operator.index(self.as_number())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of torch's functions only those that capture watches take a StepCounter."""
        return function(*pytree.tree_map_only(cls, cls.as_number, args), **(kwargs or {}))

    def item(self) -> StepCounter:
        """As NumPy's numbers: itself."""
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            return self.as_number()
        return number_of(ufunc, *args)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        args = tuple(tuple(arg) if type(arg) is list else arg for arg in args)
        return self.as_number() if kwargs else number_of(function, *args)


def number_of(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` where some are StepCounters and the others numbers or tuples of such; a truth is guarded.

    NotImplemented where an argument or the result is nothing that a StepCounter can stand for.
    """
    counters = [arg for arg in args if type(arg) is StepCounter]
    if not all(isinstance(x, int | float) for arg in args for x in (arg if type(arg) is tuple else (arg,))):
        return NotImplemented
    result = calculate(function, *(arg.value if type(arg) is StepCounter else arg for arg in args))
    made = CounterRef.of(function, tuple(arg.made if type(arg) is StepCounter else arg for arg in args))
    if isinstance(result, bool):
        counters[0].record(Guard(made, "==", result, True))
        return result
    return StepCounter(result, made, counters[0].record) if isinstance(result, int | float) else NotImplemented


def _set_operators() -> None:
    """Python's operators and roundings: each gives a StepCounter."""

    def binary(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda self, other: number_of(function, self, other), lambda self, other: number_of(
            function, other, self
        )

    def unary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *digits: number_of(function, self, *digits)

    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]:
        function = getattr(operator, name, None) or getattr(operator, f"{name}_")
        for method, each in zip((f"__{name}__", f"__r{name}__"), binary(function), strict=True):
            setattr(StepCounter, method, each)
    for name in ["neg", "pos", "abs", "invert"]:
        setattr(StepCounter, f"__{name}__", unary(getattr(operator, name)))
    for name, function in {"round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}.items():
        setattr(StepCounter, f"__{name}__", unary(function))


_set_operators()


def alike(items: Sequence[Any]) -> list[Any]:
    """Numbers, some of which are StepCounters, all of the type that a tensor of them has."""
    kind = float if any(isinstance(item, float) for item in items) else int
    return [number_of(kind, item) if type(item) is StepCounter else kind(item) for item in items]


class NumberType(type):
    """What stands for Python's `float` or `int` (`kind`) in the user's code: it takes StepCounters too."""

    kind: type

    def __call__(cls, *args: Any) -> Any:
        return number_of(cls.kind, *args) if any(type(arg) is StepCounter for arg in args) else cls.kind(*args)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


class FunctionsAsked(BaseException):
    """A plain number is asked of a StepCounter in code with these globals: with functions that take StepCounters in
    them, the trace may come further. No Exception: the user's own handlers are not meant."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


def _ask(frame: FrameType) -> None:
    has_them = isinstance(frame.f_globals.get("float"), NumberType)
    if not has_them and is_user_file(frame.f_code.co_filename):
        raise FunctionsAsked(frame.f_globals)


def made_of(value: Any) -> Any:
    """What a StepCounter is made of; anything else as it is."""
    return value.made if type(value) is StepCounter else value


def with_tensors(tree: Any, numbers: list[tuple[CounterRef, float]], device: torch.device, exact: bool = True) -> Any:
    """A call's arguments with 0-d tensors of the trace in place of StepCounters, which are added to `numbers`.

    exact: their dtype holds what Python's number does in an op on half-precision tensors; else it is that of the
    result.
    """
    tensors = [x for x in pytree.tree_leaves(tree) if type(x) is not StepCounter and isinstance(x, Tensor)]

    def tensor(arg: Any) -> Any:
        if type(arg) is not StepCounter:
            return arg
        numbers.append((arg.made, arg.value))
        dtype = dtype_beside(tensors, arg.value)
        if exact and dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        return STEP_NUMBER(len(numbers) - 1, dtype=dtype, device=device)

    return pytree.tree_map(tensor, tree)
