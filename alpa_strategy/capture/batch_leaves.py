"""The tensors of a batch: which have its size, and which share memory."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.errors import CaptureError


def have_common_size(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Return, for every tensor leaf of a batch, whether its size(0) is the most frequent one; False
    for a scalar.

    Among equally frequent ones, that of the first leaf counts. These are the leaves that
    micro-batches try to split. No number depends on it: the walk over the ops proves each split
    (microbatch/states.py).
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf.size(0) for leaf in tensors if leaf.ndim >= 1]
    batch_size = max(sizes, key=sizes.count, default=0)
    has_batch_dim = []
    for leaf in tensors:
        has_batch_dim.append(leaf.ndim >= 1 and leaf.size(0) == batch_size)
    return tuple(has_batch_dim)


def size_of_batch(leaves: Sequence[Any], rows_flags: Sequence[bool]) -> int:
    """Return the number of samples of the first leaf with a batch dim.

    Args:
        leaves: of the batch.
        rows_flags: for each tensor among them, whether it has a batch dim.

    Raises:
        CaptureError: there is no such leaf.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf.size(0) for leaf, is_rows in zip(tensors, rows_flags, strict=True) if is_rows]
    if not sizes:
        raise CaptureError(
            "the batch holds no tensor with a batch dim",
            "let the loader yield tensors with one row per sample",
        )
    return sizes[0]


def same_tensors(leaves: Sequence[Any]) -> dict[int, int]:
    """Return index of a tensor among the leaves -> index of the first leaf that is the same object:
    the index itself, mostly.
    """
    first: dict[int, int] = {}
    same = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            same[index] = first.setdefault(id(leaf), index)
    return same


def first_on_memory(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each strided tensor the index of the first one on the same memory."""
    first: dict[int, int] = {}
    indices = []
    for index, tensor in enumerate(tensors):
        indices.append(first.setdefault(tensor.untyped_storage()._cdata, index))
    return tuple(indices)


def sharing_memory(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> frozenset[int]:
    """Return the indices of the tensors whose memory another one shares. Sparse tensors share none.

    Args:
        tensors: the inputs of a step; one that is there twice shares its memory.
        others: further tensors that the step reads.
    """
    storages: list[set[int]] = []
    for tensor in (*tensors, *others):
        is_strided = tensor.layout is torch.strided
        storages.append(storages_of(tensor) if is_strided else set())
    num_tensors = Counter(storage for of_tensor in storages for storage in of_tensor)
    shared = set()
    for index in range(len(tensors)):
        if any(num_tensors[storage] > 1 for storage in storages[index]):
            shared.add(index)
    return frozenset(shared)
