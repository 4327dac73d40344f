"""StepCounter: the stand-in for batch_idx, global_step, current_epoch and other changing numbers in
a step that is captured.

Arithmetic and functions of `math` and NumPy give another StepCounter, comparisons become guards. If
it is used with a tensor, its number becomes an argument of the graph that is computed at every step
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
    """Stands for a number made of the step's counters.

    It is no subclass of int or float, because C code would then read its number without calling any
    method (`0.1 * counter`, `steps[counter]`).

    Args:
        value: the number at capture.
        made: the expression.
        record: called with a guard for every comparison.
    """

    __slots__ = ("expression", "record", "value")

    def __init__(
        self, value: float, expression: CounterRef, record: Callable[[Guard], None]
    ) -> None:
        self.value = value
        self.expression = expression
        self.record = record

    @property  # type: ignore[misc]  # for isinstance(batch_idx, int)
    def __class__(self) -> type:
        return type(self.value)

    def as_number(self) -> float:
        """Return the number at capture, and guard it: the graph is valid for this number only.

        Raises:
            CaptureError: it is another number at every step (`batch_idx`, `global_step`).
        """
        if self.expression.counters & {"batch_idx", "global_step"}:
            self.refuse()
        number_of(operator.eq, self, self.value)
        return self.value

    def refuse(self) -> NoReturn:
        """Raise CaptureError: the number would become a constant of the graph."""
        raise CaptureError(
            f"{' and '.join(sorted(self.expression.counters))}: a number made of it stands where"
            f" the captured graph would keep the value of the first step forever ({user_frame()})",
            "compute it with Python's operators and functions of `math` (no shapes, items of lists,"
            " sets or `range`) and use it element by element (`beta * x`, `x > limit`), compare it"
            " (`if self.global_step % 100 == 0`), or keep the number in a registered buffer that"
            " the step or a callback updates",
        )

    def __bool__(self) -> bool:
        return number_of(operator.ne, self, 0)

    def __eq__(self, other: object) -> Any:
        return number_of(operator.eq, self, other)

    def __hash__(self) -> int:
        # Sets and dicts compare only objects with equal hashes, so the number must be guarded.
        return hash(self.as_number())

    def __repr__(self) -> str:
        return self._text("", sys._getframe(1))

    def __format__(self, spec: str) -> str:
        return self._text(spec, sys._getframe(1))

    def _text(self, spec: str, caller: FrameType) -> str:
        """Return the counter as text. If the user's code makes it, the step is guarded by its
        value.
        """
        # The step may choose by the text: `self.heads[f"task{batch_idx % 2}"]`.
        if is_user_file(caller.f_code.co_filename) and not is_said(caller):
            number_of(operator.eq, self, self.value)
        return format(self.value, spec)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __int__(self) -> int:
        _request_functions(sys._getframe(1))
        return int(self.as_number())

    def __float__(self) -> float:
        _request_functions(sys._getframe(1))
        return float(self.as_number())

    def __index__(self) -> int:
        # A float raises TypeError, as in Python.
        return operator.index(self.as_number())  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with plain numbers. Capture intercepts those that need none."""
        return function(*pytree.tree_map_only(cls, cls.as_number, args), **(kwargs or {}))

    def item(self) -> "StepCounter":
        """Return itself, as NumPy's scalars return their number."""
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            return self.as_number()
        return number_of(ufunc, *args)

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if kwargs:
            return self.as_number()
        hashable_args = []
        for arg in args:
            hashable_args.append(tuple(arg) if type(arg) is list else arg)
        return number_of(function, *hashable_args)


def number_of(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)` as a StepCounter; a bool is guarded and returned as it is.

    Args:
        args: StepCounters, of which there is at least one, numbers, and tuples of numbers.

    Returns:
        NotImplemented if an argument or the result is no number.
    """
    counters = [arg for arg in args if type(arg) is StepCounter]
    values = []
    expressions = []
    for arg in args:
        if not all(isinstance(item, int | float) for item in _items(arg)):
            return NotImplemented
        is_counter = type(arg) is StepCounter
        values.append(arg.value if is_counter else arg)
        expressions.append(arg.expression if is_counter else arg)

    result = calculate(function, *values)
    expression = CounterRef.of(function, tuple(expressions))
    if isinstance(result, bool):
        counters[0].record(Guard(expression, result))
        return result
    if isinstance(result, int | float):
        return StepCounter(result, expression, counters[0].record)
    return NotImplemented


def _items(arg: Any) -> tuple[Any, ...]:
    """Return the items of a tuple, or a tuple with any other argument."""
    return arg if type(arg) is tuple else (arg,)


# Python's operators and roundings give a StepCounter, its comparisons are guards. `__rlt__` and the
# like are never called.
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
    """Return numbers and StepCounters, all converted to float if one is a float, else to int."""
    has_float = any(isinstance(item, float) for item in items)
    kind = float if has_float else int
    converted = []
    for item in items:
        if type(item) is StepCounter:
            converted.append(number_of(kind, item))
        else:
            converted.append(kind(item))
    return converted


class NumberType(type):
    """Replaces Python's `float` or `int` (`kind`) in the user's code, to accept StepCounters."""

    kind: type

    def __call__(cls, *args: Any) -> Any:
        if any(type(arg) is StepCounter for arg in args):
            return number_of(cls.kind, *args)
        return cls.kind(*args)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


class FunctionsRequested(BaseException):
    """The user's code converts a StepCounter to a plain number.

    The trace starts again with functions that accept StepCounters in the code's globals
    (`functions_of_counters`). It is no Exception, so that the user's handlers do not catch it.

    Args:
        namespace: the globals.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


def _request_functions(frame: FrameType) -> None:
    """Raise FunctionsRequested if `frame` is the user's and has no such functions yet."""
    is_patched = isinstance(frame.f_globals.get("float"), NumberType)
    if not is_patched and is_user_file(frame.f_code.co_filename):
        raise FunctionsRequested(frame.f_globals)


def made_of(value: Any) -> Any:
    """Return the expression of a StepCounter; any other value unchanged."""
    return value.expression if type(value) is StepCounter else value


def as_tensor(value: Any, beside: Sequence[Tensor]) -> Any:
    """Return a StepCounter as a 0-d tensor; any other value unchanged.

    Args:
        beside: the other operands of the op. The tensor's dtype is wide enough to give the result
            that a Python number gives with them.
    """
    if type(value) is not StepCounter:
        return value
    if isinstance(value.value, int):
        dtype = torch.int64
    elif any(tensor.dtype == torch.float64 for tensor in beside):
        dtype = torch.float64
    else:
        dtype = torch.float32
    # The tracer mode accepts a StepCounter here.
    number: Any = value
    return torch.full((), number, dtype=dtype, device=beside[0].device if beside else None)


_KINDS = {kind.__name__: NumberType(kind.__name__, (), {"kind": kind}) for kind in (float, int)}


def functions_of_counters(
    namespaces: Iterable[dict[str, Any]],
) -> list[tuple[dict[str, Any], str, Any]]:
    """Return patches that make functions accept StepCounters.

    These are the functions of `math`, in `math` and under any name in `namespaces`, and there
    `float` and `int`. They are patched, because they are C code that converts to a plain number:
    `__float__` must return one, so no method of StepCounter can handle
    `math.cos(self.global_step)`.

    Args:
        namespaces: globals of the user's code.

    Returns:
        (namespace, name, function) of each.
    """
    builtin = type(math.cos)
    replacements = {}
    for function in vars(math).values():
        if type(function) is builtin:
            replacements[function] = _taking_counters(function)

    patches: list[tuple[dict[str, Any], str, Any]] = []
    for namespace in (vars(math), *namespaces):
        for name, function in namespace.items():
            if type(function) is builtin and function in replacements:
                patches.append((namespace, name, replacements[function]))
    for namespace in namespaces:
        for name, kind in _KINDS.items():
            if name not in namespace:
                patches.append((namespace, name, kind))
    return patches


def _taking_counters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `function` does, and accepts StepCounters.

    Called with a StepCounter among its positional arguments, and no keyword ones, it returns a
    StepCounter of the result. Other calls, and those that `number_of` cannot do, go to `function`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(type(arg) is StepCounter for arg in args):
            result = number_of(function, *args)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return call


# Types of arguments that may be a symbolic number, as in schemas. `mul.Tensor` and the like accept
# Python's numbers for a Tensor.
_NUMBER_ARGUMENTS = ("number", "float", "Tensor")

# (node, name of its argument, the number).
_Use = tuple[fx.Node, str, SymbolicScalar]


class TraceNumbers:
    """The numbers of one trace that are made of counters.

    Calls are traced with an example in place of each, which no other number equals. When the trace
    is complete, `put` replaces the examples among the arguments of ops.
    """

    def __init__(self) -> None:
        self._examples: dict[SymbolicScalar, float] = {}
        self._symbols: dict[float, SymbolicScalar] = {}
        self._uses: list[_Use] = []

    def trace_call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Trace `call(args, kwargs)` with examples in place of StepCounters.

        Returns:
            Whether all StepCounters became arguments of ops, and the result. (False, None) if
            nothing is being traced, or the call fails with an error that an argument may cause.

        Raises:
            CaptureError: they did not, and the call has written to a tensor already.
        """
        proxy_mode = get_proxy_mode()
        if proxy_mode is None:
            return False, None
        leaves = pytree.tree_leaves((args, kwargs))
        counters = [leaf for leaf in leaves if type(leaf) is StepCounter]

        graph = proxy_mode.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        result = None
        try:
            result = call(*pytree.tree_map_only(StepCounter, self._example, (args, kwargs)))
            is_traced = True
        except AlpaError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError):
            # An argument cannot be such a number, or the user's call is wrong.
            is_traced = False

        # The nodes of the call.
        nodes = list(takewhile(lambda node: node is not last, reversed(graph.nodes)))
        uses = None
        if is_traced:
            uses = self._uses_in(nodes, leaves)
        else:
            _erase_failed(nodes)

        if uses is None:
            schemas = filter(None, map(_schema, nodes))
            if any(schema.is_mutable for schema in schemas):
                counters[0].refuse()
            return False, result
        self._uses += uses
        return True, result

    def is_symbolic(self, node: fx.Node) -> bool:
        """Whether an argument of the node is an example."""
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
        return any(number in self._symbols for number in numbers)

    def put(self) -> None:
        """Replace the examples in the graph by their numbers."""
        for node, name, symbol in self._uses:
            arguments = {**_named(node), name: symbol}
            node.kwargs = {keyword: arguments.pop(keyword) for keyword in node.kwargs}
            node.args = tuple(arguments.values())

    def _example(self, counter: StepCounter) -> float:
        """Return the number that stands for a counter's expression in the trace, the same for equal
        expressions and no other number of the step.
        """
        symbol = symbolic(counter.expression, counter.value)
        if symbol not in self._examples:
            number = len(self._examples)
            if isinstance(counter.value, int):
                example: float = 7919 + number
            else:
                example = 0.7310585786300049 + number * 2.0**-40
            self._examples[symbol] = example
            self._symbols[example] = symbol
        return self._examples[symbol]

    def _uses_in(self, nodes: list[fx.Node], leaves: list[Any]) -> list[_Use] | None:
        """Return the uses of examples in one call.

        None if an example has no use, or one that must not be symbolic, or if another number may
        have been computed from one.

        Args:
            nodes: of the call.
            leaves: of its arguments, with StepCounters.
        """
        symbols = {
            symbolic(leaf.expression, leaf.value) for leaf in leaves if type(leaf) is StepCounter
        }
        kinds = {type(symbol.example) for symbol in symbols}
        uses: list[_Use] = []
        for node in nodes:
            if node.op == "get_attr":
                return None
            schema = _schema(node)
            if schema is None:
                continue
            arguments = {argument.name: argument for argument in schema.arguments}
            for name, value in _named(node).items():
                argument = arguments[name]
                if type(value) in (int, float) and value in self._symbols:
                    if not any(kind in str(argument.type) for kind in _NUMBER_ARGUMENTS):
                        return None
                    uses.append((node, name, self._symbols[value]))
                elif _same_number(value, argument.default_value):
                    continue
                elif _has_new_number(value, kinds, leaves):
                    return None
        used = {symbol for _, _, symbol in uses}
        return uses if used == symbols else None


def _erase_failed(nodes: list[fx.Node]) -> None:
    """Remove the nodes of ops that failed, last first."""
    for node in nodes:
        if "val" not in node.meta and not node.users:
            node.graph.erase_node(node)


def _has_new_number(value: Any, kinds: set[type], leaves: list[Any]) -> bool:
    """Whether an op's argument has a number that is none of the call's arguments.

    Args:
        kinds: the types of numbers that count.
        leaves: the call's arguments.
    """
    for leaf in pytree.tree_leaves(value):
        is_of_call = any(_same_number(leaf, other) for other in leaves)
        if type(leaf) in kinds and not is_of_call:
            return True
    return False


def _same_number(a: Any, b: Any) -> bool:
    """Whether two objects are equal numbers of the same type."""
    if type(a) is not type(b) or not isinstance(a, int | float):
        return False
    return bool(a == b)


def _schema(node: fx.Node) -> torch._C.FunctionSchema | None:
    """Return the schema of the op that the node calls; None for other nodes."""
    return node.target._schema if isinstance(node.target, OpOverload) else None


def _named(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name; only keyword arguments if it has no schema."""
    schema = _schema(node)
    arguments = schema.arguments if schema is not None else ()
    names = [argument.name for argument in arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
