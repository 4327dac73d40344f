"""SyncBatchNorm on any device, in eager steps.

Captured steps need none of this: `capture/merge_ranks.py` writes such a norm over all samples.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from alpa_strategy.comm.mesh import AxisComm
from alpa_strategy.lower.local_ops import batch_norm_sync


def synced(
    module: nn.Module, all_norms: bool, ranks: Callable[[], AxisComm]
) -> list[tuple[Any, str, Callable[..., Tensor]]]:
    """Return replacements (for `patched`) of the forwards of batch norms that synchronize their
    training statistics over all ranks.

    The forwards of the classes are replaced, and the modules are not changed: copies of them,
    stored or averaged, run without communication.

    Args:
        module: whose batch norms are synchronized.
        all_norms: every BatchNorm, not SyncBatchNorms alone. Those that name a process group are
            left out.
        ranks: returns the ranks; called only if there is a batch norm to synchronize.
    """
    kind = _BatchNorm if all_norms else nn.SyncBatchNorm
    norms: set[nn.Module] = set()
    for submodule in module.modules():
        if isinstance(submodule, kind) and getattr(submodule, "process_group", None) is None:
            norms.add(submodule)
    if not norms:
        return []
    comm = ranks()

    def synced_forward(norm_class: type[_BatchNorm]) -> Callable[[Any, Tensor], Tensor]:
        local_forward = norm_class.forward

        def forward(norm: Any, x: Tensor) -> Tensor:
            is_synced = norm.training and norm in norms
            return _forward(norm, x, comm) if is_synced else local_forward(norm, x)

        return forward

    classes = (_BatchNorm, nn.SyncBatchNorm)
    return [(norm_class, "forward", synced_forward(norm_class)) for norm_class in classes]


def _forward(norm: Any, x: Tensor, ranks: AxisComm) -> Tensor:
    """Return the normalized `x`, with the statistics of all ranks, and update the running ones.

    Args:
        norm: the module, a `_BatchNorm`.
        x: [n, C, ...] on each rank; n may differ.
        ranks: over which statistics are summed.
    """
    norm._check_input_dim(x)
    momentum = norm.momentum
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            # The running statistics are the mean over all batches.
            momentum = 1.0 / float(norm.num_batches_tracked)

    tracked: list[Any] = [None, None]
    if norm.track_running_stats:
        tracked = [norm.running_mean, norm.running_var]
    mean, var = tracked
    y, *updated = batch_norm_sync(
        [ranks], x, norm.weight, norm.bias, mean, var, momentum or 0.0, norm.eps
    )
    with torch.no_grad():
        for old, new in zip(tracked, updated, strict=False):
            old.copy_(new)
    return y
