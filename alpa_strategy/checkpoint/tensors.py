"""A checkpoint's tensors that are not in memory as a whole: what this process holds of one, and one
that is on disk.

Both have the whole tensor's shape and dtype, and stand in a Lightning checkpoint (nested dicts,
lists and tuples) like any other; here they are taken out of it and put back.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.sharded_parameter import Chunk


class _Elsewhere(Tensor):
    """A tensor of which there is nothing but its shape and dtype, and the attributes given."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Self:
        return Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu")
        )

    def detach(self) -> Self:
        """Itself: `Module.state_dict` detaches what it takes."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class LocalShards(_Elsewhere):
    """What this process holds of a tensor (or is to write of it); it cannot be computed with."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunk for chunk in chunks if chunk.tensor.numel())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CheckpointError(
            f"{func} was called on a tensor of a checkpoint that is held in shards",
            'let hooks only choose or rename entries of a checkpoint, or use AlpaStrategy(checkpoint="single")',
        )

    # What `torch.distributed.checkpoint` asks of tensors that a process has in pieces
    # (`_checkpointable.py`).

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.shape),
            )
            for box in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(
            chunk.tensor.detach()
            for chunk in self.chunks
            if torch.Size(chunk.offsets) == index.offset
        )


class StoredTensor(_Elsewhere):
    """A tensor of a checkpoint on disk. Computing with it reads it whole, `fill` reads parts of
    it.
    """

    failure: CheckpointError | None = (
        None  # why it could not be read: `Module.load_state_dict` makes a text of errors
    )

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        key: str,
        fill: Callable[[str, LocalShards], None],
    ) -> None:
        """`fill(key, shards)` reads into the shards' memory what they cover of the stored tensor
        `key`.
        """
        self.key, self._fill = key, fill

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks' boxes into their tensors."""
        try:
            self._fill(self.key, LocalShards(self.shape, self.dtype, chunks))
        except CheckpointError as error:
            self.failure = error
            raise

    def whole(self) -> Tensor:
        """All of it, in memory."""
        result = torch.empty(self.shape, dtype=self.dtype)
        self.fill([Chunk((0,) * result.dim(), result)])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func is torch.ops.aten.copy_.default and args[0].is_meta
        ):  # a parameter that is still to be made
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
        box = zip(chunk.offsets, chunk.tensor.shape, strict=True)
        chunk.tensor.copy_(source[tuple(slice(start, start + size) for start, size in box)])


Path = tuple[str | int, ...]


def take_shards(checkpoint: Any) -> tuple[Any, dict[Path, str], dict[str, LocalShards]]:
    """`checkpoint` with None in the place of every `LocalShards`, where each of them was (its key),
    and key -> shards.

    One object in several places (a tied weight) has one key. A tensor without elements stays where
    it is.
    """
    places: dict[Path, str] = {}
    shards: dict[str, LocalShards] = {}
    keys: dict[int, str] = {}

    def visit(path: Path, value: LocalShards) -> Any:
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        key = keys.setdefault(id(value), ".".join(map(str, path)))
        places[path], shards[key] = key, value
        return None

    return _mapped(checkpoint, (), LocalShards, visit), places, shards


def map_tensors(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`tree` with `change(leaf)` in the place of every leaf of class `kind`."""
    return _mapped(tree, (), kind, lambda _, leaf: change(leaf))


def to_bytes(rest: Any, places: Mapping[Path, str]) -> bytes | Exception:
    """What `from_file` reads, or why `rest` cannot be stored."""
    buffer = io.BytesIO()
    try:
        torch.save(
            {"rest": rest, "places": [(list(path), key) for path, key in places.items()]}, buffer
        )
    except (
        Exception
    ) as error:  # whatever pickle of the user's objects raises; the caller raises it on all ranks
        return error
    return buffer.getvalue()


def from_file(path: Any, weights_only: bool | None, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_bytes` stored, as `torch.load(..., weights_only)` reads it, with `tensors` by key
    where shards were.
    """
    stored = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    for place, key in stored["places"]:
        owner = stored["rest"]
        for step in place[:-1]:
            owner = owner[step]
        owner[place[-1]] = tensors[key]
    return stored["rest"]


def _mapped(value: Any, path: Path, kind: type, change: Callable[[Path, Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _mapped(item, (*path, key), kind, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        copy = value.copy()  # keeps its class (OrderedDict, with the `_metadata` of a state dict)
        copy.update(items)
        return copy
    if type(value) is list:
        return [_mapped(item, (*path, i), kind, change) for i, item in enumerate(value)]
    return value
