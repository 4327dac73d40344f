"""Checkpoint formats, and reading a checkpoint of any of them: tensors come from disk when they are used.

A format of sharded checkpoints is an object with the methods of `ShardedFormat` in a file beside this one, and its line
in `FORMATS`. Ordinary files are Lightning's own: whoever wants others gives the Trainer a `CheckpointIO`.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from alpa_strategy.checkpoint.directory import DirectoryFormat
from alpa_strategy.checkpoint.restricted import reading
from alpa_strategy.checkpoint.tensors import LocalShards
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import is_possible


class ShardedFormat(Protocol):
    """How a checkpoint that all ranks write lies on disk. Paths are absolute, of a local or mounted file system."""

    def is_one(self, path: Path) -> bool:
        """Whether a complete checkpoint of this format is at `path`."""
        ...

    def load(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """The Lightning checkpoint at `path`, its tensors as `StoredTensor`s.

        Args:
            weights_only: as of `torch.load`, for everything but the tensors.

        Raises:
            CheckpointError: it is not complete, or cannot be read.
        """
        ...

    def save(
        self,
        path: Path,
        shards: Mapping[str, LocalShards],
        rest: bytes | Exception,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write a checkpoint's tensors and the rest of it. Collective over `group`.

        Every element of every tensor must be in the chunks of a rank, and may be in those of several.

        Args:
            shards: key -> what this rank writes of that tensor.
            rest: the other content (rank 0's counts), or why there is none.
            group: process group with a CPU backend; None: this process alone.

        Raises:
            CheckpointError: on every rank, when any rank could not write its part; `path` is as it was then.
        """
        ...

    def remove(self, path: Path) -> None:
        """Remove what is at `path`: at once under its name, then its content."""
        ...


FORMATS: dict[str, ShardedFormat] = {"sharded": DirectoryFormat()}  # by what `AlpaStrategy(checkpoint=...)` calls them


def is_checkpoint(path: str | Path) -> bool:
    """Whether a complete sharded checkpoint is at `path`."""
    return any(form.is_one(Path(path).absolute()) for form in FORMATS.values())


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
    form = next((form for form in FORMATS.values() if form.is_one(place)), None)
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if not place.is_dir() and not place.is_file():
        raise CheckpointError(f"{place} is no ordinary file", "give a checkpoint's path")
    if form is None and not place.is_dir():
        # Only the format of today's `torch.save` can be memory-mapped.
        with reading(place):
            mapped = zipfile.is_zipfile(place)
            return checked(torch.load(place, map_location="cpu", weights_only=weights_only, mmap=mapped), place)
    place = place.resolve()  # behind a link that may be turned to another one (`save_last="link"`)
    return checked((form or FORMATS["sharded"]).load(place, weights_only), place)


_PARTS: dict[str, type] = {
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
_PARTS |= {"epoch": int, "global_step": int, "pytorch-lightning_version": str}


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
