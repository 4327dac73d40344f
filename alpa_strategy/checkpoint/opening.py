"""Reading a checkpoint, a directory of shards or an ordinary file: tensors come from disk when they are used."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from alpa_strategy.checkpoint.directory import load_directory, restore_interrupted
from alpa_strategy.checkpoint.restricted import reading
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import is_possible


def open_checkpoint(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A Lightning checkpoint whose tensors stay on disk until they are used.

    Tensors of a sharded checkpoint are `StoredTensor`s, those of an ordinary file are memory-mapped.

    Args:
        weights_only: as of `torch.load`, for everything but the tensors of a sharded checkpoint.

    Raises:
        CheckpointError: `path` is a directory that is no complete checkpoint, or cannot be read.
        FileNotFoundError: nothing is there.
    """
    place = Path(path).absolute()
    if not is_possible(place):
        raise CheckpointError(f"{place} is a name that no file can have", "give a checkpoint's path")
    restore_interrupted(place)
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if place.is_dir():
        place = place.resolve()  # behind a link that may be turned to another one (`save_last="link"`)
        return checked(load_directory(place, weights_only), place)
    if not place.is_file():
        raise CheckpointError(f"{place} is no ordinary file", "give a checkpoint's path")
    with reading(place):
        mapped = zipfile.is_zipfile(place)  # only the format of today's `torch.save` can be memory-mapped
        return checked(torch.load(place, map_location="cpu", weights_only=weights_only, mmap=mapped), place)


_PARTS: dict[str, type] = {
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
}


def checked(checkpoint: Any, path: Path) -> dict[str, Any]:
    """`checkpoint` if it has the parts of a Lightning checkpoint, each of its kind, else a CheckpointError."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} has no `state_dict`: it is no checkpoint of Lightning", "load another one")
    for name, kind in _PARTS.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            found = type(checkpoint[name]).__name__
            raise CheckpointError(f"the checkpoint {path} has a {found} as its {name!r}", "load another one")
    if not re.match(r"\d+\.\d+\.\d+", checkpoint.get("pytorch-lightning_version", "0.0.0")):
        raise CheckpointError(f"the checkpoint {path} does not say which Lightning wrote it", "load another one")
    return checkpoint
