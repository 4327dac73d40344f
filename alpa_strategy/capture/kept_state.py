"""Containers, fields and generators as they were before the step: what of them changed, and how all
of it is put back.

A step that is captured runs once: what it changes would be changed once and never again.
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
class Kept:
    """A container as it was before the step."""

    place: str  # how messages call it
    items: Any
    before: Any  # a copy of `items`
    is_noticed: bool = True  # whether it is a change of the user's; all is restored
    attribute: Place | None = None  # where it is an attribute itself
    is_inside: bool = False  # whether it lies inside of an object, and may be its cache

    def came(self) -> list[Any] | None:
        """What it holds now (values of a dict) after all that it held; None where that is not as it
        was.

        Objects count, not whether they are equal (tensors do not compare), and their order
        (`move_to_end`).
        """
        old, new = self.before, _raw(self.items)
        if isinstance(old, set):
            return list(new - old) if old <= new else None
        is_dict = isinstance(old, dict)
        items, kept = (tuple(each.items() if is_dict else each) for each in (new, old))
        return (
            list(new.values() if is_dict else new)[len(old) :]
            if _is_same(items[: len(old)], kept)
            else None
        )

    def differs(self) -> bool:
        return self.came() != []

    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        """What changed, as messages call it, as it is now.

        of_data: whether a tensor was made of the batch or of parameters.
        """
        if not self.is_noticed or not self.differs():
            return {}
        is_cache = self.is_inside and self._is_filled_cache(of_data)
        return {} if is_cache else {self.place: self.items}

    def _is_filled_cache(self, of_data: OfData) -> bool:
        """Whether nothing came but new entries of a dict or a set that are the same at every step,
        and no numbers: these fill themselves again.
        """
        came = self.came() if isinstance(self.items, dict | set) else None
        if came is None:
            return False
        held = list(_held_in(came))
        if any(type(each) in (int, float) for each in came):
            return False
        return not any(isinstance(each, Tensor) and of_data(each) for each in held)

    def restore(self) -> None:
        """Let it hold what it did."""
        if self.differs():  # else another thread may be reading it
            self.items.clear()
            if isinstance(self.items, dict):
                for name, value in self.before.items():
                    put(self.items, name, value)
            elif isinstance(self.items, set):
                self.items.update(self.before)
            else:
                self.items.extend(self.before)


@dataclass(frozen=True)
class KeptNames(Kept):
    """The attributes of a module or another object, or the globals of a file: each name counts by
    itself.

    Names that begin with two underscores do not (torch's `__dynamo_disable`), nor those in
    `skipped`, nor imports.
    """

    owner: Any = None  # whose attributes they are
    skipped: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()  # names that are restored, but not the user's
    counted: frozenset[str] | None = None  # the names that count at all; None: every one

    def _changed(self) -> list[str]:
        names = [
            name
            for name in changed_names(self.items, self.before)
            if name not in self.skipped and (self.counted is None or name in self.counted)
        ]
        return [
            n
            for n in names
            if n[:2] != "__" and not isinstance(self.items.get(n), types.ModuleType)
        ]

    @override
    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        # A cached_property that was not there before fills itself again.
        held = [(n, getattr(type(self.owner), str(n), None)) for n in self._changed()]
        changed = [
            n
            for n, of_class in held
            if n in self.before or not isinstance(of_class, cached_property)
        ]
        counters = {
            n for n in changed if self.owner is None and type(self.before.get(n)) in (int, float)
        }
        counted = [n for n in changed if n not in self.own and (self.is_noticed or n in counters)]
        return {
            f"{self.place}.{name}".lstrip("."): self.items.get(name, MISSING) for name in counted
        }

    @override
    def restore(self) -> None:
        for name in self._changed():
            put(self.items, name, self.before.get(name, MISSING))


class KeptHooks(Kept):
    """The hooks of a module: each counts by itself, as a first call may install some (Hugging
    Face's do).
    """

    @override
    def changes(self, of_data: OfData = lambda _: False) -> dict[str, Any]:
        changed = changed_names(self.items, self.before)
        return {f"{self.place}.{number}": self.items.get(number, MISSING) for number in changed}


class KeptAttributes(Kept):
    """A class, an object with slots, or the variable of a closure; `before`: its attributes."""

    @override
    def differs(self) -> bool:
        return bool(changed_names(_attributes_of(self.items), self.before))

    @override
    def restore(self) -> None:
        for name in changed_names(_attributes_of(self.items), self.before):
            setattr(self.items, name, self.before[name]) if name in self.before else delattr(
                self.items, name
            )


def _attributes_of(owner: Any) -> dict[str, Any]:
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


class KeptState(Kept):
    """A generator of random numbers, of Python, NumPy or torch, or a small array; `before` is its
    `state_of`.
    """

    @override
    def differs(self) -> bool:
        return pickle.dumps(self.before) != pickle.dumps(
            state_of(self.items)
        )  # arrays do not compare

    @override
    def restore(self) -> None:
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
    if isinstance(value, (np.ndarray, Tensor, *ARRAYS)):
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    if isinstance(value, SHARED):
        return bytes(value)
    return value.get_state().numpy() if isinstance(value, torch.Generator) else value.__getstate__()


@contextmanager
def restored(kept: Iterable[Kept], of_data: OfData = lambda _: False) -> Iterator[dict[str, Any]]:
    """All is afterwards what it was; the block is given a dict, in which then stands what had
    changed. of_data: see `Kept.changes`.
    """
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        for each in kept:
            changed |= each.changes(of_data)
            each.restore()


def _held_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """What lies in containers and in the fields of the user's objects, and these themselves."""
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
    for each in inner:
        yield from _held_in(each, depth + 1)


def _raw(value: Any) -> Any:
    """A container; a dict as what lies in it: a subclass may answer something else (transformers'
    ACT2FN).
    """
    return dict(dict_of(value).items(value)) if isinstance(value, dict) else value


def changed_names(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> list[Any]:
    """Names that have another object now, or none, or did not have one. Equal numbers, texts and
    sizes are the same.
    """
    return [
        name
        for name in {**old, **new}
        if not _is_same(new.get(name, MISSING), old.get(name, MISSING))
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


def kept_in(
    value: Any,
    place: str,
    seen: set[int],
    attribute: Place | None = None,
    is_noticed: bool = True,
    named: Collection[str] = (),
) -> Iterator[Kept]:
    """What is to be kept of what lies at `place`: its fields, its containers, its generators of
    random numbers, and those inside them, each once.

    Objects of libraries are not walked through: of a Trainer, a strategy, a logger, a lock or a
    queue nothing is kept, whoever holds it, and of an installed package's object its own fields
    only. Other threads work on what lies deeper.

    Args:
        value: what lies there.
        place: how messages call it.
        seen: gets the ids of what is kept, and those of iterators, whose state cannot be kept.
        attribute: of the module, where the value is one.
        is_noticed: whether a change is one of the user's; all is restored.
        named: attributes that the reached code names, which count in objects that are a library's
            by descent (a thread of the user's class).
    """
    waiting: list[_Item] = [_Item(value, (), False, False)]
    while waiting:
        item = waiting.pop()
        value = _behind(item.value)
        kind = type(value)
        if id(value) in seen or kind in PLAIN:
            continue
        label, found = place + "".join(f"[{key!r}]" for key in item.keys), list[Kept]()
        container = next((each for each in CONTAINERS if isinstance(value, each)), None)
        is_shallow = len(item.keys) < MAX_DEPTH
        if isinstance(value, WITH_STATE) or _is_small_array(value):
            found.append(KeptState(label, value, state_of(value), is_noticed))
        elif (access := _access(value)) is not _Access.NONE and not item.of_library and is_shallow:
            fields = vars(value)
            by_name = frozenset(named) if access is _Access.NAMED else None
            found.append(
                KeptNames(label, fields, dict(fields), is_noticed, owner=value, counted=by_name)
            )
            counted = fields if by_name is None else fields.keys() & by_name
            of_library = access is _Access.OWN_FIELDS
            waiting += [
                _Item(fields[name], (*item.keys, name), True, of_library) for name in counted
            ]
            if access is _Access.ALL and is_own_class(kind):
                waiting.append(_Item(kind, (*item.keys, kind.__name__), False, False))
        elif _has_attributes(value) and is_shallow:
            attributes = _attributes_of(value)
            found.append(KeptAttributes(label, value, attributes, is_noticed))
            waiting += [
                _Item(held, (*item.keys, name), not isinstance(value, type), False)
                for name, held in attributes.items()
                if not isinstance(held, _DEFINITIONS) or is_own_class(held)
            ]
            if isinstance(value, type):
                bases = filter(is_own_class, (*value.__mro__[1:], type(value)))
                waiting += [
                    _Item(base, (*item.keys, base.__name__), False, False) for base in bases
                ]
        if container is not None:
            place_itself = None if item.keys else attribute
            found.append(
                Kept(label, value, container(_raw(value)), is_noticed, place_itself, item.is_inside)
            )
        if found or isinstance(value, Iterator):
            seen.add(id(value))
            yield from found
        has_items = isinstance(value, list | dict | deque | tuple) and len(value) <= MAX_ITEMS
        if has_items and is_shallow:
            items = value.items() if container is dict else enumerate(value)
            waiting += [
                _Item(held, (*item.keys, key), item.is_inside, item.of_library)
                for key, held in items
            ]


@dataclass(frozen=True)
class _Item:
    """Something that `kept_in` has yet to look at."""

    value: Any
    keys: tuple[Any, ...]  # the way to it
    is_inside: bool  # whether it lies inside of an object
    of_library: bool  # whether that is an object of an installed package


class _Access(Enum):
    """Which of an object's fields are kept."""

    ALL = 1
    OWN_FIELDS = 2  # not those of the objects in them
    NAMED = 3  # those that the reached code names
    NONE = 4


def _access(value: Any) -> _Access:
    kind: Any = type(value)
    if isinstance(value, (types.FunctionType, nn.Module, *RECORDS)):
        return _Access.ALL
    if not has_fields(value) or not is_user_class(kind):
        return _Access.NONE
    if is_librarys_by_descent(kind):
        return _Access.NAMED
    return _Access.ALL if is_own_class(kind) else _Access.OWN_FIELDS


def _behind(value: Any) -> Any:
    """What holds the state of a value that only stands before it."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    if isinstance(value, SynchronizedBase):
        return value.get_obj()
    if isinstance(value, partial):
        return value.args, value.keywords
    return value.__self__ if isinstance(value, types.MethodType) else value


def _is_small_array(value: Any) -> bool:
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


# What a class holds beside state.
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
