"""Writing a checkpoint directory through `torch.distributed.checkpoint` (DCP), by all ranks."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from alpa_strategy.checkpoint import names, opening
from alpa_strategy.checkpoint.locks import locked
from alpa_strategy.checkpoint.opening import COMPLETE, REST
from alpa_strategy.checkpoint.tensors import LocalShards
from alpa_strategy.errors import AlpaError, CheckpointError
from alpa_strategy.files import replacing, sync, write_json

# Stands in the marker file, for people who open it.
TO_READ = (
    "`import alpa_strategy` lets any Trainer and `load_from_checkpoint` read it;"
    " `alpa export` makes it one file"
)


def save_directory(
    path: Path,
    shards: Mapping[str, LocalShards],
    rest: bytes | Exception,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory, in place of a checkpoint at `path`. Collective over `group`.

    Every element of every tensor must be in the chunks of a rank, and may be in those of several.

    Args:
        path: absolute, of a local or mounted file system that all ranks share.
        shards: key -> the shards of that tensor that this rank writes.
        rest: the content without tensors, pickled, or the error of pickling it; rank 0's is used.
        group: of all ranks, with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, if any rank could not write its shards, or `path` is a
            directory that is no checkpoint; `path` is unchanged.
    """
    writer = _DirectoryWriter(path, rest)
    with writer.lock():
        _save(writer, shards, group, str(path))


def write_shards(
    folder: Path,
    shards: Mapping[str, LocalShards],
    rest: bytes | Exception,
    group: dist.ProcessGroup | None,
    path: str,
) -> list[str]:
    """Write a checkpoint directory into local folders, which nodes need not share. Collective.

    Args:
        folder: of this node; ranks of one node may share it.
        shards, rest, group: as of `save_directory`.
        path: of the checkpoint, for messages.

    Returns:
        The names of the files that this rank has written; on rank 0, the marker is the last.

    Raises:
        CheckpointError: on every rank, if any rank could not write its shards.
    """
    writer = _Writer(folder, rest)
    _save(writer, shards, group, path)
    return writer.written


def _save(
    writer: "_Writer",
    shards: Mapping[str, LocalShards],
    group: dist.ProcessGroup | None,
    path: str,
) -> None:
    """Let DCP write with a writer. Collective.

    Args:
        writer: of this rank.
        shards, group: as of `save_directory`.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(shards),
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, AlpaError):
            raise CheckpointError(error.problem, error.fix) from failure
        raise CheckpointError(
            f"the checkpoint {path} was not written: rank {rank}: {type(error).__name__}: {error}",
            "the previous checkpoint, if any, is unchanged; fix the cause and save again",
        ) from failure


class _Writer(dcp.FileSystemWriter):
    """Writes this rank's files into a folder, and on rank 0 the marker after all ranks' files.

    DCP calls the methods below in contexts in which an error of one rank is raised on all.

    Args:
        folder: local.
        rest: see `save_directory`.
    """

    def __init__(self, folder: Path, rest: bytes | Exception) -> None:
        self._folder = folder
        self._rest = rest

        # Names of the files that this rank has written.
        self.written: list[str] = []

        # Synchronized files: a name may not be on disk before its content is.
        super().__init__(folder, sync_files=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise the error that making the checkpoint's other content has raised, on all ranks
        together.
        """
        if isinstance(self._rest, Exception):
            raise self._rest
        return plan

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Write this rank's shards, and return a future of (result, checksum) of each of them.
        `written` gets the names of its files.
        """
        # A shared file system may show rank 0's folder late.
        self._folder.mkdir(parents=True, exist_ok=True)
        writing = super().write_data(plan, planner)

        def with_checksums(done: Any) -> list[tuple[Any, int]]:
            return [(result, self._checksum(result.storage_data)) for result in done.value()]

        written = writing.then(with_checksums)
        self.written = sorted(_file_sizes([written.value()]))
        return written

    def _checksum(self, info: _StorageInfo) -> int:
        """Return the checksum of a written item."""
        with (self._folder / info.relative_path).open("rb") as file:
            return opening.checksum(file, info)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write metadata, everything but shards, and at last the marker, on rank 0; add them to
        `written`.

        Args:
            metadata: of DCP.
            results: by rank, what `write_data` returned.

        Raises:
            CheckpointError: a file that a rank has written is not in the folder.
        """
        without_checksums: list[list[Any]] = []
        checksums: dict[str, int] = {}
        for of_rank in results:
            without_checksums.append([result for result, _ in of_rank])
            for result, crc in of_rank:
                checksums[opening.place_of(result.storage_data)] = crc
        super().finish(metadata, without_checksums)

        assert isinstance(self._rest, bytes)
        with replacing(self._folder / REST) as file:
            file.write_bytes(self._rest)

        sizes = _file_sizes(results)
        self._check_files(sizes)
        for name in (REST, opening.METADATA):
            sizes[name] = (self._folder / name).stat().st_size
            info = _StorageInfo(name, 0, sizes[name])
            checksums[opening.place_of(info)] = self._checksum(info)

        # The marker is written after all other files.
        content = {
            "to_read": TO_READ,
            "format": opening.FORMAT_VERSION,
            "files": sizes,
            "sums": checksums,
        }
        write_json(self._folder / COMPLETE, content)
        sync(self._folder)
        self.written += [REST, opening.METADATA, COMPLETE]

    def _check_files(self, sizes: Mapping[str, int]) -> None:
        """Check the files of all ranks: other nodes may have folders of their own."""


def _file_sizes(results: Sequence[Sequence[tuple[Any, int]]]) -> dict[str, int]:
    """Return name -> bytes of the files that `write_data` of some ranks has written."""
    sizes: dict[str, int] = {}
    for of_rank in results:
        for result, _ in of_rank:
            info = result.storage_data
            end = info.offset + info.length
            sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    return sizes


class _DirectoryWriter(_Writer):
    """Writes a directory under a hidden name; rank 0 gives it the checkpoint's name after all ranks
    have written.

    Args:
        target: path of the checkpoint.
        rest: see `save_directory`.
    """

    def __init__(self, target: Path, rest: bytes | Exception) -> None:
        self._target = target

        # The same path on every rank, cleared by the next attempt.
        super().__init__(opening.beside(target, "saving"), rest)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context of writing. If it fails, unfinished checkpoints without a living writer are
        removed.
        """
        names.LOCKS[self._folder] = None
        try:
            yield
        except BaseException:
            names.discard_unfinished()
            raise
        finally:
            names.unlock(self._folder)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, make the locked staging folder before anything is written. Unfinished
        checkpoints beside it without a living writer are deleted.

        Raises:
            CheckpointError: the target exists and is no checkpoint.
        """
        names.check_replaceable(self._target)
        names.delete_abandoned(self._target.parent)
        names.delete(self._folder)
        self._folder.mkdir(parents=True)
        names.LOCKS[self._folder] = locked(self._folder)
        return super().prepare_global_plan(plans)

    def _check_files(self, sizes: Mapping[str, int]) -> None:
        """Check the files of all ranks, which share the folder."""
        opening.check_files(self._folder, sizes)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete the directory on rank 0, and rename it to the checkpoint's path."""
        super().finish(metadata, results)
        names.put_in_place(self._folder, self._target)
