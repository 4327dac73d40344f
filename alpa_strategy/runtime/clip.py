"""Gradient clipping over shards: the norm is that of the whole gradient, every element counted once, and has the same
bits on every device (so that all clip alike). A Trainer's precision plugin clips so, and agrees on overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import world_size
from alpa_strategy.runtime.parameters import ParameterStore


def use_whole_norms(plugin: Any, store: ParameterStore, is_whole: Callable[[], bool]) -> AbstractContextManager[None]:
    """Context: `plugin` clips by the norm of all shards of `store`, and agrees on overflow where it scales.

    Any plugin does, the user's own too: only what it knows of norms and of overflow is replaced, on the object.

    Args:
        is_whole: whether gradients are whole at the moment, for a hook that sees them so.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = plugin.main_params(optimizer)
        if is_whole():
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            clip_by_norm(store, float(clip_val), parameters)

    patches: list[tuple[Any, str, Any]] = [(plugin, "clip_grad_by_norm", clip)]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and world_size() > 1:
        patches.append((scaler, "_unscale_grads_", partial(_unscale_and_agree, scaler._unscale_grads_)))
    return patched(patches)


def _unscale_and_agree(
    unscale: Callable[..., dict[torch.device, Tensor]],
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """A scaler's `unscale`, which skips a step when any rank's gradients overflow, so that all ranks keep one scale.

    torch's ShardedGradScaler does the same for gradients that every rank has; here a rank may have none.
    """
    found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
    overflow = torch.stack([flag.to(found_inf.device) for flag in (found_inf, *found.values())]).amax()
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return {overflow.device: overflow}


def clip_by_norm(store: ParameterStore, max_norm: float, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Scale gradients in place so that their norm, taken as one vector, is at most `max_norm` (as
    `torch.nn.utils.clip_grad_norm_`). Collective over the mesh.

    Args:
        parameters: whose gradients, the same on all devices (an optimizer's).

    Returns the norm before clipping.
    """
    given = tuple(parameters)
    counted = [p.grad.detach() for p in given if p.grad is not None and p.grad.numel() > 0 and store.counts_here(p)]
    precise = [(grad, torch.promote_types(grad.dtype, torch.float32)) for grad in counted]
    squares = [torch.linalg.vector_norm(grad, dtype=dtype).double().square() for grad, dtype in precise]
    device = store.device  # where collectives are; some gradients may lie in host memory
    own = torch.zeros((), dtype=torch.float64, device=device)
    if squares:
        own = torch.stack([square.to(device) for square in squares]).sum()
    norm = store.mesh.whole.all_reduce(own).sqrt()
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm
