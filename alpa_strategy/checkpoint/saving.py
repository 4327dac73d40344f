"""Writing checkpoints: `CheckpointWriter` writes those of a job, synchronously or in the
background; `export_checkpoint` converts one to an ordinary Lightning file, as a plain Trainer on
one device writes it.

A sharded checkpoint is a directory that all ranks write through `torch.distributed.checkpoint`
(DCP), first under a hidden name in the same folder. It gets its own name when everything is on
disk: a reader sees the complete old checkpoint or the complete new one. Code that lists a folder
(`ckpt_path="last"`, SLURM's `hpc_ckpt_*`) does not take the hidden name for a checkpoint.
"""

import io
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alpa_strategy import urls
from alpa_strategy.checkpoint import names, opening
from alpa_strategy.checkpoint.directory import save_directory
from alpa_strategy.checkpoint.on_demand import LazyEntryGather
from alpa_strategy.checkpoint.tensors import (
    Chunk,
    LocalShards,
    StoredTensor,
    map_tensors,
    take_shards,
    to_bytes,
)
from alpa_strategy.checkpoint.uploading import remove_at_url, upload_directory, upload_file
from alpa_strategy.comm.collectives import Background, all_gather_object, on_all_ranks
from alpa_strategy.errors import AlpaError, CheckpointError
from alpa_strategy.files import is_possible, replacing, sync

# Saves that are being uploaded at the same time: two have the content of one step, if
# `ModelCheckpoint` also saves the last one.
_MAX_UPLOADS = 2


class CheckpointWriter:
    """Writes and removes checkpoints, in the order of its calls.

    Args:
        group: process group of the whole job with a CPU backend, used by nothing else; None for one
            process.
        main_group: likewise, which the caller may use when no method is running.
        is_rank_zero: whether this process removes checkpoints.
        staging_root: local folder in which the files for URLs are written first; None: one below
            `TMPDIR`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        main_group: dist.ProcessGroup | None,
        is_rank_zero: bool,
        staging_root: Path | None = None,
    ) -> None:
        self._group = group
        self._main_group = main_group
        self._is_rank_zero = is_rank_zero
        self._staging_root = staging_root or Path(tempfile.gettempdir()) / "alpa-staging"
        self._background = Background("alpa-checkpoint")

        # Of the saves that are uploaded.
        self._uploads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._background.is_busy

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        in_background: bool = False,
        on_demand: LazyEntryGather | None = None,
    ) -> None:
        """Write `checkpoint` to `path` as a directory. Collective.

        Waits for the save before this one; if both are uploaded, for the one before that.

        Args:
            checkpoint: of this rank. Its `LocalShards` are written for the tensors that rank 0's
                checkpoint has, everything else by rank 0.
            path: of a local or mounted file system, or a URL.
            in_background: whether to return as soon as this rank's tensors are copied.
            on_demand: gathers the tensors that hooks compute with; all hooks have returned.

        Raises:
            CheckpointError: on every rank, if any rank fails; in the background, from the next call
                of a method.
        """
        self._wait_for_others(path, in_background)
        if on_demand is not None:
            on_demand.finish()
        rest, paths, shards = take_shards(checkpoint)
        content = to_bytes(rest, paths) if self._is_rank_zero else b""
        if on_demand is not None:
            # Pickling a tuple, or an object of the user's, may have gathered entries.
            on_demand.finish()
            shards = _as_on_rank_zero(shards, on_demand, self._main_group)
        if not in_background:
            self._write_directory(path, shards, content)
            return
        copies = {key: _copied(local_shards) for key, local_shards in shards.items()}
        self._run(path, lambda: self._write_directory(path, copies, content))

    def save_file(
        self, checkpoint: Mapping[str, Any], path: str | Path, in_background: bool = False
    ) -> None:
        """Write `checkpoint` to `path` as one ordinary file. Collective.

        Waits for the saves that `save` waits for.

        Args:
            checkpoint: that of rank 0, with full tensors, is written.
            path: of a local or mounted file system, or a URL.
            in_background: whether to return as soon as `checkpoint` is copied.

        Raises:
            CheckpointError: on every rank, if rank 0 fails; in the background, from the next call
                of a method. There, an error of pickling is raised at once, on rank 0 alone.
        """
        self._wait_for_others(path, in_background)

        def save(file: Any) -> None:
            torch.save(checkpoint, file)

        if not in_background:
            self._write_file(path, save if self._is_rank_zero else None)
            return
        content = io.BytesIO()
        if self._is_rank_zero:
            save(content)

        def write_content(file: Path) -> None:
            file.write_bytes(content.getbuffer())

        write = write_content if self._is_rank_zero else None
        self._run(path, lambda: self._write_file(path, write))

    def _wait_for_others(self, path: str | Path, in_background: bool) -> None:
        """Wait for earlier saves, as of `save`. Collective.

        Raises:
            CheckpointError: on all ranks, if one of them has failed.
        """
        if not in_background or not urls.is_url(path):
            self.wait()
            return
        self._uploads = [thread for thread in self._uploads if thread.is_alive()]
        # Each has a copy of the tensors.
        if len(self._uploads) >= _MAX_UPLOADS:
            self._uploads[0].join()
        if any(all_gather_object(self._background.has_failed, self._main_group)):
            self.wait()

    def _run(self, path: str | Path, job: Callable[[], None]) -> None:
        """Run a save in the background."""
        thread = self._background.run(job)
        if urls.is_url(path):
            self._uploads.append(thread)

    def _write_directory(
        self, path: str | Path, shards: Mapping[str, LocalShards], rest: bytes | Exception
    ) -> None:
        """Write a directory to a path or a URL. Collective."""
        if urls.is_url(path):
            upload_directory(str(path), shards, rest, self._group, self._staging_root)
        else:
            save_directory(urls.local_path(path).absolute(), shards, rest, self._group)

    def _write_file(self, path: str | Path, write: Callable[[Path], None] | None) -> None:
        """Write an ordinary file to a path or a URL. Collective."""
        if urls.is_url(path):
            upload_file(str(path), write, self._group, self._staging_root)
        else:
            write_file(urls.local_path(path).absolute(), write, self._group)

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, on rank 0.

        A save that is in flight is finished first. If it fails, nothing is removed: the checkpoint
        may be the last one. Done in the background then, and for a URL.
        """
        if not self._is_rank_zero:
            return
        if urls.is_url(path):
            # Removing takes requests over the network.
            self._background.run(lambda: remove_at_url(str(path)))
            return
        target = urls.local_path(path).absolute()
        if self._background.is_busy:
            self._background.run(lambda: names.remove(target))
        else:
            names.remove(target)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save that is in flight, at most until the timeout.

        Raises:
            CheckpointError: a save in the background has failed.
        """
        self._background.wait(timeout_seconds)


def _as_on_rank_zero(
    shards: Mapping[str, LocalShards], on_demand: LazyEntryGather, group: Any
) -> dict[str, LocalShards]:
    """Return the shards that this rank writes, of the tensors in rank 0's checkpoint. Collective.

    A hook may have removed entries on one rank only. Shards without an entry are left out.
    CheckpointError if one is of an earlier checkpoint.

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
    """Return a copy of the shards in host memory, without their entry."""
    chunks = []
    for chunk in local_shards.chunks:
        copy = chunk.tensor.detach().to("cpu", copy=True).contiguous()
        chunks.append(Chunk(chunk.offsets, copy))
    return LocalShards(local_shards.shape, local_shards.dtype, chunks)


def export_checkpoint(
    source: str | Path, target: str | Path, weights_only: bool = True
) -> Path | str:
    """Write the checkpoint `source` (sharded, or ordinary already) as one ordinary file. Needs no
    other process.

    The plain module loads its `state_dict`, and its optimizer state has PyTorch's usual layout.
    Tensors go through temporary files in the folder of `target`, not through memory. The file
    appears under its name when it is complete.

    Args:
        source: path or URL of a checkpoint.
        target: path or URL of the file. For a URL it is written in `TMPDIR` first.
        weights_only: whether to read tensors and plain values only. False runs pickled code (of
            objects among hyper-parameters): only for checkpoints of authors you trust.

    Returns:
        The absolute path of the file, or its URL.

    Raises:
        CheckpointError: `source` is no complete checkpoint, or `target` is a directory or cannot be
            written.
        FileNotFoundError: there is no `source`.
    """
    if not urls.is_url(target):
        return _export_to_path(source, urls.local_path(target).absolute(), weights_only)
    with tempfile.TemporaryDirectory() as folder:
        file = _export_to_path(source, Path(folder) / "exported.ckpt", weights_only)
        try:
            urls.replace(file, str(target))
        except OSError as error:
            raise CheckpointError(str(error), "give another URL") from error
    return str(target)


def _export_to_path(source: str | Path, target: Path, weights_only: bool) -> Path:
    """Write a checkpoint as an ordinary file to the absolute path `target`, and return that.

    Args:
        source: path or URL of the checkpoint.
        weights_only: as of `torch.load`.

    Raises:
        CheckpointError: the source cannot be read, or the target cannot be written.
        FileNotFoundError: there is no source.
    """
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

    The files have no names any more; their space is freed with the tensors. CheckpointError if a
    stored tensor is damaged.
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
            names.check_replaceable(path)
            names.write_beside(path, write)
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
