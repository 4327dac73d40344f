"""Means of logged values over the ranks (`self.log(..., sync_dist=True)`), weighted by samples.

Lightning averages two tensors over the ranks: the sum of value x batch size, and the sum of batch
sizes. The second is an integer, and its average is rounded down, under DDP too (Lightning #21859):
ranks with 1 and 2 samples that both log 0.25 get 0.375. Here the average of the batch sizes keeps
its fraction.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reduce_logged(
    trainer: Any,
    tensor: Tensor,
    group_size: int,
    reduce_op: Any,
    reduce: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """Return `reduce(tensor, reduce_op)`, exact if it is "mean" and `tensor` is the batch sizes of
    a logged mean.

    Args:
        trainer: whose logged results are looked at.
        group_size: number of ranks that `reduce` reduces over.
        reduce: collective over these ranks; may work in place.
    """
    dtype = _dtype_of_mean(trainer, tensor) if reduce_op == "mean" else None
    if dtype is None:
        return reduce(tensor, reduce_op)
    num_samples = reduce(tensor.clone(), "sum").item()
    return torch.tensor(num_samples / group_size, dtype=dtype, device=tensor.device)


def _dtype_of_mean(trainer: Any, tensor: Tensor) -> torch.dtype | None:
    """Dtype of the logged mean whose batch sizes `tensor` is; None if it is anything else."""
    if tensor.is_floating_point() or trainer is None:
        return None
    for item in (trainer._results or {}).values():
        is_mean = item.is_tensor and item.meta.is_mean_reduction
        if is_mean and item.cumulated_batch_size is tensor:
            return item.value.dtype
    return None
