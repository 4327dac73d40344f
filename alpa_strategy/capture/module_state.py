"""Refuse and undo changes that the step makes to attributes of the module, unless they are an
initialization in the first call.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from alpa_strategy.capture.kept_state import snapshots_in
from alpa_strategy.capture.python_state import (
    LIBRARIES,
    MEMBERS,
    framework_attributes,
    is_plain,
    outermost_metrics,
    put,
)
from alpa_strategy.capture.snapshots import Kind, NamesThatCount, OfData, Snapshot, take
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import MISSING
from alpa_strategy.ir.places import Place


def _class_values(kind: type) -> dict[str, Any]:
    """Return the attributes of a module's class and its bases by name, without functions and names
    that begin with `__`.

    Only the user's classes count.
    """
    values = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith((*LIBRARIES, "builtins", "abc")):
            continue
        for name, value in vars(base).items():
            if not name.startswith("__") and not isinstance(value, types.FunctionType):
                values[name] = value
    return values


class ChangesOfStep(Protocol):
    """The changes of attributes by one run of the step."""

    # Label -> (namespace, name, value) of new numbers, texts, flags, hooks, if there are no other
    # changes: they may be an initialization (`initialized`).
    stored: dict[str, tuple[dict[str, Any], str, Any]]

    # The locations of lists to which the step only appended.
    grown: list[Place]

    # Of attributes that every step sets to tensors of its own: location -> value.
    assigned: dict[Place, Any]

    # Of attributes that may be set to tensors in the first call only: label -> (namespace, name,
    # value).
    initial: dict[str, tuple[dict[str, Any], str, Any]]

    # Attributes with tensors that one step leaves for the next: they must become inputs.
    states: list[Place]

    # Of `assigned`, those whose plain value the step has read before.
    guarded: set[Place]

    def is_of_data(self, tensor: Tensor) -> bool:
        """Return as `OfData`."""


@contextmanager
def attributes_kept(
    module: nn.Module, of_step: ChangesOfStep, seen: set[int]
) -> Iterator[list[Snapshot]]:
    """Undo changes of attributes of all submodules, and refuse a step that makes any.

    Captured, the step would not repeat them. Containers and objects in attributes are included,
    with everything in them. Not refused are those that `of_step.assigned`, `initial` and `states`
    have at the end.

    Args:
        of_step: gets `stored` and `grown`.
        seen: gets the ids of the objects that are restored.

    Yields:
        The snapshots.

    Raises:
        CaptureError: the step makes other changes.
    """
    # These attributes of Lightning and nn.Module change in every step.
    framework = framework_attributes() - {"_hparams", "training"}
    metrics: set[int] = set()
    for _, root in outermost_metrics(module):
        metrics.update(map(id, root.modules()))

    # Modules that are no submodules, in lists and objects, are searched like other objects.
    seen |= set(map(id, module.modules()))
    snapshots: list[Snapshot] = []
    for path, child in module.named_modules():
        if id(child) not in metrics:
            snapshots += _snapshots_of(path, child, framework, seen)
    try:
        yield snapshots
    finally:
        changes = _Changes()
        for snapshot in snapshots:
            changes.add(snapshot, of_step.grown, of_step.is_of_data)
            snapshot.restore()
    assigned = {place.attribute for place in (*of_step.assigned, *of_step.states)}
    initial = changes.initial | of_step.initial
    changed = [label for label in changes.changed if label not in assigned]
    if not initial.keys() >= set(changed):
        raise changed_attributes(changed)
    of_step.stored |= {label: initial[label] for label in changed}
    # What the first call sets beside that may be set in it alone as well.
    if changed:
        of_step.stored |= of_step.initial


def _snapshots_of(
    path: str, module: nn.Module, framework: frozenset[str], seen: set[int]
) -> Iterator[Snapshot]:
    """Yield the snapshots of one module, without its submodules.

    Args:
        path: of the module.
        framework: names of attributes that are ignored.
        seen: as of `snapshots_in`.
    """
    attributes = vars(module)
    before = {name: value for name, value in attributes.items() if name not in framework}
    # Attributes of torch.nn's modules are not reported, unless they are new: RNNs cache their
    # weights in a list.
    is_torch = type(module).__module__.startswith("torch.nn.")
    unreported = frozenset(before if is_torch else ()) - {"training"}
    names = NamesThatCount(owner=module, skipped=framework, unreported=unreported)
    yield take(Kind.NAMES, path, attributes, names=names)

    dicts = {name: value for name, value in attributes.items() if isinstance(value, dict)}
    # A first call may install layers and buffers. Its flag is undone as well.
    for name, value in dicts.items():
        if name in MEMBERS:
            yield take(Kind.CONTAINER, f"{path}.{name}".lstrip("."), value)
    for name, value in dicts.items():
        if name.startswith("_forward_"):
            yield take(Kind.HOOKS, f"{path}.{name}".lstrip("."), value)

    for name, value in {**_class_values(type(module)), **before}.items():
        place = Place(path, name)
        yield from snapshots_in(value, place.attribute, seen, place, is_noticed=not is_torch)


class _Changes:
    """The changes of the step, from snapshots."""

    def __init__(self) -> None:
        # Label -> new value.
        self.changed: dict[str, Any] = {}

        # Label -> (namespace, name, value) of values that a first call may set.
        self.initial: dict[str, tuple[dict[str, Any], str, Any]] = {}

    def add(self, snapshot: Snapshot, appended: list[Place], of_data: OfData) -> None:
        """Add the changes of one snapshot; a list that has only grown goes to `appended`."""
        is_list = snapshot.attribute is not None and type(snapshot.items) is list
        if snapshot.is_noticed and is_list and snapshot.came():
            assert snapshot.attribute is not None
            appended.append(snapshot.attribute)
            return
        changes = snapshot.changes(of_data)
        self.changed |= changes
        if not changes or snapshot.kind not in (Kind.NAMES, Kind.HOOKS):
            return
        for name, value in snapshot.items.items():
            if snapshot.kind is Kind.HOOKS or is_plain(value):
                label = f"{snapshot.place}.{name}".lstrip(".")
                self.initial[label] = snapshot.items, name, value


def changed_attributes(names: Iterable[str]) -> CaptureError:
    """Return the error for a step that changes attributes of the module."""
    return CaptureError(
        f"the step sets or changes attributes of the module ({', '.join(sorted(set(names)))}): a"
        " captured step repeats tensor work only, so this would happen once and never again",
        "use self.log or a torchmetrics Metric for values, register_buffer for tensors that change,"
        " or move it to a hook such as on_train_batch_end (the step's returned dict arrives there)",
    )


@contextmanager
def initialized(stored: Mapping[str, tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set the attributes that a first call of the step sets, for a block that captures the next.

    If the block fails, it was no initialization, and they are reset; else they stay set.

    Args:
        stored: label -> (namespace, name, value).
    """
    before = [(fields, name, fields.get(name, MISSING)) for fields, name, _ in stored.values()]
    for fields, name, value in stored.values():
        fields[name] = value
    try:
        yield
    except BaseException:
        for fields, name, old in before:
            put(fields, name, old)
        raise
