"""The Trainer's precision plugin over shards: gradient norms and overflow are those of all ranks together.

Any plugin does, the user's own too: only what it knows of norms and of overflow is replaced, on the object.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.runtime.clip import clip_by_norm


def use_whole_norms(plugin: Any, run: Any) -> None:
    """Let `plugin` clip by the norm of all shards of `run` (a Run), and agree on overflow when it scales."""

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = plugin.main_params(optimizer)
        if run.whole.is_active:  # within a hook that sees whole gradients
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            clip_by_norm(run.store, float(clip_val), parameters=parameters)

    plugin.clip_grad_by_norm = clip
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and world_size() > 1:
        agree_on_overflow(scaler)


def agree_on_overflow(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler skip a step when any rank's gradients overflow, so that all ranks keep one scale.

    torch's ShardedGradScaler does the same for gradients that every rank has; here a rank may have none.
    """
    if "_unscale_grads_" in vars(scaler):  # done before: the plugin lives as long as its Trainer
        return
    unscale = scaler._unscale_grads_

    def unscale_and_agree(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
        overflow = torch.stack([flag.to(found_inf.device) for flag in (found_inf, *found.values())]).amax()
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return {overflow.device: overflow}

    scaler._unscale_grads_ = unscale_and_agree
