"""Writing checkpoints: `CheckpointWriter` writes those of a job, synchronously or in the
background;
`export_checkpoint` converts one to an ordinary Lightning file, as a plain Trainer on one device
writes it.

A sharded checkpoint is a directory that all ranks write through `torch.distributed.checkpoint`
(DCP), first under a hidden name in the same folder. It gets its own name when everything is on
disk: a reader sees the complete old checkpoint or the complete new one. Code that lists a folder
(`ckpt_path="last"`, SLURM's `hpc_ckpt_*`) does not take the hidden name for a checkpoint.
"""

import ctypes
import fcntl
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from alpa_strategy.checkpoint import opening
from alpa_strategy.checkpoint.on_demand import LazyEntryGather
from alpa_strategy.checkpoint.opening import COMPLETE, REST
from alpa_strategy.checkpoint.tensors import (
    Chunk,
    LocalShards,
    StoredTensor,
    map_tensors,
    take_shards,
    to_bytes,
)
from alpa_strategy.comm.collectives import Background, all_gather_object, on_all_ranks
from alpa_strategy.errors import AlpaError, CheckpointError
from alpa_strategy.files import is_possible, replacing, sync, write_json

# Stands in the marker file, for people who open it.
TO_READ = (
    "`import alpa_strategy` lets any Trainer and `load_from_checkpoint` read it;"
    " `alpa export` makes it one file"
)

# Hidden path that this process is writing -> descriptor with its lock, on rank 0; None on others.
_LOCKS: dict[Path, int | None] = {}

# Arguments of `renameat2`: paths are relative to the working directory, names are swapped.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class CheckpointWriter:
    """Writes and removes checkpoints, in the order of its calls.

    Args:
        group: process group of the whole job with a CPU backend, used by nothing else; None for one
            process.
        is_rank_zero: whether this process removes checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None, is_rank_zero: bool) -> None:
        self._group = group
        self._is_rank_zero = is_rank_zero
        self._background = Background("alpa-checkpoint")

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        in_background: bool = False,
        on_demand: LazyEntryGather | None = None,
    ) -> None:
        """Write `checkpoint` to `path` as a directory. Collective.

        Waits for the save before this one.

        Args:
            checkpoint: of this rank. Its `LocalShards` are written for the tensors that rank 0's
                checkpoint has, everything else by rank 0.
            path: of a local or mounted file system.
            in_background: whether to return as soon as this rank's tensors are copied.
            on_demand: gathers the tensors that hooks compute with; all hooks have returned.

        Raises:
            CheckpointError: on every rank, if any rank fails; in the background, from the next call
                of a method.
        """
        self.wait()
        target = _local_path(path)
        if on_demand is not None:
            on_demand.finish()
        rest, paths, shards = take_shards(checkpoint)
        content = to_bytes(rest, paths) if self._is_rank_zero else b""
        if on_demand is not None:
            # Pickling a tuple, or an object of the user's, may have gathered entries.
            on_demand.finish()
            shards = _as_on_rank_zero(shards, on_demand, self._group)
        if not in_background:
            save_directory(target, shards, content, self._group)
            return
        copies = {key: _copied(local_shards) for key, local_shards in shards.items()}
        self._background.run(lambda: save_directory(target, copies, content, self._group))

    def save_file(
        self, checkpoint: Mapping[str, Any], path: str | Path, in_background: bool = False
    ) -> None:
        """Write `checkpoint` to `path` as one ordinary file. Collective.

        Waits for the save before this one.

        Args:
            checkpoint: that of rank 0, with full tensors, is written.
            path: of a local or mounted file system.
            in_background: whether to return as soon as `checkpoint` is copied.

        Raises:
            CheckpointError: on every rank, if rank 0 fails; in the background, from the next call
                of a method.
        """
        self.wait()
        target = _local_path(path)

        def save(file: Any) -> None:
            torch.save(checkpoint, file)

        if not in_background:
            write_file(target, save if self._is_rank_zero else None, self._group)
            return
        content = io.BytesIO()
        if self._is_rank_zero:
            save(content)

        def write_content(file: Path) -> None:
            file.write_bytes(content.getbuffer())

        write = write_content if self._is_rank_zero else None
        self._background.run(lambda: write_file(target, write, self._group))

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, on rank 0.

        A save that is in flight is finished first. If it fails, nothing is removed: the checkpoint
        may be the last one.
        """
        if not self._is_rank_zero:
            return
        target = _local_path(path)
        if self._background.is_busy:
            self._background.run(lambda: _remove(target))
        else:
            _remove(target)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save that is in flight, at most until the timeout.

        Raises:
            CheckpointError: a save in the background has failed.
        """
        self._background.wait(timeout_seconds)


def _local_path(path: str | Path) -> Path:
    """Return the absolute path of a local or mounted file system.

    Raises:
        CheckpointError: it is a URL.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"sharded checkpoints are written to local or mounted folders, not to {path}",
            'give a path, or use AlpaStrategy(checkpoint="single")',
        )
    return Path(path).absolute()


def _as_on_rank_zero(
    shards: Mapping[str, LocalShards], on_demand: LazyEntryGather, group: Any
) -> dict[str, LocalShards]:
    """Return the shards that this rank writes, of the tensors in rank 0's checkpoint. Collective.

    A hook may have removed entries on one rank only.

    Args:
        shards: of this rank's checkpoint, by key.
        on_demand: of the checkpoint.
        group: of all ranks.
    """
    numbers: dict[str, int] = {}
    for key, local_shards in shards.items():
        if local_shards.entry is not None:
            numbers[key] = local_shards.entry.number
    of_rank_zero = all_gather_object(numbers, group)[0]
    return {key: on_demand.held(number) for key, number in of_rank_zero.items()}


def _copied(local_shards: LocalShards) -> LocalShards:
    """Return a copy of the shards in host memory."""
    chunks = []
    for chunk in local_shards.chunks:
        copy = chunk.tensor.detach().to("cpu", copy=True).contiguous()
        chunks.append(Chunk(chunk.offsets, copy))
    return LocalShards(local_shards.shape, local_shards.dtype, chunks)


def export_checkpoint(source: str | Path, target: str | Path, weights_only: bool = True) -> Path:
    """Write the checkpoint `source` (sharded, or ordinary already) as one ordinary file. Needs no
    other process.

    The plain module loads its `state_dict`, and its optimizer state has PyTorch's usual layout.
    Tensors go through temporary files in the folder of `target`, not through memory. The file
    appears under its name when it is complete.

    Args:
        source: path of a checkpoint.
        target: path of the file.
        weights_only: whether to read tensors and plain values only. False runs pickled code (of
            objects among hyper-parameters): only for checkpoints of authors you trust.

    Returns:
        The absolute path of the file.

    Raises:
        CheckpointError: `source` is no complete checkpoint, or `target` is a directory or cannot be
            written.
        FileNotFoundError: there is no `source`.
    """
    target = Path(target).absolute()
    if not is_possible(target) or target.is_dir():
        raise CheckpointError(
            f"{target} is a directory, or has a name that no file can have", "give a file's name"
        )
    checkpoint = opening.open_checkpoint(source, weights_only)
    try:
        with replacing(target) as temporary:
            torch.save(_mapped_tensors(checkpoint, target.parent), temporary)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}", "give a path with enough space"
        ) from error
    return target


def _mapped_tensors(checkpoint: Any, folder: Path) -> Any:
    """Return the checkpoint with its stored tensors in memory-mapped files of `folder`.

    The files have no names any more; their space is freed with the tensors.
    """
    mapped_tensors: dict[str, Tensor] = {}

    def mapped(stored: StoredTensor) -> Tensor:
        if stored.key not in mapped_tensors:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                flat = torch.from_file(
                    file.name, shared=True, size=stored.numel(), dtype=stored.dtype
                )
            tensor = flat.view(stored.shape)
            mapped_tensors[stored.key] = tensor
            stored.fill([Chunk((0,) * tensor.dim(), tensor)])
        return mapped_tensors[stored.key]

    return map_tensors(checkpoint, StoredTensor, mapped)


def write_file(
    path: Path, write: Callable[[Path], None] | None, group: dist.ProcessGroup | None
) -> None:
    """Let rank 0 write one file, which appears under its name when it is complete. Collective.

    Args:
        path: absolute, of a local or mounted file system.
        write: writes the content to the path that is its argument; None on all ranks but rank 0.
        group: of all ranks, with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, if the file could not be written; `path` is unchanged.
    """

    def write_in_place() -> None:
        if write is None:
            return
        try:
            _check_replaceable(path)
            _write_beside(path, write)
            sync(path.parent)
        except AlpaError:
            raise
        except Exception as error:
            # Any error, because pickling the user's objects may raise any.
            raise CheckpointError(
                f"the checkpoint {path} was not written: {type(error).__name__}: {error}",
                "the previous checkpoint, if any, is unchanged; fix the cause and save again",
            ) from error

    on_all_ranks(write_in_place, lambda _: None, group)


# Writing a directory through DCP


def save_directory(
    path: Path,
    shards: Mapping[str, LocalShards],
    rest: bytes | Exception,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory. Collective over `group`.

    Every element of every tensor must be in the chunks of a rank, and may be in those of several.

    Args:
        path: absolute, of a local or mounted file system.
        shards: key -> the shards of that tensor that this rank writes.
        rest: the content without tensors, pickled, or the error of pickling it; rank 0's is used.
        group: of all ranks, with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, if any rank could not write its shards; `path` is unchanged.
    """
    writer = _Writer(path, rest)
    try:
        with writer.lock(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
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


def _write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """Write one file under a hidden name, and rename it to `path` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_abandoned(path.parent)
    staging = opening.beside(path, "saving")
    _delete(staging)
    staging.touch()
    _LOCKS[staging] = _locked(staging)
    try:
        write(staging)
        sync(staging)
        if path.is_dir() and not path.is_symlink():
            # A sharded checkpoint: a file cannot be renamed to a directory's name.
            _put_in_place(staging, path)
        else:
            staging.replace(path)
    finally:
        _unlock(staging)
        _delete(staging)


class _Writer(dcp.FileSystemWriter):
    """Writes a directory under a hidden name; rank 0 gives it the checkpoint's name after all ranks
    have written.

    DCP calls the methods below in contexts in which an error of one rank is raised on all.

    Args:
        target: path of the checkpoint.
        rest: see `save_directory`.
    """

    def __init__(self, target: Path, rest: bytes | Exception) -> None:
        self._target = target
        self._rest = rest

        # The same path on every rank, cleared by the next attempt.
        self._staging = opening.beside(target, "saving")

        # Synchronized files: a name may not be on disk before its content is.
        super().__init__(self._staging, sync_files=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context of writing. If it fails, unfinished checkpoints without a living writer are
        removed.
        """
        _LOCKS[self._staging] = None
        try:
            yield
        except BaseException:
            discard_unfinished()
            raise
        finally:
            _unlock(self._staging)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise the error that making the checkpoint's other content has raised, on all ranks
        together.
        """
        if isinstance(self._rest, Exception):
            raise self._rest
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, make the locked staging folder before anything is written.

        Raises:
            CheckpointError: the target exists and is no checkpoint.
        """
        _check_replaceable(self._target)
        _delete_abandoned(self._target.parent)
        _delete(self._staging)
        self._staging.mkdir(parents=True)
        _LOCKS[self._staging] = _locked(self._staging)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Write this rank's shards, and return a future of (result, checksum) of each of them."""
        # A shared file system may show rank 0's folder late.
        self._staging.mkdir(parents=True, exist_ok=True)
        written = super().write_data(plan, planner)

        def with_checksums(done: Any) -> list[tuple[Any, int]]:
            return [(result, self._checksum(result.storage_data)) for result in done.value()]

        return written.then(with_checksums)

    def _checksum(self, info: _StorageInfo) -> int:
        """Return the checksum of a written item."""
        with (self._staging / info.relative_path).open("rb") as file:
            return opening.checksum(file, info)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete the directory on rank 0, and rename it to the checkpoint's path.

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
        with replacing(self._staging / REST) as file:
            file.write_bytes(self._rest)

        names = [location.partition("@")[0] for location in checksums]
        opening.check_files(self._staging, dict.fromkeys((REST, *names), -1))

        files = {file.name: file.stat().st_size for file in self._staging.iterdir()}
        for name in (REST, opening.METADATA):
            info = _StorageInfo(name, 0, files[name])
            checksums[opening.place_of(info)] = self._checksum(info)

        # The marker is written after all other files.
        content = {
            "to_read": TO_READ,
            "format": opening.FORMAT_VERSION,
            "files": files,
            "sums": checksums,
        }
        write_json(self._staging / COMPLETE, content)
        sync(self._staging)
        _put_in_place(self._staging, self._target)


def discard_unfinished() -> None:
    """Remove the unfinished checkpoints that this process is writing, unless rank 0 is still alive
    to do so.
    """
    for staging in list(_LOCKS):
        _unlock(staging)
        _delete_abandoned(staging.parent)


def _delete_abandoned(folder: Path) -> None:
    """Remove unfinished checkpoints in `folder` that no process has locked: their rank 0 is
    gone.
    """
    for staging in folder.glob(".alpa.*.saving"):
        if (staging / COMPLETE).exists():
            continue
        lock = _locked(staging)
        if lock is not None:
            # OSError: other ranks do the same.
            with suppress(OSError):
                _delete(staging)
            os.close(lock)


def _unlock(staging: Path) -> None:
    """Release the lock of a staging folder, if this process has it."""
    lock = _LOCKS.pop(staging, None)
    if lock is not None:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a file or folder, and return the descriptor that has the lock.

    None if another process has locked it, or if the file system has no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


# Names in a folder


def _check_replaceable(target: Path) -> None:
    """Check that no data is lost when `target` is replaced.

    Raises:
        CheckpointError: `target` is a directory with files that is no checkpoint.
    """
    if not target.is_dir() or target.is_symlink():
        return
    is_empty = next(target.iterdir(), None) is None
    if not is_empty and not (target / COMPLETE).exists():
        raise CheckpointError(
            f"{target} is a directory that is not a checkpoint; it will not be replaced by one",
            "give the checkpoint a name of its own",
        )


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename the complete `staging` to `target`, and delete a previous checkpoint there."""
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not _exchange(staging, target):
        # On a file system that cannot swap names, neither checkpoint is there for an instant:
        # `opening.restore_interrupted` repairs an interruption.
        old = opening.beside(target, "replaced")
        _delete(old)
        os.rename(target, old)
        os.rename(staging, target)
        _delete(old)
    sync(target.parent)
    _delete(staging)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one atomic step (Linux); return False if that is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    first_name = os.fsencode(first)
    second_name = os.fsencode(second)
    return rename(_AT_FDCWD, first_name, _AT_FDCWD, second_name, _RENAME_EXCHANGE) == 0


def _remove(path: Path) -> None:
    """Remove a checkpoint (a directory, file or link): its name in one step, then its content."""
    # A killed process may have left these.
    for purpose in ("saving", "replaced"):
        _delete(opening.beside(path, purpose))
    if os.path.lexists(path):
        trash = opening.beside(path, "removed")
        _delete(trash)
        os.rename(path, trash)
        _delete(trash)


def _delete(path: Path) -> None:
    """Remove the directory, file or link at `path`, if any."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
