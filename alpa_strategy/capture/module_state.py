"""Attributes of the module tree that the step sets or changes: refused and put back, unless it is
what a first call does once.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from alpa_strategy.capture.kept_state import Kept, KeptHooks, KeptNames, OfData, kept_in
from alpa_strategy.capture.python_state import (
    LIBRARIES,
    framework_attributes,
    is_plain,
    outermost_metrics,
    put,
)
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import Place
from alpa_strategy.ir.guards import MISSING

_MEMBERS = ("_parameters", "_buffers", "_modules")


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
    module: nn.Module,
    stored: dict[str, Any],
    appended: list[Place],
    seen: set[int],
    of_data: OfData = lambda _: False,
) -> Iterator[None]:
    """Restore the plain attributes of all submodules; refuse a step that changed any: it would not
    happen again.

    Containers that are attributes count too, with those inside them, and fields of objects. Where
    the step stored nothing but numbers, texts, flags and hooks, these go to `stored` instead, by
    dotted name: it may be what a first call does once (`initialized`). Lists of the module that
    only grew go to `appended`, what is found to `seen`. of_data: see `Kept.changes`.
    """
    # What Lightning and nn.Module keep for themselves changes in every step.
    framework = framework_attributes() - {"_hparams", "training"}
    metrics = {id(m) for _, root in outermost_metrics(module) for m in root.modules()}
    kept: list[Kept] = []
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
                Kept(f"{path}.{n}".lstrip("."), v, dict(v))
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
            elif own_changes := each.changes(of_data):
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
        f"the step sets or changes attributes of the module ({', '.join(sorted(set(names)))}): a"
        " captured step "
        "repeats tensor work only, so this would happen once and never again",
        "use self.log or a torchmetrics Metric for values, register_buffer for tensors that change,"
        " or move it to "
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
            put(fields, name, old)
        raise
