"""What a captured graph depends on besides tensors: numbers made of the step's counters, and
guards.

The graph holds such a number as an argument (a `SymbolicScalar`) in the place where Python's number
stood, so that dtypes and rounding are those of a plain number. Its value is computed when the
program runs, on every rank alike.

A captured graph is one path through the user's Python. Where the path depends on a counter, the
comparison is recorded; where it depends on an attribute, the value. The strategy captures again
when one would come out differently.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.fx.graph import magic_methods, reflectable_magic_methods
from torch.utils import _pytree as pytree

from alpa_strategy.ir.op import OpCall

COUNTERS = "<counters>"  # what a program's buffers call the values of the counters, by name


@dataclass(frozen=True, repr=False)
class CounterRef:
    """A counter (`batch_idx`, `global_step`, `current_epoch`, a number that changes), or `function`
    of such.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> "CounterRef":
        """`function(*args)`."""
        return cls(getattr(function, "__name__", repr(function)), function, args)

    @property
    def counters(self) -> frozenset[str]:
        """The counters that it is made of."""
        if self.function is None:
            return frozenset({self.name})
        return frozenset().union(
            *(arg.counters for arg in self.args if isinstance(arg, CounterRef))
        )

    def value(self, counters: Mapping[str, Any]) -> Any:
        """The number for these values of the counters."""
        if self.function is None:
            return counters[self.name]
        return calculate(
            self.function,
            *(a.value(counters) if isinstance(a, CounterRef) else a for a in self.args),
        )

    def __str__(self) -> str:
        if self.function is None:
            return self.name
        if self.name in magic_methods and len(self.args) == 2:  # "{} + {}"
            inside = self.name in reflectable_magic_methods  # of arithmetic; comparisons bind less
            parts = (
                f"({arg})" if inside and getattr(arg, "function", None) else arg
                for arg in self.args
            )
            return magic_methods[self.name].format(*parts)
        return f"{self.name}({', '.join(map(str, self.args))})"

    __repr__ = __str__


def calculate(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; a number of NumPy's as one of Python's."""
    result = function(*args)
    return (
        result.item() if isinstance(result, np.generic) else result
    )  # graphs and guards hold plain numbers


class SymbolicScalar:
    """An op's argument that is made of the step's counters, and so another number at every step.

    As a number it is an example, the same for all: rules and trials may compute with it. Equal to
    what is made in the same way only. Arithmetic with it gives another one.
    """

    made: CounterRef
    example: Any

    def __new__(cls, made: CounterRef) -> Any:
        scalar = super().__new__(cls, cls.example)  # type: ignore[call-arg]  # of float or int
        scalar.made = made
        return scalar

    # What pickle and deepcopy give to __new__.
    def __getnewargs__(self) -> tuple[CounterRef]:
        return (self.made,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.made == self.made

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return f"<{self.made!r}>"

    def __neg__(self) -> "SymbolicInt | SymbolicFloat":
        return _made(operator.neg, self)


class SymbolicFloat(SymbolicScalar, float):  # type: ignore[misc]  # pickled by what it is made of
    """See `SymbolicScalar`."""

    example = 0.7310585786300049  # between 0 and 1, as most factors and probabilities are


class SymbolicInt(SymbolicScalar, int):  # type: ignore[misc]
    """See `SymbolicScalar`."""

    example = 3


def symbolic(made: CounterRef, like: float) -> SymbolicInt | SymbolicFloat:
    """The argument for a number made so, of the same type as `like`."""
    return SymbolicInt(made) if isinstance(like, int) else SymbolicFloat(made)


def _made(function: Callable[..., Any], *args: Any) -> SymbolicInt | SymbolicFloat:
    example = calculate(
        function, *(arg.example if isinstance(arg, SymbolicScalar) else arg for arg in args)
    )
    made = CounterRef.of(
        function, tuple(arg.made if isinstance(arg, SymbolicScalar) else arg for arg in args)
    )
    return symbolic(made, example)


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]:
    _function = getattr(operator, _name)
    setattr(
        SymbolicScalar,
        f"__{_name}__",
        lambda self, other, function=_function: _made(function, self, other),
    )
    setattr(
        SymbolicScalar,
        f"__r{_name}__",
        lambda self, other, function=_function: _made(function, other, self),
    )


def is_symbolic(call: OpCall) -> bool:
    """Whether an argument of the call is a SymbolicScalar."""
    return any(
        isinstance(leaf, SymbolicScalar) for leaf in pytree.tree_leaves((call.args, call.kwargs))
    )


def at_counters(call: OpCall, counters: Mapping[str, Any]) -> OpCall:
    """The call with the numbers that its SymbolicScalars are for these values of the counters."""
    if not is_symbolic(call):
        return call

    def value(arg: Any) -> Any:
        return arg.made.value(counters) if isinstance(arg, SymbolicScalar) else arg

    return replace(
        call, args=pytree.tree_map(value, call.args), kwargs=pytree.tree_map(value, call.kwargs)
    )


@dataclass(frozen=True)
class Guard:
    """What the step asked of its counters, `asked`, came out as `outcome`."""

    asked: CounterRef
    outcome: bool

    def holds(self, **counters: Any) -> bool:
        """True when it comes out as it did at capture."""
        return (
            self.asked.value({"batch_idx": 0, "global_step": 0, "current_epoch": 0, **counters})
            == self.outcome
        )

    def __str__(self) -> str:
        return f"({self.asked}) is {self.outcome}"


@dataclass(frozen=True)
class ValueGuard:
    """`name` of `namespace` (anything with a dict's `get`) was `value` when the step read it."""

    label: str  # for messages
    name: str
    namespace: Any = field(compare=False)
    # a snapshot (see capture/python_state.py): `value == now` tells whether `now` is still the same
    value: Any = field(compare=False)


MISSING = object()  # the value of a guard of what was not there
_SCALARS = (bool, int, float, complex, str)


def changed_value(guards: Iterable[ValueGuard]) -> str | None:
    """Label of the first that is not what the step read (0.05 us each), None when all are."""
    for guard in guards:
        value, now = guard.value, guard.namespace.get(guard.name, MISSING)
        # `True == 1`: scalars must be of the same type too.
        if now is not value and not (
            value == now and (type(value) is type(now) or type(value) not in _SCALARS)
        ):
            return guard.label
    return None
