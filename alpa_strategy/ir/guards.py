"""Guards: what the step's Python asked of its counters and of the module's attributes while it was captured.

A captured graph is one path through the user's Python. Where the path depends on a counter, the comparison is
recorded; where it depends on an attribute, the value. The strategy captures again when one would come out differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from alpa_strategy.ir.counters import CounterRef

_COMPARISON: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Guard:
    """`left`, compared by `op` with `right`, gave `outcome`."""

    left: CounterRef
    op: str
    right: CounterRef | int | float
    outcome: bool

    def holds(self, *, batch_idx: int = 0, global_step: int = 0, current_epoch: int = 0) -> bool:
        """True when the comparison comes out as it did at capture."""
        counters = {"batch_idx": batch_idx, "global_step": global_step, "current_epoch": current_epoch}
        right = self.right.value(counters) if isinstance(self.right, CounterRef) else self.right
        return compare(self.op, self.left.value(counters), right) == self.outcome

    def __str__(self) -> str:
        return f"({self.left} {self.op} {self.right}) is {self.outcome}"


def compare(op: str, left: float, right: float) -> bool:
    """The outcome of a comparison of numbers."""
    return bool(_COMPARISON[op](left, right))


_MISSING = object()


@dataclass(frozen=True)
class AttributeGuard:
    """Attribute `name` of submodule `module` ("" for the LightningModule) was `value` when the step read it.

    `value` is a snapshot (see capture/python_state.py): `value == now` tells whether `now` is still the same.
    `is_class_attribute`: it was found on the class, not on the instance.
    """

    module: str
    name: str
    value: Any = field(compare=False)
    is_class_attribute: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(frozen=True)
class ValueGuard:
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

    def __init__(self, module: nn.Module, guards: Iterable[AttributeGuard | ValueGuard]) -> None:
        guards = tuple(guards)
        found = [(module.get_submodule(guard.module), guard) for guard in guards if isinstance(guard, AttributeGuard)]
        # The instance's dict is asked directly: a property or __getattr__ would run the user's code.
        self._rows: list[tuple[Mapping[str, Any], str, Any, AttributeGuard | ValueGuard]] = [
            (vars(m), g.name, g.value, g) for m, g in found if not g.is_class_attribute
        ]
        self._rows += [(g.namespace, g.name, g.value, g) for g in guards if not isinstance(g, AttributeGuard)]
        self._class_rows = [(m, g) for m, g in found if g.is_class_attribute]

    def changed(self) -> str | None:
        """Name of the first attribute that is not what the step read (0.05 us each), None when all are."""
        for attributes, name, value, guard in self._rows:
            now = attributes.get(name, _MISSING)
            # `True == 1`: scalars must be of the same type too.
            if now is not value and not (value == now and (type(value) is type(now) or type(value) not in _SCALARS)):
                return str(guard)
        for module, guard in self._class_rows:
            if guard.value != getattr(module, guard.name, _MISSING):
                return str(guard)
        return None


_SCALARS = (bool, int, float, complex, str)
