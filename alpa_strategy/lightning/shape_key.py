"""What tells one captured program's batches from another's: structure, shapes, dtypes, values of the other leaves."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def shape_key(batch: Any) -> tuple[Any, ...]:
    """What a program depends on: shapes and dtypes of the tensors, the other leaves themselves, the structure."""
    leaves, spec = pytree.tree_flatten(batch)
    described = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (spec, *described)


def shapes_text(batch: Any) -> str:
    """The same for people."""
    leaves = pytree.tree_leaves(batch)
    others = hashlib.sha256(repr([x for x in leaves if not isinstance(x, Tensor)]).encode()).hexdigest()[:6]
    text = ", ".join(str(list(x.shape)) for x in leaves if isinstance(x, Tensor))
    return text if all(isinstance(x, Tensor) for x in leaves) else f"{text} and values #{others}"
