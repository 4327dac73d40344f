"""Which batches one program may serve: those with equal keys, made of containers and shapes.

A key is made of every batch, so the usual containers are walked here, some times as fast as by
`torch.utils._pytree`. What else torch or a user has registered as a container is left to it.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.batch_leaves import first_on_memory, same_tensors
from alpa_strategy.capture.non_tensor_inputs import may_be_unread, register_batch_types

# Values of these types are leaves, whatever is registered.
_PLAIN = (str, int, float, bool, type(None))


def shape_key(batch: Any) -> Hashable:
    """Return a key that is equal for batches that one program may run."""
    return keyed_leaves(batch)[0]


def keyed_leaves(batch: Any) -> tuple[Hashable, list[Any]]:
    """Return `shape_key(batch)`, and the batch's leaves in the order of `pytree.tree_leaves`."""
    leaves: list[Any] = []
    key = _key(batch, leaves)
    shared = _shared_memory(leaves)
    return (key, shared) if shared else key, leaves


def _shared_memory(leaves: list[Any]) -> tuple[tuple[int, int], ...]:
    """Return for each tensor the index of the first leaf that is the same one, and of the first
    one on the same memory; nothing if all have memory of their own.
    """
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            tensors.append(leaf)
    if len(tensors) < 2:
        return ()
    on_memory = first_on_memory(tensors)
    if on_memory == tuple(range(len(tensors))):
        return ()
    return tuple(zip(same_tensors(tensors).values(), on_memory, strict=True))


def _key(value: Any, leaves: list[Any]) -> Hashable:
    """Return the key of a part of a batch: equal for parts of equal structure, shapes and plain
    values. Adds its leaves to `leaves`.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return (kind, *[_key(item, leaves) for item in value])
    if kind is dict:
        return (kind, tuple(value), *[_key(item, leaves) for item in value.values()])
    if isinstance(value, Tensor) or kind in _PLAIN:
        leaves.append(value)
        return _leaf_key(value)
    register_batch_types(value)
    parts, spec = pytree.tree_flatten(value)
    leaves += parts
    return (spec, *map(_leaf_key, parts))


def _leaf_key(leaf: Any) -> Hashable:
    """Return the key of a leaf of the batch: shape and dtype of a tensor, the type of a value that
    steps need not read (a text), any other value itself.
    """
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf).__qualname__ if may_be_unread(leaf) else leaf
