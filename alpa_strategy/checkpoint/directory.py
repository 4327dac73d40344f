"""A sharded checkpoint as a directory that all ranks write through `torch.distributed.checkpoint` (DCP).

It is written beside its place under a hidden name, and takes its place when everything is on disk: a reader sees the
whole old checkpoint or the whole new one. The hidden name holds no part of the checkpoint's own: nothing that lists a
folder (`ckpt_path="last"`, SLURM's `hpc_ckpt_*`) takes it for one.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from alpa_strategy.checkpoint.restricted import RestrictedReader, check_sum, checksum, is_plain, place_of, reading
from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor, from_file, put_tensors
from alpa_strategy.errors import AlpaError, CheckpointError
from alpa_strategy.files import read_json, replacing, write_json


def is_checkpoint(path: str | Path) -> bool:
    """Whether a complete sharded checkpoint is at `path`; finishes what `_put_in_place` left undone."""
    path = Path(path).absolute()
    restore_interrupted(path)
    return (path / COMPLETE).is_file()


def load_directory(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """The Lightning checkpoint in the directory `path`, its tensors as `StoredTensor`s.

    Args:
        weights_only: as of `torch.load`, for everything but the tensors.

    Raises:
        CheckpointError: it is not complete, or cannot be read.
    """
    sums = _check_complete(path)
    with reading(path):
        rest, places = from_file(path / REST, weights_only)
        return put_tensors(rest, places, _stored_tensors(path, sums))


def save_directory(
    path: Path, shards: Mapping[str, LocalShards], rest: bytes | Exception, group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint's tensors and the rest of it. Collective over `group`.

    Every element of every tensor must be in the chunks of a rank, and may be in those of several.

    Args:
        path: absolute, of a local or mounted file system.
        shards: key -> what this rank writes of that tensor.
        rest: the other content (rank 0's counts), or why there is none.
        group: process group with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, when any rank could not write its part; `path` is as it was then.
    """
    writer = _Writer(path, rest)
    try:
        with writer.lock(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(shards),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, AlpaError):
            raise CheckpointError(error.problem, error.fix) from failure
        raise CheckpointError(
            f"the checkpoint {path} was not written: rank {rank}: {type(error).__name__}: {error}",
            "the checkpoint of before, if any, is untouched; mend the cause and save again",
        ) from failure


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint (a directory, file or link): at once under its name, then its content."""
    for purpose in ("saving", "replaced"):  # what a killed process may have left of it
        _delete(_beside(path, purpose))
    if os.path.lexists(path):
        trash = _beside(path, "removed")
        _delete(trash)
        os.rename(path, trash)
        _delete(trash)


# Writing through DCP


class _Writer(dcp.FileSystemWriter):
    """Writes beside the checkpoint's place; rank 0 puts the whole of it in place after all ranks have written.

    Its steps run where DCP hands errors of one rank to all.
    """

    def __init__(self, target: Path, rest: bytes | Exception) -> None:
        # The same place on every rank, cleared by the next try.
        self._target, self._rest, self._staging = target, rest, _beside(target, "saving")
        # Its name may not be on disk before its content is.
        super().__init__(self._staging, sync_files=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Around writing. Where it fails, whoever comes here removes what nobody will complete any more."""
        _LOCKS[self._staging] = None
        try:
            yield
        except BaseException:
            discard_unfinished()
            raise
        finally:
            _unlock(self._staging)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if isinstance(self._rest, Exception):
            raise self._rest
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _check_replaceable(self._target)
        _delete_abandoned(self._target.parent)
        _delete(self._staging)
        self._staging.mkdir(parents=True)
        _LOCKS[self._staging] = _locked(self._staging)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        self._staging.mkdir(parents=True, exist_ok=True)  # a shared file system may show it late
        written = super().write_data(plan, planner)
        return written.then(lambda done: [(result, self._sum(result.storage_data)) for result in done.value()])

    def _sum(self, info: _StorageInfo) -> int:
        with (self._staging / info.relative_path).open("rb") as file:
            return checksum(file, info.offset, info.length)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, [[result for result, _ in rank] for rank in results])
        assert isinstance(self._rest, bytes)
        with replacing(self._staging / REST) as file:  # on disk before its name is
            file.write_bytes(self._rest)
        sums = {place_of(result.storage_data): crc for rank in results for result, crc in rank}
        _mark_complete(self._staging, {place.partition("@")[0] for place in sums} | {REST}, sums)
        _put_in_place(self._staging, self._target)


# Reading through DCP


def _stored_tensors(path: Path, sums: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Key -> tensor, of all that a complete checkpoint directory holds. Each process reads for itself."""
    reader = RestrictedReader(path, sums)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    stored = {k: t for k, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}

    def fill(key: str, shards: LocalShards) -> None:
        planner = DefaultLoadPlanner()
        planner.state_dict = {key: shards}
        items = create_read_items_for_chunk_list(key, stored[key], shards.__create_chunk_list__())
        with reading(path):
            reader.read_data(LoadPlan(items), planner).wait()

    return {key: StoredTensor(found.size, found.properties.dtype, key, fill) for key, found in stored.items()}


FORMAT_VERSION = 1  # of the marker
METADATA = ".metadata"  # of DCP
REST = "lightning.pt"  # everything but the tensors
COMPLETE = "complete.json"  # names and bytes of all other files; written last
TO_READ = "`import alpa_strategy` lets any Trainer and `load_from_checkpoint` read it; `alpa export` makes it one file"
_LOCKS: dict[Path, int | None] = {}  # what this process writes; rank 0: with the folder's lock
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _check_complete(path: Path) -> dict[str, int]:
    """CheckpointError unless the directory `path` holds a complete checkpoint of this format.

    Returns:
        The checksums of what its files hold, by `place_of`; none in checkpoints of before there were any.
    """
    try:
        marker = read_json(path / COMPLETE)
        files = {str(name): int(size) for name, size in marker["files"].items()}
        sums = {str(place): int(crc) for place, crc in marker.get("sums", {}).items()}
        version = marker["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a directory, but not a complete checkpoint ({COMPLETE}: {error})", "load another one"
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}", "use the version that wrote it"
        )
    _check_files(path, files)
    for name in (REST, METADATA) if sums else ():
        with reading(path), (path / name).open("rb") as file:
            check_sum(file, _StorageInfo(name, 0, files[name]), sums)
    return sums


def _mark_complete(path: Path, names: set[str], sums: dict[str, int]) -> None:
    """Write the marker after all files, which must be there.

    Raises:
        CheckpointError: a file that a rank has written is not here.
    """
    _check_files(path, dict.fromkeys(names, -1))
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    for name in (REST, METADATA):
        with (path / name).open("rb") as file:
            sums[place_of(_StorageInfo(name, 0, files[name]))] = checksum(file, 0, files[name])
    content = {"to_read": TO_READ, "format": FORMAT_VERSION, "files": files, "sums": sums}
    write_json(path / COMPLETE, content)
    sync_folder(path)


def _check_files(path: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        file = path / name
        if not is_plain(name) or not file.is_file():
            raise CheckpointError(
                f"{name} is missing in {path}", "write checkpoints to a folder that all nodes share, and copy all of it"
            )
        if size >= 0 and file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {size} were written", "copy it again")


def _check_replaceable(target: Path) -> None:
    """CheckpointError when something stands at `target` that is no checkpoint and would be lost."""
    if target.is_dir() and not target.is_symlink() and any(target.iterdir()) and not (target / COMPLETE).exists():
        raise CheckpointError(
            f"{target} is a directory that is not a checkpoint; it will not be replaced by one",
            "give the checkpoint a name of its own",
        )


def _put_in_place(staging: Path, target: Path) -> None:
    """Let the complete `staging` be `target`, in the place of what may be there."""
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not _exchange(staging, target):  # a file system without the exchange: for an instant neither is there
        old = _beside(target, "replaced")
        _delete(old)
        os.rename(target, old)
        os.rename(staging, target)
        _delete(old)
    sync_folder(target.parent)
    _delete(staging)


def restore_interrupted(target: Path) -> None:
    """Finish what `_put_in_place` left undone between its two renames (file systems without the exchange)."""
    if os.path.lexists(target):
        return
    for candidate in (_beside(target, "saving"), _beside(target, "replaced")):
        if (candidate / COMPLETE).is_file():
            with suppress(FileNotFoundError):  # another rank was quicker
                os.rename(candidate, target)
            return


def discard_unfinished() -> None:
    """Remove what this process is in the middle of writing, unless it is rank 0's business, which is still alive."""
    for staging in list(_LOCKS):
        _unlock(staging)
        _delete_abandoned(staging.parent)


def _delete_abandoned(folder: Path) -> None:
    """Remove partial checkpoints of jobs whose rank 0 is gone: nobody holds their locks any more."""
    for staging in folder.glob(".alpa.*.saving"):
        if staging.is_dir() and not (staging / COMPLETE).exists() and (lock := _locked(staging)) is not None:
            with suppress(OSError):  # other ranks do the same
                _delete(staging)
            os.close(lock)


def _unlock(staging: Path) -> None:
    lock = _LOCKS.pop(staging, None)
    if lock is not None:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor with the folder's lock, None where another process has it or the file system has no locks."""
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


def _delete(path: Path) -> None:
    """Remove whatever stands at `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(target: Path, purpose: str) -> Path:
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return target.parent / f".alpa.{digest}.{purpose}"


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux); False where it is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
