"""Python state around the step's tensors: attributes of the module tree, globals, closures, the
Trainer's values.

What the step reads is frozen into the captured graph, so it becomes guards (python_reads.py): each
holds a `snapshot`. What it changes would be changed once and never again, so it is refused, and all
is restored. Parameters and buffers are inputs of the graph and need no guard. Globals and closures
are found in the code of the methods that ran.
"""

import argparse
import copy
import copyreg
import ctypes
import dataclasses
import pickle
import random
import sys
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import user_code
from alpa_strategy.ir.graph import Place
from alpa_strategy.ir.guards import MISSING

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_ARRAYS = (array, bytearray)
LIBRARIES = ("torch.nn.", "torch.ao.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
_SHARED: tuple[Any, ...] = (
    SynchronizedBase,
    ctypes._SimpleCData,
    ctypes.Array,
)  # multiprocessing's Value and Array
_WITH_STATE = (
    random.Random,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
    *_SHARED,
)
_MEMBERS = ("_parameters", "_buffers", "_modules")
MAX_DEPTH = 6
_MAX_ITEMS, _MAX_COMPARED = 1000, 10_000


# Snapshots


def snapshot(value: Any, depth: int = 0) -> Any:
    """Something that equals `value` as long as it stays what it is.

    Numbers and texts stand for themselves, containers are copied with their contents,
    configurations are known by identity and fields, tensors by identity and version (in-place
    changes count), large containers by identity and length (comparing a vocabulary's items would
    slow every step down), any other object by identity.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        return Same(value, version_of)
    if isinstance(value, np.ndarray):
        return Same(
            value, lambda array: array.ravel()[:: 1 + array.size // _MAX_COMPARED].tobytes()
        )
    if isinstance(value, _ARRAYS):
        return Same(value, bytes)
    if isinstance(value, types.MappingProxyType):  # whoever holds what it shows may change that
        return snapshot(dict(value), depth)
    if isinstance(value, partial):
        return Same(
            value,
            lambda call: (call.args, call.keywords),
            snapshot((value.args, value.keywords), depth + 1),
        )
    if isinstance(value, list | dict | set) and len(value) > _MAX_ITEMS:
        return Same(value, len)
    if depth < MAX_DEPTH:
        if isinstance(value, dict):
            return {k: snapshot(v, depth + 1) for k, v in value.items()}
        if (
            sequence := next(
                (each for each in (list, tuple, deque) if isinstance(value, each)), None
            )
        ) is not None:
            return sequence(snapshot(v, depth + 1) for v in value)
        if kind in (set, frozenset):
            return kind(value)
        if is_configuration(value):
            return Same(value, vars, snapshot(vars(value), depth))
    return Same(value)


class Same:
    """Equals one object only, and while `tell(object)` equals `told`. A guard keeps no memory alive
    where possible.
    """

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(
        self, value: Any, tell: Callable[[Any], Any] | None = None, told: Any = None
    ) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value
        self._tell, self._told = tell, tell(value) if tell is not None and told is None else told

    def __eq__(self, other: object) -> bool:
        return self._ref() is other and (self._tell is None or self._told == self._tell(other))


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors keep no version


def has_fields(value: Any) -> bool:
    """True for an object of a user's class with fields in its `__dict__`: no nn.Module, function,
    class or tensor.
    """
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType):
        return False
    if isinstance(value, _CONTAINERS) and type(value).__module__ == "collections":
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(
        ("torch.", "builtins", *LIBRARIES)
    )


def is_configuration(value: Any) -> bool:
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
        return all(map(is_plain, value.values()))
    kinds = (list, tuple, set, frozenset, torch.Size)
    return all(map(is_plain, value)) if type(value) in kinds else type(value) in PLAIN


@lru_cache(maxsize=1)
def framework_attributes() -> frozenset[str]:
    """Names of the attributes that Lightning and nn.Module give every module."""
    return frozenset(vars(LightningModule()))


def is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    """`isinstance`, but ABCMeta would ask all of torchmetrics' classes about each new class: 0.5 s
    of a first step.
    """
    return not {Metric, MetricCollection}.isdisjoint(type(value).__mro__)


def outermost_metrics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Torchmetrics objects of the tree by path, without those inside another one."""
    inside: list[str] = []
    for name, child in module.named_modules():
        if is_metric(child) and not any(name.startswith(f"{p}.") for p in inside):
            inside.append(name)
            yield name, child


def class_attribute(owner: type, name: str) -> Any:
    """The attribute as it stands in the first of the user's classes that has it, else MISSING."""
    for base in owner.__mro__:
        if name in vars(base):
            return MISSING if base.__module__.startswith(LIBRARIES) else vars(base)[name]
    return MISSING


def user_classes(module: nn.Module) -> set[type]:
    kinds = {base for child in module.modules() for base in type(child).__mro__}
    return set(filter(is_user_class, kinds))


def functions_in(kinds: Iterable[type]) -> list[types.FunctionType]:
    """Methods that the classes define."""
    members = (member for kind in kinds for member in vars(kind).values())
    return [member for member in members if isinstance(member, types.FunctionType)]


def is_user_class(value: Any) -> bool:
    return isinstance(value, type) and is_user_module(sys.modules.get(value.__module__))


def is_user_module(value: Any) -> bool:
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and user_code.is_user_file(file)


# What is changed


@dataclass(frozen=True)
class _Kept:
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
                    _put(self.items, name, value)
            elif isinstance(self.items, set):
                self.items.update(self.before)
            else:
                self.items.extend(self.before)


@dataclass(frozen=True)
class KeptNames(_Kept):
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
            _put(self.items, name, self.before.get(name, MISSING))


class KeptHooks(_Kept):
    """The hooks of a module: each counts by itself, as a first call may install some (Hugging
    Face's do).
    """

    @override
    def changes(self) -> dict[str, Any]:
        changed = changed_names(self.items, self.before)
        return {f"{self.place}.{number}": self.items.get(number, MISSING) for number in changed}


class KeptAttributes(_Kept):
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


class KeptState(_Kept):
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
        elif isinstance(self.items, _ARRAYS):
            self.items[:] = self.before
        elif isinstance(self.items, _SHARED):
            ctypes.memmove(ctypes.byref(self.items), self.before, len(self.before))
        elif isinstance(self.items, torch.Generator):
            self.items.set_state(torch.from_numpy(self.before))
        else:
            self.items.__setstate__(self.before)


def state_of(value: Any) -> Any:
    if isinstance(value, (np.ndarray, Tensor, *_ARRAYS)):
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    if isinstance(value, _SHARED):
        return bytes(value)
    return value.get_state().numpy() if isinstance(value, torch.Generator) else value.__getstate__()


@contextmanager
def restored(kept: Iterable[_Kept]) -> Iterator[dict[str, Any]]:
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
    return dict(_dict_of(value).items(value)) if isinstance(value, dict) else value


def _dict_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict


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


def _put(owner: Any, name: str, value: Any) -> None:
    """Give an attribute, or an item of a dict, a value; MISSING: it is not to be there."""
    if value is MISSING:
        owner.pop(name, None) if isinstance(owner, dict) else delattr(owner, name)
    else:
        _dict_of(owner).__setitem__(owner, name, value) if isinstance(owner, dict) else setattr(
            owner, name, value
        )


def kept_in(
    value: Any, place: str, seen: set[int], attribute: Place | None = None, is_noticed: bool = True
) -> Iterator[_Kept]:
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
        label, found = place + "".join(f"[{key!r}]" for key in keys), list[_Kept]()
        is_object = has_fields(value) or isinstance(value, types.FunctionType | nn.Module)
        container = next((each for each in _CONTAINERS if isinstance(value, each)), None)
        is_small = kind is np.ndarray and value.size <= _MAX_ITEMS and value.flags.writeable
        is_small |= isinstance(value, _ARRAYS) and len(value) <= _MAX_ITEMS
        if isinstance(value, _WITH_STATE) or is_small:
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
                _Kept(label, value, container(_raw(value)), is_noticed, place_itself, is_inside)
            )
        if found or isinstance(value, Iterator):
            seen.add(id(value))
            yield from found
        has_items = isinstance(value, list | dict | deque | tuple) and len(value) <= _MAX_ITEMS
        if has_items and len(keys) < MAX_DEPTH:
            items = value.items() if container is dict else enumerate(value)
            waiting += [(item, (*keys, key), is_inside) for key, item in items]


def fields_kept(owner: Any, *functions: Any) -> AbstractContextManager[dict[str, Any]]:
    """An object's fields, what functions name or hold, containers, generators and small tensors in
    these: afterwards as
    they were. CaptureError where the functions name an iterator, which cannot go back."""
    seen, names = set[int](), set[str]()
    found = [("", "", getattr(owner, "__dict__", {})), ("", "", type(owner))]
    for function in user_code.reached_functions(functions):
        names.update(user_code.code_names(function.__code__))
        found += [
            *_held_by(function),
            *((n, n, v) for n, v in function.__globals__.items() if n in names),
        ]
    kept = [each for at, name, v in found if _may_change(name, v) for each in kept_in(v, at, seen)]
    named = [
        v
        for each in kept
        if isinstance(each.before, dict)
        for n, v in each.before.items()
        if n in names
    ]
    named += [v for _, _, v in found]
    if any(isinstance(each, Iterator) for each in named):
        raise CaptureError("an iterator cannot go back to where it was")
    tensors = (
        each.detach() for each in named if isinstance(each, Tensor) and each.numel() <= _MAX_ITEMS
    )
    return restored([*kept, *(KeptState("", each, state_of(each)) for each in tensors)])


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """(place, name, value) of what a function closes over, and of its defaults."""
    for name, cell in user_code.closure_values(function).items():
        yield from (
            (f"{name} of {function.__qualname__}", name, each)
            for each in (cell, cell.cell_contents)
        )
    defaults = (function.__defaults__, function.__kwdefaults__)
    yield from ((f"defaults of {function.__qualname__}", "defaults", each) for each in defaults)


def _may_change(name: str, value: Any) -> bool:
    """Not for objects of libraries: a logger, a console."""
    is_users = is_user_module(sys.modules.get(type(value).__module__))
    return name[:2] != "__" and (
        is_users or not has_fields(value) or isinstance(value, _WITH_STATE)
    )


def _class_values(kind: type) -> dict[str, Any]:
    """By name, what the user's classes of a module hold beside functions."""
    bases = (
        base
        for base in reversed(kind.__mro__)
        if not base.__module__.startswith((*LIBRARIES, "builtins", "abc"))
    )
    values = ((k, v) for base in bases for k, v in vars(base).items() if not k.startswith("__"))
    return {k: v for k, v in values if not isinstance(v, types.FunctionType)}


@contextmanager
def attributes_kept(
    module: nn.Module, stored: dict[str, Any], appended: list[Place], seen: set[int]
) -> Iterator[None]:
    """Restore the plain attributes of all submodules; refuse a step that changed any: it would not
    happen again.

    Containers that are attributes count too, with those inside them, and fields of objects. Where
    the step stored nothing but numbers, texts, flags and hooks, these go to `stored` instead, by
    dotted name: it may be what a first call does once (`initialized`). Lists of the module that
    only grew go to `appended`, what is found to `seen`.
    """
    # What Lightning and nn.Module keep for themselves changes in every step.
    framework = framework_attributes() - {"_hparams", "training"}
    metrics = {id(m) for _, root in outermost_metrics(module) for m in root.modules()}
    kept: list[_Kept] = []
    seen |= set(
        map(id, module.modules())
    )  # others, in lists and objects, are looked at as objects are
    for path, child in module.named_modules():
        if id(child) not in metrics:
            before = {name: value for name, value in vars(child).items() if name not in framework}
            # Those of torch.nn are its own business but for new ones: RNNs keep their weights in a
            # list.
            is_torch = type(child).__module__.startswith("torch.nn.")
            own = frozenset(before if is_torch else ()) - {"training"}
            kept.append(
                KeptNames(path, vars(child), before, owner=child, skipped=framework, own=own)
            )
            # Layers and buffers that a first call would install: with them goes a flag, which is
            # put back.
            held = {n: v for n, v in vars(child).items() if isinstance(v, dict)}
            kept += [
                _Kept(f"{path}.{n}".lstrip("."), v, dict(v))
                for n, v in held.items()
                if n in _MEMBERS
            ]
            kept += [
                KeptHooks(f"{path}.{n}".lstrip("."), v, dict(v))
                for n, v in held.items()
                if n[:9] == "_forward_"
            ]
            for name, value in {**_class_values(type(child)), **before}.items():
                place = Place(path, name)
                kept += kept_in(value, place.attribute, seen, place, is_noticed=not is_torch)
    try:
        yield
    finally:
        changed: dict[str, Any] = {}
        may_be_first: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for each in kept:
            if (
                each.is_noticed
                and each.attribute is not None
                and type(each.items) is list
                and each.came()
            ):
                appended.append(each.attribute)
            elif own_changes := each.changes():
                changed |= own_changes
                for name, value in (
                    each.items.items() if isinstance(each, KeptNames | KeptHooks) else ()
                ):
                    if isinstance(each, KeptHooks) or is_plain(value):
                        may_be_first[f"{each.place}.{name}".lstrip(".")] = each.items, name, value
            each.restore()
    if not changed.keys() <= may_be_first.keys():
        raise changed_attributes(changed)
    stored |= {label: may_be_first[label] for label in changed}


def changed_attributes(names: Iterable[str]) -> CaptureError:
    """The error for a step that changes attributes of the module."""
    return CaptureError(
        f"the step sets or changes attributes of the module ({', '.join(sorted(set(names)))}): a captured step "
        "repeats tensor work only, so this would happen once and never again",
        "use self.log or a torchmetrics Metric for values, register_buffer for tensors that change, or move it to "
        "a hook such as on_train_batch_end (the step's returned dict arrives there)",
    )


@contextmanager
def initialized(stored: Mapping[str, tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Store what a first call of the step stores; taken back when the block fails: it was no
    initialization.
    """
    before = [(fields, name, fields.get(name, MISSING)) for fields, name, _ in stored.values()]
    for fields, name, value in stored.values():
        fields[name] = value
    try:
        yield
    except BaseException:
        for fields, name, old in before:
            _put(fields, name, old)
        raise


@contextmanager
def globals_kept(module: nn.Module, seen: set[int]) -> Iterator[dict[str, dict[str, Any]]]:
    """Restore the globals (which the block is given, by file) and closures of the methods of the
    module's classes, and of the functions that they name; caches (`functools.lru_cache`) that were
    filled, with fake tensors, are emptied.

    Raises:
        CaptureError: when the step set a global, or changed a container or an object that globals
            or closures hold.
    """
    kinds = user_classes(module)
    members = [member for kind in kinds for member in vars(kind).values()]
    trainer: Any = getattr(module, "_trainer", None)
    methods = user_code.reached_functions([cast(Any, module.training_step), *functions_in(kinds)])
    files = {method.__globals__["__name__"]: method.__globals__ for method in methods}
    named = {name for method in methods for name in user_code.code_names(method.__code__)}
    every = [
        (f"{where}.{name}", name, value)
        for where, names in files.items()
        for name, value in names.items()
    ]
    found = [each for each in every if each[1] in named or isinstance(each[2], _CONTAINERS)]
    found += [each for method in methods for each in _held_by(method)]
    found += [(kind.__name__, "", kind) for kind in kinds]
    # What threads work on beside the step (a monitor's, a loader's) only where the step sets or
    # fills such attributes.
    beside = [("trainer.callbacks", "callback", each) for each in getattr(trainer, "callbacks", ())]
    beside += [("trainer.datamodule", "datamodule", getattr(trainer, "datamodule", None))]
    beside += [
        ("the dataset", "dataset", getattr(loader, "dataset", None))
        for loader in loaders_of(trainer)
    ]
    sets = user_code.stored_names(cast(Any, module.training_step))
    found += [each for each in beside if not sets.isdisjoint(dir(each[2]))]
    own = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    # What other packages fill are their caches (einops: a dict of backends).
    foreign = {where: each for where, each in files.items() if where.partition(".")[0] not in own}
    installed = {
        where for where, each in foreign.items() if user_code.is_installed(each.get("__file__", ""))
    }
    kept: list[_Kept] = [
        KeptNames(where, names, dict(names), where not in installed)
        for where, names in files.items()
    ]
    for place, name, value in found:
        if _may_change(name, value):
            where = place.rpartition(".")[0]
            kept += kept_in(value, place, seen, is_noticed=where not in installed)
    cached = [
        (v, v.cache_info().misses)
        for v in (*members, *(v for *_, v in every))
        if hasattr(type(v), "cache_info")
    ]
    try:
        with restored(kept) as changed:
            yield files
    finally:
        for function, misses in cached:
            if function.cache_info().misses != misses:
                function.cache_clear()
    if changed:
        raise CaptureError(
            f"the step changes variables outside of the module ({', '.join(sorted(changed))}): a captured step "
            "repeats tensor work only, so this would happen once and never again",
            "do it before training or in a hook such as on_train_batch_end (the returned dict arrives there), or "
            "use register_buffer for tensors",
        )


def loaders_of(trainer: Any) -> list[Any]:
    """The user's loaders of training batches."""
    combined = getattr(getattr(trainer, "fit_loop", None), "_combined_loader", None)
    return (
        [getattr(each, "_loader", each) for each in combined.flattened]
        if combined is not None
        else []
    )


@contextmanager
def patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set (owner, name, value) in the block, of a dict its items, or take it away (MISSING); all
    comes back.
    """
    with ExitStack() as before:
        for owner, name, value in list(patches):
            old = (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)
            _put(owner, name, value)
            before.callback(_put, owner, name, old)
        yield


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter], flag: bool) -> Iterator[None]:
    """All of them train in the block, or none does, whichever way they were left."""
    others = [parameter for parameter in parameters if parameter.requires_grad is not flag]
    for parameter in others:
        parameter.requires_grad_(flag)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(not flag)


def standing_in(module: nn.Module, others: Mapping[Any, Tensor]) -> AbstractContextManager[None]:
    """Context in which the module has other tensors in the place of parameters and buffers."""
    held = [own for child in module.modules() for own in (child._parameters, child._buffers)]
    places = [(own, name, tensor) for own in held for name, tensor in own.items()]
    return patched((own, name, others[tensor]) for own, name, tensor in places if tensor in others)
