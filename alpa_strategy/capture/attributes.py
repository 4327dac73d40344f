"""Which attributes of the module tree a step reads while it is captured, and what they were.

Their values are frozen into the captured graph, so each becomes an AttributeGuard (capture/guards.py). Parameters and
buffers are inputs of the graph and need none.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from alpa_strategy.capture.guards import AttributeGuard

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = ("torch.nn.", "torch.ao.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
_LIBRARY_NUMBERS = frozenset({"p", "eps", "momentum", "dropout"})
MAX_DEPTH = 6
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


def attribute_guards(module: nn.Module, reads: set[tuple[int, str]]) -> tuple[AttributeGuard, ...]:
    """Guards of the attributes in `reads`, parents before children; values are those of now.

    Of the modules of torch.nn only flags and numbers that people do change are guarded (training, p, eps, ...), of
    Lightning's own attributes `training` and the hyperparameters. Submodules are guarded by identity.
    """
    names_of: dict[int, list[str]] = {}
    for owner, name in sorted(reads):
        names_of.setdefault(owner, []).append(name)
    framework = framework_attributes() - {"training"}
    found: list[AttributeGuard] = []
    for path, child in module.named_modules():
        if id(child) not in names_of or isinstance(child, Metric | MetricCollection):
            continue
        attributes, library = vars(child), type(child).__module__.startswith(_LIBRARIES)
        if attributes["_modules"]:
            found.append(AttributeGuard(path, "_modules", dict(attributes["_modules"])))
        for name in names_of[id(child)]:
            if name in framework or name.startswith("__"):
                continue
            if name in attributes:
                value = attributes[name]
                if not library or type(value) in (bool, float) or name in _LIBRARY_NUMBERS:
                    found.append(AttributeGuard(path, name, snapshot(value)))
            elif not library:
                value = _class_attribute(type(child), name)
                if type(value) in _PLAIN or type(value) in (list, tuple, dict, set):
                    found.append(AttributeGuard(path, name, snapshot(value), is_class_attribute=True))
    return tuple(found)


@lru_cache(maxsize=1)
def framework_attributes() -> frozenset[str]:
    """Names of the attributes that Lightning and nn.Module give every module."""
    return frozenset(vars(LightningModule()))


def _class_attribute(owner: type, name: str) -> Any:
    """The attribute as it stands in the first of the user's classes that has it, else _NOT_DATA."""
    for base in owner.__mro__:
        if name in vars(base):
            return _NOT_DATA if base.__module__.startswith(_LIBRARIES) else vars(base)[name]
    return _NOT_DATA


def snapshot(value: Any, depth: int = 0) -> Any:
    """Something that equals `value` as long as it stays what it is.

    Numbers and texts stand for themselves, containers are copied with their contents, namespaces, dataclass objects
    and objects with plain fields (configurations) are known by identity and fields, tensors by identity and version
    (in-place changes count), any other object by identity.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _SameTensor(value)
    if depth < MAX_DEPTH:
        if isinstance(value, dict):
            return {k: snapshot(v, depth + 1) for k, v in value.items()}
        if kind in (list, tuple):
            return kind(snapshot(v, depth + 1) for v in value)
        if kind in (set, frozenset):
            return kind(value)
        if has_fields(value) and (
            kind in _NAMESPACES or dataclasses.is_dataclass(value) or all(map(_is_plain, vars(value).values()))
        ):
            return _SameFields(value, depth)
    return _SameObject(value)


def has_fields(value: Any) -> bool:
    """True for an object of a user's class with fields in its `__dict__`: no nn.Module, function, class or tensor."""
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch.", "builtins", *_LIBRARIES))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple, set, frozenset) else type(value) in _PLAIN


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


class _SameTensor(_SameObject):
    """Equals one tensor until it is changed in place."""

    __hash__ = None

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self._version = _version(value)

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and _version(other) == self._version


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
