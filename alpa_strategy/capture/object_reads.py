"""Which attributes the step reads, of modules and of objects of the user's classes (a schedule, a data module).

The classes note it while the step is traced: what an object holds changes without a trace in what holds the object,
and only what is read matters.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.capture.python_state import (
    LIBRARIES,
    PLAIN,
    Values,
    class_attribute,
    framework_attributes,
    is_metric,
    patched,
    snapshot,
)
from alpa_strategy.ir.graph import Place
from alpa_strategy.ir.guards import ValueGuard
from alpa_strategy.ir.user_code import is_user_file

Reads = dict[tuple[int, str], Callable[[], Any]]
"""(id of an object, attribute name) -> the object, None once it is no more: the step made it for itself."""

_LIBRARY_NUMBERS = frozenset({"p", "eps", "momentum", "dropout"})  # of torch's modules: what people do change


@contextmanager
def attribute_reads(module: nn.Module) -> Iterator[Reads]:
    """Collect every attribute that a module, or an object of a user's class, is asked for in the block."""
    reads: Reads = {}
    thread = get_ident()

    def watching(kind: type) -> tuple[type, str, Any]:
        original: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            if (id(self), name) not in reads and name[:2] != "__" and get_ident() == thread:
                reads[id(self), name] = weakref.ref(self) if type(self).__weakrefoffset__ else lambda: self
            return original(self, name)

        return kind, "__getattribute__", read

    # On the classes and not by swapping those of objects: `type(module)` stays what the user's code expects.
    with patched(map(watching, _watched_classes(module))):
        yield reads


def _watched_classes(module: nn.Module) -> list[type]:
    """nn.Module and the user's classes, those of the module's packages and of files that are not installed, without
    what inherits from one of these; and what may hold a learning rate."""
    packages = {base.__module__.partition(".")[0] for child in module.modules() for base in type(child).__mro__}
    packages -= {"alpa_strategy", "abc", "builtins", "lightning", "torch", "torchmetrics", "typing"}
    kinds: dict[type, None] = dict.fromkeys((nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    waiting: list[type] = [object]
    while waiting:
        kind: type
        for kind in type.__subclasses__(waiting.pop()):
            if kind in kinds or issubclass(kind, nn.Module | Tensor | BaseException | Enum | type | tuple):
                continue
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
            if kind.__module__.partition(".")[0] in packages or (is_user_file(file) and "site-packages" not in file):
                kinds[kind] = None
            else:
                waiting.append(kind)
    return list(kinds)


def attribute_guards(module: nn.Module, reads: Reads, appended: Collection[Place]) -> tuple[ValueGuard, ...]:
    """Guards of the attributes in `reads`; values are those of now.

    Of the modules of torch.nn only flags and numbers that people do change are guarded (training, p, eps, ...), of
    Lightning's own attributes `training` and the hyperparameters. Submodules are guarded by identity, parents before
    children, other objects last. What lies in the lists `appended`, and which list it is, does not matter: they are
    only appended to.
    """
    found: dict[tuple[int, str], ValueGuard] = {}
    paths = {id(child): (place, path) for place, (path, child) in enumerate(module.named_modules())}
    skipped = framework_attributes() - {"training"}
    for identity, name in sorted(reads, key=lambda key: (*paths.get(key[0], (len(paths), "")), key[1], key[0])):
        owner, (_, path) = reads[identity, name](), paths.get(identity, (0, None))
        if owner is None or is_metric(owner):
            continue
        label = type(owner).__name__ if path is None else path
        attributes, is_library = getattr(owner, "__dict__", {}), type(owner).__module__.startswith(LIBRARIES)
        if path is not None and attributes["_modules"]:
            submodules = ValueGuard(f"{path}._modules".lstrip("."), "_modules", attributes, {**attributes["_modules"]})
            found.setdefault((identity, "_modules"), submodules)
        if name in skipped or Place(label, name) in appended:
            continue
        # The instance's dict is asked directly: a property or __getattr__ would run the user's code.
        value, namespace = attributes.get(name), attributes
        if name not in attributes:
            value, namespace = class_attribute(type(owner), name), Values(partial(getattr, owner))
            if isinstance(value, types.MemberDescriptorType):  # of `__slots__`
                value = getattr(owner, name, None)
            elif is_library or type(value) not in (*PLAIN, list, tuple, dict, set):
                continue
        elif is_library and type(value) not in (bool, float) and name not in _LIBRARY_NUMBERS:
            continue
        found[identity, name] = ValueGuard(f"{label}.{name}".lstrip("."), name, namespace, snapshot(value))
    return tuple(found.values())
