"""Find everything that a step could change, and undo its changes after a block.

Containers, fields of objects, attributes of classes, random generators and small arrays get
snapshots (snapshots.py). A captured step runs once: without that, its changes would happen once
and never again.
"""

import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
from torch import nn

from alpa_strategy.capture.python_state import (
    ARRAYS,
    CONTAINERS,
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN,
    RECORDS,
    WITH_STATE,
    has_fields,
    is_librarys_by_descent,
    is_own_class,
    is_user_class,
    stored_items,
)
from alpa_strategy.capture.snapshots import Kind, NamesThatCount, OfData, Snapshot, take
from alpa_strategy.ir.places import Place


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


def snapshots_in(
    value: Any,
    place: str,
    seen: set[int],
    attribute: Place | None = None,
    is_noticed: bool = True,
    named: Collection[str] = (),
) -> Iterator[Snapshot]:
    """Yield snapshots of a value and of everything in it (fields, containers, random generators,
    small arrays), each object once, at most MAX_DEPTH levels deep, and of at most MAX_ITEMS items.

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
            snapshots.append(take(Kind.STATE, label, value, is_noticed))
        elif is_shallow and not item.of_library and _access(value) is not _Access.NONE:
            snapshots.append(_fields_snapshot(value, label, is_noticed, named))
            waiting += _items_in_fields(value, item.keys, named)
        elif is_shallow and _has_attributes(value):
            of_attributes = take(Kind.ATTRIBUTES, label, value, is_noticed)
            snapshots.append(of_attributes)
            waiting += _items_in_attributes(value, item.keys, of_attributes.before)

        container = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
        if container is not None:
            location = None if item.keys else attribute
            snapshots.append(
                take(Kind.CONTAINER, label, value, is_noticed, location, item.is_inside)
            )
        if snapshots or isinstance(value, Iterator):
            seen.add(id(value))
            yield from snapshots

        has_items = isinstance(value, list | dict | deque | tuple) and len(value) <= MAX_ITEMS
        if has_items and is_shallow:
            inner = stored_items(value).items() if container is dict else enumerate(value)
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


def _fields_snapshot(value: Any, label: str, is_noticed: bool, named: Collection[str]) -> Snapshot:
    """Return the snapshot of an object's fields. Args: as of `snapshots_in`."""
    counted = frozenset(named) if _access(value) is _Access.NAMED else None
    names = NamesThatCount(owner=value, counted=counted)
    return take(Kind.NAMES, label, vars(value), is_noticed, names=names)


def _items_in_fields(value: Any, keys: tuple[Any, ...], named: Collection[str]) -> Iterator[_Item]:
    """Yield the fields of an object that `snapshots_in` has to search, and its class if it is the
    user's.

    Args:
        keys: path to the object.
        named: names in the code that the step reaches.
    """
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
    """Yield those of `attributes` that `snapshots_in` has to search; of a class also its bases and
    its metaclass that are the user's.

    Args:
        value: the class, or another object that has the attributes.
        keys: path to it.
    """
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
    """Return the object that has the state of a wrapper (of a partial: its arguments); any other
    value unchanged.
    """
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    if isinstance(value, SynchronizedBase):
        return value.get_obj()
    if isinstance(value, partial):
        return value.args, value.keywords
    return value.__self__ if isinstance(value, types.MethodType) else value


def _is_small_array(value: Any) -> bool:
    """Return whether `value` is one of `ARRAYS`, or a writable array of numpy's own class, of at
    most `MAX_ITEMS` elements.
    """
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
