"""SyncBatchNorm on any device, in steps as written: captured ones have the whole batch's statistics
anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from alpa_strategy.comm.mesh import AxisComm
from alpa_strategy.lower.local_ops import batch_norm_sync


def synced(
    module: nn.Module, every: bool, ranks: Callable[[], AxisComm]
) -> list[tuple[Any, str, Callable[..., Tensor]]]:
    """For `patched`: the SyncBatchNorms of all ranks, or `every` BatchNorm, train with the
    statistics of all `ranks`.

    Forwards are classes', and modules stay as they are: copies of them, stored or averaged, know
    nothing of ranks.
    """
    kind = _BatchNorm if every else nn.SyncBatchNorm
    norms = {
        n
        for n in module.modules()
        if isinstance(n, kind) and getattr(n, "process_group", None) is None
    }
    comm = ranks() if norms else None

    def of(kind: type[_BatchNorm]) -> Callable[[Any, Tensor], Tensor]:
        own = kind.forward
        return lambda norm, x: (
            _forward(norm, x, comm) if comm and norm.training and norm in norms else own(norm, x)
        )

    return [(kind, "forward", of(kind)) for kind in (_BatchNorm, nn.SyncBatchNorm) if norms]


def _forward(norm: Any, x: Tensor, ranks: AxisComm) -> Tensor:
    """x: [n, C, ...] on each rank."""
    norm._check_input_dim(x)
    momentum = norm.momentum
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if momentum is None else momentum
    kept: list[Any] = (
        [norm.running_mean, norm.running_var] if norm.track_running_stats else [None, None]
    )
    y, *running = batch_norm_sync(
        [ranks], x, norm.weight, norm.bias, kept[0], kept[1], momentum or 0.0, norm.eps
    )
    with torch.no_grad():
        for old, new in zip(kept, running, strict=False):
            old.copy_(new)
    return y
