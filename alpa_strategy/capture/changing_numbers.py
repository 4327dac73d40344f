"""Numbers that change between steps, of attributes and in batches, as inputs of the captured step.

A number is first captured as it is. Once it has changed, the step is captured with a StepCounter in its place: what is
computed with it is computed at every step, comparisons become guards, and where a number is needed at once (shapes,
indices) the step is good for this one only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import value_text
from alpa_strategy.capture.python_state import changed_attributes, patched
from alpa_strategy.ir.graph import Place, StepGraph
from alpa_strategy.ir.guards import ValueGuard, at_counters


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
