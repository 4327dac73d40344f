"""`LightningModule.load_from_checkpoint(path)` of a sharded checkpoint: Lightning itself opens files only.

Lightning has no hook there, so the function by which it opens a checkpoint is wrapped, once, when the strategy is
imported; anything but a complete sharded checkpoint goes on to Lightning's own.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor

from alpa_strategy.checkpoint.directory import is_checkpoint


def let_directories_load() -> None:
    """Wrap Lightning's reader, unless it is wrapped already."""
    own = saving.pl_load
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | Path) and is_checkpoint(path):
            return _read(path, *args, **kwargs)
        return own(path, *args, **kwargs)

    saving.pl_load = load


def _read(path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint with its tensors in memory; those of optimizers, which no module takes, stay on disk."""
    from alpa_strategy.checkpoint.loading import open_checkpoint
    from alpa_strategy.checkpoint.tensors import Chunk, StoredTensor
    from alpa_strategy.checkpoint.tree import map_tensors

    device = map_location if isinstance(map_location, str | torch.device) else "cpu"

    def read(stored: StoredTensor) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        stored.fill([Chunk((0,) * tensor.dim(), tensor)])
        return tensor.to(device)

    checkpoint = open_checkpoint(path, weights_only)
    kept = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
    return {**checkpoint, **map_tensors(kept, StoredTensor, read)}
