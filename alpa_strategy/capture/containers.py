"""Containers among a module's attributes, those inside them included: what they held before a step, and after it."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from alpa_strategy.capture.lists import grown, new_lists
from alpa_strategy.ir.graph import ListPlace

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
