"""StepCounter: what the step's Python sees of batch_idx, global_step and current_epoch while it is captured.

Arithmetic and functions of `math` and NumPy give another one, comparisons become guards, and where it meets a tensor,
its number becomes an argument of the graph that is computed at every step (ir/counters.py).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.counters import STEP_NUMBER, CounterRef, LateNumber, calculate, dtype_beside, late
from alpa_strategy.ir.guards import Guard, compare
from alpa_strategy.ir.user_code import is_user_file, user_frame


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


_KINDS = {kind.__name__: NumberType(kind.__name__, (), {"kind": kind}) for kind in (float, int)}


@contextmanager
def functions_of_counters(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Functions of `math` take StepCounters in the block; in `namespaces`, globals of the user's code, also those that
    were imported from it, and `float` and `int`.
    """
    taking = {function: _taking(function) for function in vars(math).values() if type(function) is type(math.cos)}
    swaps: list[tuple[dict[str, Any], str, Any]] = []
    for namespace in (vars(math), *namespaces):
        swaps += [(namespace, n, taking[f]) for n, f in namespace.items() if type(f) is type(math.cos) and f in taking]
    swaps += [
        (namespace, name, kind) for namespace in namespaces for name, kind in _KINDS.items() if name not in namespace
    ]
    before = [(namespace, name, namespace.get(name)) for namespace, name, _ in swaps]
    for namespace, name, function in swaps:
        namespace[name] = function
    try:
        yield
    finally:
        for namespace, name, function in before:
            if function is None:
                del namespace[name]
            else:
                namespace[name] = function


def _taking(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(type(arg) is StepCounter for arg in args):
            result = number_of(function, *args)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return call


aten = torch.ops.aten


@dataclass
class TraceNumbers:
    """The numbers of one trace: what `step_number(i)` stands for, and arguments of nodes that hold an example.

    made: how a number is made, and its value at capture. literals: (node, argument's name, number).
    """

    made: list[tuple[CounterRef, float]] = field(default_factory=list)
    literals: list[tuple[fx.Node, str, LateNumber]] = field(default_factory=list)

    def add_literal(self, nodes: list[fx.Node], number: LateNumber) -> bool:
        """One call was traced as `nodes` with the number's example; False unless that is an argument of one of them,
        and no other number of the type is there: it could be made of the example.
        """
        kind = type(number.example)
        found = [(node, x) for node in nodes for x in pytree.tree_leaves((node.args, node.kwargs)) if type(x) is kind]
        if len(found) != 1 or found[0][1] != number.example:
            return False
        node = found[0][0]
        if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
            return False
        kinds = {argument.name: str(argument.type) for argument in node.target._schema.arguments}
        place = next((name for name, arg in _named(node).items() if type(arg) is kind), None)
        if place is None or not any(each in kinds[place] for each in ("number", "float")):
            return False
        self.literals.append((node, place, number))
        return True


def place_numbers(graph: fx.Graph, numbers: TraceNumbers, origins: MutableMapping[fx.Node, tuple[str, str]]) -> None:
    """Put the numbers where the traced graph has something else in their place; calls that failed go."""
    for node in reversed([node for node in graph.nodes if isinstance(node.target, OpOverload)]):
        if "val" not in node.meta and not node.users:
            graph.erase_node(node)
    for node, name, number in numbers.literals:
        given = {**_named(node), name: number}
        node.kwargs = {n: given.pop(n) for n in node.kwargs}
        node.args = tuple(given.values())
    late_ones = {n: late(*numbers.made[n.args[0]]) for n in graph.nodes if n.target is STEP_NUMBER}
    for user in dict.fromkeys(user for node in late_ones for user in node.users):
        together = tuple(node for node in late_ones if node in user.args)
        for nodes in (together, *((node,) for node in together)):
            form = _with_numbers(user, nodes)
            if form is not None:
                user.target = form
                user.args = fx.map_arg(user.args, lambda n, nodes=nodes: late_ones[n] if n in nodes else n)
    for node, number in late_ones.items():
        if node.users:
            with graph.inserting_before(node):
                made = graph.call_function(aten.full.default, ((), number), {"dtype": node.kwargs["dtype"]})
            made.meta, origins[made] = node.meta, origins.get(node, ("", ""))
            node.replace_all_uses_with(made)
        graph.erase_node(node)


def _named(node: fx.Node) -> dict[str, Any]:
    """Arguments by name."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _with_numbers(user: fx.Node, nodes: tuple[fx.Node, ...]) -> OpOverload | None:
    """The overload that the user's call would be if Python's numbers stood in place of `nodes`; None: none is."""
    positions = tuple(i for i, arg in enumerate(user.args) if arg in nodes)
    if not positions or not isinstance(user.target, OpOverload):
        return None
    alone = all(node.target is STEP_NUMBER for node in user.all_input_nodes)
    return None if alone else _overload(user.target, positions)


@lru_cache(maxsize=256)
def _overload(target: OpOverload, positions: tuple[int, ...]) -> OpOverload | None:
    """See `_with_numbers`. positions: of the arguments that are numbers."""
    packet, arguments = target._overloadpacket, target._schema.arguments
    if torch._C._should_allow_numbers_as_tensors(packet.__name__.rstrip("_")):
        return target
    for other in (getattr(packet, name) for name in packet.overloads()):
        others = other._schema.arguments
        pairs = list(zip(arguments, others, strict=False))
        if len(arguments) == len(others) and all(
            a.name == b.name and ("number" in str(b.type) if i in positions else a.type == b.type)
            for i, (a, b) in enumerate(pairs)
        ):
            return other
    return None
