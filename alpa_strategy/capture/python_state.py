"""Attributes of the module tree while the step is captured: which it reads, what they were; it must change none.

What is read is frozen into the captured graph, so each becomes an AttributeGuard (ir/guards.py). Parameters and
buffers are inputs of the graph and need none.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from alpa_strategy.capture.append_only_lists import StandIns, grown, new_lists
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ListPlace
from alpa_strategy.ir.guards import AttributeGuard

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_LIBRARY_NUMBERS = frozenset({"p", "eps", "momentum", "dropout"})
_CONTAINERS = (list, dict, set)
_NOT_DATA = object()


@contextmanager
def attribute_reads() -> Iterator[set[tuple[int, str]]]:
    """Collect (id of the module, attribute name) of every attribute that any nn.Module is asked for in the block."""
    reads: set[tuple[int, str]] = set()
    add = reads.add

    def read(self: nn.Module, name: str) -> Any:
        add((id(self), name))
        return super(nn.Module, self).__getattribute__(name)

    # On nn.Module itself and not by swapping the modules' classes: `type(module)` stays what the user's code expects.
    before = vars(nn.Module).get("__getattribute__")
    nn.Module.__getattribute__ = read
    try:
        yield reads
    finally:
        if before is None:
            del nn.Module.__getattribute__
        else:
            nn.Module.__getattribute__ = before


def attribute_guards(module: nn.Module, reads: set[tuple[int, str]], stand_ins: StandIns) -> tuple[AttributeGuard, ...]:
    """Guards of the attributes in `reads`, parents before children; values are those of now.

    Of the modules of torch.nn only flags and numbers that people do change are guarded (training, p, eps, ...), of
    Lightning's own attributes `training` and the hyperparameters. Submodules are guarded by identity, lists that the
    step appends to by their place.
    """
    names_of: dict[int, list[str]] = {}
    for owner, name in sorted(reads):
        names_of.setdefault(owner, []).append(name)
    framework = framework_attributes() - {"training"}
    found: list[AttributeGuard] = []
    for path, child in module.named_modules():
        if id(child) not in names_of or isinstance(child, Metric | MetricCollection):
            continue
        attributes, library = vars(child), type(child).__module__.startswith(LIBRARIES)
        if attributes["_modules"]:
            found.append(AttributeGuard(path, "_modules", dict(attributes["_modules"])))
        for name in names_of[id(child)]:
            if name in framework or name.startswith("__"):
                continue
            if (path, name) in stand_ins.attributes:
                guard = stand_ins.attributes[path, name].guard(snapshot)
                found.append(AttributeGuard(path, name, guard, is_class_attribute=name not in attributes))
            elif name in attributes:
                value = attributes[name]
                if not library or type(value) in (bool, float) or name in _LIBRARY_NUMBERS:
                    found.append(AttributeGuard(path, name, snapshot(value)))
            elif not library:
                value = _class_attribute(type(child), name)
                if type(value) in _PLAIN or type(value) in (list, tuple, dict, set):
                    found.append(AttributeGuard(path, name, snapshot(value), is_class_attribute=True))
    return tuple(found)


def buffer_guards(module: nn.Module, names: Iterable[str]) -> tuple[AttributeGuard, ...]:
    """Guards of the values of buffers: they hold until one is replaced or changed in place."""
    by_owner: dict[str, set[str]] = {}
    for name in sorted(names):
        owner, _, leaf = name.rpartition(".")
        by_owner.setdefault(owner, set()).add(leaf)
    return tuple(
        AttributeGuard(owner, "_buffers", _SameItems(vars(module.get_submodule(owner))["_buffers"], leaves))
        for owner, leaves in by_owner.items()
    )


@lru_cache(maxsize=1)
def framework_attributes() -> frozenset[str]:
    """Names of the attributes that Lightning and nn.Module give every module."""
    return frozenset(vars(LightningModule()))


def outermost_metrics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Torchmetrics objects of the tree by path, without those inside another one."""
    inside: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, Metric | MetricCollection) and not any(name.startswith(f"{p}.") for p in inside):
            inside.append(name)
            yield name, child


@dataclass(frozen=True)
class SetAttribute:
    """A number, text, flag or None that the step stored as `name` in the submodule at `path`."""

    path: str
    name: str
    value: Any


@contextmanager
def attributes_kept(module: nn.Module, stored: list[SetAttribute], appended: list[ListPlace]) -> Iterator[None]:
    """Restore the plain attributes of all submodules; refuse a step that changed any: it would not happen again.

    Containers that are attributes count too, with those inside them, and fields of objects. Where the step stored
    nothing but numbers, texts and flags, these go to `stored` instead: it may be what a first call does once
    (`initialized`). Lists that only grew go to `appended`.
    """
    skipped = framework_attributes()
    metrics = {id(m) for _, root in outermost_metrics(module) for m in root.modules()}
    before, seen = [], set()
    for path, child in module.named_modules():
        if id(child) not in metrics:
            plain = {k: v for k, v in vars(child).items() if k not in skipped}
            inside = {**class_containers(type(child)), **plain}
            copies = [entry for k, v in inside.items() for entry in containers_in(v, path, k, seen)]
            fields = {k: dict(vars(v)) for k, v in plain.items() if has_fields(v)}
            before.append((path, child, plain, copies, fields))
    changed: list[str] = []
    plain_changes: list[SetAttribute] = []
    completed = False
    try:
        yield
        completed = True
    finally:
        for path, child, plain, copies, fields in before:
            for key, old in fields.items():
                now_fields = {k: v for k, v in vars(plain[key]).items() if k in old or not _is_cached(plain[key], k)}
                if not same_items(old, now_fields):
                    changed.append(f"{path}.{key}".lstrip("."))
                if not same_items(old, vars(plain[key])):
                    vars(plain[key]).clear()
                    vars(plain[key]).update(old)
            now = vars(child)
            for key in [k for k in now if k not in plain and k not in skipped]:
                if not _is_cached(child, key):
                    changed.append(f"{path}.{key}".lstrip("."))
                    if type(now[key]) in _PLAIN:
                        plain_changes.append(SetAttribute(path, key, now[key]))
                del now[key]
            for key, value in plain.items():
                if now.get(key) is not value and not type(child).__module__.startswith("torch.nn."):
                    changed.append(f"{path}.{key}".lstrip("."))
                    if key in now and type(now[key]) in _PLAIN:
                        plain_changes.append(SetAttribute(path, key, now[key]))
                now[key] = value
            for entry in copies:
                if not type(child).__module__.startswith("torch.nn."):
                    places = entry.appended()
                    appended += places
                    if not places and entry.is_changed():
                        changed.append(str(entry.place))
                restore_items(entry.container, entry.copy)
    if completed and len(plain_changes) == len(changed):
        stored += plain_changes
    elif completed:
        raise changed_attributes(changed)


def changed_attributes(names: Iterable[str]) -> CaptureError:
    """The error for a step that changes attributes of the module."""
    return CaptureError(
        f"the step sets or changes attributes of the module ({', '.join(sorted(set(names)))}): a captured step "
        "repeats tensor work only, so this would happen once and never again",
        "use self.log or a torchmetrics Metric for values, register_buffer for tensors that change, or move it to "
        "a hook such as on_train_batch_end (the step's returned dict arrives there)",
    )


@contextmanager
def initialized(module: nn.Module, stored: list[SetAttribute]) -> Iterator[None]:
    """Store what a first call of the step stores; taken back when the block fails: it was no initialization."""
    owners = [vars(module.get_submodule(entry.path)) for entry in stored]
    before = [owner.get(entry.name, _NOT_DATA) for owner, entry in zip(owners, stored, strict=True)]
    for owner, entry in zip(owners, stored, strict=True):
        owner[entry.name] = entry.value
    try:
        yield
    except BaseException:
        for owner, entry, value in zip(owners, stored, before, strict=True):
            if value is _NOT_DATA:
                del owner[entry.name]
            else:
                owner[entry.name] = value
        raise


def _is_cached(owner: Any, name: str) -> bool:
    """True for a functools.cached_property: it fills itself again."""
    return isinstance(getattr(type(owner), name, None), cached_property)


def _class_attribute(owner: type, name: str) -> Any:
    """The attribute as it stands in the first of the user's classes that has it, else _NOT_DATA."""
    for base in owner.__mro__:
        if name in vars(base):
            return _NOT_DATA if base.__module__.startswith(LIBRARIES) else vars(base)[name]
    return _NOT_DATA


def snapshot(value: Any, depth: int = 0) -> Any:
    """Something that equals `value` as long as it stays what it is.

    Numbers and texts stand for themselves, containers are copied with their contents, namespaces, dataclass objects
    and objects with plain fields (configurations) are known by identity and fields, tensors by identity and version
    (in-place changes count), large containers by identity and length, any other object by identity.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _SameTensor(value)
    if isinstance(value, np.ndarray):
        return _SameArray(value)
    if isinstance(value, _CONTAINERS) and len(value) > MAX_ITEMS:
        return _SameLength(value)
    if depth < MAX_DEPTH:
        if isinstance(value, dict):
            return {k: snapshot(v, depth + 1) for k, v in value.items()}
        if kind in (list, tuple):
            return kind(snapshot(v, depth + 1) for v in value)
        if kind in (set, frozenset):
            return kind(value)
        if has_fields(value) and (
            kind in _NAMESPACES or dataclasses.is_dataclass(value) or all(map(is_plain, vars(value).values()))
        ):
            return _SameFields(value, depth)
    return _SameObject(value)


def is_plain(value: Any) -> bool:
    """Whether `value` is a number, a text, None, or a container of such."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if type(value) in (list, tuple, set, frozenset) else type(value) in _PLAIN


class _SameObject:
    """Equals one object only. Held weakly where possible: a guard keeps no memory alive."""

    __hash__ = None

    def __init__(self, value: Any) -> None:
        try:
            self._ref = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        return self._ref() is other


class _SameLength(_SameObject):
    """Equals one large container (a vocabulary) of the same length; comparing its items would slow every step down."""

    __hash__ = None

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._length = len(value)

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and len(other) == self._length


class _SameTensor(_SameObject):
    """Equals one tensor until it is changed in place."""

    __hash__ = None

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self._version = _version(value)

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and _version(other) == self._version


class _SameArray(_SameObject):
    """Equals one NumPy array; a small one until its content changes."""

    __hash__ = None

    def __init__(self, value: np.ndarray) -> None:
        super().__init__(value)
        self._content = value.tobytes() if value.size <= MAX_ITEMS else b""

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and (other.size > MAX_ITEMS or other.tobytes() == self._content)


class _SameItems:
    """Equals a dict as long as some of its items are what they were."""

    __hash__ = None

    def __init__(self, value: dict[str, Any], keys: set[str]) -> None:
        self._items = [(key, snapshot(value[key])) for key in sorted(keys)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and all(key in other and item == other[key] for key, item in self._items)


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors keep no version


class _SameFields(_SameObject):
    """Equals one object as long as its fields are what they were."""

    __hash__ = None

    def __init__(self, value: Any, depth: int) -> None:
        super().__init__(value)
        self._fields = {k: snapshot(v, depth + 1) for k, v in vars(value).items()}

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and self._fields == vars(other)


KEPT = (list, dict, set, defaultdict, OrderedDict, Counter, deque)
LIBRARIES = ("torch.nn.", "torch.ao.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
MAX_DEPTH = 6
MAX_ITEMS = 1000


@dataclass(frozen=True)
class KeptContainer:
    """A container of the module as it was. `is_field`: it lies in an object, where only lists that grow are noticed."""

    place: ListPlace
    container: Any
    copy: Any
    is_field: bool

    def is_changed(self) -> bool:
        """Whether it has other items now."""
        if self.is_field and not isinstance(self.container, list):
            return False
        return not same_items(self.copy, self.container)

    def appended(self) -> list[ListPlace]:
        """The lists that grew: this one, or those that a `defaultdict(list)` made."""
        if self.is_field:
            return []
        if isinstance(self.container, list):
            return [self.place] if grown(self.copy, self.container) else []
        place, keys = self.place, new_lists(self.copy, self.container) or ()
        return [ListPlace(place.module, place.name, (*place.keys, key)) for key in keys]


def containers_in(value: Any, module: str, name: str, seen: set[int]) -> Iterator[KeptContainer]:
    """An attribute's containers, and those inside them; each is given once, with a copy."""
    waiting: list[tuple[Any, tuple[Any, ...], bool]] = [(value, (), False)]
    while waiting:
        value, keys, is_field = waiting.pop()
        kind = type(value)
        if has_fields(value) and len(keys) < MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            waiting += [(v, (*keys, k), True) for k, v in vars(value).items()]
        if (kind not in KEPT and kind is not tuple) or id(value) in seen:
            continue
        if kind is not tuple:
            seen.add(id(value))
            yield KeptContainer(ListPlace(module, name, keys), value, value.copy(), is_field)
        if len(keys) < MAX_DEPTH and len(value) <= MAX_ITEMS and not isinstance(value, set):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(item, (*keys, key), is_field) for key, item in items]


def class_containers(kind: type) -> dict[str, Any]:
    """By name, the containers that the user's classes of a module hold."""
    bases = (base for base in reversed(kind.__mro__) if not base.__module__.startswith((*LIBRARIES, "builtins", "abc")))
    return {k: v for base in bases for k, v in vars(base).items() if type(v) in KEPT and not k.startswith("__")}


def restore_items(container: Any, old: Any) -> None:
    """Give a list, dict or set the items of `old`."""
    container.clear()
    container.extend(old) if isinstance(container, list | deque) else container.update(old)


def same_items(old: Any, new: Any) -> bool:
    """Same keys and identical (not merely equal: tensors do not compare) items."""
    if len(old) != len(new):
        return False
    if isinstance(old, list | deque):
        return all(a is b for a, b in zip(old, new, strict=True))
    if isinstance(old, dict):
        return all(k in new and new[k] is v for k, v in old.items())
    return {id(v) for v in old} == {id(v) for v in new}


def has_fields(value: Any) -> bool:
    """True for an object of a user's class with fields in its `__dict__`: no nn.Module, function, class or tensor."""
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch.", "builtins", *LIBRARIES))
