"""What the step reads in Python's objects, as guards, and numbers among it that change, as inputs of the graph.

The classes of modules, and the user's (a schedule, a data module), note what is read while the step is traced: what an
object holds changes without a trace in what holds the object, and only what is read matters. A number is first captured
as it is. Once it has changed, the step is captured with a StepCounter in its place: what is computed with it is
computed at every step, comparisons become guards, and where a number is needed at once (shapes, indices) the step is
good for this one only.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import IOBase
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import value_text
from alpa_strategy.capture.python_state import (
    LIBRARIES,
    PLAIN,
    Values,
    changed_attributes,
    class_attribute,
    framework_attributes,
    is_metric,
    patched,
    snapshot,
)
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import Place, StepGraph
from alpa_strategy.ir.guards import MISSING, ValueGuard, at_counters
from alpa_strategy.ir.user_code import is_user_file, user_frame

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
            is_first = (id(self), name) not in reads and name[:2] != "__" and get_ident() == thread
            if is_first:  # before it is looked up: what is not there now may be there at another step
                reads[id(self), name] = weakref.ref(self) if type(self).__weakrefoffset__ else lambda: self
            value = original(self, name)
            if is_first and (isinstance(value, IOBase) or type(value).__module__ == "_csv"):
                raise CaptureError(
                    f"the step uses an open file ({user_frame()}): captured, it would write once and never again",
                    "write files in a hook such as on_train_batch_end (what the step returns arrives there)",
                )
            return value

        return kind, "__getattribute__", read

    def variable(environment: Any, name: str) -> str:
        reads[id(environment), name] = lambda: environment
        return environment_item(environment, name)

    environment_item = type(os.environ).__getitem__
    # On the classes and not by swapping those of objects: `type(module)` stays what the user's code expects.
    with patched([*map(watching, _watched_classes(module)), (type(os.environ), "__getitem__", variable)]):
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
            is_pythons = bool(kind.__flags__ & 1 << 9)  # a C extension's own cannot be changed: Py_TPFLAGS_HEAPTYPE
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
            is_users = kind.__module__.partition(".")[0] in packages
            if is_pythons and (is_users or (is_user_file(file) and "site-packages" not in file)):
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
        if owner is os.environ:
            found[identity, name] = ValueGuard(f"os.environ[{name!r}]", name, owner, owner.get(name, MISSING))
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
            elif not hasattr(type(owner), name) and getattr(owner, name, MISSING) is MISSING:
                value = MISSING  # `getattr(self, "factor", 1.0)`
            elif is_library or type(value) not in (*PLAIN, list, tuple, dict, set):
                continue
        elif is_library and type(value) not in (bool, float) and name not in _LIBRARY_NUMBERS:
            continue
        found[identity, name] = ValueGuard(f"{label}.{name}".lstrip("."), name, namespace, snapshot(value))
    return tuple(found.values())


# Numbers that change


@dataclass(frozen=True)
class _AnyOf:
    """Stands in a guard's value for a number that may be any of its kind."""

    kind: type

    def __eq__(self, other: object) -> bool:
        return type(other) is self.kind


def _is_changed(before: Any, now: Any) -> bool:
    return type(now) in (int, float) and type(before) is type(now) and before != now


def changed_numbers(step: StepGraph, module: nn.Module, batch: Any) -> set[Place]:
    """Numbers that the step was captured with and that are others now."""
    owners = dict(module.named_modules())
    found = set()
    for guard in step.attributes:
        path, _, name = guard.label.rpartition(".")
        held = vars(owners[path]).get(name) if path in owners else None  # no global, nothing of the Trainer
        if held is None or held is not guard.namespace.get(guard.name):
            continue
        if _is_changed(guard.value, held):
            found.add(Place(path, name))
        elif isinstance(held, dict) and isinstance(guard.value, dict):
            keys = [key for key, value in held.items() if _is_changed(guard.value.get(key), value)]
            found |= {Place(path, name, key) for key in keys if isinstance(key, str | int)}
    leaves = pytree.tree_flatten_with_path(batch)[0]
    for index, text in step.leaves:
        path_of_leaf, leaf = leaves[index]
        is_number = type(leaf) in (int, float) and text.startswith(f"{type(leaf).__qualname__} ")
        if is_number and text != value_text(leaf):
            found.add(Place("", f"the batch{pytree.keystr(path_of_leaf)}", leaf=index))
    return found


def numbers_now(places: Collection[Place], module: nn.Module, batch: Any) -> dict[str, Any]:
    """The numbers by label."""
    leaves = pytree.tree_leaves(batch) if any(place.leaf is not None for place in places) else []
    return {str(place): place.value(module, leaves) for place in places}


@contextmanager
def counters_for(module: nn.Module, places: Sequence[Place], counter: Callable[[Any, str], Any]) -> Iterator[None]:
    """Attributes at these places are counters in the block. CaptureError where it stores others."""
    held = [(place.holder(module), place.item, place) for place in places if place.leaf is None]
    given = [(holder, item, counter(holder[item], str(place))) for holder, item, place in held]
    with patched(given):
        yield
        if changed := [str(held[i][2]) for i, (holder, item, c) in enumerate(given) if holder.get(item) is not c]:
            raise changed_attributes(changed)


def freed(guards: Sequence[ValueGuard], places: Sequence[Place]) -> tuple[ValueGuard, ...]:
    """The guards, which hold for any numbers at these places."""

    def free(guard: ValueGuard) -> ValueGuard:
        value = guard.value
        for place in places:
            if place.leaf is None and guard.label == place.attribute:
                is_item = place.key is not None
                value = {**value, place.key: _AnyOf(type(value[place.key]))} if is_item else _AnyOf(type(value))
        return replace(guard, value=value)

    return tuple(map(free, guards))


def is_same_step(one: StepGraph, other: StepGraph, numbers: Mapping[str, Any]) -> bool:
    """Whether two captures of a step compute the same where the counters and changing numbers are these."""

    def as_now(step: StepGraph) -> str:
        ops = tuple(replace(op, call=at_counters(op.call, numbers)) for op in step.ops)
        return replace(step, ops=ops, output=None, logs=(), metrics=(), appended=()).graph_digest

    return as_now(one) == as_now(other)
