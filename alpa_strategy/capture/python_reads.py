"""What the step reads in Python's objects, as guards, and numbers among it that change, as inputs
of the graph.

The classes of modules, and the user's (a schedule, a data module), note what is read while the step
is traced: what an object holds changes without a trace in what holds the object, and only what is
read matters. A number is first captured
as it is. Once it has changed, the step is captured with a StepCounter in its place: what is
computed with it is computed at every step, comparisons become guards; where a number is needed at
once (shapes), the step is for this one.
"""

import operator
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import IOBase
from threading import get_ident
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture import kept_state, module_state, outside_state, python_state
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
from alpa_strategy.ir.graph import Place, StepGraph
from alpa_strategy.ir.guards import MISSING, ValueGuard, at_counters
from alpa_strategy.ir.user_code import is_user_code, names_set_from, user_frame

Reads = dict[tuple[int, str], Callable[[], Any]]
"""(id of an object, attribute name) -> the object, None once it is no more: the step made it for itself."""

_BATCH_SIZE = re.compile("^batch_?size$|^bsz?$", re.IGNORECASE)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def attribute_reads(module: nn.Module) -> Iterator[Reads]:
    """Collect every attribute that a module, or an object of a user's class, is asked for in the
    block.
    """
    reads: Reads = {}
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

    def variable(environment: Any, name: str) -> str:
        if user_code.asked_by_user(sys._getframe(1)):  # torch's own are its caches' and switches
            reads[id(environment), name] = lambda: environment
        return environment_item(environment, name)

    environment_item = type(os.environ).__getitem__
    # On the classes and not by swapping those of objects: `type(module)` stays what the user's code
    # expects.
    with patched(
        [*map(watching, _watched_classes(module)), (type(os.environ), "__getitem__", variable)]
    ):
        yield reads


def refuse_iterator() -> NoReturn:
    """CaptureError for an iterator that lives longer than the step."""
    raise CaptureError(
        f"the step takes the next of an iterator that it has not made ({user_frame()}): the"
        " captured step would use "
        "the first one forever",
        "let the loader yield it (CombinedLoader), or take it in on_train_batch_start and keep a"
        " buffer",
    )


def _watched_classes(module: nn.Module) -> list[type]:
    """nn.Module and the user's classes, those of the module's packages and of files that are not
    installed, without
    what inherits from one of these; and what may hold a learning rate."""
    packages = {
        base.__module__.partition(".")[0]
        for child in module.modules()
        for base in type(child).__mro__
    }
    packages -= {"alpa_strategy", "abc", "builtins", "lightning", "torch", "torchmetrics", "typing"}
    kinds: dict[type, None] = dict.fromkeys(
        (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    )
    waiting: list[type] = [object]
    while waiting:
        kind: type
        for kind in type.__subclasses__(waiting.pop()):
            if kind in kinds or issubclass(
                kind, nn.Module | Tensor | BaseException | Enum | type | tuple
            ):
                continue
            # A C extension's own cannot be changed: Py_TPFLAGS_HEAPTYPE is missing, or
            # Py_TPFLAGS_IMMUTABLETYPE there.
            is_pythons = (
                kind.__flags__ & (1 << 9 | 1 << 8) == 1 << 9
                and type(kind).__setattr__ is type.__setattr__
            )
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
            is_users = kind.__module__.partition(".")[0] in packages
            if is_pythons and (
                is_users or (user_code.is_user_file(file) and not user_code.is_installed(file))
            ):
                kinds[kind] = None
            else:
                waiting.append(kind)
    return list(kinds)


def attribute_guards(
    module: nn.Module, reads: Reads, appended: Collection[Place]
) -> tuple[ValueGuard, ...]:
    """Guards of the attributes in `reads`; values are those of now.

    Of the modules of torch.nn plain values are guarded (training, p, padding, ...), of Lightning's
    own attributes
    `training` and the hyperparameters, of all modules their hooks. Submodules are guarded by
    identity, parents before children, other objects last. The lists `appended`, and what lies in
    them, do not matter: they only grow.
    """
    found: dict[tuple[int, str], ValueGuard] = {}
    paths = {id(child): (place, path) for place, (path, child) in enumerate(module.named_modules())}
    skipped = python_state.framework_attributes() - {"training"}
    for identity, name in sorted(
        reads, key=lambda key: (*paths.get(key[0], (len(paths), "")), key[1], key[0])
    ):
        owner, (_, path) = reads[identity, name](), paths.get(identity, (0, None))
        if owner is None or python_state.is_metric(owner):
            continue
        if owner is os.environ:
            found[identity, name] = ValueGuard(
                f"os.environ[{name!r}]", name, owner, owner.get(name, MISSING)
            )
            continue
        label = type(owner).__name__ if path is None else path
        attributes, is_library = (
            getattr(owner, "__dict__", {}),
            type(owner).__module__.startswith(LIBRARIES),
        )
        if path is not None and (attributes["_modules"] or (identity, "_modules") in reads):
            submodules = ValueGuard(
                f"{path}._modules".lstrip("."), "_modules", attributes, {**attributes["_modules"]}
            )
            found.setdefault((identity, "_modules"), submodules)
        if name in skipped or Place(label, name) in appended:
            continue
        # The instance's dict is asked directly: a property or __getattr__ would run the user's
        # code.
        value, namespace = attributes.get(name), attributes
        if name not in attributes:
            value, namespace = (
                python_state.class_attribute(type(owner), name),
                Values(partial(getattr, owner)),
            )
            if isinstance(value, types.MemberDescriptorType):  # of `__slots__`
                value = getattr(owner, name, None)
            elif not hasattr(type(owner), name) and getattr(owner, name, MISSING) is MISSING:
                value = MISSING  # `getattr(self, "factor", 1.0)`
            elif is_library:
                continue
            elif type(value) not in (*python_state.PLAIN, list, tuple, dict, set):
                value, namespace = (
                    MISSING,
                    attributes,
                )  # a method: the object may get one of its own
        elif is_library and not is_plain(value):
            continue
        found[identity, name] = ValueGuard(
            f"{label}.{name}".lstrip("."), name, namespace, snapshot(value)
        )
    fields = [vars(child) for child in module.modules()]
    held = [each[name] for each in fields for name in MODULE_HOOKS]
    held += [vars(nn.modules.module)[f"_global{name}"] for name in MODULE_HOOKS]  # of all modules
    hooks = Values(
        lambda _: (
            [dict(each) for each in held if each] + [v["forward"] for v in fields if "forward" in v]
        )
    )
    return (*found.values(), ValueGuard("hooks of modules", "hooks", hooks, hooks.get("hooks")))


def guards_at(owner: Any, values: Mapping[str, Any], prefix: str = "") -> tuple[ValueGuard, ...]:
    """Guards of the `values` (by dotted path, before which messages say `prefix`) that `owner` has
    now.
    """
    now = Values(lambda path: operator.attrgetter(path)(owner))
    return tuple(ValueGuard(f"{prefix}{path}", path, now, value) for path, value in values.items())


def global_guards(module: nn.Module, reads: Iterable[tuple[int, str]]) -> tuple[ValueGuard, ...]:
    """Guards of the globals and closures in the code of the methods in `reads` (id of a module,
    name).

    Numbers, texts, containers of them, tensors and arrays are guarded; functions and other objects
    are constant.
    """
    guards: dict[tuple[int, str], ValueGuard] = {}
    looked_into: set[int] = set()  # many functions name the same ones

    def add(label: str, name: str, namespace: Any, value: Any, identity: int) -> None:
        if isinstance(value, ContextVar):
            namespace = Values(lambda _, variable=value: variable.get())  # type: ignore[misc]
            value = namespace.get(name, MISSING)
        if (
            value is MISSING
            or isinstance(value, Tensor | np.ndarray)
            or is_plain(value)
            or is_configuration(value)
        ):
            guards.setdefault((identity, name), ValueGuard(label, name, namespace, snapshot(value)))

    def add_inside(label: str, value: Any, depth: int = 0) -> None:
        """`settings.scale`, `Config.scale`, `Config.Loss.scale`: what code may read inside of what
        it names.
        """
        is_users = (
            is_user_code(value)
            or python_state.is_user_class(value)
            or python_state.is_user_module(value)
        )
        if is_users and depth < python_state.MAX_DEPTH and id(value) not in looked_into:
            looked_into.add(id(value))
            for holder in getattr(value, "__mro__", (value,))[
                : -1 if isinstance(value, type) else None
            ]:
                inside = vars(holder)
                for inner in sorted(n for n in mentioned & inside.keys() if n[:2] != "__"):
                    add(f"{label}.{inner}", inner, inside, inside[inner], id(holder))
                    if isinstance(inside[inner], type):
                        add_inside(f"{label}.{inner}", inside[inner], depth + 1)

    reached = user_code.reached_functions(list(_methods(module, reads)))
    mentioned = {name for function in reached for name in user_code.code_names(function.__code__)}
    for kind in (
        {type(child) for child in module.modules()} if mentioned & {"type", "__class__"} else ()
    ):
        add_inside(kind.__name__, kind)  # `type(self).scale`
    for function in reached:
        names = set(user_code.code_names(function.__code__))
        values, where = function.__globals__, function.__globals__.get("__name__", "")
        for name in sorted(n for n in names & values.keys() if not n.startswith("__")):
            add(f"{where}.{name}", name, values, values[name], id(values))
            add_inside(f"{where}.{name}", values[name])
        cells = user_code.closure_values(function)
        variables = Values(lambda name, cells=cells: cells[name].cell_contents)  # type: ignore[misc]
        for name, cell in cells.items():
            add(f"{name} of {function.__qualname__}", name, variables, cell.cell_contents, id(cell))
            add_inside(name, cell.cell_contents)
        for name in ("__defaults__", "__kwdefaults__"):  # a dict among them may have changed
            if defaults := getattr(function, name):
                fields = Values(partial(getattr, function))
                add(f"{name} of {function.__qualname__}", name, fields, defaults, id(function))
                for value in defaults.values() if isinstance(defaults, dict) else defaults:
                    add_inside(getattr(value, "__name__", name), value)
    return tuple(guards.values())


@dataclass(frozen=True)
class Values:
    """Something that gives values by name, with a dict's `get`."""

    read: Callable[[str], Any]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.read(name)
        except (
            AttributeError,
            LookupError,
            ValueError,
        ):  # no such attribute, a variable without a value
            return default


def _methods(module: nn.Module, reads: Iterable[tuple[int, str]]) -> Iterator[Any]:
    """The user's functions behind the attributes in `reads`, those of base classes included
    (`super()`).
    """
    owners = {id(child): child for child in module.modules()}
    held_by = [
        (vars(owners[owner]).get(name), type(owners[owner]), name)
        for owner, name in reads
        if owner in owners
    ]
    found = {
        (id(each[0]), *each[1:]): each
        for each in held_by
        if each[0] is None or is_user_code(each[0])
    }
    for held, kind, name in found.values():
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
    return type(now) in (int, float) and type(before) is type(now) and before != now


def changed_numbers(step: StepGraph, module: nn.Module, batch: Any) -> set[Place]:
    """Numbers that the step was captured with and that are others now."""
    owners = dict(module.named_modules())
    found = set()
    for guard in step.attributes:
        path, _, name = guard.label.rpartition(".")
        held = (
            vars(owners[path]).get(name) if path in owners else None
        )  # no global, nothing of the Trainer
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
def counters_for(
    module: nn.Module, places: Sequence[Place], counter: Callable[[Any, str], Any]
) -> Iterator[None]:
    """Attributes at these places are counters in the block. CaptureError where it stores others."""
    held = [(place.holder(module), place.item, place) for place in places if place.leaf is None]
    given = [(holder, item, counter(holder[item], str(place))) for holder, item, place in held]
    with patched(given):
        yield
        if changed := [
            str(held[i][2])
            for i, (holder, item, c) in enumerate(given)
            if holder.get(item) is not c
        ]:
            raise module_state.changed_attributes(changed)


def freed(guards: Sequence[ValueGuard], places: Sequence[Place]) -> tuple[ValueGuard, ...]:
    """The guards, which hold for any numbers at these places."""

    def free(guard: ValueGuard) -> ValueGuard:
        value = guard.value
        for place in places:
            if place.leaf is None and guard.label == place.attribute:
                is_item = place.key is not None
                value = (
                    {**value, place.key: _AnyOf(type(value[place.key]))}
                    if is_item
                    else _AnyOf(type(value))
                )
        return replace(guard, value=value)

    return tuple(map(free, guards))


def is_same_step(one: StepGraph, other: StepGraph, numbers: Mapping[str, Any]) -> bool:
    """Whether two captures of a step compute the same where the counters and changing numbers are
    these.
    """

    def as_now(step: StepGraph) -> str:
        ops = tuple(replace(op, call=at_counters(op.call, numbers)) for op in step.ops)
        return replace(step, ops=ops, output=None, logs=(), metrics=(), appended=()).graph_digest

    return as_now(one) == as_now(other)


def places_of(module: nn.Module, value: int, name: re.Pattern[str]) -> list[tuple[Any, str]]:
    """(owner, name), as `patched` takes them, of what holds this number under such a name, or one
    that is set in a line
    with a batch size: attributes of the module tree, of the data module and the loaders,
    hyperparameters,
    configurations, and globals of the files of the module's classes."""
    trainer, step = getattr(module, "_trainer", None), cast(Any, module.training_step)
    data_module = getattr(trainer, "datamodule", None)
    # Every loader has its batch size: it counts where the step may ask for one.
    loaders = (
        outside_state.loaders_of(trainer) if "batch_size" in user_code.mentioned_names(step) else []
    )
    classes = python_state.user_classes(module)
    set_from = {
        key
        for function in python_state.functions_in(classes)
        for key in names_set_from(function, _BATCH_SIZE)
    }
    owners: list[Any] = [*classes, *(vars(sys.modules[kind.__module__]) for kind in classes)]
    for attributes in (
        vars(each)
        for each in (*module.modules(), data_module, *loaders)
        if hasattr(each, "__dict__")
    ):
        dicts = [each for each in attributes.values() if isinstance(each, dict)]
        kept = [
            each.items for v in attributes.values() for each in kept_state.kept_in(v, "", set())
        ]
        owners += [attributes, *dicts, *(each for each in kept if isinstance(each, dict))]
    return [
        (owner, key)
        for owner in owners
        for key, held in (owner if isinstance(owner, dict) else vars(owner)).items()
        if type(held) is int
        and held == value
        and isinstance(key, str)
        and (name.search(key) or key in set_from)
    ]
