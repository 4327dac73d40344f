"""CheckpointWriter: the one that a job's sharded checkpoints go through, at once or in the background; and
`export_checkpoint`: a sharded checkpoint as an ordinary Lightning file, as a plain Trainer on one device writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alpa_strategy.checkpoint.directory import remove_checkpoint, save_directory, sync_folder
from alpa_strategy.checkpoint.opening import open_checkpoint
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor, map_tensors, take_shards, to_bytes
from alpa_strategy.comm.collectives import Background
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import is_possible, replacing


class CheckpointWriter:
    """Writes and removes sharded checkpoints, in the order in which it is asked to.

    Args:
        group: process group of the whole job with a CPU backend, used by nothing else; None for one process.
        is_rank_zero: whether this process removes checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None, is_rank_zero: bool) -> None:
        self._group, self._is_rank_zero = group, is_rank_zero
        self._background = Background("alpa-checkpoint")

    def save(self, checkpoint: Mapping[str, Any], path: str | Path, in_background: bool = False) -> None:
        """Write `checkpoint` to `path`. Collective; all ranks write their `LocalShards` in it.

        Args:
            in_background: return when this rank's tensors are copied; waits for the save before this one.

        Raises:
            CheckpointError: on every rank; in the background, from the next call of a method.
        """
        self.wait()
        target = local_path(path)
        rest, places, shards = take_shards(checkpoint)
        content = to_bytes(rest, places) if self._is_rank_zero else b""
        if not in_background:
            save_directory(target, shards, content, self._group)
            return
        copies = {key: _copied(held) for key, held in shards.items()}
        self._background.run(lambda: save_directory(target, copies, content, self._group))

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint; after the save that is under way, and not if that fails (it may be the last one)."""
        if not self._is_rank_zero:
            return
        target = local_path(path)
        if self._background.is_busy:
            self._background.run(lambda: remove_checkpoint(target))
        else:
            remove_checkpoint(target)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when nothing is under way (or at the timeout); raise what failed."""
        self._background.wait(timeout_seconds)


def local_path(path: str | Path) -> Path:
    """The path as an absolute one of a local (or mounted) file system; CheckpointError for URLs."""
    if "://" in str(path):
        raise CheckpointError(
            f"sharded checkpoints are written to local or mounted folders, not to {path}",
            'give a path, or use AlpaStrategy(checkpoint="single")',
        )
    return Path(path).absolute()


def _copied(held: LocalShards) -> LocalShards:
    chunks = [Chunk(c.offsets, c.tensor.detach().to("cpu", copy=True).contiguous()) for c in held.chunks]
    return LocalShards(held.shape, held.dtype, chunks)


def export_checkpoint(source: str | Path, target: str | Path, weights_only: bool = True) -> Path:
    """Write the checkpoint `source` (sharded, or ordinary already) as one ordinary file; needs no other process.

    Its `state_dict` is what the plain module loads, its optimizer state has PyTorch's usual layout. Tensors go through
    temporary files beside `target`, not through memory. The file appears under its name when it is complete.

    Args:
        weights_only: tensors and plain values only. False runs what is pickled in it (objects among hyper-parameters):
            for checkpoints of people you trust.

    Returns:
        The path written.

    Raises:
        CheckpointError: `source` is no complete checkpoint, or `target` is a directory or cannot be written.
    """
    target = Path(target).absolute()
    if not is_possible(target) or target.is_dir():
        raise CheckpointError(f"{target} is a directory, or has a name that no file can have", "give a file's name")
    checkpoint = open_checkpoint(source, weights_only)
    try:
        with replacing(target) as temporary:
            torch.save(_mapped_tensors(checkpoint, target.parent), temporary)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}", "give a path with enough space") from error
    return target


def _mapped_tensors(checkpoint: Any, folder: Path) -> Any:
    """The checkpoint with its stored tensors in memory-mapped files, whose memory is given back with the tensors."""
    whole: dict[str, Tensor] = {}

    def mapped(stored: StoredTensor) -> Tensor:
        if stored.key not in whole:
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # the mapping outlives the name
                flat = torch.from_file(file.name, shared=True, size=stored.numel(), dtype=stored.dtype)
            tensor = whole[stored.key] = flat.view(stored.shape)
            stored.fill([Chunk((0,) * tensor.dim(), tensor)])
        return whole[stored.key]

    return map_tensors(checkpoint, StoredTensor, mapped)
