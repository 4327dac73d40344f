"""Our chunks in the terms of `torch.distributed.checkpoint`: planners for writing and reading, and the writer's end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from alpa_strategy.checkpoint.directory import (
    REST,
    check_replaceable,
    delete,
    mark_complete,
    put_in_place,
    staging_path,
    write_synced,
)
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor
from alpa_strategy.errors import AlpaError, CheckpointError


def write_directory(
    target: Path, shards: Mapping[str, LocalShards], rest: bytes | Exception, group: Any = None
) -> None:
    """Write a checkpoint's tensors and the rest of it to the directory `target`. Collective over `group`.

    Every element of every tensor must be in the chunks of a rank, and may be in those of several.

    Args:
        shards: key -> what this rank writes of that tensor.
        rest: the other content (rank 0's counts), or why there is none.
        group: process group with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, when any rank could not write its part; `target` is as it was then.
    """
    writer = _DirectoryWriter(target, rest)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(shards),
                storage_writer=writer,
                planner=_SavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, AlpaError):
            raise CheckpointError(error.problem, error.fix) from failure
        raise CheckpointError(
            f"the checkpoint {target} was not written: rank {rank}: {type(error).__name__}: {error}",
            "the checkpoint of before, if any, is untouched; mend the cause and save again",
        ) from failure


class _SavePlanner(DefaultSavePlanner):
    """Every chunk of `LocalShards` is an item; chunks that several ranks hold are written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(key, s, chunk) for key, s in self.state_dict.items() for chunk in s.chunks]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _chunk_at(self.state_dict[index.fqn], index).tensor.detach()


def _write_item(key: str, shards: LocalShards, chunk: Chunk) -> WriteItem:
    box = _box(chunk)
    properties = TensorProperties(dtype=shards.dtype)
    return WriteItem(
        index=MetadataIndex(key, box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=box, properties=properties, size=shards.shape),
    )


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)


def _chunk_at(shards: LocalShards, index: MetadataIndex) -> Chunk:
    return next(chunk for chunk in shards.chunks if torch.Size(chunk.offsets) == index.offset)


class _DirectoryWriter(dcp.FileSystemWriter):
    """Writes beside the checkpoint's place; rank 0 puts the whole of it in place after all ranks have written.

    Its steps run where DCP hands errors of one rank to all.
    """

    def __init__(self, target: Path, rest: bytes | Exception) -> None:
        super().__init__(staging_path(target), sync_files=True)
        self._target, self._rest = target, rest
        self._staging = staging_path(target)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if isinstance(self._rest, Exception):
            raise self._rest
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        check_replaceable(self._target)
        delete(self._staging)
        self._staging.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        self._staging.mkdir(parents=True, exist_ok=True)  # a shared file system may show it late
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        assert isinstance(self._rest, bytes)
        write_synced(self._staging / REST, self._rest)
        written = {result.storage_data.relative_path for rank in results for result in rank}
        mark_complete(self._staging, {*written, REST})
        put_in_place(self._staging, self._target)


class DirectoryReader:
    """Reads parts of the tensors of a complete checkpoint directory; each process for itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = dcp.FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def tensors(self) -> dict[str, StoredTensor]:
        """Key -> tensor, of all that are stored."""
        return {
            key: StoredTensor(found.size, found.properties.dtype, key, self.fill)
            for key, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def fill(self, key: str, shards: LocalShards) -> None:
        """Read into the memory of `shards` what they cover of tensor `key`, whatever their dtype and device.

        Raises:
            CheckpointError: the files cannot be read, or hold something else.
        """
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(key, found, [_box(chunk) for chunk in shards.chunks])
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(shards)).wait()
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(
                f"{key} cannot be read from {self._path}: {error}", "load another checkpoint"
            ) from error


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into the chunks of `LocalShards`."""

    def __init__(self, shards: LocalShards) -> None:
        super().__init__()
        self._shards = shards

    @torch.no_grad()
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = _chunk_at(self._shards, read_item.dest_index).tensor
        box = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(start, start + length) for start, length in box)]
