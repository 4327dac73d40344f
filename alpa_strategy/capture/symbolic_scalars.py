"""StepCounter: what a step that is captured sees of batch_idx, global_step, current_epoch and
numbers that change.

Arithmetic and functions of `math` and NumPy give another one, comparisons become guards, and where
it meets a tensor, its number becomes an argument of the graph that is computed at every step
(ir/guards.py).
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from alpa_strategy.errors import AlpaError, CaptureError
from alpa_strategy.ir.guards import CounterRef, Guard, SymbolicScalar, calculate, symbolic
from alpa_strategy.ir.user_code import is_said, is_user_file, user_frame


class StepCounter:
    """Stands for a number made of the step's counters. `made`: how; `record` is told of every
    comparison.

    No subclass of int or float: C code takes the number of one unasked (`0.1 * counter`,
    `steps[counter]`).
    """

    __slots__ = ("made", "record", "value")

    def __init__(self, value: float, made: CounterRef, record: Callable[[Guard], None]) -> None:
        """A number that is `value` now."""
        self.value, self.made, self.record = value, made, record

    @property  # type: ignore[misc]  # for isinstance(batch_idx, int)
    def __class__(self) -> type:
        return type(self.value)

    def as_number(self) -> float:
        """The number as it is now: the graph is good for it alone. Not of one that is another at
        every step.
        """
        if self.made.counters & {"batch_idx", "global_step"}:
            self.refuse()
        number_of(operator.eq, self, self.value)
        return self.value

    def refuse(self) -> NoReturn:
        """The number goes where it would be frozen into the graph."""
        raise CaptureError(
            f"{' and '.join(sorted(self.made.counters))}: a number made of it stands where the"
            " captured graph would "
            f"keep the value of the first step forever ({user_frame()})",
            "compute it with Python's operators and functions of `math` (no shapes, items of lists,"
            " sets or `range`) "
            "and use it element by element (`beta * x`, `x > limit`), compare it (`if"
            " self.global_step % 100 == 0`), "
            "or keep the number in a registered buffer that the step or a callback updates",
        )

    def __bool__(self) -> bool:
        return number_of(operator.ne, self, 0)

    def __eq__(self, other: object) -> Any:
        return number_of(operator.eq, self, other)

    def __hash__(self) -> int:
        return hash(self.as_number())  # sets and dicts ask for nothing more where it differs

    def __repr__(self) -> str:
        return self._text("", sys._getframe(1))

    def __format__(self, spec: str) -> str:
        return self._text(spec, sys._getframe(1))

    def _text(self, spec: str, asking: FrameType) -> str:
        # It may choose by it: `self.heads[f"task{batch_idx % 2}"]`.
        if is_user_file(asking.f_code.co_filename) and not is_said(asking):
            number_of(operator.eq, self, self.value)
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
        return operator.index(self.as_number())  # type: ignore[arg-type]  # TypeError of a float, as Python

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Of torch's functions only those that capture watches take a StepCounter."""
        return function(*pytree.tree_map_only(cls, cls.as_number, args), **(kwargs or {}))

    def item(self) -> "StepCounter":
        """As NumPy's numbers: itself."""
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.as_number() if method != "__call__" or kwargs else number_of(ufunc, *args)

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        args = tuple(tuple(arg) if type(arg) is list else arg for arg in args)
        return self.as_number() if kwargs else number_of(function, *args)


def number_of(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` where some are StepCounters and the others numbers or tuples of such; a
    truth is guarded.

    NotImplemented where an argument or the result is nothing that a StepCounter can stand for.
    """
    counters = [arg for arg in args if type(arg) is StepCounter]
    if not all(
        isinstance(x, int | float) for arg in args for x in (arg if type(arg) is tuple else (arg,))
    ):
        return NotImplemented
    result = calculate(function, *(arg.value if type(arg) is StepCounter else arg for arg in args))
    made = CounterRef.of(
        function, tuple(arg.made if type(arg) is StepCounter else arg for arg in args)
    )
    if isinstance(result, bool):
        counters[0].record(Guard(made, result))
        return result
    return (
        StepCounter(result, made, counters[0].record)
        if isinstance(result, int | float)
        else NotImplemented
    )


# Python's operators and roundings give a StepCounter, its comparisons are guards.
# no one asks for `__rlt__`
_TWO_SIDED = "ne lt le gt ge add sub mul truediv floordiv mod pow and or xor lshift rshift"
_ONE_SIDED = {name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert")}
_ONE_SIDED |= {"round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
for _name in _TWO_SIDED.split():
    # `and` and `or` are keywords: `operator` has them with an underscore.
    _of = getattr(operator, _name, None) or getattr(operator, f"{_name}_")
    setattr(
        StepCounter,
        f"__{_name}__",
        lambda self, other, function=_of: number_of(function, self, other),
    )
    setattr(
        StepCounter,
        f"__r{_name}__",
        lambda self, other, function=_of: number_of(function, other, self),
    )
for _name, _of in _ONE_SIDED.items():
    setattr(
        StepCounter,
        f"__{_name}__",
        lambda self, *digits, function=_of: number_of(function, self, *digits),
    )


def alike(items: Sequence[Any]) -> list[Any]:
    """Numbers, some of which are StepCounters, all of the type that a tensor of them has."""
    kind = float if any(isinstance(item, float) for item in items) else int
    return [number_of(kind, item) if type(item) is StepCounter else kind(item) for item in items]


class NumberType(type):
    """What stands for Python's `float` or `int` (`kind`) in the user's code: it takes StepCounters
    too.
    """

    kind: type

    def __call__(cls, *args: Any) -> Any:
        return (
            number_of(cls.kind, *args)
            if any(type(arg) is StepCounter for arg in args)
            else cls.kind(*args)
        )

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


class FunctionsRequested(BaseException):
    """A plain number is asked of a StepCounter in code with these globals: with functions that take
    StepCounters in
    them, the trace may come further. No Exception: the user's own handlers are not meant."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


def _ask(frame: FrameType) -> None:
    has_them = isinstance(frame.f_globals.get("float"), NumberType)
    if not has_them and is_user_file(frame.f_code.co_filename):
        raise FunctionsRequested(frame.f_globals)


def made_of(value: Any) -> Any:
    """What a StepCounter is made of; anything else as it is."""
    return value.made if type(value) is StepCounter else value


def as_tensor(value: Any, beside: Sequence[Tensor]) -> Any:
    """A StepCounter as a 0-d tensor that holds what Python's number does in an op on these tensors;
    else the value.
    """
    if type(value) is not StepCounter:
        return value
    wide = (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in beside) else torch.float32
    )
    dtype = torch.int64 if isinstance(value.value, int) else wide
    number: Any = value  # the tracer mode knows it
    return torch.full((), number, dtype=dtype, device=beside[0].device if beside else None)


_KINDS = {kind.__name__: NumberType(kind.__name__, (), {"kind": kind}) for kind in (float, int)}


def functions_of_counters(
    namespaces: Iterable[dict[str, Any]],
) -> list[tuple[dict[str, Any], str, Any]]:
    """(namespace, name, function) to be patched in, so that functions of `math` take StepCounters;
    in `namespaces`, globals of the user's code, also those that were imported from it, and `float`
    and `int`.

    Patched, because these functions are C code that asks for a plain number (`__float__` may return
    nothing else): a StepCounter cannot answer `math.cos(self.global_step)` by itself.
    """
    builtin = type(math.cos)
    taking = {
        function: _taking(function) for function in vars(math).values() if type(function) is builtin
    }
    found = [
        (namespace, name, taking[function])
        for namespace in (vars(math), *namespaces)
        for name, function in namespace.items()
        if type(function) is builtin and function in taking
    ]
    return found + [
        (each, name, kind)
        for each in namespaces
        for name, kind in _KINDS.items()
        if name not in each
    ]


def _taking(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(type(arg) is StepCounter for arg in args):
            result = number_of(function, *args)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return call


# Types of arguments, as schemas name them: `mul.Tensor` and its like take Python's numbers where
# they say Tensor.
_TAKING_NUMBERS = ("number", "float", "Tensor")


class TraceNumbers:
    """Numbers of one trace that are made of counters: calls are traced with an example, which no
    other number equals.

    Where the example turns up as an argument of an op, the number is put when the trace is complete
    (`put`).
    """

    def __init__(self) -> None:
        self._examples: dict[SymbolicScalar, float] = {}
        self._symbols: dict[float, SymbolicScalar] = {}
        self._places: list[tuple[fx.Node, str, SymbolicScalar]] = []  # node, name of its argument

    def trace_call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether StepCounters among the arguments become arguments of ops, and if so, what the
        call gives.
        """
        proxy_mode = get_proxy_mode()
        counters = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is StepCounter]
        if proxy_mode is None:
            return False, None
        graph = proxy_mode.tracer.graph
        last, result = next(iter(reversed(graph.nodes)), None), None
        try:
            result = call(*pytree.tree_map_only(StepCounter, self._example, (args, kwargs)))
            is_traced = True
        except AlpaError:
            raise
        except (
            TypeError,
            ValueError,
            IndexError,
            RuntimeError,
        ):  # it fits in no place, or the user erred
            is_traced = False
        nodes = list(takewhile(lambda node: node is not last, reversed(graph.nodes)))
        for node in nodes if not is_traced else ():
            if "val" not in node.meta and not node.users:
                node.graph.erase_node(node)
        places = self._places_in(nodes, pytree.tree_leaves((args, kwargs))) if is_traced else None
        if places is None and any(
            schema is not None and schema.is_mutable for schema in map(_schema, nodes)
        ):
            counters[0].refuse()  # the example is written already
        self._places += places or ()
        return places is not None, result

    def is_symbolic(self, node: fx.Node) -> bool:
        """Whether an argument of the node is an example."""
        return any(
            type(x) in (int, float) and x in self._symbols
            for x in pytree.tree_leaves((node.args, node.kwargs))
        )

    def put(self) -> None:
        """Put the numbers where their examples are."""
        for node, name, symbol in self._places:
            given = {**_named(node), name: symbol}
            node.kwargs = {n: given.pop(n) for n in node.kwargs}
            node.args = tuple(given.values())

    def _example(self, counter: StepCounter) -> float:
        symbol = symbolic(counter.made, counter.value)
        if symbol not in self._examples:
            number = len(self._examples)
            example = (
                7919 + number
                if isinstance(counter.value, int)
                else 0.7310585786300049 + number * 2.0**-40
            )
            self._examples[symbol], self._symbols[example] = example, symbol
        return self._examples[symbol]

    def _places_in(
        self, nodes: list[fx.Node], given: list[Any]
    ) -> list[tuple[fx.Node, str, SymbolicScalar]] | None:
        """Where the examples of one call, traced as `nodes`, stand; None if one stands nowhere, or
        where ops take no
        number, or if another number may be made of one."""
        symbols = {symbolic(x.made, x.value) for x in given if type(x) is StepCounter}
        kinds = {type(symbol.example) for symbol in symbols}
        found = []
        for node in nodes:
            if node.op == "get_attr":
                return None
            schema = _schema(node)
            arguments = {} if schema is None else {a.name: a for a in schema.arguments}
            for name, value in _named(node).items() if arguments else ():
                if type(value) in (int, float) and value in self._symbols:
                    if not any(kind in str(arguments[name].type) for kind in _TAKING_NUMBERS):
                        return None
                    found.append((node, name, self._symbols[value]))
                elif not _same_number(value, arguments[name].default_value) and any(
                    type(x) in kinds and not any(_same_number(x, other) for other in given)
                    for x in pytree.tree_leaves(value)
                ):
                    return None
        return found if symbols == {symbol for _, _, symbol in found} else None


def _same_number(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, int | float) and a == b


def _schema(node: fx.Node) -> torch._C.FunctionSchema | None:
    """That of the op which the node calls; None of other nodes."""
    return node.target._schema if isinstance(node.target, OpOverload) else None


def _named(node: fx.Node) -> dict[str, Any]:
    """Arguments by name."""
    schema = _schema(node)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
