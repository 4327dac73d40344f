"""Optimizer state of parameters that one device steps in full (`runtime/owner_step.py`).

It is at that device only, and may have any structure: moments of the parameter's shape, a list of
preconditioners, objects. Other ranks get a description of it: the same structure with meta tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from alpa_strategy.checkpoint.on_demand import LazyEntryGather
from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import Chunk

# (parameter, a tensor of its state at the owner, the tensor's shape) -> what a state dict has.
# Elsewhere than at the owner the tensor is an empty one.
ConvertOwned = Callable[[nn.Parameter, Tensor, torch.Size], Any]


@dataclass(frozen=True)
class _DescribedTensor:
    """A tensor of the state, as its rank describes it to the others."""

    # Without values (meta) if it has dims. Step counters and the like have their values.
    value: Tensor

    is_on_device: bool


@dataclass(frozen=True)
class _DescribedParts:
    """A tensor of a class that wraps others (torchao's 8-bit state), as its rank describes it."""

    kind: Any

    # By the name of the attribute.
    parts: dict[str, _DescribedTensor]

    # What the class makes the tensor from, beside its parts.
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def with_parts(self, parts: dict[str, Tensor]) -> Any:
        """Return the tensor of the class that wraps `parts`."""
        return self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)


def described_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a parameter's state: small and picklable."""
    return pytree.tree_map_only(Tensor, _described, dict(state))


def _described(tensor: Any) -> _DescribedTensor | _DescribedParts:
    """Return a tensor's shape and dtype for other ranks; its value if it has no dims. A tensor that
    wraps others is described by its parts.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _described_plain(getattr(tensor, name)) for name in names}
        return _DescribedParts(type(tensor), parts, context, tensor.shape, tensor.stride())
    return _described_plain(tensor)


def _described_plain(tensor: Tensor) -> _DescribedTensor:
    """Return the description of a tensor that wraps no others."""
    is_on_device = tensor.device.type != "cpu"
    if tensor.dim() == 0:
        return _DescribedTensor(tensor.detach().cpu(), is_on_device)
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _DescribedTensor(meta, is_on_device)


def converted_state(
    parameter: nn.Parameter,
    description: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    convert: ConvertOwned,
    gather: ConvertOwned,
) -> dict[str, Any]:
    """Return the state with converted tensors, on every rank; other values are the owner's.
    Collective.

    Args:
        parameter: of the module.
        description: of its state.
        state: at the owner; None elsewhere.
        convert: is called for all tensors with dims, in the same order on all ranks.
        gather: returns a full tensor. A tensor that wraps others is made of its parts in full.
    """

    def converted_by(function: ConvertOwned, described: _DescribedTensor, local: Any) -> Any:
        value = described.value
        if value.is_meta:
            tensor = torch.empty(0, dtype=value.dtype) if local is None else local
            return function(parameter, tensor, value.shape)
        if local is not None:
            return local
        return value.to(parameter.device) if described.is_on_device else value

    leaves, structure = pytree.tree_flatten(dict(description))
    local_leaves: list[Any] = [None] * len(leaves)
    if state is not None:
        local_leaves = pytree.tree_leaves(dict(state))

    converted: list[Any] = []
    for leaf, local in zip(leaves, local_leaves, strict=True):
        if isinstance(leaf, _DescribedTensor):
            converted.append(converted_by(convert, leaf, local))
        elif isinstance(leaf, _DescribedParts):
            parts: dict[str, Tensor] = {}
            for name, described in leaf.parts.items():
                local_part = None if local is None else getattr(local, name)
                parts[name] = converted_by(gather, described, local_part)
            converted.append(leaf.with_parts(parts))
        else:
            converted.append(leaf if local is None else local)
    return pytree.tree_unflatten(converted, structure)


def owner_state_to_write(store: ParameterStore, on_demand: LazyEntryGather) -> ConvertOwned:
    """Return a function (parameter, state tensor, full shape) -> its `LocalShards`: the owner
    writes all of it, other ranks nothing.

    Every rank has to call it for the same tensors in the same order.

    Args:
        store: of the parameters.
        on_demand: gathers the tensors that hooks compute with.
    """

    def shards(parameter: nn.Parameter, tensor: Tensor, shape: torch.Size) -> LocalShards:
        def gather() -> Tensor:
            return store.state_of_owner(parameter, tensor, shape).to(tensor.device)

        def put(full: Tensor) -> None:
            if tensor.shape == shape:
                tensor.copy_(full.view(shape))

        chunks = []
        if store.writes_state(parameter):
            chunks.append(Chunk((0,) * len(shape), tensor))
        entry = on_demand.add(gather, put, is_local=False)
        entry.held = LocalShards(shape, tensor.dtype, chunks, entry, device=tensor.device)
        return entry.held

    return shards


def state_in_full(state: Any, values: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """Return state with full tensors in memory, of state (or a part of it) in a checkpoint or of a
    full parameter.

    Args:
        values: returns the full tensor of one that is in memory, or will be.
    """

    def full(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, StoredTensor) else values(tensor)

    return pytree.tree_map_only(Tensor, full, state)
