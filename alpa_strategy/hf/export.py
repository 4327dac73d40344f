"""`alpa export CKPT --hf DIR`: a Lightning checkpoint in the format of Hugging Face."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.checkpoint.opening import open_checkpoint
from alpa_strategy.checkpoint.tensors import StoredTensor
from alpa_strategy.errors import CheckpointError
from alpa_strategy.hf.description import ENTRY, rebuild
from alpa_strategy.hf.saving import MAX_SHARD_SIZE, Values, save_pretrained


def export_pretrained(
    source: str | Path,
    folder: str | Path,
    module: str | None = None,
    max_shard_size: str | int = MAX_SHARD_SIZE,
    weights_only: bool = True,
) -> Path | str:
    """Write the model of a checkpoint as its own `save_pretrained` does.

    One parameter at a time is in memory.

    Args:
        source: the checkpoint, a file or a directory.
        folder: to write to, or a URL.
        module: name of the submodule, if several are models of Hugging Face.
        max_shard_size: largest size of a file of weights.
        weights_only: as of `torch.load`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the checkpoint has no such model, or one of its weights is missing or has
            another shape, or a file cannot be written.
        FileNotFoundError: there is no `source`.
        SetupError: a library of Hugging Face is not installed.
    """
    checkpoint = open_checkpoint(source, weights_only)
    name, description = _described(checkpoint.get(ENTRY) or {}, source, module)
    model = rebuild(description)
    state = checkpoint["state_dict"]

    stored: dict[int, Tensor] = {}
    for own_name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        key = f"{name}.{own_name}"
        if key not in state:
            raise CheckpointError(f"{source} has no weights for {key}", "export another checkpoint")
        if state[key].shape != tensor.shape:
            raise CheckpointError(
                f"{key} has shape {list(state[key].shape)} in {source} and {list(tensor.shape)} in"
                " the model",
                "export another checkpoint",
            )
        stored[id(tensor)] = state[key]

    _use_dtypes_of(model, stored)

    def read(tensor: Tensor) -> Tensor:
        value = stored[id(tensor)]
        return value.full_tensor() if isinstance(value, StoredTensor) else value

    values = Values(lambda parameter: parameter.shape, read, nullcontext)
    return save_pretrained(model, folder, values, max_shard_size)


def _described(
    descriptions: Mapping[str, dict[str, Any]], source: str | Path, module: str | None
) -> tuple[str, dict[str, Any]]:
    """Return name and description of the model to export.

    Args:
        descriptions: of the checkpoint's models, by name.
        source: the checkpoint, for the message.
        module: name of the model; None: the only one.

    Raises:
        CheckpointError: there is none, none of this name, or more than one and no name.
    """
    if not descriptions:
        raise CheckpointError(
            f"{source} has no model of Hugging Face",
            "export a checkpoint that was saved with this strategy, of a module whose submodule is"
            " one; older ones: load them, and call the model's own save_pretrained",
        )
    if module is None and len(descriptions) == 1:
        return next(iter(descriptions.items()))
    if module is None or module not in descriptions:
        names = ", ".join(descriptions)
        raise CheckpointError(f"{source} has the models {names}", "give one of them: --module NAME")
    return module, descriptions[module]


@torch.no_grad()
def _use_dtypes_of(model: nn.Module, stored: Mapping[int, Tensor]) -> None:
    """Give the parameters and buffers of a model on the meta device the dtypes of the checkpoint.

    The Python objects stay the same.

    Args:
        model: a model on the meta device.
        stored: id of a parameter or buffer -> the checkpoint's tensor. Others keep their dtype.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        value = stored.get(id(tensor))
        if value is not None and value.dtype != tensor.dtype:
            tensor.data = torch.empty(tensor.shape, dtype=value.dtype, device="meta")
