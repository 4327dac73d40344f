"""What tells the batches of one captured program from another's: structure, shapes and dtypes.

Leaves that are no tensors count by their type only; those that the step reads are guarded
(capture/non_tensor_inputs.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.non_tensor_inputs import know_types, may_be_unread


def shape_key(batch: Any) -> tuple[Any, ...]:
    """Equal for batches that one program may serve."""
    know_types(batch)
    leaves, spec = pytree.tree_flatten(batch)
    return (spec, *map(_described, leaves))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf).__qualname__ if may_be_unread(leaf) else leaf


def shapes_text(batch: Any) -> str:
    """The shapes of the batch's tensors, for people."""
    return ", ".join(str(list(leaf.shape)) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
