"""Products of groups of rows with a matrix each (experts): what capture puts in place of `torch._grouped_mm`.

PyTorch's own has no shape function for anything but bfloat16 on GPUs, and cannot leave out groups: a device that holds
some of the experts multiplies the rows of these only (`groups_between`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("alpa::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x [s, k] up to offsets[0] times weight[0] [k, n], up to offsets[1] times weight[1], ... -> [s, n].

    offsets [e] ascend; rows past the last give zeros.
    """
    return _products(x, weight, _bounds(offsets))


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"grouped_mm takes [s, k] and [e, k, n], got {tuple(x.shape)} and {tuple(weight.shape)}")
    return x.new_empty(x.shape[0], weight.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, offsets = inputs
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offsets = ctx.saved_tensors
    return *_gradients(grad, x, weight, _bounds(offsets)), None


grouped_mm.register_autograd(_backward, setup_context=_save)


class _GroupsBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bounds)
        return _products(x, weight, bounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, bounds = ctx.saved_tensors
        return *_gradients(grad, x, weight, bounds), None


def groups_between(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """`grouped_mm` where weight[i] is for the rows from bounds[i] to bounds[i + 1]; all other rows give zeros."""
    return _GroupsBetween.apply(x, weight, bounds)


def replacement(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The arguments of `grouped_mm` for a call of PyTorch's own; None when it is another function or another form."""
    if function not in (torch._grouped_mm, F.grouped_mm):
        return None
    bound = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    x, weight = args[:2] if len(args) > 1 else (None, None)
    offsets = bound.get("offs")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or offsets is None:
        return None
    if x.dim() != 2 or weight.dim() != 3 or bound.get("bias") is not None or bound.get("out_dtype") is not None:
        return None
    return x, weight, offsets


def _bounds(offsets: Tensor) -> Tensor:
    return F.pad(offsets, (1, 0))


def _products(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    result = x.new_zeros(x.shape[0], weight.shape[2])
    ends = bounds.tolist()
    for group, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            torch.mm(x[start:end], weight[group], out=result[start:end])
    return result


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    ends = bounds.tolist()
    for group, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            torch.mm(grad[start:end], weight[group].T, out=grad_x[start:end])
            torch.mm(x[start:end].T, grad[start:end], out=grad_weight[group])
    return grad_x, grad_weight
