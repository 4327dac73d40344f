"""Modules that do not fit into one device's memory, seen from outside; nothing here needs the recorder."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from alpa_strategy.errors import AlpaError


def is_on_meta(module: nn.Module | None) -> bool:
    """Whether a parameter or buffer of the module has no memory."""
    return module is not None and any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def move_real_tensors(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, without what is on the meta device."""
    if is_on_meta(module):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def skip_sanity_check(trainer: Any) -> None:
    """There are no parameters to check with before the first training batch brings the plan."""
    if trainer.num_sanity_val_steps and trainer.enable_validation:
        trainer.num_sanity_val_steps = 0
        rank_zero_info(
            "alpa: no sanity check before training: parameters are made in shards, by the plan that the first training "
            "batch brings"
        )


def stays_sharded(run: Any) -> bool:
    """Whether the module has to leave a training in shards, because it does not fit whole (with a word about it)."""
    against = run.room.for_release()
    if against is not None:
        rank_zero_info(
            f"alpa: the module stays in shards after training: {against}. This trainer saves and evaluates it as before"
        )
    return against is not None


def raise_still_sharded(module: nn.Module) -> NoReturn:
    """AlpaError: a second training of a module that did not fit whole after the first."""
    raise AlpaError(
        f"{type(module).__name__} is still in shards from the training before: it does not fit whole",
        "save a checkpoint, and train on with a new Trainer and `ckpt_path`",
    )
