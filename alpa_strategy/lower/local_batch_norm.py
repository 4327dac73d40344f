"""BatchNorm over a batch that several devices share: one statistics exchange forward, one backward.

Means and variances of the parts are combined with Chan's formula (Chan, Golub, LeVeque 1979), which is stable and
right for parts of unequal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import AxisComm


class _BatchNormSync(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comms: Sequence[AxisComm]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        channels = x.shape[1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        count = x.numel() // max(channels, 1)
        if count:
            variance, mean = torch.var_mean(x.to(dtype), dims, correction=0)
        else:
            variance, mean = x.new_zeros(2, channels, dtype=dtype)
        part = torch.cat([mean, variance * count, mean.new_tensor([count])])
        for comm in comms:
            parts = comm.all_gather(part.unsqueeze(0), 0, comm.size)
            means, squares, counts = parts.split([channels, channels, 1], dim=1)
            total = counts.sum(0)
            mean = (means * counts).sum(0) / total.clamp(min=1.0)
            square = squares.sum(0) + ((means - mean).square() * counts).sum(0)
            part = torch.cat([mean, square, total])
        mean, square, total = part.split([channels, channels, 1])
        inverse_std = (square / total + eps).rsqrt()
        y = torch.batch_norm(x, weight, bias, mean, square / total, False, 0.0, eps, False)
        ctx.save_for_backward(x, weight, mean, inverse_std, total)
        ctx.comms, ctx.dims, ctx.bias_dtype = comms, dims, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, square, total)
        return y, mean, square, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any):
        x, weight, mean, inverse_std, total = ctx.saved_tensors
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        normal = (x.to(mean.dtype) - mean.view(shape)).mul_(inverse_std.view(shape))
        grad_y = grad_y.to(mean.dtype)
        sums = torch.stack([grad_y.sum(ctx.dims), (grad_y * normal).sum(ctx.dims)])
        grad_bias, grad_weight = sums.unbind()  # this device's summands: weight and bias are R* on the axes
        grad_x = None
        if ctx.needs_input_grad[0]:
            for comm in ctx.comms:
                sums = comm.all_reduce(sums)
            mean_grad, mean_grad_normal = (sums / total).unbind()
            scale = inverse_std if weight is None else inverse_std * weight
            grad_x = normal.mul_(-mean_grad_normal.view(shape)).sub_(mean_grad.view(shape)).add_(grad_y)
            grad_x = grad_x.mul_(scale.view(shape)).to(x.dtype)
        return (
            grad_x,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def batch_norm_sync(
    comms: Sequence[AxisComm],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """`capture.ops.batch_norm_train` on this device's part of the batch x [n, C, ...]; `comms`: the axes that share it.

    Returns (y, new_running_mean, new_running_var), or (y,) without running statistics.
    """
    y, mean, square, total = _BatchNormSync.apply(x, weight, bias, eps, tuple(comms))
    if running_mean is None or running_var is None:
        return (y,)
    unbiased = square / (total - 1.0)
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return y, new_mean, new_var
