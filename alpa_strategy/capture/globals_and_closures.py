"""What the step's Python reads outside of the module: globals, variables of enclosing functions, the Trainer's values.

They are frozen into the captured graph like the module's attributes, so they are guarded like them; a step that sets a
global is refused. Globals and closures are found in the code of the methods that ran, not by watching them run.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import Tensor, nn

from alpa_strategy.capture.python_state import has_fields, is_plain, restore_items, same_items, snapshot
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import OutsideGuard
from alpa_strategy.ir.user_code import closure_values, code_names, is_user_code, is_user_file, reached_functions

_MISSING = object()


class TrainerValues:
    """The Trainer's values by dotted path."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path of the trainer's attributes (a dict's `get`)."""
        value = self._trainer
        for name in path.split("."):
            value = getattr(value, name, _MISSING)
            if value is _MISSING:
                return default
        return value


class _Closure:
    """Variables of enclosing functions by name."""

    def __init__(self, cells: dict[str, types.CellType]) -> None:
        self._cells = cells

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # deleted since
            return default


def trainer_guards(trainer: Any, reads: dict[str, Any]) -> tuple[OutsideGuard, ...]:
    """Guards of the Trainer's values in `reads` (dotted path -> value)."""
    values = TrainerValues(trainer)
    return tuple(OutsideGuard(f"trainer.{path}", path, values, value) for path, value in reads.items())


def is_value(value: Any) -> bool:
    """Whether a value read from the Trainer can be guarded: a number, a text, a choice."""
    return value is None or isinstance(value, bool | int | float | str | Enum)


def outside_guards(module: nn.Module, reads: set[tuple[int, str]]) -> tuple[OutsideGuard, ...]:
    """Guards of the globals and closures in the code of the methods in `reads` (id of a module, name).

    Numbers, texts, containers and configurations of them, tensors and arrays are guarded; functions and other objects
    are taken to stay what they are.
    """
    guards: dict[tuple[int, str], OutsideGuard] = {}

    def add(label: str, name: str, namespace: Any, value: Any, identity: int) -> None:
        if _is_data(value):
            guards.setdefault((identity, name), OutsideGuard(label, name, namespace, snapshot(value)))

    for function in reached_functions(list(_methods(module, reads))):
        names = set(code_names(function.__code__))
        values, where = function.__globals__, function.__globals__.get("__name__", "")
        for name in sorted(names & values.keys()):
            value = values[name]
            if name.startswith("__"):
                continue
            add(f"{where}.{name}", name, values, value, id(values))
            if isinstance(value, type) or _is_user_module(value):
                inside = dict(vars(value)) if isinstance(value, type) else vars(value)
                for inner in sorted(names & inside.keys()):
                    add(f"{where}.{name}.{inner}", inner, vars(value), inside[inner], id(value))
        cells = closure_values(function)
        for name, cell in cells.items():
            label = f"{name} of {function.__qualname__}"
            add(label, name, _Closure(cells), cell.cell_contents, id(cell))
    return tuple(guards.values())


@contextmanager
def outside_kept(module: nn.Module) -> Iterator[None]:
    """Restore the globals and closures of the files and methods that the module's classes are written in.

    Raises:
        CaptureError: when the step set a global, or changed a container among globals and closures.
    """
    files = {name: vars(sys.modules[name]) for name in _class_modules(module)}
    before = {name: dict(values) for name, values in files.items()}
    containers = [(f"{where}.{name}", value) for where, old in before.items() for name, value in old.items()]
    containers += list(_closures(module))
    copies = [(label, value, value.copy()) for label, value in containers if type(value) in (list, dict, set)]
    copies = [entry for entry in copies if not entry[0].rpartition(".")[2].startswith("__")]
    completed = False
    changed: list[str] = []
    try:
        yield
        completed = True
    finally:
        for where, values in files.items():
            changed += [f"{where}.{name}" for name in _restore_globals(values, before[where])]
        for label, value, copy in copies:
            if not same_items(copy, value):
                changed.append(label)
                restore_items(value, copy)
    if completed and changed:
        raise CaptureError(
            f"the step changes variables outside of the module ({', '.join(sorted(set(changed)))}): a captured step "
            "repeats tensor work only, so this would happen once and never again",
            "do it before training or in a hook such as on_train_batch_end (the returned dict arrives there), or "
            "use register_buffer for tensors",
        )


def _restore_globals(values: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Put back what was assigned; its names. Imports are no assignments that matter."""
    names = [n for n in values if not n.startswith("__") and values[n] is not old.get(n, _MISSING)]
    names = [n for n in names if not isinstance(values[n], types.ModuleType)]
    for name in names:
        if name in old:
            values[name] = old[name]
        else:
            del values[name]
    return names


def _closures(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the methods of the user's classes hold of enclosing functions."""
    for kind in _user_classes(module):
        for member in vars(kind).values():
            if isinstance(member, types.FunctionType):
                for name, cell in closure_values(member).items():
                    yield f"{name} of {member.__qualname__}", cell.cell_contents


def _methods(module: nn.Module, reads: Iterable[tuple[int, str]]) -> Iterator[Any]:
    """The user's functions behind the attributes in `reads`, those of base classes included (`super()`)."""
    kinds = {id(child): type(child) for child in module.modules()}
    for kind, name in {(kinds[owner], name) for owner, name in reads if owner in kinds}:
        for base in kind.__mro__:
            member = vars(base).get(name)
            member = member.fget if isinstance(member, property) else member
            if is_user_code(member):
                yield member


def _user_classes(module: nn.Module) -> set[type]:
    kinds = {base for child in module.modules() for base in type(child).__mro__}
    return {kind for kind in kinds if _is_user_module(sys.modules.get(kind.__module__))}


def _class_modules(module: nn.Module) -> set[str]:
    """Names of the Python modules of the user's classes in the tree."""
    return {kind.__module__ for kind in _user_classes(module)}


def _is_user_module(value: Any) -> bool:
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and is_user_file(file)


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor) or is_plain(value) or type(value).__name__ == "ndarray":
        return True
    return has_fields(value) and (dataclasses.is_dataclass(value) or all(map(is_plain, vars(value).values())))
