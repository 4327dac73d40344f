"""Parameters are updated within the backward, each as soon as its gradient is complete, and the gradient is freed.

Only for optimizers that work element by element, and where nothing has to look at all gradients together (clipping,
accumulation, hooks): `alpa_strategy.planner.early_step` knows that. The optimizer's own step after the backward
finds what is left: gradients that are reduced once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from alpa_strategy.options import waiting_limit


class StepInBackward:
    """Calls `optimizer.step()` for a bucket of complete gradients at a time; optimizers pass over those without one.

    Args:
        optimizer: the user's, over all parameters.
        bucket_bytes: gradients wait until they have so many bytes, or an eighth of all.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int) -> None:
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._limit = bucket_bytes
        self._trained: frozenset[nn.Parameter] = frozenset()
        self._waiting: dict[nn.Parameter, None] = {}
        self._num_bytes = 0
        self._stepped: set[nn.Parameter] = set()

    def watch(self, parameters: Iterable[nn.Parameter]) -> list[torch.utils.hooks.RemovableHandle]:
        """Update these from now on, whenever autograd has made their gradient; parameters that it does not train are
        left alone. Returns the hooks."""
        known = {p for group in self._optimizer.param_groups for p in group["params"]}
        watched = [parameter for parameter in parameters if parameter in known]
        self._limit = waiting_limit(sum(p.numel() * p.element_size() for p in watched), self._bucket_bytes)
        return [parameter.register_post_accumulate_grad_hook(self._add) for parameter in watched]

    def has_stepped(self, parameter: nn.Parameter) -> bool:
        """Whether this backward's gradient of `parameter` has been used."""
        return parameter in self._stepped

    def reset(self) -> None:
        """Before the next backward: forget this one."""
        self._waiting.clear()
        self._stepped.clear()
        self._num_bytes = 0

    def _add(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._waiting[parameter] = None
        self._num_bytes += parameter.grad.numel() * parameter.grad.element_size()
        if self._num_bytes >= self._limit:
            self.step()

    def step(self) -> None:
        """One step of the optimizer that sees the waiting gradients and no others. After the backward: for the rest."""
        if not self._waiting:
            return
        others = [
            (p, p.grad)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p not in self._waiting
        ]
        for parameter, _ in others:
            parameter.grad = None
        with torch.no_grad():
            self._optimizer.step()
        for parameter in self._waiting:
            parameter.grad = None
        for parameter, grad in others:
            parameter.grad = grad
        self._stepped.update(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
