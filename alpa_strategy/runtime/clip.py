"""Gradient clipping over shards: the norm is that of the whole gradient, every element counted once, and has the same
bits on every device (so that all clip alike)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.runtime.comm import all_reduce_over
from alpa_strategy.runtime.parameters import ParameterStore


def grad_norm(
    store: ParameterStore, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
) -> Tensor:
    """Norm of all gradients taken as one vector, a scalar. Collective over the mesh.

    Args:
        norm_type: p of the p-norm; `inf` for the largest magnitude.
        parameters: whose gradients, the same on all devices (an optimizer's); by default all of the store's.
    """
    given = tuple(store.parameters if parameters is None else parameters)
    device = given[0].device if given else torch.device("cpu")
    norms = [
        torch.linalg.vector_norm(parameter.grad.detach(), norm_type, dtype=_accumulation_dtype(parameter.grad))
        for parameter in given
        if parameter.grad is not None and parameter.grad.numel() > 0 and _counts_here(store, parameter)
    ]
    if math.isinf(norm_type):
        largest = torch.stack([norm.double() for norm in norms]).amax() if norms else torch.zeros((), device=device)
        return all_reduce_over(store.mesh, largest.double(), "max")
    powers = torch.stack([norm.double() for norm in norms]).pow(norm_type).sum() if norms else None
    total = torch.zeros((), dtype=torch.float64, device=device) if powers is None else powers
    return all_reduce_over(store.mesh, total).pow(1.0 / norm_type)


def clip_by_norm(
    store: ParameterStore,
    max_norm: float,
    norm_type: float = 2.0,
    parameters: Iterable[nn.Parameter] | None = None,
) -> Tensor:
    """Scale gradients in place so that their whole norm is at most `max_norm` (as `torch.nn.utils.clip_grad_norm_`).

    Returns the norm before clipping. Collective over the mesh.
    """
    given = tuple(store.parameters if parameters is None else parameters)
    norm = grad_norm(store, norm_type, given)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in given:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(scale.to(parameter.grad))
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value], in place. No communication."""
    nn.utils.clip_grad_value_(list(parameters), clip_value)


def _counts_here(store: ParameterStore, parameter: nn.Parameter) -> bool:
    """Of the devices that hold the same elements, the first one counts them."""
    layout = store.layout_of(parameter)
    return all(isinstance(p, Shard) or index == 0 for p, index in zip(layout, store.mesh.coordinate, strict=True))


def _accumulation_dtype(grad: Tensor) -> torch.dtype:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
