"""Gradient clipping over shards: the norm is that of the whole gradient, every element counted once, and has the same
bits on every device (so that all clip alike)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm, all_reduce_over


class Gradients(Protocol):
    """What the norm needs to know of a store (a `ParameterStore`)."""

    mesh: MeshComm

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those with gradients to look at."""
        ...

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this device's elements count in a sum over the mesh."""
        ...


def grad_norm(store: Gradients, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
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
        if parameter.grad is not None and parameter.grad.numel() > 0 and store.counts_here(parameter)
    ]
    if math.isinf(norm_type):
        largest = torch.stack([norm.double() for norm in norms]).amax() if norms else torch.zeros((), device=device)
        return all_reduce_over(store.mesh, largest.double(), "max")
    powers = torch.stack([norm.double() for norm in norms]).pow(norm_type).sum() if norms else None
    total = torch.zeros((), dtype=torch.float64, device=device) if powers is None else powers
    return all_reduce_over(store.mesh, total).pow(1.0 / norm_type)


def clip_by_norm(
    store: Gradients,
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


def _accumulation_dtype(grad: Tensor) -> torch.dtype:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
