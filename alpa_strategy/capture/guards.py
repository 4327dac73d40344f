"""Guards: what the step's Python asked of its counters and of the module's attributes while it was captured.

A captured graph is one path through the user's Python. Where the path depends on a counter, the comparison is
recorded; where it depends on an attribute, the value. The strategy captures again when one would come out differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from alpa_strategy.capture.blame import user_frame
from alpa_strategy.errors import CaptureError

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "%": operator.mod,
    "//": operator.floordiv,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_COMPARISON: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def calculate(value: int, arithmetic: tuple[tuple[str, int], ...]) -> int:
    """A counter's value put through `arithmetic`, in order."""
    for op, number in arithmetic:
        value = _ARITHMETIC[op](value, number)
    return value


@dataclass(frozen=True)
class Guard:
    """`name`, put through `arithmetic` in order and compared by `op` with `other`, gave `outcome`."""

    name: str
    arithmetic: tuple[tuple[str, int], ...]
    op: str
    other: int | float
    outcome: bool

    def holds(self, *, batch_idx: int = 0, global_step: int = 0, current_epoch: int = 0) -> bool:
        """True when the comparison comes out as it did at capture."""
        counters = {"batch_idx": batch_idx, "global_step": global_step, "current_epoch": current_epoch}
        value = calculate(counters[self.name], self.arithmetic)
        return bool(_COMPARISON[self.op](value, self.other)) == self.outcome

    def __str__(self) -> str:
        left = self.name + "".join(f" {op} {number}" for op, number in self.arithmetic)
        return f"({left} {self.op} {self.other}) is {self.outcome}"


_MISSING = object()


@dataclass(frozen=True)
class AttributeGuard:
    """Attribute `name` of submodule `module` ("" for the LightningModule) was `value` when the step read it.

    `value` is a snapshot (see capture/attributes.py): `value == now` tells whether `now` is still the same.
    `is_class_attribute`: it was found on the class, not on the instance.
    """

    module: str
    name: str
    value: Any = field(compare=False)
    is_class_attribute: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(frozen=True)
class OutsideGuard:
    """`name` of `namespace` (anything with a dict's `get`) was `value`, a snapshot, when the step read it."""

    label: str
    name: str
    namespace: Any = field(compare=False)
    value: Any = field(compare=False)

    def __str__(self) -> str:
        return self.label


class AttributeCheck:
    """The guards of one captured step (AttributeGuards, OutsideGuards) made quick to check: owners are looked up once.

    A replaced submodule is noticed by the guard on its parent's `_modules`, which precedes those of the submodule.
    """

    def __init__(self, module: nn.Module, guards: Iterable[Any]) -> None:
        guards = tuple(guards)
        found = [(module.get_submodule(guard.module), guard) for guard in guards if isinstance(guard, AttributeGuard)]
        self._rows = [(vars(m), g.name, g.value, g) for m, g in found if not g.is_class_attribute]
        self._rows += [(g.namespace, g.name, g.value, g) for g in guards if not isinstance(g, AttributeGuard)]
        self._class_rows = [(m, g) for m, g in found if g.is_class_attribute]

    def changed(self) -> str | None:
        """Name of the first attribute that is not what the step read (0.05 us each), None when all are."""
        for attributes, name, value, guard in self._rows:
            now = attributes.get(name, _MISSING)
            if now is not value and not (value == now and (type(value) is type(now) or type(value) not in _SCALARS)):
                return str(guard)
        for module, guard in self._class_rows:
            if guard.value != getattr(module, guard.name, _MISSING):
                return str(guard)
        return None


_SCALARS = (bool, int, float, complex, str)


def attributes_hold(module: nn.Module, guards: Iterable[Any]) -> str | None:
    """Name of the first guarded attribute of `module` that changed, else None. `AttributeCheck` is quicker in a loop.

    Raises:
        AttributeError: a guarded submodule does not exist any more.
    """
    return AttributeCheck(module, guards).changed()


def _number(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of a counter that gives a number of its own."""
    return lambda counter, *others: operation(counter.as_number(), *others)


def _swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The same with the counter on the right."""
    return lambda counter, other: operation(other, counter.as_number())


class StepCounter:
    """Stands for an int and records every comparison made with it; integer arithmetic gives another StepCounter.

    No subclass of int: C code takes the number of one unasked (`0.1 * counter`, `steps[counter]`, `int(counter)`).
    """

    __slots__ = ("arithmetic", "counter_name", "record", "value")

    def __init__(
        self, value: int, name: str, record: Callable[[Guard], None], arithmetic: tuple[tuple[str, int], ...] = ()
    ) -> None:
        """A counter `name` at `value`, after `arithmetic`, that tells `record` its comparisons."""
        self.value, self.counter_name, self.record, self.arithmetic = value, name, record, arithmetic

    @property
    def __class__(self) -> type:  # for isinstance(batch_idx, int)
        return int

    def _compare(self, op: str, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _COMPARISON[op](self.as_number(), other)
        if not isinstance(other, int | float):
            return NotImplemented
        if type(other) is StepCounter:
            self.refuse()  # two counters in one comparison: not expressible as a Guard
        plain_other = int(other) if isinstance(other, int) else other
        outcome = bool(_COMPARISON[op](self.value, plain_other))
        self.record(Guard(self.counter_name, self.arithmetic, op, plain_other, outcome))
        return outcome

    def _calculate(self, op: str, other: Any) -> Any:
        if type(other) is not int:
            return _ARITHMETIC[op](self.as_number(), other)
        value = _ARITHMETIC[op](self.value, other)
        return StepCounter(value, self.counter_name, self.record, (*self.arithmetic, (op, other)))

    def as_number(self) -> int:
        """The counter's number as it is now: the graph is good for it alone. Only of one that seldom changes."""
        if self.counter_name != "current_epoch":
            self.refuse()
        self.record(Guard(self.counter_name, self.arithmetic, "==", self.value, True))
        return self.value

    def refuse(self) -> NoReturn:
        """The counter goes where its number would be frozen into the graph."""
        raise CaptureError(
            f"{self.counter_name} is used as a number in the step ({user_frame()}): the captured graph would keep the "
            f"value of the first step forever",
            f"compare it (`if {self.counter_name} % 100 == 0`), or keep the number in a registered buffer that the "
            "step or a callback updates",
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
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __mod__(self, other: Any) -> Any:
        return self._calculate("%", other)

    def __floordiv__(self, other: Any) -> Any:
        return self._calculate("//", other)

    def __add__(self, other: Any) -> Any:
        return self._calculate("+", other)

    def __radd__(self, other: Any) -> Any:
        return self._calculate("+", other)

    def __sub__(self, other: Any) -> Any:
        return self._calculate("-", other)

    def __mul__(self, other: Any) -> Any:
        return self._calculate("*", other)

    def __rmul__(self, other: Any) -> Any:
        return self._calculate("*", other)

    __truediv__, __pow__, __divmod__ = map(_number, (operator.truediv, operator.pow, divmod))
    __rtruediv__, __rsub__, __rmod__ = map(_swapped, (operator.truediv, operator.sub, operator.mod))
    __rfloordiv__, __rpow__ = _swapped(operator.floordiv), _swapped(operator.pow)
    __neg__, __pos__, __abs__, __invert__ = map(_number, (operator.neg, operator.pos, abs, operator.invert))
    __int__, __index__, __float__, __round__ = map(_number, (int, int, float, round))
    __and__, __or__, __xor__ = map(_number, (operator.and_, operator.or_, operator.xor))
    __lshift__, __rshift__ = map(_number, (operator.lshift, operator.rshift))
