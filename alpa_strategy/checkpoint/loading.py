"""Reading a checkpoint, sharded or an ordinary file, without holding it in memory: tensors come when they are used.

`open_checkpoint` gives the Lightning checkpoint with tensors that are read when used; `load_parameters` reads what this
rank holds of each parameter.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from alpa_strategy.checkpoint.directory import REST, DirectoryReader, check_complete, restore_interrupted
from alpa_strategy.checkpoint.tensors import Chunk, from_file, put_tensors, read_chunks
from alpa_strategy.errors import CheckpointError


class Holder(Protocol):
    """A ParameterStore: which parameters there are, and which chunks of them this rank holds."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The step's parameters."""
        ...

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The step's name of a parameter, None when the step does not use it."""
        ...

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        ...

    def chunks(self, name: str, tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of the whole that this process holds: (where it begins, a view of `tensor`) each."""
        ...


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
    restore_interrupted(place)
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if not place.is_dir():
        return _open_file(place, weights_only)
    place = place.resolve()  # behind a link that may be turned to another one (`save_last="link"`)
    check_complete(place)
    try:
        rest, places = from_file(place / REST, weights_only)
        tensors = DirectoryReader(place).tensors()
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}", "load another one") from error
    return put_tensors(rest, places, tensors)


def _open_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    # Only the format of today's `torch.save` can be memory-mapped.
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))


def load_parameters(state_dict: Mapping[str, Tensor], store: Holder) -> None:
    """Read this rank's part of the parameters that `state_dict` names into `store`. No communication.

    Args:
        state_dict: names among those of `store`'s parameters -> whole tensor, on disk
            (`open_checkpoint(path)["state_dict"]`) or in memory.
        store: holds the parameters, in shards.

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


def read_held(source: Tensor, name: str, held: Tensor, store: Holder) -> None:
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
