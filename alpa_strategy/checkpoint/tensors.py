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

from alpa_strategy.checkpoint.on_demand import Entry
from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.sharded_parameter import Chunk

aten = torch.ops.aten


class _Elsewhere(Tensor):
    """A tensor of which this process has the shape and dtype, and gets the values when they are
    used.

    `__torch_dispatch__` of a subclass gives its operations values. What torch reads without an
    operation (memory, NumPy arrays, pickles) is here.
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
        """The full tensor, the same memory at every call."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """The full tensor, for one use."""
        raise NotImplementedError

    def detach(self) -> Self:
        """Itself: `Module.state_dict` detaches what it takes."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        """As of the full tensor."""
        return self.in_memory().numpy(force=force)

    def tolist(self) -> Any:
        """As of the full tensor."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """As of the full tensor."""
        return self.in_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of the full tensor."""
        return self.in_memory().untyped_storage()

    def storage(self) -> Any:
        """As of the full tensor."""
        return self.in_memory().storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.whole().clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _called_in_full(kind: type["_Elsewhere"], func: Any, args: Any, kwargs: Any) -> Any:
    """What `func(*args, **kwargs)` gives with full tensors in the place of those of class `kind`.

    An argument that the result may be a view of, or that is changed, is the same memory at every
    call.
    """
    schema = {argument.name: argument for argument in func._schema.arguments}

    def in_full(value: Any, argument: Any) -> Any:
        is_aliased = argument is None or argument.alias_info is not None
        change = kind.in_memory if is_aliased else kind.whole
        return pytree.tree_map_only(kind, change, value)

    arguments = list(schema.values())
    arguments += [None] * (len(args) - len(arguments))
    positional = [
        in_full(value, argument) for value, argument in zip(args, arguments, strict=False)
    ]
    named = {name: in_full(value, schema.get(name)) for name, value in (kwargs or {}).items()}
    return func(*positional, **named)


class LocalShards(_Elsewhere):
    """What this process holds of a tensor (or is to write of it).

    Args:
        entry: makes the full tensor for code that computes with it; None: nothing may.
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
        """The full tensor, the same memory at every call. Collective: see `LazyEntryGather`."""
        return self._full(keeps=True)

    def whole(self) -> Tensor:
        """The full tensor, for one use. Collective: see `LazyEntryGather`."""
        return self._full(keeps=False)

    def alias(self) -> "LocalShards":
        """Another object for the same tensor (`tensor.data`)."""
        return LocalShards(self.shape, self.dtype, self.chunks, self.entry, device=self.device)

    def _full(self, keeps: bool) -> Tensor:
        if self.entry is None:
            raise CheckpointError(
                "a tensor of a checkpoint that is being written in shards was computed with",
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
        self._in_memory: Tensor | None = None

    def in_memory(self) -> Tensor:
        """All of it, the same memory at every call."""
        if self._in_memory is None:
            self._in_memory = self.whole()
        return self._in_memory

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks' boxes into their tensors."""
        if self._in_memory is not None:  # a hook may have changed it
            read_chunks(self._in_memory, chunks)
            return
        try:
            self._fill(self.key, LocalShards(self.shape, self.dtype, chunks))
        except CheckpointError as error:
            self.failure = error
            raise

    def whole(self) -> Tensor:
        """All of it, in memory of its own, unless `in_memory` was used."""
        if self._in_memory is not None:
            return self._in_memory
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
        return _called_in_full(StoredTensor, func, args, kwargs)


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

    One tensor in several places (a tied weight) has one key. A tensor without elements stays where
    it is; one that a hook has changed becomes the full tensor.
    """
    places: dict[Path, str] = {}
    shards: dict[str, LocalShards] = {}
    keys: dict[int, str] = {}

    def visit(path: Path, value: LocalShards) -> Any:
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        if value.entry is not None and value.entry.is_changed:
            return value.in_memory()
        identity = id(value) if value.entry is None else id(value.entry)
        key = keys.setdefault(identity, ".".join(map(str, path)))
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
