"""A snapshot of one object before the step: what of it has changed since then, and its former
content back.

There is one class of snapshots, and a table of the kinds of objects that have them (`_KINDS`).
"""

import copy
import copyreg
import ctypes
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alpa_strategy.capture.python_state import (
    ARRAYS,
    CONTAINERS,
    MAX_DEPTH,
    PLAIN,
    SHARED,
    has_fields,
    is_user_class,
    put,
    stored_items,
)
from alpa_strategy.ir.guards import MISSING
from alpa_strategy.ir.places import Place

OfData = Callable[[Tensor], bool]


class Kind(Enum):
    """The kinds of objects that have snapshots."""

    # A list, dict, set or deque.
    CONTAINER = "container"

    # The attributes of a module or another object, or the globals of a file: a dict of names.
    NAMES = "names"

    # The hooks of a module: a first call may install some (Hugging Face's do).
    HOOKS = "hooks"

    # A class, an object with slots, or the variable of a closure.
    ATTRIBUTES = "attributes"

    # A random generator of Python, NumPy or torch, a small array, or shared memory.
    STATE = "state"


@dataclass(frozen=True)
class NamesThatCount:
    """Which names of a `Kind.NAMES` snapshot count.

    Names that begin with two underscores (torch's `__dynamo_disable`) and imports never do.
    """

    # The object that has the attributes; None for globals.
    owner: Any = None

    # Names that are ignored.
    skipped: frozenset[str] = frozenset()

    # Names whose changes are undone, but not reported.
    unreported: frozenset[str] = frozenset()

    # The only names that are not ignored; None: all.
    counted: frozenset[str] | None = None

    def includes(self, name: str, value: Any) -> bool:
        """Return whether a name, which has `value` now, counts."""
        is_ignored = name in self.skipped or name[:2] == "__"
        is_counted = self.counted is None or name in self.counted
        return is_counted and not is_ignored and not isinstance(value, types.ModuleType)


@dataclass(frozen=True)
class Snapshot:
    """An object, and a copy of its content before the step."""

    kind: Kind

    # Its path in messages.
    place: str

    # The object; of `Kind.NAMES` and `Kind.HOOKS` the dict that has them.
    items: Any

    # The copy.
    before: Any

    # Whether its changes are reported. All are undone.
    is_noticed: bool = True

    # Its location, if it is an attribute.
    attribute: Place | None = None

    # Whether it is inside an object, and may be its cache.
    is_inside: bool = False

    names: NamesThatCount = field(default_factory=NamesThatCount)

    def came(self) -> list[Any] | None:
        """Return the items (values of a dict) that were appended to a container.

        Items are compared by identity, as tensors have no equality, and their order counts
        (`move_to_end`). None if there is any other change.
        """
        return _appended(self.items, self.before)

    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        """Return path in messages -> present value (`MISSING` if deleted) of all that changed.

        Args:
            of_data: whether a tensor was made of the batch or of parameters.
        """
        return _KINDS[self.kind].changes(self, of_data)

    def restore(self) -> None:
        """Put the former content back into the same object."""
        _KINDS[self.kind].restore(self)


def take(
    kind: Kind,
    place: str,
    items: Any,
    is_noticed: bool = True,
    attribute: Place | None = None,
    is_inside: bool = False,
    names: NamesThatCount | None = None,
) -> Snapshot:
    """Return a snapshot of `items` as they are now. Args: the fields of `Snapshot`."""
    before = _KINDS[kind].copy(items)
    return Snapshot(
        kind, place, items, before, is_noticed, attribute, is_inside, names or NamesThatCount()
    )


@dataclass(frozen=True)
class _HowTo:
    """How objects of one kind are copied, compared with the copy, and put back."""

    copy: Callable[[Any], Any]
    changes: Callable[[Snapshot, OfData], dict[str, Any]]
    restore: Callable[[Snapshot], None]


# Containers


def _copy_of_container(value: Any) -> Any:
    """Return a container of Python's own class with the same items."""
    kind = next(kind for kind in CONTAINERS if isinstance(value, kind))
    return kind(_raw(value))


def _raw(value: Any) -> Any:
    """Return a container, a dict with its stored items."""
    return stored_items(value) if isinstance(value, dict) else value


def _appended(items: Any, old: Any) -> list[Any] | None:
    """Return the items that a container has beyond `old`; None if it lacks one of `old`, or has
    them in another order.

    Args:
        items: a set, dict, list or another sequence; of a dict, values are returned.
        old: a copy of it.
    """
    new = _raw(items)
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


def _changes_of_container(snapshot: Snapshot, of_data: OfData) -> dict[str, Any]:
    """Return {place: container} if it has changed, unless it is a cache that has filled itself or
    its changes are not reported; else {}.
    """
    if not snapshot.is_noticed or snapshot.came() == []:
        return {}
    is_cache = snapshot.is_inside and _is_filled_cache(snapshot, of_data)
    return {} if is_cache else {snapshot.place: snapshot.items}


def _is_filled_cache(snapshot: Snapshot, of_data: OfData) -> bool:
    """Whether the only changes are new entries of a dict or a set that are no numbers and the same
    at every step: a cache fills itself again.

    Args:
        of_data: whether a tensor has values of the batch; such an entry differs between steps.
    """
    added = snapshot.came() if isinstance(snapshot.items, dict | set) else None
    if added is None:
        return False
    if any(type(item) in (int, float) for item in added):
        return False
    tensors = [value for value in _values_in(added) if isinstance(value, Tensor)]
    return not any(map(of_data, tensors))


def _values_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and what is in it, `MAX_DEPTH` levels deep, if it is a container or an object
    of the user's. Of dicts that is the values.
    """
    yield value
    if depth == MAX_DEPTH:
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = stored_items(value).values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    elif is_user_class(type(value)) and has_fields(value):
        inner = vars(value).values()
    for item in inner:
        yield from _values_in(item, depth + 1)


def _refill(snapshot: Snapshot) -> None:
    """Give a container, in place, the items that it had when the snapshot was taken; an unchanged
    one is left alone.
    """
    # Another thread may be reading an unchanged one.
    if snapshot.came() == []:
        return
    snapshot.items.clear()
    if isinstance(snapshot.items, dict):
        for name, value in snapshot.before.items():
            put(snapshot.items, name, value)
    elif isinstance(snapshot.items, set):
        snapshot.items.update(snapshot.before)
    else:
        snapshot.items.extend(snapshot.before)


# Names and hooks


def _changed_names(snapshot: Snapshot) -> list[str]:
    """Return the names that count whose values have changed."""
    names = changed_names(snapshot.items, snapshot.before)
    return [name for name in names if snapshot.names.includes(name, snapshot.items.get(name))]


def _changes_of_names(snapshot: Snapshot, _: OfData) -> dict[str, Any]:
    """Return label -> present value of the names that the step has changed.

    Unreported names and new values of a `cached_property` do not count. If changes of the snapshot
    are not reported, only globals count that were numbers before.
    """
    names = snapshot.names
    changes = {}
    for name in _changed_names(snapshot):
        # A new cached_property is filled again.
        of_class = getattr(type(names.owner), str(name), None)
        if name not in snapshot.before and isinstance(of_class, cached_property):
            continue
        is_counter = names.owner is None and type(snapshot.before.get(name)) in (int, float)
        if name not in names.unreported and (snapshot.is_noticed or is_counter):
            label = f"{snapshot.place}.{name}".lstrip(".")
            changes[label] = snapshot.items.get(name, MISSING)
    return changes


def _restore_names(snapshot: Snapshot) -> None:
    """Give the changed names their former values; new ones are deleted."""
    for name in _changed_names(snapshot):
        put(snapshot.items, name, snapshot.before.get(name, MISSING))


def _changes_of_hooks(snapshot: Snapshot, _: OfData) -> dict[str, Any]:
    """Return label -> present hook of the changed hooks."""
    changed = changed_names(snapshot.items, snapshot.before)
    return {f"{snapshot.place}.{number}": snapshot.items.get(number, MISSING) for number in changed}


# Attributes


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a class, a closure's variable or an object with slots; of a class,
    without those that begin with `__` or `_abc_`.
    """
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


def _changes_of_attributes(snapshot: Snapshot, _: OfData) -> dict[str, Any]:
    """Return {place: object} if an attribute was set, changed or deleted and this is reported; else
    {}.
    """
    if not snapshot.is_noticed:
        return {}
    changed = changed_names(_attributes_of(snapshot.items), snapshot.before)
    return {snapshot.place: snapshot.items} if changed else {}


def _restore_attributes(snapshot: Snapshot) -> None:
    """Give the changed attributes their former values; new ones are deleted."""
    for name in changed_names(_attributes_of(snapshot.items), snapshot.before):
        if name in snapshot.before:
            setattr(snapshot.items, name, snapshot.before[name])
        else:
            delattr(snapshot.items, name)


# States


def _state_of(value: Any) -> Any:
    """Return a copy of the state of a random generator, an array, a tensor or shared memory, in a
    form that can be compared.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (np.ndarray, *ARRAYS)):
        return copy.copy(value)
    if isinstance(value, SHARED):
        return bytes(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    return value.__getstate__()


def _changes_of_state(snapshot: Snapshot, _: OfData) -> dict[str, Any]:
    """Return {place: object} if its content has changed and this is reported; else {}."""
    if not snapshot.is_noticed:
        return {}
    # As pickles, because arrays compare element by element.
    is_same = pickle.dumps(snapshot.before) == pickle.dumps(_state_of(snapshot.items))
    return {} if is_same else {snapshot.place: snapshot.items}


def _restore_state(snapshot: Snapshot) -> None:
    """Write the former state back into the same random generator, array, tensor or memory."""
    items = snapshot.items
    before = snapshot.before
    if isinstance(items, np.ndarray | Tensor):
        items[...] = before
    elif isinstance(items, ARRAYS):
        items[:] = before
    elif isinstance(items, SHARED):
        ctypes.memmove(ctypes.byref(items), before, len(before))
    elif isinstance(items, torch.Generator):
        items.set_state(torch.from_numpy(before))
    else:
        items.__setstate__(before)


_KINDS = {
    Kind.CONTAINER: _HowTo(_copy_of_container, _changes_of_container, _refill),
    Kind.NAMES: _HowTo(dict, _changes_of_names, _restore_names),
    Kind.HOOKS: _HowTo(dict, _changes_of_hooks, _refill),
    Kind.ATTRIBUTES: _HowTo(_attributes_of, _changes_of_attributes, _restore_attributes),
    Kind.STATE: _HowTo(_state_of, _changes_of_state, _restore_state),
}


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
