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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    SHARED,
    WITH_STATE,
    dict_of,
    has_fields,
    is_user_class,
    put,
)
from alpa_strategy.ir.graph import Place
from alpa_strategy.ir.guards import MISSING


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

    def changes(self) -> dict[str, Any]:
        """What changed, as messages call it, as it is now."""
        is_change = (
            self.is_noticed and self.differs() and not (self.is_inside and self._is_filled_cache())
        )
        return {self.place: self.items} if is_change else {}

    def _is_filled_cache(self) -> bool:
        """Whether nothing came but new entries of a dict or a set that are no numbers: these fill
        themselves again.
        """
        came = self.came() if isinstance(self.items, dict | set) else None
        return came is not None and not any(type(each) in (int, float) for each in came)

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

    def _changed(self) -> list[str]:
        names = [
            name for name in changed_names(self.items, self.before) if name not in self.skipped
        ]
        return [
            n
            for n in names
            if n[:2] != "__" and not isinstance(self.items.get(n), types.ModuleType)
        ]

    @override
    def changes(self) -> dict[str, Any]:
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
    def changes(self) -> dict[str, Any]:
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
        return {name: value for name, value in vars(owner).items() if name[:1] != "_"}
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
def restored(kept: Iterable[Kept]) -> Iterator[dict[str, Any]]:
    """All is afterwards what it was; the block is given a dict, in which then stands what had
    changed.
    """
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        for each in kept:
            changed |= each.changes()
            each.restore()


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
    value: Any, place: str, seen: set[int], attribute: Place | None = None, is_noticed: bool = True
) -> Iterator[Kept]:
    """What is to be kept of what lies at `place`: its fields, its containers, its generators of
    random numbers, and those inside them, each once. Caches inside of objects, which only fill, are
    not noticed. `seen` gets their ids, and
    those of iterators, whose state cannot be kept."""
    waiting: list[tuple[Any, tuple[Any, ...], bool]] = [(value, (), False)]
    while waiting:
        value, keys, is_inside = waiting.pop()
        value = value.bit_generator if isinstance(value, np.random.Generator) else value
        value = value.get_obj() if isinstance(value, SynchronizedBase) else value
        value = (value.args, value.keywords) if isinstance(value, partial) else value
        kind = type(value)
        if id(value) in seen or kind in PLAIN:
            continue
        label, found = place + "".join(f"[{key!r}]" for key in keys), list[Kept]()
        is_object = has_fields(value) or isinstance(value, types.FunctionType | nn.Module)
        container = next((each for each in CONTAINERS if isinstance(value, each)), None)
        is_small = kind is np.ndarray and value.size <= MAX_ITEMS and value.flags.writeable
        is_small |= isinstance(value, ARRAYS) and len(value) <= MAX_ITEMS
        if isinstance(value, WITH_STATE) or is_small:
            found.append(KeptState(label, value, state_of(value), is_noticed))
        elif is_object and len(keys) < MAX_DEPTH:
            found.append(KeptNames(label, vars(value), dict(vars(value)), is_noticed, owner=value))
            waiting += [(v, (*keys, k), True) for k, v in vars(value).items()]
        elif (
            kind is types.CellType
            or is_user_class(value)
            or (is_user_class(kind) and not isinstance(value, tuple))
        ):
            found.append(KeptAttributes(label, value, _attributes_of(value), is_noticed))
        if container is not None:
            place_itself = None if keys else attribute
            found.append(
                Kept(label, value, container(_raw(value)), is_noticed, place_itself, is_inside)
            )
        if found or isinstance(value, Iterator):
            seen.add(id(value))
            yield from found
        has_items = isinstance(value, list | dict | deque | tuple) and len(value) <= MAX_ITEMS
        if has_items and len(keys) < MAX_DEPTH:
            items = value.items() if container is dict else enumerate(value)
            waiting += [(item, (*keys, key), is_inside) for key, item in items]
