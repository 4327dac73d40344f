"""A sharded checkpoint as an ordinary Lightning file: what a plain Trainer on one device would have written."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.checkpoint.directory import sync_folder
from alpa_strategy.checkpoint.loading import open_checkpoint
from alpa_strategy.checkpoint.tensors import Chunk, StoredTensor
from alpa_strategy.checkpoint.tree import map_tensors
from alpa_strategy.errors import CheckpointError

_ALIGNMENT = 64  # bytes


def export_checkpoint(source: str | Path, target: str | Path) -> Path:
    """Write the checkpoint `source` (sharded, or ordinary already) as one ordinary file; needs no other process.

    Its `state_dict` is what the plain module loads, its optimizer state has PyTorch's usual layout. Tensors go through
    a temporary file beside `target`, not through memory. The file appears under its name when it is complete.

    Like every reader of an ordinary checkpoint with hyper-parameters, this runs what is pickled in it: export your own.

    Returns:
        The path written.

    Raises:
        CheckpointError: `source` is no complete checkpoint, or `target` is a directory or cannot be written.
    """
    target = Path(target).absolute()
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory", "give the name of a file")
    checkpoint = open_checkpoint(source, weights_only=False)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _mapped_tensors(checkpoint, target.parent) as whole, _replacing(target) as temporary:
            torch.save(whole, temporary)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}", "give a path with enough space") from error
    return target


@contextmanager
def _mapped_tensors(checkpoint: Any, folder: Path) -> Iterator[Any]:
    """The checkpoint with its stored tensors in a memory-mapped file that is gone afterwards."""
    stored: dict[str, StoredTensor] = {}
    map_tensors(checkpoint, StoredTensor, lambda tensor: stored.setdefault(tensor.key, tensor))
    starts: dict[str, int] = {}
    num_bytes = 0
    for key, tensor in stored.items():
        starts[key] = num_bytes
        num_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(max(num_bytes, 1))
        memory = mmap.mmap(file.fileno(), 0)
        whole = {key: _read(tensor, memory, starts[key]) for key, tensor in stored.items()}
        yield map_tensors(checkpoint, StoredTensor, lambda tensor: whole[tensor.key])


def _read(stored: StoredTensor, memory: mmap.mmap, start: int) -> Tensor:
    flat = torch.frombuffer(memory, dtype=stored.dtype, count=stored.numel(), offset=start)
    tensor = flat.view(stored.shape)
    stored.fill([Chunk((0,) * tensor.dim(), tensor)])
    return tensor


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place at the end."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".alpa.", suffix=".saving")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
