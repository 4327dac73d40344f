"""Tensors of a checkpoint that are not fully in memory: `LocalShards`, of which this process stores
shards, and `StoredTensor`, which is on disk.

Both have the full tensor's shape and dtype, and are leaves of a Lightning checkpoint (nested dicts,
lists and tuples) like any other; here they are also taken out of it and put back.
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

from alpa_strategy.checkpoint.on_demand import Entry
from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.sharded_parameter import Chunk

aten = torch.ops.aten


class _Elsewhere(Tensor):
    """A tensor with shape and dtype, whose values are fetched when they are used.

    `__torch_dispatch__` of a subclass runs operations on the values. Accesses of torch without an
    operation (to memory, NumPy arrays, pickles) are here.
    """

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *_: Any,
        device: torch.device | str = "cpu",
        **__: Any,
    ) -> Self:
        return Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device(device)
        )

    def in_memory(self) -> Tensor:
        """Return the full tensor, the same memory at every call."""
        raise NotImplementedError

    def full_tensor(self) -> Tensor:
        """Return the full tensor for one use."""
        raise NotImplementedError

    def detach(self) -> Self:
        """Return this tensor: `Module.state_dict` detaches its values."""
        return self

    # The method is untyped in torch.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor, gathered if needed, as an array."""
        return self.in_memory().numpy(force=force)

    def tolist(self) -> Any:
        """Return the full tensor, gathered if needed, as nested lists."""
        return self.full_tensor().tolist()

    def data_ptr(self) -> int:
        """Return the address of the full tensor, which stays in memory for it."""
        return self.in_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the full tensor, which stays in memory for it."""
        return self.in_memory().untyped_storage()

    def storage(self) -> Any:
        """Return the typed storage of the full tensor, which stays in memory for it."""
        return self.in_memory().storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.full_tensor().clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _called_in_full(kind: type["_Elsewhere"], func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)` with full tensors in the place of those of class `kind`.

    An argument that is changed, or of which the result may be a view, is the same memory at every
    call.
    """
    schema = {argument.name: argument for argument in func._schema.arguments}

    def in_full(value: Any, argument: Any) -> Any:
        is_aliased = argument is None or argument.alias_info is not None
        change = kind.in_memory if is_aliased else kind.full_tensor
        return pytree.tree_map_only(kind, change, value)

    arguments = list(schema.values())
    arguments += [None] * (len(args) - len(arguments))
    pairs = zip(args, arguments, strict=False)
    positional = [in_full(value, argument) for value, argument in pairs]
    kwargs = kwargs or {}
    named = {name: in_full(value, schema.get(name)) for name, value in kwargs.items()}
    return func(*positional, **named)


class LocalShards(_Elsewhere):
    """A tensor of which this process stores, reads or writes shards.

    Args:
        shape: of the full tensor.
        dtype: of the full tensor.
        chunks: the boxes of this process.
        entry: gathers the full tensor for code that computes with it; None: no code may.
        device: of the full tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        chunks: Sequence[Chunk],
        entry: Entry | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.chunks = tuple(chunk for chunk in chunks if chunk.tensor.numel())
        self.entry = entry

    def in_memory(self) -> Tensor:
        """Return the full tensor, the same memory at every call.

        Collective: see `LazyEntryGather.full`.

        Raises:
            CheckpointError: there is no entry.
        """
        return self._full(keeps=True)

    def full_tensor(self) -> Tensor:
        """Return the full tensor for one use.

        Collective: see `LazyEntryGather.full`.

        Raises:
            CheckpointError: there is no entry.
        """
        return self._full(keeps=False)

    def alias(self) -> "LocalShards":
        """Return another object for the same tensor (`tensor.data`)."""
        return LocalShards(self.shape, self.dtype, self.chunks, self.entry, device=self.device)

    def _full(self, keeps: bool) -> Tensor:
        """Return the full tensor, gathered on demand.

        Args:
            keeps: whether later calls return the same memory.

        Raises:
            CheckpointError: the checkpoint is already being written.
        """
        if self.entry is None:
            raise CheckpointError(
                "code computes with a tensor of a checkpoint that is being written in shards",
                "do it in on_save_checkpoint",
            )
        return self.entry.full(keeps)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0].alias()
        return _called_in_full(LocalShards, func, args, kwargs)

    # The protocol of `torch.distributed.checkpoint` for sharded tensors (`_checkpointable.py`)

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
        matching = [c for c in self.chunks if torch.Size(c.offsets) == index.offset]
        return matching[0].tensor.detach()


class StoredTensor(_Elsewhere):
    """A tensor of a checkpoint on disk. Operations on it read all of it, `fill` reads boxes."""

    # Why it could not be read. `Module.load_state_dict` catches errors and joins their texts.
    failure: CheckpointError | None = None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        key: str,
        fill: Callable[[str, LocalShards], None],
    ) -> None:
        """Describe a stored tensor.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            key: of the tensor in its checkpoint.
            fill: reads the boxes of shards of the tensor with this key into their memory.
        """
        self.key = key
        self._fill = fill
        self._in_memory: Tensor | None = None

    def in_memory(self) -> Tensor:
        """Return all of it, the same memory at every call."""
        if self._in_memory is None:
            self._in_memory = self.full_tensor()
        return self._in_memory

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks' boxes into their tensors; from memory if the tensor was loaded.

        Raises:
            CheckpointError: the file is damaged; `failure` keeps it.
        """
        if self._in_memory is not None:
            # A hook may have changed it.
            read_chunks(self._in_memory, chunks)
            return
        try:
            self._fill(self.key, LocalShards(self.shape, self.dtype, chunks))
        except CheckpointError as error:
            self.failure = error
            raise

    def full_tensor(self) -> Tensor:
        """Return all of it, in new memory unless `in_memory` was called before. CheckpointError if
        the file is damaged.
        """
        if self._in_memory is not None:
            return self._in_memory
        result = torch.empty(self.shape, dtype=self.dtype)
        self.fill([Chunk((0,) * result.dim(), result)])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            # The target has no memory yet.
            return args[0]
        return _called_in_full(StoredTensor, func, args, kwargs)


@torch.no_grad()
def read_chunks(source: Tensor, chunks: Sequence[Chunk]) -> None:
    """Read the chunks' boxes of `source` into their tensors, whatever their dtype and device.
    CheckpointError if a file on disk is damaged.
    """
    if isinstance(source, StoredTensor):
        source.fill(chunks)
        return
    for chunk in chunks:
        ranges = zip(chunk.offsets, chunk.tensor.shape, strict=True)
        box = tuple(slice(start, start + size) for start, size in ranges)
        chunk.tensor.copy_(source[box])


# Keys and indices from the root of a checkpoint to a leaf.
Path = tuple[str | int, ...]


def take_shards(checkpoint: Any) -> tuple[Any, dict[Path, str], dict[str, LocalShards]]:
    """Take all `LocalShards` in dicts and lists out of a checkpoint, which is not changed itself.

    A tensor at several paths (a tied weight) has one key. A tensor without elements stays in the
    checkpoint; one that a hook has changed is replaced by the full tensor.

    Returns:
        The checkpoint with None in the place of the shards, path -> key, and key -> shards.
    """
    key_of_path: dict[Path, str] = {}
    shards: dict[str, LocalShards] = {}
    keys: dict[int, str] = {}

    def visit(path: Path, value: LocalShards) -> Any:
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        if value.entry is not None and value.entry.is_changed:
            return value.in_memory()
        identity = id(value) if value.entry is None else id(value.entry)
        key = keys.setdefault(identity, ".".join(map(str, path)))
        key_of_path[path] = key
        shards[key] = value
        return None

    return _mapped(checkpoint, (), LocalShards, visit), key_of_path, shards


def map_tensors(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `tree` with `change(leaf)` in the place of every leaf of class `kind`."""
    return _mapped(tree, (), kind, lambda _, leaf: change(leaf))


def to_bytes(rest: Any, key_of_path: Mapping[Path, str]) -> bytes | Exception:
    """Return the bytes for `from_file`, or the error of pickling `rest`.

    Args:
        rest: a checkpoint without its shards.
        key_of_path: the paths at which shards were, with their keys.
    """
    buffer = io.BytesIO()
    paths = [(list(path), key) for path, key in key_of_path.items()]
    try:
        torch.save({"rest": rest, "places": paths}, buffer)
    except Exception as error:
        # Any error of pickling the user's objects; the caller raises it on all ranks.
        return error
    return buffer.getvalue()


def from_file(path: Any, weights_only: bool | None, tensors: Mapping[str, Tensor]) -> Any:
    """Return the checkpoint that `to_bytes` stored, with `tensors` at the paths of its shards.

    Args:
        path: of the file.
        weights_only: as of `torch.load`.
        tensors: by key.
    """
    stored = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    for tensor_path, key in stored["places"]:
        owner = stored["rest"]
        for step in tensor_path[:-1]:
            owner = owner[step]
        owner[tensor_path[-1]] = tensors[key]
    return stored["rest"]


def _mapped(value: Any, path: Path, kind: type, change: Callable[[Path, Any], Any]) -> Any:
    """Return `value` with `change(path, leaf)` in the place of every leaf of class `kind` in dicts
    and lists. Lists are new ones; a dict without such leaves and lists is returned itself.
    """
    if isinstance(value, kind):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _mapped(item, (*path, key), kind, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        # The copy keeps its class (OrderedDict, with the `_metadata` of a state dict).
        copy = value.copy()
        copy.update(items)
        return copy
    if type(value) is list:
        return [_mapped(item, (*path, i), kind, change) for i, item in enumerate(value)]
    return value
