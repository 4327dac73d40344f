"""Lightning's own readers, which read sharded checkpoints as well.

`LightningModule.load_from_checkpoint(path)` of a sharded checkpoint has no hook in Lightning, nor
has a Trainer with another strategy. So the functions by which they open a checkpoint are wrapped,
once, when the strategy is imported.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.core import saving

from alpa_strategy.checkpoint.opening import (
    checked,
    is_checkpoint,
    local_file,
    open_checkpoint,
    reading,
)
from alpa_strategy.checkpoint.tensors import StoredTensor, map_tensors
from alpa_strategy.lightning.checkpoint_paths import find_last_at_urls
from alpa_strategy.urls import is_url, local_path


def register_directory_loading() -> None:
    """Wrap Lightning's readers, unless they are wrapped already: `load_from_checkpoint`'s, and
    other strategies'. `ckpt_path="last"` finds checkpoints at URLs then, too.
    """
    find_last_at_urls()
    readers: tuple[Any, ...] = (saving, torch_io)
    for owner in readers:
        if not hasattr(owner.pl_load, "__wrapped__"):
            owner.pl_load = _reader(owner.pl_load, for_module=owner is saving)


def _reader(read: Callable[..., Any], for_module: bool) -> Callable[..., Any]:
    """Return a function that does what `read` does, and reads this package's directories as well,
    with their tensors in memory.

    That function raises CheckpointError if a checkpoint is incomplete or cannot be read.

    Args:
        read: Lightning's reader of files.
        for_module: optimizers' state may stay on disk, and whatever is read must be a module's
            checkpoint.
    """

    @wraps(read)
    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path, str | Path):
            return read(path, map_location, weights_only)
        is_folder = for_module and not is_url(path) and local_path(path).is_dir()
        if not is_folder and not is_checkpoint(path):
            return _load_file(read, path, map_location, weights_only, for_module)
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        checkpoint = open_checkpoint(path, weights_only)
        entries = {
            key: value
            for key, value in checkpoint.items()
            if not for_module or key != "optimizer_states"
        }
        return {
            **checkpoint,
            **map_tensors(entries, StoredTensor, lambda stored: stored.full_tensor().to(device)),
        }

    return load


def _load_file(
    read: Callable[..., Any],
    path: str | Path,
    map_location: Any,
    weights_only: bool | None,
    for_module: bool,
) -> Any:
    """Return the content of an ordinary file; a node downloads one at a URL once.

    Args:
        read: Lightning's reader.
        map_location, weights_only: its arguments, as of `torch.load`.
        for_module: whether it is a module's checkpoint, whose tensors are then checked.

    Raises:
        CheckpointError: it cannot be read. Those of web servers, missing ones, and local ones of no
            module raise what `read` raises.
    """
    if is_url(path):
        if str(path).startswith("http"):
            return read(path, map_location, weights_only)
        with local_file(str(path)) as file, reading(str(path)):
            return read(file, map_location, weights_only)
    place = local_path(path)
    if not for_module or not place.exists():
        return read(path, map_location, weights_only)
    with reading(place):
        return checked(read(path, map_location, weights_only), place)
