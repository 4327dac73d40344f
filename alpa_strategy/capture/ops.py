"""Ops that capture puts in place of ATen ones, so that every loss and statistic splits exactly over devices.

A mean with `ignore_index` is a sum divided by a count: both are plain sums over rows, so they can be sharded without
ever taking a mean of means (docs/formulas.md#capture). BatchNorm returns its new statistics instead of mutating
buffers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Summed cross entropy; logits [N, C] or [N, C, d1, ...] or [C], target class indices or probabilities."""
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )


def nll_sum(log_probs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Summed negative log likelihood; log_probs [N, C, ...], target [N, ...]."""
    return F.nll_loss(log_probs, target, weight, ignore_index=ignore_index, reduction="sum")


def target_weight_sum(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What a mean cross entropy divides by: the count (or summed class weight) of targets that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)], 0.0).sum().to(dtype)


def bag_lookup(weight: Tensor, ids: Tensor, per_sample_weights: Tensor | None, mode: int, padding_idx: int) -> Tensor:
    """Sum (mode 0), mean (1) or maximum (2) of the rows that each bag names: weight [v, d], ids [n, k] -> [n, d].

    `padding_idx` (negative: none) is left out of its bag. Bags of one length are rows of a batch: they split.
    """
    return F.embedding_bag(
        ids,
        weight,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=per_sample_weights,
        padding_idx=padding_idx if padding_idx >= 0 else None,
    )


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Training BatchNorm without mutation: x [N, C, ...] -> (y, new_running_mean, new_running_var).

    Without running statistics the result is (y,).
    """
    if running_mean is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    mean, var = running_mean.clone(), running_var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return y, mean, var


def segmented_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear whose output comes in equal segments: x [*b, k], weight [s, n, k], bias [s, n] -> [*b, s, n].

    One matrix product, as `F.linear` with the weight [s * n, k]; the segments are views of its result.
    """
    flat_bias = None if bias is None else bias.flatten()
    return F.linear(x, weight.flatten(0, 1), flat_bias).unflatten(-1, weight.shape[:2])
