"""The values that the step reads in Python's objects: guards on them, and numbers that change as
inputs of the graph.

While the step is traced, reads of attributes are recorded by the classes of modules and by the
user's classes (a schedule, a data module). A change inside an object cannot be seen from outside,
and only values that are read matter.

A number is first a constant of the graph. Once it has changed, the step is captured with a
StepCounter in its place: computations with it are repeated at every step, comparisons become
guards. If the number itself is needed (for shapes), the captured step is valid for this one.
"""

import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import IOBase
from threading import get_ident
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture import module_state, python_state
from alpa_strategy.capture.non_tensor_inputs import value_text
from alpa_strategy.capture.python_state import (
    LIBRARIES,
    is_configuration,
    is_plain,
    patched,
    snapshot,
)
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import user_code
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import MISSING, ValueGuard, at_counters
from alpa_strategy.ir.places import OptimizerNumber, Place
from alpa_strategy.ir.user_code import is_user_code, user_frame


class Reads(dict[tuple[int, str], Callable[[], Any]]):
    """(id of an object, attribute name) -> a function that returns the object.

    It returns None for an object that the step made and that no longer exists.
    """

    def __init__(self) -> None:
        super().__init__()

        # Attributes of modules that were set.
        self.written: set[tuple[int, str]] = set()

        # Those that were read before they were set, if ever.
        self.before_write: set[tuple[int, str]] = set()

    def has_read_before(self, module: nn.Module, name: str) -> bool:
        """Whether a module's attribute was read before it was set."""
        return (id(module), name) in self.before_write


# Py_TPFLAGS_HEAPTYPE and Py_TPFLAGS_IMMUTABLETYPE.
_HEAP_TYPE = 1 << 9
_IMMUTABLE_TYPE = 1 << 8

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def attribute_reads(module: nn.Module) -> Iterator[Reads]:
    """Collect what this thread reads in the block: attributes (no `__names__`) of modules and
    users' objects, environment variables. Open files and libraries' iterators raise CaptureError.
    """
    reads = Reads()
    thread = get_ident()

    def watching(kind: type) -> tuple[type, str, Any]:
        original: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            is_first = (id(self), name) not in reads and name[:2] != "__" and get_ident() == thread
            if (
                is_first
            ):  # before it is looked up: what is not there now may be there at another step
                reads[id(self), name] = (
                    weakref.ref(self) if type(self).__weakrefoffset__ else lambda: self
                )
                if (id(self), name) not in reads.written:
                    reads.before_write.add((id(self), name))
            value = original(self, name)
            if is_first and (isinstance(value, IOBase) or type(value).__module__ == "_csv"):
                raise CaptureError(
                    f"the step uses an open file ({user_frame()}): captured, it would write once"
                    " and never again",
                    "write files in a hook such as on_train_batch_end (what the step returns"
                    " arrives there)",
                )
            is_iterator = (
                is_first and isinstance(value, Iterator) and type(value) not in weakref.ProxyTypes
            )
            if is_iterator and not python_state.is_user_class(
                type(value)
            ):  # such a one has a state that is kept
                refuse_iterator()
            return value

        return kind, "__getattribute__", read

    def write(self: nn.Module, name: str, value: Any) -> None:
        reads.written.add((id(self), name))
        set_attribute(self, name, value)

    def variable(environment: Any, name: str) -> str:
        if user_code.asked_by_user(sys._getframe(1)):  # torch's own are its caches' and switches
            reads[id(environment), name] = lambda: environment
        return environment_item(environment, name)

    set_attribute = nn.Module.__setattr__
    environment_item = type(os.environ).__getitem__
    # On the classes and not by swapping those of objects: `type(module)` stays what the user's code
    # expects.
    patches = [*map(watching, _watched_classes(module)), (nn.Module, "__setattr__", write)]
    with patched([*patches, (type(os.environ), "__getitem__", variable)]):
        yield reads


def refuse_iterator() -> NoReturn:
    """Raise the CaptureError for an iterator that lives longer than the step."""
    raise CaptureError(
        f"the step takes the next of an iterator that it has not made ({user_frame()}): the"
        " captured step would use "
        "the first one forever",
        "let the loader yield it (CombinedLoader), or take it in on_train_batch_start and keep a"
        " buffer",
    )


def _watched_classes(module: nn.Module) -> list[type]:
    """Return the classes whose attribute reads are watched: nn.Module, optimizers, schedulers, and
    the user's.

    The user's are those of the module's packages and of files that are not installed. Classes that
    inherit from a watched one are left out, as they are watched with it.
    """
    packages = {
        base.__module__.partition(".")[0]
        for child in module.modules()
        for base in type(child).__mro__
    }
    packages -= {"alpa_strategy", "abc", "builtins", "lightning", "torch", "torchmetrics", "typing"}
    kinds: dict[type, None] = dict.fromkeys(
        (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    )
    # Module name -> whether its classes are the user's. Most of some ten thousand classes are not.
    is_users: dict[str, bool] = {}
    passed = {Tensor, BaseException, Enum, type, tuple, *kinds}
    waiting: list[type] = [object]
    while waiting:
        kind: type
        for kind in type.__subclasses__(waiting.pop()):
            if kind in passed:
                continue
            passed.add(kind)
            # Classes of some extensions have no module.
            module_name = kind.__module__ or ""
            if module_name not in is_users:
                is_users[module_name] = _is_users_module(module_name, packages)
            if not is_users[module_name]:
                waiting.append(kind)
            elif issubclass(kind, nn.Module | Tensor | BaseException | Enum | type | tuple):
                continue
            elif _can_be_changed(kind):
                kinds[kind] = None
            else:
                waiting.append(kind)
    return list(kinds)


def _is_users_module(name: str, packages: Collection[str]) -> bool:
    """Whether a module belongs to one of the user's `packages`, or its file is not installed."""
    if name.partition(".")[0] in packages:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or "<"
    return user_code.is_user_file(file) and not user_code.is_installed(file)


def _can_be_changed(kind: type) -> bool:
    """Whether attributes of a class can be set, which those of C extensions do not allow."""
    flags = kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE)
    return flags == _HEAP_TYPE and type(kind).__setattr__ is type.__setattr__


def attribute_guards(
    module: nn.Module, reads: Reads, changing: Collection[Place]
) -> tuple[ValueGuard, ...]:
    """Return guards on the attributes in `reads`, with their current values.

    Of modules of torch.nn, plain values are guarded (training, p, padding, ...); of Lightning's
    attributes, `training` and the hyperparameters; of all modules, their hooks. Submodules are
    guarded by identity, parents before children; other objects come last. Variables of `os.environ`
    are guarded, metrics are not.

    Args:
        changing: attributes that the step sets, and lists to which it only appends. They and their
            items are not guarded.
    """
    guards: dict[tuple[int, str], ValueGuard] = {}
    # id of a submodule -> (its number, its path).
    paths: dict[int, tuple[int, str]] = {}
    for number, (path, child) in enumerate(module.named_modules()):
        paths[id(child)] = (number, path)

    def order(key: tuple[int, str]) -> tuple[Any, ...]:
        identity, name = key
        return (*paths.get(identity, (len(paths), "")), name, identity)

    skipped = python_state.framework_attributes() - {"training"}
    for identity, name in sorted(reads, key=order):
        owner = reads[identity, name]()
        if owner is None or python_state.is_metric(owner):
            continue
        if owner is os.environ:
            label = f"os.environ[{name!r}]"
            guards[identity, name] = ValueGuard(label, name, owner, owner.get(name, MISSING))
            continue

        prefix = type(owner).__name__
        if identity in paths:
            _, prefix = paths[identity]
            modules = vars(owner)["_modules"]
            if modules or (identity, "_modules") in reads:
                label = f"{prefix}._modules".lstrip(".")
                submodules = ValueGuard(label, "_modules", vars(owner), {**modules})
                guards.setdefault((identity, "_modules"), submodules)

        if name in skipped or Place(prefix, name) in changing:
            continue
        guard = _attribute_guard(owner, name, f"{prefix}.{name}".lstrip("."))
        if guard is not None:
            guards[identity, name] = guard
    return (*guards.values(), _hooks_guard(module))


def _attribute_guard(owner: Any, name: str, label: str) -> ValueGuard | None:
    """Return the guard on the attribute `name` of `owner`; None for what libraries' objects hold,
    except plain values. A method's guard: no attribute of the object may hide it.

    The object's dict is read directly: a property or __getattr__ would run the user's code.

    Args:
        label: of the attribute, for messages.
    """
    attributes = getattr(owner, "__dict__", {})
    is_library = type(owner).__module__.startswith(LIBRARIES)
    if name in attributes:
        value = attributes[name]
        if is_library and not is_plain(value):
            return None
        return ValueGuard(label, name, attributes, snapshot(value))

    namespace = Values(partial(getattr, owner))
    value = python_state.class_attribute(type(owner), name)
    # An attribute in `__slots__`.
    if isinstance(value, types.MemberDescriptorType):
        return ValueGuard(label, name, namespace, snapshot(getattr(owner, name, None)))
    # Such as `getattr(self, "factor", 1.0)`.
    if not hasattr(type(owner), name) and getattr(owner, name, MISSING) is MISSING:
        return ValueGuard(label, name, namespace, snapshot(MISSING))
    if is_library:
        return None
    # A method: the object may get an attribute of this name.
    if type(value) not in (*python_state.PLAIN, list, tuple, dict, set):
        return ValueGuard(label, name, attributes, snapshot(MISSING))
    return ValueGuard(label, name, namespace, snapshot(value))


_HAS_FORWARD = operator.methodcaller("__contains__", "forward")


def _hooks_guard(module: nn.Module) -> ValueGuard:
    """Return the guard on the hooks and replaced forwards of all submodules, and global hooks."""
    attributes = [vars(child) for child in module.modules()]
    hook_dicts = [of_child[name] for of_child in attributes for name in MODULE_HOOKS]
    hook_dicts += [vars(nn.modules.module)[f"_global{name}"] for name in MODULE_HOOKS]

    def current(_: str) -> list[Any]:
        # Every step asks, and few modules have any.
        if not any(hook_dicts) and not any(map(_HAS_FORWARD, attributes)):
            return []
        hooks: list[Any] = [dict(hook_dict) for hook_dict in hook_dicts if hook_dict]
        return hooks + [of_child["forward"] for of_child in attributes if "forward" in of_child]

    hooks = Values(current)
    return ValueGuard("hooks of modules", "hooks", hooks, hooks.get("hooks"))


def guards_at(owner: Any, values: Mapping[str, Any], prefix: str = "") -> tuple[ValueGuard, ...]:
    """Return guards on attributes of `owner`.

    Args:
        values: dotted path -> current value.
        prefix: precedes the path in messages.
    """
    now = Values(lambda path: operator.attrgetter(path)(owner))
    return tuple(ValueGuard(f"{prefix}{path}", path, now, value) for path, value in values.items())


def global_guards(module: nn.Module, reads: Iterable[tuple[int, str]]) -> tuple[ValueGuard, ...]:
    """Return guards on the globals and closures in the code of the methods in `reads`.

    Numbers, texts, containers of them, tensors and arrays are guarded. Functions and other objects
    are assumed to be constant.

    Args:
        reads: (id of a module, name of the attribute).
    """
    functions = user_code.reached_functions(list(_methods(module, reads)))
    mentioned: set[str] = set()
    for function in functions:
        mentioned.update(user_code.code_names(function.__code__))

    guards = _GlobalGuards(mentioned)
    # Such as `type(self).scale`.
    if mentioned & {"type", "__class__"}:
        for kind in {type(child) for child in module.modules()}:
            guards.add_inside(kind.__name__, kind)
    for function in functions:
        guards.add_globals(function)
        guards.add_closure(function)
        guards.add_defaults(function)
    return tuple(guards.guards.values())


class _GlobalGuards:
    """Collects guards on values that functions name.

    Args:
        mentioned: names in the code of all functions.
    """

    def __init__(self, mentioned: set[str]) -> None:
        self.mentioned = mentioned

        # (id of the namespace, name) -> guard.
        self.guards: dict[tuple[int, str], ValueGuard] = {}

        # Ids of the objects that have been searched: many functions name the same ones.
        self._searched: set[int] = set()

    def add_globals(self, function: types.FunctionType) -> None:
        """Guard the globals that a function names, and what is inside of them; not `__names__`."""
        namespace = function.__globals__
        module_name = namespace.get("__name__", "")
        names = set(user_code.code_names(function.__code__))
        for name in sorted(names & namespace.keys()):
            if name.startswith("__"):
                continue
            label = f"{module_name}.{name}"
            self._add(label, name, namespace, namespace[name], id(namespace))
            self.add_inside(label, namespace[name])

    def add_closure(self, function: types.FunctionType) -> None:
        """Guard a function's variables of enclosing functions, and what is inside of them."""
        cells = user_code.closure_values(function)
        variables = Values(lambda name: cells[name].cell_contents)
        for name, cell in cells.items():
            label = f"{name} of {function.__qualname__}"
            self._add(label, name, variables, cell.cell_contents, id(cell))
            self.add_inside(name, cell.cell_contents)

    def add_defaults(self, function: types.FunctionType) -> None:
        """Guard a function's default arguments (a dict may change), and what is inside of them."""
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            if not defaults:
                continue
            fields = Values(partial(getattr, function))
            label = f"{name} of {function.__qualname__}"
            self._add(label, name, fields, defaults, id(function))
            for value in defaults.values() if isinstance(defaults, dict) else defaults:
                self.add_inside(getattr(value, "__name__", name), value)

    def add_inside(self, label: str, value: Any, depth: int = 0) -> None:
        """Guard values that code may read in a module, class or function of the user.

        Such as `settings.scale`, `Config.scale`, `Config.Loss.scale`. Other objects, and those that
        have been searched, add nothing.

        Args:
            label: of the object, for messages.
            value: the object.
            depth: how many classes it is in; at most `MAX_DEPTH` are searched.
        """
        is_users = (
            is_user_code(value)
            or python_state.is_user_class(value)
            or python_state.is_user_module(value)
        )
        if not is_users or depth >= python_state.MAX_DEPTH or id(value) in self._searched:
            return
        self._searched.add(id(value))
        # Of a class without `object`.
        holders = value.__mro__[:-1] if isinstance(value, type) else (value,)
        for holder in holders:
            namespace = vars(holder)
            for name in sorted(self.mentioned & namespace.keys()):
                if name[:2] == "__":
                    continue
                inner = namespace[name]
                self._add(f"{label}.{name}", name, namespace, inner, id(holder))
                if isinstance(inner, type):
                    self.add_inside(f"{label}.{name}", inner, depth + 1)

    def _add(self, label: str, name: str, namespace: Any, value: Any, identity: int) -> None:
        """Guard a value if it may change: data, or an object with settings.

        Args:
            label: of the value, for messages.
            name: under which `namespace` has it.
            namespace: a mapping from which the guard reads it later.
            value: the present one.
            identity: id of the object that has it.
        """
        if isinstance(value, ContextVar):
            variable = value
            namespace = Values(lambda _: variable.get())
            value = namespace.get(name, MISSING)
        is_data = isinstance(value, Tensor | np.ndarray) or is_plain(value)
        if value is MISSING or is_data or is_configuration(value):
            guard = ValueGuard(label, name, namespace, snapshot(value))
            self.guards.setdefault((identity, name), guard)


@dataclass(frozen=True)
class Values:
    """Values by name, with a dict's `get`."""

    # name -> value; raises if there is none.
    read: Callable[[str], Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, or `default` if there is no such attribute or variable."""
        try:
            return self.read(name)
        except (AttributeError, LookupError, ValueError):
            return default


def _methods(module: nn.Module, reads: Iterable[tuple[int, str]]) -> Iterator[Any]:
    """Yield the user's functions that are the attributes in `reads`.

    Those of base classes are included, as `super()` may call them.
    """
    owners = {id(child): child for child in module.modules()}
    # The module's attribute or None, its class, and the name; each once.
    attributes: dict[tuple[Any, ...], tuple[Any, type, str]] = {}
    for owner, name in reads:
        if owner in owners:
            attribute = vars(owners[owner]).get(name)
            kind = type(owners[owner])
            if attribute is None or is_user_code(attribute):
                attributes[id(attribute), kind, name] = (attribute, kind, name)
    for held, kind, name in attributes.values():
        for member in (held, *(vars(base).get(name) for base in kind.__mro__)):
            member = member.fget if isinstance(member, property) else member
            if is_user_code(member):
                yield member


# Numbers that change


@dataclass(frozen=True)
class _AnyOf:
    """Stands in a guard's value for a number that may be any of its kind."""

    kind: type

    def __eq__(self, other: object) -> bool:
        return type(other) is self.kind


def _is_changed(before: Any, now: Any) -> bool:
    """Return whether a number has another value of the same type."""
    return type(now) in (int, float) and type(before) is type(now) and before != now


def changed_numbers(step: StepGraph, module: nn.Module, batch: Any) -> set[Place]:
    """Return the locations of numbers that the step reads and that changed after its capture.

    These are attributes of the module, items of dicts that are attributes, and leaves of the batch.
    """
    owners = dict(module.named_modules())
    changed = set()
    for guard in step.attributes:
        path, _, name = guard.label.rpartition(".")
        # Globals and the Trainer's values are no attributes of the module.
        value = vars(owners[path]).get(name) if path in owners else None
        if value is None or value is not guard.namespace.get(guard.name):
            continue
        if _is_changed(guard.value, value):
            changed.add(Place(path, name))
        elif isinstance(value, dict) and isinstance(guard.value, dict):
            for key, item in value.items():
                if _is_changed(guard.value.get(key), item) and isinstance(key, str | int):
                    changed.add(Place(path, name, key))

    leaves = pytree.tree_flatten_with_path(batch)[0]
    for index, text in step.leaves:
        path_of_leaf, leaf = leaves[index]
        is_number = type(leaf) in (int, float) and text.startswith(f"{type(leaf).__qualname__} ")
        if is_number and text != value_text(leaf):
            changed.add(Place("", f"the batch{pytree.keystr(path_of_leaf)}", leaf=index))
    return changed


def numbers_now(places: Collection[Place], module: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the current numbers by label."""
    reads_leaves = any(place.leaf is not None for place in places)
    leaves = pytree.tree_leaves(batch) if reads_leaves else []
    return {str(place): place.value(module, leaves) for place in places}


@contextmanager
def counters_for(
    module: nn.Module,
    places: Sequence[Place],
    counter: Callable[[Any, str], Any],
    assigned: Container[Place] = (),
) -> Iterator[Mapping[Place, Any]]:
    """Replace the attributes at `places` by counters in the block; leaves and optimizers' stay.

    Args:
        counter: (number, label) -> the counter.
        assigned: those that the block may set.

    Yields:
        Location -> the counter.

    Raises:
        CaptureError: the block sets another one.
    """
    attributes = []
    for place in places:
        if place.leaf is None and not isinstance(place, OptimizerNumber):
            attributes.append(place)
    patches = []
    for place in attributes:
        holder = place.holder(module)
        patches.append((holder, place.item, counter(holder[place.item], str(place))))
    with patched(patches):
        yield dict(zip(attributes, [stand_in for _, _, stand_in in patches], strict=True))
        changed = []
        for place, (holder, item, stand_in) in zip(attributes, patches, strict=True):
            if holder.get(item) is not stand_in and place not in assigned:
                changed.append(str(place))
        if changed:
            raise module_state.changed_attributes(changed)


def freed(guards: Sequence[ValueGuard], places: Sequence[Place]) -> tuple[ValueGuard, ...]:
    """Return the guards, changed to hold for any numbers at `places`, each of its present type."""

    def free(guard: ValueGuard) -> ValueGuard:
        value = guard.value
        for place in places:
            if place.leaf is not None or guard.label != place.attribute:
                continue
            if place.key is None:
                value = _AnyOf(type(value))
            else:
                value = {**value, place.key: _AnyOf(type(value[place.key]))}
        return replace(guard, value=value)

    return tuple(map(free, guards))


def is_same_step(one: StepGraph, other: StepGraph, numbers: Mapping[str, Any]) -> bool:
    """Whether two captures compute the same, apart from output, logs, metrics, lists, attributes.

    Args:
        one, other: the captures.
        numbers: values of counters and changing numbers, which are put into both.
    """

    def as_now(step: StepGraph) -> str:
        ops = tuple(replace(op, call=at_counters(op.call, numbers)) for op in step.ops)
        bare = replace(step, ops=ops, output=None, logs=(), metrics=(), appended=(), assigned=())
        return bare.graph_digest

    return as_now(one) == as_now(other)
