"""The dependencies of a captured graph besides tensors: numbers made of the step's counters, and
guards.

Such a number is an op's argument in the graph (a `SymbolicScalar`), as Python's number was, so that
dtypes and rounding are those of a plain number. Its value is computed when the program runs, the
same on every rank.

A captured graph is one path through the user's Python. If the path depends on a counter, the
comparison is recorded; if it depends on an attribute, the value. The strategy captures the step
again when one of them changes.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.fx.graph import magic_methods, reflectable_magic_methods
from torch.utils import _pytree as pytree

from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.per_rank import PerRank

# The key of the counters' values (a dict by name) among the buffers of a program.
COUNTERS = "<counters>"


@dataclass(frozen=True, repr=False)
class CounterRef:
    """A counter, or a function of counters.

    Counters are `batch_idx`, `global_step`, `current_epoch`, and numbers that change between steps.
    """

    # Of the counter, or of the function.
    name: str

    # None for a counter.
    function: Callable[..., Any] | None = None

    # The function's arguments: CounterRefs and constants.
    args: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> "CounterRef":
        """Return the expression `function(*args)`."""
        return cls(getattr(function, "__name__", repr(function)), function, args)

    @property
    def counters(self) -> frozenset[str]:
        """Names of the counters in the expression."""
        if self.function is None:
            return frozenset({self.name})
        names: frozenset[str] = frozenset()
        for arg in self.args:
            if isinstance(arg, CounterRef):
                names |= arg.counters
        return names

    def value(self, counters: Mapping[str, Any]) -> Any:
        """Return the number for these values of the counters."""
        if self.function is None:
            return counters[self.name]

        args = []
        for arg in self.args:
            is_expression = isinstance(arg, CounterRef)
            args.append(arg.value(counters) if is_expression else arg)
        return calculate(self.function, *args)

    def __str__(self) -> str:
        if self.function is None:
            return self.name
        is_operator = self.name in magic_methods and len(self.args) == 2
        if not is_operator:
            return f"{self.name}({', '.join(map(str, self.args))})"

        # Arithmetic on expressions needs parentheses, comparisons bind less.
        is_arithmetic = self.name in reflectable_magic_methods
        operands = []
        for arg in self.args:
            if is_arithmetic and getattr(arg, "function", None) is not None:
                operands.append(f"({arg})")
            else:
                operands.append(arg)
        # Such as "{} + {}".
        return magic_methods[self.name].format(*operands)

    __repr__ = __str__


def calculate(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, a NumPy scalar as Python's number.

    Graphs and guards have plain numbers only.
    """
    result = function(*args)
    return result.item() if isinstance(result, np.generic) else result


class SymbolicScalar:
    """An op's argument that is made of the step's counters, and so another number at every step.

    As a number it is an example, the same for all of its type: rules and trials may compute with
    it. It equals only scalars with the same expression. Arithmetic with it gives another one.
    """

    # The expression.
    expression: CounterRef

    # Its value as a number.
    example: Any

    def __new__(cls, expression: CounterRef) -> Any:
        scalar = super().__new__(cls, cls.example)  # type: ignore[call-arg]  # of float or int
        scalar.expression = expression
        return scalar

    # The arguments of __new__ for pickle and deepcopy.
    def __getnewargs__(self) -> tuple[CounterRef]:
        return (self.expression,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.expression == self.expression

    def __hash__(self) -> int:
        """Return the hash of the expression: the example is the same for many."""
        return hash(self.expression)

    def __repr__(self) -> str:
        return f"<{self.expression!r}>"

    def __neg__(self) -> "SymbolicInt | SymbolicFloat":
        return _made(operator.neg, self)


class SymbolicFloat(SymbolicScalar, float):  # type: ignore[misc]  # pickled by its expression
    """A `SymbolicScalar` that is a float."""

    # Between 0 and 1, as most factors and probabilities are.
    example = 0.7310585786300049


class SymbolicInt(SymbolicScalar, int):  # type: ignore[misc]
    """A `SymbolicScalar` that is an int."""

    example = 3


def symbolic(expression: CounterRef, like: float) -> SymbolicInt | SymbolicFloat:
    """Return the argument for the expression `expression`, of the type of the number `like`."""
    return SymbolicInt(expression) if isinstance(like, int) else SymbolicFloat(expression)


def _made(function: Callable[..., Any], *args: Any) -> SymbolicInt | SymbolicFloat:
    """Return the symbolic scalar of `function(*args)`, some of whose arguments are symbolic."""
    examples = []
    expressions = []
    for arg in args:
        is_symbolic_arg = isinstance(arg, SymbolicScalar)
        examples.append(arg.example if is_symbolic_arg else arg)
        expressions.append(arg.expression if is_symbolic_arg else arg)
    expression = CounterRef.of(function, tuple(expressions))
    return symbolic(expression, calculate(function, *examples))


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
    if isinstance(call.target, PerRank):
        return is_symbolic(call.target.inner)
    return any(
        isinstance(leaf, SymbolicScalar) for leaf in pytree.tree_leaves((call.args, call.kwargs))
    )


def at_counters(call: OpCall, counters: Mapping[str, Any]) -> OpCall:
    """Return the call with numbers in place of its SymbolicScalars.

    Args:
        counters: the counters' values by name.
    """
    if not is_symbolic(call):
        return call
    if isinstance(call.target, PerRank):
        inner = at_counters(call.target.inner, counters)
        return replace(call, target=call.target.with_inner(inner))

    def value(arg: Any) -> Any:
        return arg.expression.value(counters) if isinstance(arg, SymbolicScalar) else arg

    args = pytree.tree_map(value, call.args)
    kwargs = pytree.tree_map(value, call.kwargs)
    return replace(call, args=args, kwargs=kwargs)


@dataclass(frozen=True)
class Guard:
    """A condition on counters that the step's Python evaluated at capture."""

    # The condition.
    asked: CounterRef

    # Its value at capture.
    outcome: bool

    def holds(self, **counters: Any) -> bool:
        """Whether the condition has the same value as at capture."""
        values = {"batch_idx": 0, "global_step": 0, "current_epoch": 0, **counters}
        return self.asked.value(values) == self.outcome

    def __str__(self) -> str:
        return f"({self.asked}) is {self.outcome}"


@dataclass(frozen=True)
class ValueGuard:
    """A Python value that the step read at capture."""

    # For messages.
    label: str

    # Its name in `namespace`.
    name: str

    # Anything with the `get` of a dict.
    namespace: Any = field(compare=False)

    # A snapshot of the value (capture/python_state.py). It equals the current value if that has not
    # changed.
    value: Any = field(compare=False)


# The value of a guard on a name that was missing.
MISSING = object()

_SCALARS = (bool, int, float, complex, str)


def changed_value(guards: Iterable[ValueGuard]) -> str | None:
    """Return the label of the first guard whose value has changed; None if none has.

    A guard takes 0.05 us.
    """
    for guard in guards:
        value = guard.value
        now = guard.namespace.get(guard.name, MISSING)
        if now is value:
            continue
        is_equal = value == now
        if not is_equal:
            return guard.label
        # As `True == 1`, scalars must be of the same type too.
        if type(value) is not type(now) and type(value) in _SCALARS:
            return guard.label
    return None
