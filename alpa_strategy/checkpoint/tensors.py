"""Tensors of a checkpoint that are not in memory as a whole: what this process holds of one, and one that is on disk.

Both have the whole tensor's shape and dtype, and stand in a Lightning checkpoint's `state_dict` like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]  # (start, stop) per dim


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor: where it begins, and its elements (a view of this process's memory)."""

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def ranges(self) -> Ranges:
        """The box."""
        return tuple((start, start + size) for start, size in zip(self.offsets, self.tensor.shape, strict=True))


class LocalShards(Tensor):
    """What this process holds of a tensor (or is to write of it); it cannot be computed with."""

    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> LocalShards:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        made.chunks = tuple(chunk for chunk in chunks if chunk.tensor.numel())
        return made

    def detach(self) -> LocalShards:
        """Itself: `Module.state_dict` detaches what it takes."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"LocalShards({list(self.shape)}, {self.dtype}, {len(self.chunks)} chunks)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CheckpointError(
            f"{func} was called on a tensor of a checkpoint that is held in shards",
            'let hooks only choose or rename entries of a checkpoint, or use AlpaStrategy(checkpoint="single")',
        )


class StoredTensor(Tensor):
    """A tensor of a checkpoint on disk. Computing with it reads it whole, `fill` reads parts of it."""

    key: str
    _fill: Callable[[str, LocalShards], None]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, key: str, fill: Callable[[str, LocalShards], None]
    ) -> StoredTensor:
        """`fill(key, shards)` reads into the shards' memory what they cover of the stored tensor `key`."""
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        made.key, made._fill = key, fill
        return made

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks' boxes into their tensors."""
        self._fill(self.key, LocalShards(self.shape, self.dtype, chunks))

    def whole(self) -> Tensor:
        """All of it, in memory."""
        result = torch.empty(self.shape, dtype=self.dtype)
        self.fill([Chunk((0,) * result.dim(), result)])
        return result

    def detach(self) -> StoredTensor:
        """Itself, unread."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.key}, {list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:  # a parameter that is still to be made
            return args[0]
        args, kwargs = pytree.tree_map_only(StoredTensor, StoredTensor.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


@torch.no_grad()
def read_chunks(source: Tensor, chunks: Sequence[Chunk]) -> None:
    """Read the chunks' boxes of `source` into their tensors, whatever their dtype and device."""
    if isinstance(source, StoredTensor):
        source.fill(chunks)
        return
    for chunk in chunks:
        chunk.tensor.copy_(source[tuple(slice(*r) for r in chunk.ranges)])
