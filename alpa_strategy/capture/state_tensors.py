"""Tensors in attributes of modules that one step leaves for the next: `self.hidden = h.detach()`.

They are inputs of the step, like the tensors of its batch: each rank has its own. What the step
sets them to is set again after every step (`attribute_writes.py`), or written into them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.batch_leaves import first_on_memory
from alpa_strategy.capture.python_state import MEMBERS, PLAIN, patched
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import ValueGuard
from alpa_strategy.ir.places import Place


class WrittenConstantError(CaptureError):
    """The step writes into a tensor from outside that is none of its inputs.

    Args:
        source: the user's line.
        tensor: the tensor.
    """

    def __init__(self, source: str, tensor: Tensor) -> None:
        super().__init__(
            f"the step changes a tensor that is no buffer in place ({source})",
            "register it: self.register_buffer(name, tensor, persistent=False)",
        )
        self.tensor = tensor


def is_state(value: Any) -> bool:
    """Whether a value is made of dense tensors without gradient, at least one, and plain values."""
    has_tensor = False
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            is_dense = type(leaf) is Tensor and leaf.layout is torch.strided
            if not is_dense or leaf.requires_grad:
                return False
            has_tensor = True
        elif type(leaf) not in PLAIN:
            return False
    return has_tensor


def state_leaves(module: nn.Module, places: Iterable[Place]) -> list[Any]:
    """Return the leaves of the values at `places`, one value after the other."""
    leaves: list[Any] = []
    for place in places:
        leaves += pytree.tree_leaves(place.value(module))
    return leaves


def place_of(module: nn.Module, tensor: Tensor) -> Place | None:
    """Return the attribute that has a tensor, or a container of it; None if there is none.

    Parameters and buffers are not searched, and the whole value must be a state (`is_state`).
    """
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name in MEMBERS:
                continue
            is_there = any(leaf is tensor for leaf in pytree.tree_leaves(value))
            if is_there and is_state(value):
                return Place(path, name)
    return None


class StateInputs:
    """The values at some places, as inputs of one trace.

    Args:
        module: has the values.
        places: attributes of the module.
    """

    def __init__(self, module: nn.Module, places: Sequence[Place]) -> None:
        self._module = module
        self._places = places
        self._values = {place: place.value(module) for place in places}

        # The leaves of the values.
        self.leaves = state_leaves(module, places)

        # Location -> the leaves that stand in for those of the value.
        self._stand_ins: dict[Place, list[Any]] = {}

    def standing_in(self, tensors: Iterator[Tensor]) -> AbstractContextManager[None]:
        """Return the context in which the attributes have other tensors, with which `is_unchanged`
        compares later.

        Args:
            tensors: one for each tensor of the values, in order.
        """
        patches = []
        for place, value in self._values.items():
            leaves, spec = pytree.tree_flatten(value)
            replaced: list[Any] = []
            for leaf in leaves:
                is_tensor = isinstance(leaf, Tensor)
                replaced.append(next(tensors) if is_tensor else leaf)
            self._stand_ins[place] = replaced
            stand_in = pytree.tree_unflatten(replaced, spec)
            patches.append((place.holder(self._module), place.name, stand_in))
        return patched(patches)

    def __contains__(self, place: Place) -> bool:
        return place in self._values

    def is_unchanged(self, place: Place, value: Any) -> bool:
        """Whether an attribute still has the tensors that it had when the step began.

        What is written into these is an input that changes in place.
        """
        stand_ins = self._stand_ins[place]
        leaves = pytree.tree_leaves(value)
        is_same = [one is other for one, other in zip(leaves, stand_ins, strict=False)]
        return len(leaves) == len(stand_ins) and all(is_same)

    def guards(self) -> tuple[ValueGuard, ...]:
        """Return guards on the values: structure, shapes, dtypes, plain values, common memory."""
        guards = []
        for place, value in self._values.items():
            namespace: Mapping[Any, Any] = place.holder(self._module)
            guards.append(ValueGuard(place.attribute, place.name, namespace, _Alike(value)))
        names = ", ".join(map(str, self._places))
        memory = _CommonMemory(self._module, self._places)
        if len(memory.get("")) > 1:
            label = f"which of the tensors in {names} share memory"
            guards.append(ValueGuard(label, "memory", memory, memory.get("")))
        return tuple(guards)


class _CommonMemory:
    """The namespace of a guard on which tensors at some places share memory."""

    def __init__(self, module: nn.Module, places: Sequence[Place]) -> None:
        self._module = module
        self._places = places

    def get(self, name: str, default: Any = None) -> tuple[int, ...]:
        """Return for each tensor the index of the first one on the same memory."""
        leaves = state_leaves(self._module, self._places)
        return first_on_memory([leaf for leaf in leaves if isinstance(leaf, Tensor)])


class _Alike:
    """Equals values that have the same structure, shapes and plain values as one."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(self, value: Any) -> None:
        self._description = _description(value)

    def __eq__(self, other: object) -> bool:
        return self._description == _description(other)


def _description(value: Any) -> Any:
    """Return a description of a state, equal for states of one kind: the structure, the shape and
    dtype of every tensor, and type and value of every other leaf.
    """
    leaves, spec = pytree.tree_flatten(value)
    descriptions = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        descriptions.append((leaf.shape, leaf.dtype) if is_tensor else (type(leaf), leaf))
    return spec, descriptions
