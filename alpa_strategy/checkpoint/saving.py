"""Writing checkpoints: `CheckpointWriter`, the one that a job's sharded checkpoints go through, at
once or in the background; and `export_checkpoint`: one as an ordinary Lightning file, as a plain
Trainer on one device writes it.

A sharded checkpoint is a directory that all ranks write through `torch.distributed.checkpoint`
(DCP), beside its place
under a hidden name. It takes its place when everything is on disk: a reader sees the whole old
checkpoint or the whole new one. Nothing that lists a folder (`ckpt_path="last"`, SLURM's
`hpc_ckpt_*`) takes the hidden name for a checkpoint.
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
from alpa_strategy.files import is_possible, replacing, write_json


class CheckpointWriter:
    """Writes and removes sharded checkpoints, in the order in which it is asked to.

    Args:
        group: process group of the whole job with a CPU backend, used by nothing else; None for one
            process.
        is_rank_zero: whether this process removes checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None, is_rank_zero: bool) -> None:
        self._group, self._is_rank_zero = group, is_rank_zero
        self._background = Background("alpa-checkpoint")

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        in_background: bool = False,
        on_demand: LazyEntryGather | None = None,
    ) -> None:
        """Write `checkpoint` to `path` as a directory. Collective; all ranks write their
        `LocalShards` of what rank 0 has in it.

        Args:
            in_background: return when this rank's tensors are copied; waits for the save before
                this one.
            on_demand: gathers what hooks compute with; they are done.

        Raises:
            CheckpointError: on every rank; in the background, from the next call of a method.
        """
        self.wait()
        target = _local_path(path)
        if on_demand is not None:
            on_demand.finish()
        rest, places, shards = take_shards(checkpoint)
        content = to_bytes(rest, places) if self._is_rank_zero else b""
        if on_demand is not None:
            on_demand.finish()  # pickling a tuple, or an object of the user's, gathers its entries
            shards = _as_on_rank_zero(shards, on_demand, self._group)
        if not in_background:
            save_directory(target, shards, content, self._group)
            return
        copies = {key: _copied(held) for key, held in shards.items()}
        self._background.run(lambda: save_directory(target, copies, content, self._group))

    def save_file(
        self, checkpoint: Mapping[str, Any], path: str | Path, in_background: bool = False
    ) -> None:
        """Write `checkpoint`, whose tensors rank 0 has in full, to `path` as one ordinary file.
        Collective.

        Args, raises: as of `save`; in the background, `checkpoint` is copied before it returns.
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
        """Remove a checkpoint; after the save that is under way, and not if that fails (it may be
        the last one).
        """
        if not self._is_rank_zero:
            return
        target = _local_path(path)
        if self._background.is_busy:
            self._background.run(lambda: _remove(target))
        else:
            _remove(target)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when nothing is under way (or at the timeout); raise what failed."""
        self._background.wait(timeout_seconds)


def _local_path(path: str | Path) -> Path:
    """The path as an absolute one of a local (or mounted) file system; CheckpointError for URLs."""
    if "://" in str(path):
        raise CheckpointError(
            f"sharded checkpoints are written to local or mounted folders, not to {path}",
            'give a path, or use AlpaStrategy(checkpoint="single")',
        )
    return Path(path).absolute()


def _as_on_rank_zero(
    shards: Mapping[str, LocalShards], on_demand: LazyEntryGather, group: Any
) -> dict[str, LocalShards]:
    """What this rank writes of the tensors that rank 0 has in its checkpoint: hooks may leave out
    entries on one rank only. Collective.
    """
    own = {key: held.entry.number for key, held in shards.items() if held.entry is not None}
    of_rank_zero = all_gather_object(own, group)[0]
    return {key: on_demand.held(number) for key, number in of_rank_zero.items()}


def _copied(held: LocalShards) -> LocalShards:
    chunks = [
        Chunk(c.offsets, c.tensor.detach().to("cpu", copy=True).contiguous()) for c in held.chunks
    ]
    return LocalShards(held.shape, held.dtype, chunks)


def export_checkpoint(source: str | Path, target: str | Path, weights_only: bool = True) -> Path:
    """Write the checkpoint `source` (sharded, or ordinary already) as one ordinary file; needs no
    other process.

    Its `state_dict` is what the plain module loads, its optimizer state has PyTorch's usual layout.
    Tensors go through temporary files beside `target`, not through memory. The file appears under
    its name when it is complete.

    Args:
        weights_only: tensors and plain values only. False runs what is pickled in it (objects among
            hyper-parameters): for checkpoints of people you trust.

    Returns:
        The path written.

    Raises:
        CheckpointError: `source` is no complete checkpoint, or `target` is a directory or cannot be
            written.
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
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}", "give a path with enough space"
        ) from error
    return target


def _mapped_tensors(checkpoint: Any, folder: Path) -> Any:
    """The checkpoint with its stored tensors in memory-mapped files, whose memory is given back
    with the tensors.
    """
    whole: dict[str, Tensor] = {}

    def mapped(stored: StoredTensor) -> Tensor:
        if stored.key not in whole:
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # the mapping outlives the name
                flat = torch.from_file(
                    file.name, shared=True, size=stored.numel(), dtype=stored.dtype
                )
            tensor = whole[stored.key] = flat.view(stored.shape)
            stored.fill([Chunk((0,) * tensor.dim(), tensor)])
        return whole[stored.key]

    return map_tensors(checkpoint, StoredTensor, mapped)


def write_file(
    path: Path, write: Callable[[Path], None] | None, group: dist.ProcessGroup | None
) -> None:
    """Let rank 0 write one file, which appears under its name when it is complete. Collective.

    Args:
        path: absolute, of a local or mounted file system.
        write: writes the content to the path that it gets; None on all ranks but the first.

    Raises:
        CheckpointError: on every rank, when it could not be written; `path` is as it was then.
    """

    def write_in_place() -> None:
        if write is None:
            return
        try:
            _check_replaceable(path)
            _write_beside(path, write)
            _sync_folder(path.parent)
        except Exception as error:  # whatever pickle of the user's objects raises, too
            if isinstance(error, AlpaError):
                raise
            raise CheckpointError(
                f"the checkpoint {path} was not written: {type(error).__name__}: {error}",
                "the checkpoint of before, if any, is untouched; mend the cause and save again",
            ) from error

    on_all_ranks(write_in_place, lambda _: None, group)


# Writing a directory through DCP


def save_directory(
    path: Path,
    shards: Mapping[str, LocalShards],
    rest: bytes | Exception,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint's tensors and the rest of it. Collective over `group`.

    Every element of every tensor must be in the chunks of a rank, and may be in those of several.

    Args:
        path: absolute, of a local or mounted file system.
        shards: key -> what this rank writes of that tensor.
        rest: the other content (rank 0's counts), or why there is none.
        group: process group with a CPU backend; None: this process alone.

    Raises:
        CheckpointError: on every rank, when any rank could not write its part; `path` is as it was
            then.
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
            "the checkpoint of before, if any, is untouched; mend the cause and save again",
        ) from failure


def _write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """Write one file beside its place, and put it there when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_abandoned(path.parent)
    staging = opening.beside(path, "saving")
    _delete(staging)
    staging.touch()
    _LOCKS[staging] = _locked(staging)
    try:
        write(staging)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        if path.is_dir() and not path.is_symlink():
            _put_in_place(staging, path)  # a checkpoint in shards, whose name no file can take
        else:
            staging.replace(path)
    finally:
        _unlock(staging)
        _delete(staging)


class _Writer(dcp.FileSystemWriter):
    """Writes beside the checkpoint's place; rank 0 puts the whole of it in place after all ranks
    have written.

    Its steps run where DCP hands errors of one rank to all.
    """

    def __init__(self, target: Path, rest: bytes | Exception) -> None:
        # The same place on every rank, cleared by the next try.
        self._target, self._rest, self._staging = target, rest, opening.beside(target, "saving")
        # Its name may not be on disk before its content is.
        super().__init__(self._staging, sync_files=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Around writing. Where it fails, whoever comes here removes what nobody will complete any
        more.
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
        return written.then(
            lambda done: [(result, self._sum(result.storage_data)) for result in done.value()]
        )

    def _sum(self, info: _StorageInfo) -> int:
        with (self._staging / info.relative_path).open("rb") as file:
            return opening.checksum(file, info)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, [[result for result, _ in rank] for rank in results])
        assert isinstance(self._rest, bytes)
        with replacing(self._staging / REST) as file:  # on disk before its name is
            file.write_bytes(self._rest)
        sums = {
            opening.place_of(result.storage_data): crc for rank in results for result, crc in rank
        }
        # CheckpointError where a file that a rank has written is not here. The marker comes after
        # all files.
        opening.check_files(
            self._staging, dict.fromkeys((REST, *(place.partition("@")[0] for place in sums)), -1)
        )
        files = {file.name: file.stat().st_size for file in self._staging.iterdir()}
        for info in (_StorageInfo(name, 0, files[name]) for name in (REST, opening.METADATA)):
            sums[opening.place_of(info)] = self._sum(info)
        content = {
            "to_read": TO_READ,
            "format": opening.FORMAT_VERSION,
            "files": files,
            "sums": sums,
        }
        write_json(self._staging / COMPLETE, content)
        _sync_folder(self._staging)
        _put_in_place(self._staging, self._target)


TO_READ = "`import alpa_strategy` lets any Trainer and `load_from_checkpoint` read it; `alpa export` makes it one file"
_LOCKS: dict[Path, int | None] = {}  # what this process writes; rank 0: with the folder's lock
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def discard_unfinished() -> None:
    """Remove what this process is in the middle of writing, unless it is rank 0's business, which
    is still alive.
    """
    for staging in list(_LOCKS):
        _unlock(staging)
        _delete_abandoned(staging.parent)


def _delete_abandoned(folder: Path) -> None:
    """Remove partial checkpoints of jobs whose rank 0 is gone: nobody holds their locks any
    more.
    """
    for staging in folder.glob(".alpa.*.saving"):
        is_complete = (staging / COMPLETE).exists()
        if not is_complete and (lock := _locked(staging)) is not None:
            with suppress(OSError):  # other ranks do the same
                _delete(staging)
            os.close(lock)


def _unlock(staging: Path) -> None:
    lock = _LOCKS.pop(staging, None)
    if lock is not None:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor with the folder's lock, None where another process has it or the file system has
    no locks.
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
    """CheckpointError when something stands at `target` that is no checkpoint and would be lost."""
    if (
        target.is_dir()
        and not target.is_symlink()
        and any(target.iterdir())
        and not (target / COMPLETE).exists()
    ):
        raise CheckpointError(
            f"{target} is a directory that is not a checkpoint; it will not be replaced by one",
            "give the checkpoint a name of its own",
        )


def _put_in_place(staging: Path, target: Path) -> None:
    """Let the complete `staging` be `target`, in the place of what may be there. See
    `restore_interrupted`.
    """
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not _exchange(
        staging, target
    ):  # a file system without the exchange: for an instant neither is there
        old = opening.beside(target, "replaced")
        _delete(old)
        os.rename(target, old)
        os.rename(staging, target)
        _delete(old)
    _sync_folder(target.parent)
    _delete(staging)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux); False where it is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return (
        rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    )


def _remove(path: Path) -> None:
    """Remove a checkpoint (a directory, file or link): at once under its name, then its content."""
    for purpose in ("saving", "replaced"):  # what a killed process may have left of it
        _delete(opening.beside(path, purpose))
    if os.path.lexists(path):
        trash = opening.beside(path, "removed")
        _delete(trash)
        os.rename(path, trash)
        _delete(trash)


def _delete(path: Path) -> None:
    """Remove whatever stands at `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
