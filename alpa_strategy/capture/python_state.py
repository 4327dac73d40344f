"""Predicates and snapshots of Python objects around the step's tensors, and patches that go away.

What the step reads is frozen into the captured graph, so it becomes guards (python_reads.py): each
holds a `snapshot`. What it changes is compared and put back by snapshots.py: attributes of the
module tree in module_state.py, globals, closures and classes in outside_state.py.
"""

import argparse
import ctypes
import dataclasses
import operator
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, lru_cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from alpa_strategy.capture.lightning_adapter import LightningModule, Metric, MetricCollection
from alpa_strategy.ir import user_code
from alpa_strategy.ir.guards import MISSING

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, dict, set, deque)
ARRAYS = (array, bytearray)
LIBRARIES = ("torch.nn.", "torch.ao.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
SHARED: tuple[Any, ...] = (
    SynchronizedBase,
    ctypes._SimpleCData,
    ctypes.Array,
)  # multiprocessing's Value and Array
WITH_STATE = (
    random.Random,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
    *SHARED,
)
MEMBERS = ("_parameters", "_buffers", "_modules")
# Objects of Python's own classes that are nothing but their fields.
RECORDS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, threading.local)
# Modules whose classes other threads work on, or the framework: what descends from one of these
# is not walked through.
_NOT_WALKED = (
    "threading",
    "_thread",
    "logging",
    "queue",
    "_queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "subprocess",
    "socket",
    "io",
    "_io",
    "alpa_strategy",
    "lightning.fabric",
    "lightning_fabric",
    *(
        f"{package}.{part}"
        for package in ("lightning.pytorch", "pytorch_lightning")
        for part in ("trainer", "strategies", "loggers", "plugins", "accelerators", "profilers")
    ),
)
MAX_DEPTH = 6
MAX_ITEMS = 1000
# What is larger is known by its length alone (containers) or by samples (arrays).
MAX_COMPARED_ITEMS, MAX_COMPARED_ELEMENTS = 100_000, 1_000_000


# Snapshots


def snapshot(value: Any, depth: int = 0) -> Any:
    """Return an object that equals `value` as long as that is unchanged.

    - Numbers and texts are compared as such, containers with their contents.
    - Configurations are compared by identity and fields, tensors by identity and version, so that
      changes in place count. Arrays are compared by identity and elements, of a large one by some.
    - Large containers are compared by identity and by those of their items (50,000 of a vocabulary
      take about a millisecond of a step), larger ones by identity and length.
    - Any other object is compared by identity.

    Args:
        depth: how many containers it is in; below `MAX_DEPTH`, contents are compared.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        return Same(value, version_of)
    if isinstance(value, np.ndarray):
        every = 1 + value.size // MAX_COMPARED_ELEMENTS
        return Same(value, lambda array: array.ravel()[::every].tobytes())
    if isinstance(value, ARRAYS):
        return Same(value, bytes)
    if isinstance(value, types.MappingProxyType):  # whoever holds what it shows may change that
        return snapshot(dict(value), depth)
    if isinstance(value, partial):
        return Same(
            value,
            lambda call: (call.args, call.keywords),
            snapshot((value.args, value.keywords), depth + 1),
        )
    if isinstance(value, list | dict | set) and len(value) > MAX_ITEMS:
        if len(value) > MAX_COMPARED_ITEMS:
            return Same(value, len)
        return Same(value, lambda container: container, SameItems(value))
    if depth < MAX_DEPTH:
        if isinstance(value, dict):
            return {k: snapshot(v, depth + 1) for k, v in stored_items(value).items()}
        for sequence in (list, tuple, deque):
            if isinstance(value, sequence):
                return sequence(snapshot(v, depth + 1) for v in value)
        if kind in (set, frozenset):
            return kind(value)
        if is_configuration(value):
            return Same(value, vars, snapshot(vars(value), depth))
    return Same(value)


class Same:
    """Equals one object only, and while `tell(object)` equals `told`.

    It has a weak reference to the object, if there can be one.

    Args:
        value: the object.
        tell: returns what of the object must not change; None: only its identity counts.
        told: the former result of `tell`; None: it is called now.
    """

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(
        self, value: Any, tell: Callable[[Any], Any] | None = None, told: Any = None
    ) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value
        if tell is not None and told is None:
            told = tell(value)
        self._tell = tell
        self._told = told

    def __eq__(self, other: object) -> bool:
        if self._ref() is not other:
            return False
        return self._tell is None or self._told == self._tell(other)


class SameItems:
    """Equals a list, dict or set while its items are the same objects or equal plain values."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(self, container: Collection[Any]) -> None:
        self._items = list(container)
        self._values = list(container.values()) if isinstance(container, dict) else []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | dict | set) or len(other) != len(self._items):
            return False
        values: Iterable[Any] = other.values() if isinstance(other, dict) else ()
        return _are_same(self._items, other) and _are_same(self._values, values)


def _are_same(before: list[Any], now: Iterable[Any]) -> bool:
    """Whether the items are the same objects, or equal plain values of the same types.

    Args:
        before, now: equally many items.
    """
    now = list(now)
    if all(map(operator.is_, before, now)):
        return True
    for one, other in zip(before, now, strict=True):
        is_equal = type(one) is type(other) and type(one) in PLAIN and one == other
        if one is not other and not is_equal:
            return False
    return True


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with every write to the tensor; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def has_fields(value: Any) -> bool:
    """Whether it is an object of a user's class with fields in its `__dict__`: no nn.Module,
    function, class or tensor.
    """
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType):
        return False
    if isinstance(value, CONTAINERS) and type(value).__module__ == "collections":
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(
        ("torch.", "builtins", *LIBRARIES)
    )


def is_configuration(value: Any) -> bool:
    """Return whether `value` is an object that only stores settings: a namespace, a dataclass, or
    any object all of whose attributes are plain values.
    """
    if not has_fields(value):
        return False
    is_record = type(value) in (
        types.SimpleNamespace,
        argparse.Namespace,
    ) or dataclasses.is_dataclass(value)
    return is_record or all(map(is_plain, vars(value).values()))


def is_plain(value: Any) -> bool:
    """Whether `value` is a number, a text, None, or a container of such."""
    if isinstance(value, dict):
        return all(map(is_plain, stored_items(value).values()))
    kinds = (list, tuple, set, frozenset, torch.Size)
    return all(map(is_plain, value)) if type(value) in kinds else type(value) in PLAIN


@lru_cache(maxsize=1)
def framework_attributes() -> frozenset[str]:
    """Return the names of the attributes that Lightning and nn.Module give every module."""
    return frozenset(vars(LightningModule()))


def is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    """Whether it is a metric or a collection of metrics.

    `isinstance` would do the same, but ABCMeta asks all of torchmetrics' classes about each new
    class: 0.5 s of a first step.
    """
    return not {Metric, MetricCollection}.isdisjoint(type(value).__mro__)


def outermost(
    module: nn.Module, is_wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, submodule) of those that `is_wanted`, without those inside another one."""
    inside: list[str] = []
    for path, child in module.named_modules():
        if is_wanted(child) and not any(path.startswith(f"{outer}.") for outer in inside):
            inside.append(path)
            yield path, child


def outermost_metrics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the torchmetrics objects of the tree by path, without those inside another one."""
    yield from outermost(module, is_metric)


def class_attribute(owner: type, name: str) -> Any:
    """Return the attribute `name` from the dict of the first class in the MRO of `owner` that has
    it; MISSING if that is a library's, or if there is none.
    """
    for base in owner.__mro__:
        if name in vars(base):
            return MISSING if base.__module__.startswith(LIBRARIES) else vars(base)[name]
    return MISSING


def user_classes(module: nn.Module) -> set[type]:
    """Return the classes of the module's tree that users wrote, base classes included."""
    kinds = {base for child in module.modules() for base in type(child).__mro__}
    return set(filter(is_user_class, kinds))


def functions_in(kinds: Iterable[type]) -> list[types.FunctionType]:
    """Return the methods that classes define, without inherited ones."""
    members = (member for kind in kinds for member in vars(kind).values())
    return [member for member in members if isinstance(member, types.FunctionType)]


def is_user_class(value: Any) -> bool:
    """Return whether `value` is a class of a module that users wrote."""
    return isinstance(value, type) and is_user_module(sys.modules.get(value.__module__))


def is_own_class(value: Any) -> bool:
    """Whether it is a class of the user's own code, not of an installed package."""
    if not is_user_class(value):
        return False
    file = sys.modules[value.__module__].__file__
    return file is not None and not user_code.is_installed(file)


@cache
def is_librarys_by_descent(kind: type) -> bool:
    """Whether a class, or one of its bases, has objects that other threads or the framework use.

    Such as a thread, a lock, a logger, a queue, a Trainer, a strategy; but no `threading.local`.
    """
    if issubclass(kind, threading.local):
        return False
    prefixes = tuple(f"{module}." for module in _NOT_WALKED)
    return any(f"{base.__module__}.".startswith(prefixes) for base in kind.__mro__)


def is_user_module(value: Any) -> bool:
    """Whether it is a module in a file of the user."""
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and user_code.is_user_file(file)


def dict_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the type of dict that a copy of `value` should have."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def stored_items(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with the items that are stored in one of any class.

    Methods of a subclass may return others, or compute them (transformers' ACT2FN, and its tables
    of models, which import a model when they are read).
    """
    return dict(dict_of(value).items(value))


def put(owner: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of an object, or the item of a dict; delete it if `value` is
    MISSING, with AttributeError if the object has none.
    """
    is_dict = isinstance(owner, dict)
    if value is MISSING and is_dict:
        owner.pop(name, None)
    elif value is MISSING:
        delattr(owner, name)
    elif is_dict:
        # Not the user's `__setitem__` of a class derived from dict.
        dict_of(owner).__setitem__(owner, name, value)
    else:
        setattr(owner, name, value)


@contextmanager
def patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, or items of dicts, in the block; afterwards all are as before.

    Args:
        patches: (owner, name, value); MISSING as the value deletes it.
    """
    with ExitStack() as before:
        for owner, name, value in list(patches):
            old = (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)
            put(owner, name, value)
            before.callback(put, owner, name, old)
        yield


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter], flag: bool) -> Iterator[None]:
    """Context in which all of the parameters require gradients (`flag`), or none does; undone at
    its end.
    """
    others = [parameter for parameter in parameters if parameter.requires_grad is not flag]
    for parameter in others:
        parameter.requires_grad_(flag)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(not flag)


def standing_in(module: nn.Module, others: Mapping[Any, Tensor]) -> AbstractContextManager[None]:
    """Context in which the module has other tensors in the place of parameters and buffers.

    Args:
        module: the module, whose submodules are included.
        others: parameter or buffer -> the tensor in its place; others stay.
    """
    patches = []
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor in others:
                    patches.append((tensors, name, others[tensor]))
    return patched(patches)
