"""Checkpoint formats, and reading a checkpoint of any of them: tensors come from disk when they are used.

A format of sharded checkpoints is an object with the methods of `ShardedFormat` in a file beside this one, and its line
in `FORMATS`. Ordinary files are Lightning's own: whoever wants others gives the Trainer a `CheckpointIO`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.checkpoint.directory import DirectoryFormat
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, read_chunks
from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.parameters import ParameterStore


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
    form = next((form for form in FORMATS.values() if form.is_one(place)), None)
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if form is None and not place.is_dir():
        # Only the format of today's `torch.save` can be memory-mapped.
        return torch.load(place, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(place))
    place = place.resolve()  # behind a link that may be turned to another one (`save_last="link"`)
    return (form or FORMATS["sharded"]).load(place, weights_only)


# Into a module, or into the parts of it that this rank holds


def load_parameters(state_dict: Mapping[str, Tensor], store: ParameterStore) -> None:
    """Read this rank's part of the parameters that `state_dict` names into `store`. No communication.

    Args:
        state_dict: names among those of `store`'s parameters -> whole tensor, on disk
            (`open_checkpoint(path)["state_dict"]`) or in memory.

    Raises:
        CheckpointError: a parameter has another shape there.
    """
    for parameter in store.parameters:
        name = store.name_of(parameter)
        assert name is not None
        if name in state_dict:
            read_held(state_dict[name], name, parameter.detach(), store)


def load_others(module: nn.Module, state_dict: Mapping[str, Tensor], apart: Collection[str], strict: bool) -> None:
    """`module.load_state_dict(state_dict, strict)`, without the parameters `apart`, whose values come another way.

    Raises:
        RuntimeError: as torch does, when `strict` and a name is missing or surplus.
    """
    if not apart:
        module.load_state_dict(state_dict, strict=strict)
        return
    others = {name: tensor for name, tensor in state_dict.items() if name not in apart}
    result = module.load_state_dict(others, strict=False)
    missing = [name for name in result.missing_keys if name not in state_dict]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\tMissing key(s) in state_dict: {missing}"
            f"\n\tUnexpected key(s) in state_dict: {result.unexpected_keys}"
        )


def read_held(source: Tensor, name: str, held: Tensor, store: ParameterStore) -> None:
    """Read into `held`, which lies as parameter `name` does here, its part of the whole tensor `source`.

    Raises:
        CheckpointError: the whole shapes differ.
    """
    if source.shape != store.whole_shape(name):
        raise CheckpointError(
            f"{name} has shape {list(source.shape)} in the checkpoint and {list(store.whole_shape(name))} here",
            "load a checkpoint of the same model",
        )
    read_chunks(source, [Chunk(offsets, view) for offsets, view in store.chunks(name, held)])
