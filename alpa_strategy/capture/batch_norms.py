"""The forward of BatchNorms in a step that is captured."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

_FORWARD = _BatchNorm.forward


def forward_patches() -> list[tuple[type, str, Any]]:
    """Return (owner, name, value) of the forwards, as `patched` takes them."""
    return [(kind, "forward", _forward) for kind in (_BatchNorm, nn.SyncBatchNorm)]


def _forward(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Return the result of the norm's forward, without collectives or reads of a tensor's value.

    Running statistics and their count change in place. In a captured step, statistics are those
    of all ranks without collectives of the user's.
    """
    is_cumulative = norm.training and norm.track_running_stats and norm.momentum is None
    if not is_cumulative or norm.num_batches_tracked is None:
        return _FORWARD(norm, x)

    # Torch reads the number of batches as a Python number.
    norm._check_input_dim(x)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean = torch.zeros_like(norm.running_mean)
    variance = torch.ones_like(norm.running_var)
    y = F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    share = norm.num_batches_tracked.to(torch.float64).reciprocal()
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.mul_(1 - share).add_(new * share)
    return y
