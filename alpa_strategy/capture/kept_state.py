"""Snapshots of containers, fields and random generators before the step, to report and undo the
changes of the step.

A captured step runs once: without that, its changes would happen once and never again.
"""

import copy
import copyreg
import ctypes
import pickle
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from alpa_strategy.capture.python_state import (
    ARRAYS,
    CONTAINERS,
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN,
    RECORDS,
    SHARED,
    WITH_STATE,
    dict_of,
    has_fields,
    is_librarys_by_descent,
    is_own_class,
    is_user_class,
    put,
)
from alpa_strategy.ir.graph import Place
from alpa_strategy.ir.guards import MISSING

OfData = Callable[[Tensor], bool]


@dataclass(frozen=True)
class Snapshot:
    """A container, and a snapshot of it before the step."""

    # Its path in messages.
    place: str

    items: Any

    # A copy of `items`.
    before: Any

    # Whether its changes are reported. All are undone.
    is_noticed: bool = True

    # Its location, if it is an attribute.
    attribute: Place | None = None

    # Whether it is inside an object, and may be its cache.
    is_inside: bool = False

    def came(self) -> list[Any] | None:
        """Return the items (values of a dict) that were appended; None for any other change.

        Items are compared by identity, as tensors have no equality, and their order counts
        (`move_to_end`).
        """
        old = self.before
        new = _raw(self.items)
        if isinstance(old, set):
            return list(new - old) if old <= new else None
        if isinstance(old, dict):
            old_items = tuple(old.items())
            new_items = tuple(new.items())
            values = list(new.values())
        else:
            old_items = tuple(old)
            new_items = tuple(new)
            values = list(new)
        if not _is_same(new_items[: len(old)], old_items):
            return None
        return values[len(old) :]

    def differs(self) -> bool:
        """Whether it has changed."""
        return self.came() != []

    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        """Return path in messages -> current value, of everything that changed.

        Args:
            of_data: whether a tensor was made of the batch or of parameters.
        """
        if not self.is_noticed or not self.differs():
            return {}
        is_cache = self.is_inside and self._is_filled_cache(of_data)
        return {} if is_cache else {self.place: self.items}

    def _is_filled_cache(self, of_data: OfData) -> bool:
        """Whether the only change are new entries of a dict or a set that are no numbers and the
        same at every step: a cache fills itself again.
        """
        added = self.came() if isinstance(self.items, dict | set) else None
        if added is None:
            return False
        if any(type(item) in (int, float) for item in added):
            return False
        tensors = [value for value in _values_in(added) if isinstance(value, Tensor)]
        return not any(map(of_data, tensors))

    def restore(self) -> None:
        """Undo the changes."""
        # Another thread may be reading an unchanged one.
        if not self.differs():
            return
        self.items.clear()
        if isinstance(self.items, dict):
            for name, value in self.before.items():
                put(self.items, name, value)
        elif isinstance(self.items, set):
            self.items.update(self.before)
        else:
            self.items.extend(self.before)


@dataclass(frozen=True)
class NamesSnapshot(Snapshot):
    """The attributes of a module or another object, or the globals of a file, name by name.

    Names that begin with two underscores (torch's `__dynamo_disable`) and imports are ignored.
    """

    # The object that has the attributes; None for globals.
    owner: Any = None

    # Names that are ignored.
    skipped: frozenset[str] = frozenset()

    # Names whose changes are undone, but not reported.
    unreported: frozenset[str] = frozenset()

    # The only names that are not ignored; None: all.
    counted: frozenset[str] | None = None

    def _changed(self) -> list[str]:
        """Return the names whose values have changed."""
        names = []
        for name in changed_names(self.items, self.before):
            is_ignored = name in self.skipped or name[:2] == "__"
            is_counted = self.counted is None or name in self.counted
            is_import = isinstance(self.items.get(name), types.ModuleType)
            if is_counted and not is_ignored and not is_import:
                names.append(name)
        return names

    @override
    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        """Return label -> present value (`MISSING` if deleted) of the names that the step has
        changed.

        Names that capture itself sets, and caches of `cached_property`, do not count.
        """
        changes = {}
        for name in self._changed():
            # A new cached_property is filled again.
            of_class = getattr(type(self.owner), str(name), None)
            if name not in self.before and isinstance(of_class, cached_property):
                continue
            is_counter = self.owner is None and type(self.before.get(name)) in (int, float)
            if name not in self.unreported and (self.is_noticed or is_counter):
                label = f"{self.place}.{name}".lstrip(".")
                changes[label] = self.items.get(name, MISSING)
        return changes

    @override
    def restore(self) -> None:
        """Give the changed names their former values; new ones are deleted."""
        for name in self._changed():
            put(self.items, name, self.before.get(name, MISSING))


class HooksSnapshot(Snapshot):
    """The hooks of a module, one by one: a first call may install some (Hugging Face's do)."""

    @override
    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        """Return label -> present hook (`MISSING` if removed) of the changed hooks."""
        changed = changed_names(self.items, self.before)
        return {f"{self.place}.{number}": self.items.get(number, MISSING) for number in changed}


class AttributesSnapshot(Snapshot):
    """A class, an object with slots, or the variable of a closure. `before` has its attributes."""

    @override
    def differs(self) -> bool:
        """Return whether an attribute was set, changed or deleted."""
        return bool(changed_names(_attributes_of(self.items), self.before))

    @override
    def restore(self) -> None:
        """Give the changed attributes their former values; new ones are deleted."""
        for name in changed_names(_attributes_of(self.items), self.before):
            if name in self.before:
                setattr(self.items, name, self.before[name])
            else:
                delattr(self.items, name)


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a class, a closure's variable or an object with slots."""
    if isinstance(owner, type):
        return {
            name: value
            for name, value in vars(owner).items()
            if not name.startswith(("__", "_abc_"))
        }
    if isinstance(owner, types.CellType):
        names = ["cell_contents"]
    else:
        names = copyreg._slotnames(type(owner))  # type: ignore[attr-defined]
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


class StateSnapshot(Snapshot):
    """A random generator of Python, NumPy or torch, or a small array.

    `before` is its `state_of`.
    """

    @override
    def differs(self) -> bool:
        """Return whether the object's content has changed."""
        # As pickles, because arrays compare element by element.
        return pickle.dumps(self.before) != pickle.dumps(state_of(self.items))

    @override
    def restore(self) -> None:
        """Write the former content back into the same object."""
        if isinstance(self.items, np.ndarray | Tensor):
            self.items[...] = self.before
        elif isinstance(self.items, ARRAYS):
            self.items[:] = self.before
        elif isinstance(self.items, SHARED):
            ctypes.memmove(ctypes.byref(self.items), self.before, len(self.before))
        elif isinstance(self.items, torch.Generator):
            self.items.set_state(torch.from_numpy(self.before))
        else:
            self.items.__setstate__(self.before)


def state_of(value: Any) -> Any:
    """Return a copy of the state of a random generator or an array."""
    if isinstance(value, (np.ndarray, Tensor, *ARRAYS)):
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    if isinstance(value, SHARED):
        return bytes(value)
    return value.get_state().numpy() if isinstance(value, torch.Generator) else value.__getstate__()


@contextmanager
def restored(
    snapshots: Iterable[Snapshot], of_data: OfData = lambda _: False
) -> Iterator[dict[str, Any]]:
    """Undo all changes of the block. At its end, the yielded dict gets them.

    Args:
        of_data: as of `Snapshot.changes`.
    """
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        for snapshot in snapshots:
            changed |= snapshot.changes(of_data)
            snapshot.restore()


def _values_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and everything in it if it is a container or an object of the user's."""
    yield value
    if depth == MAX_DEPTH:
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    elif is_user_class(type(value)) and has_fields(value):
        inner = vars(value).values()
    for item in inner:
        yield from _values_in(item, depth + 1)


def _raw(value: Any) -> Any:
    """Return a container, a dict with its stored items.

    Methods of a dict's subclass may return others (transformers' ACT2FN).
    """
    return dict(dict_of(value).items(value)) if isinstance(value, dict) else value


def changed_names(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> list[Any]:
    """Return the keys that were added, removed, or have another object now.

    Equal numbers, texts and sizes are the same object.
    """
    names = []
    for name in {**old, **new}:
        if not _is_same(new.get(name, MISSING), old.get(name, MISSING)):
            names.append(name)
    return names


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal plain values, or tuples of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in PLAIN and bool(one == other)


def snapshots_in(
    value: Any,
    place: str,
    seen: set[int],
    attribute: Place | None = None,
    is_noticed: bool = True,
    named: Collection[str] = (),
) -> Iterator[Snapshot]:
    """Yield snapshots of a value and of everything in it, each object once.

    These are fields, containers, random generators and small arrays.

    Objects of libraries are not searched: a Trainer, a strategy, a logger, a lock or a queue has no
    snapshot, and an installed package's object only one of its direct fields. Other threads may use
    deeper ones.

    Args:
        place: the value's path in messages.
        seen: gets the ids of the objects with snapshots, and those of iterators, whose state cannot
            be copied.
        attribute: location of the value, if it is an attribute of the module.
        is_noticed: whether changes are reported. All are undone.
        named: attributes in the code that the step reaches. Of objects whose class inherits from a
            library's (a thread of the user's class), only these are included.
    """
    waiting = [_Item(value, (), False, False)]
    while waiting:
        item = waiting.pop()
        value = _behind(item.value)
        if id(value) in seen or type(value) in PLAIN:
            continue
        label = place + "".join(f"[{key!r}]" for key in item.keys)
        is_shallow = len(item.keys) < MAX_DEPTH

        snapshots: list[Snapshot] = []
        if isinstance(value, WITH_STATE) or _is_small_array(value):
            snapshots.append(StateSnapshot(label, value, state_of(value), is_noticed))
        elif is_shallow and not item.of_library and _access(value) is not _Access.NONE:
            snapshots.append(_fields_snapshot(value, label, is_noticed, named))
            waiting += _items_in_fields(value, item.keys, named)
        elif is_shallow and _has_attributes(value):
            attributes = _attributes_of(value)
            snapshots.append(AttributesSnapshot(label, value, attributes, is_noticed))
            waiting += _items_in_attributes(value, item.keys, attributes)

        container = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
        if container is not None:
            location = None if item.keys else attribute
            before = container(_raw(value))
            snapshots.append(Snapshot(label, value, before, is_noticed, location, item.is_inside))
        if snapshots or isinstance(value, Iterator):
            seen.add(id(value))
            yield from snapshots

        has_items = isinstance(value, list | dict | deque | tuple) and len(value) <= MAX_ITEMS
        if has_items and is_shallow:
            inner = value.items() if container is dict else enumerate(value)
            for key, held in inner:
                waiting.append(_Item(held, (*item.keys, key), item.is_inside, item.of_library))


@dataclass(frozen=True)
class _Item:
    """An object that `snapshots_in` has not searched yet."""

    value: Any

    # The keys and attributes that lead to it.
    keys: tuple[Any, ...]

    # Whether it is inside an object.
    is_inside: bool

    # Whether that is an object of an installed package.
    of_library: bool


class _Access(Enum):
    """Which of an object's fields have snapshots."""

    ALL = 1
    # Without those of the objects in them.
    OWN_FIELDS = 2
    # Those in the code that the step reaches.
    NAMED = 3
    NONE = 4


def _fields_snapshot(
    value: Any, label: str, is_noticed: bool, named: Collection[str]
) -> NamesSnapshot:
    """Return the snapshot of an object's fields. Args: as of `snapshots_in`."""
    fields = vars(value)
    counted = frozenset(named) if _access(value) is _Access.NAMED else None
    return NamesSnapshot(label, fields, dict(fields), is_noticed, owner=value, counted=counted)


def _items_in_fields(value: Any, keys: tuple[Any, ...], named: Collection[str]) -> Iterator[_Item]:
    """Yield what `snapshots_in` has to search in an object's fields, and its class."""
    access = _access(value)
    fields = vars(value)
    names = fields.keys() & frozenset(named) if access is _Access.NAMED else fields
    for name in names:
        yield _Item(fields[name], (*keys, name), True, access is _Access.OWN_FIELDS)
    kind = type(value)
    if access is _Access.ALL and is_own_class(kind):
        yield _Item(kind, (*keys, kind.__name__), False, False)


def _items_in_attributes(
    value: Any, keys: tuple[Any, ...], attributes: dict[str, Any]
) -> Iterator[_Item]:
    """Yield what `snapshots_in` has to search in `attributes`, and the bases of a class."""
    is_class = isinstance(value, type)
    for name, attribute in attributes.items():
        if not isinstance(attribute, _DEFINITIONS) or is_own_class(attribute):
            yield _Item(attribute, (*keys, name), not is_class, False)
    if is_class:
        for base in filter(is_own_class, (*value.__mro__[1:], type(value))):
            yield _Item(base, (*keys, base.__name__), False, False)


def _access(value: Any) -> _Access:
    """Return which of an object's fields have snapshots."""
    kind: Any = type(value)
    if isinstance(value, (types.FunctionType, nn.Module, *RECORDS)):
        return _Access.ALL
    if not has_fields(value) or not is_user_class(kind):
        return _Access.NONE
    if is_librarys_by_descent(kind):
        return _Access.NAMED
    return _Access.ALL if is_own_class(kind) else _Access.OWN_FIELDS


def _behind(value: Any) -> Any:
    """Return the object that has the state of a wrapper; any other value unchanged."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    if isinstance(value, SynchronizedBase):
        return value.get_obj()
    if isinstance(value, partial):
        return value.args, value.keywords
    return value.__self__ if isinstance(value, types.MethodType) else value


def _is_small_array(value: Any) -> bool:
    """Return whether `value` is a writable array of at most `MAX_ITEMS` elements."""
    if isinstance(value, np.ndarray):
        is_plain_array = type(value) is np.ndarray and value.flags.writeable
        return is_plain_array and value.size <= MAX_ITEMS
    return isinstance(value, ARRAYS) and len(value) <= MAX_ITEMS


def _has_attributes(value: Any) -> bool:
    """Whether it is the variable of a closure, a user's class, or an object of one with slots."""
    if isinstance(value, types.CellType) or is_user_class(value):
        return True
    kind = type(value)
    return is_user_class(kind) and not isinstance(value, tuple) and not has_fields(value)


# Members of a class that are no state.
_DEFINITIONS = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    type,
    types.ModuleType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
