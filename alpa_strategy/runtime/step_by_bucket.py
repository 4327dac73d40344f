"""An optimizer's step in parts: what has its gradient is stepped while gradients of other buckets
are still summed.

What is seen is one step: the gradients that it used are back when it ends, its hooks and schedulers
are called once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_post
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_pre


class StepByBucket:
    """Steps some of an optimizer's parameters ahead of the others, between a backward and the
    optimizer's own step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """New values for `parameters` from their gradients, which the optimizer's own step does not
        see again.
        """
        wanted = set(parameters)
        every = {
            p: p.grad
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        for p in every.keys() - wanted:
            p.grad = None
        type(self._optimizer).step(
            self._optimizer
        )  # not the object's own: schedulers have wrapped that to count calls
        for p, grad in every.items():
            p.grad = None if p in wanted else grad
        self._stepped += [(p, grad) for p, grad in every.items() if p in wanted]

    def end(self) -> None:
        """The optimizer's own step is done: all gradients are seen again."""
        for p, grad in self._stepped:
            p.grad = grad
        self._stepped.clear()


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Whether steps of some parameters each are the same as one of all: state and counters of
    torch's own optimizers
    are each parameter's, and nobody listens to the step."""
    wrapped = vars(optimizer).get("step")
    listens = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_pre
        or _global_post
    )
    is_own = type(optimizer).__module__.startswith("torch.optim.") and not listens
    return is_own and (wrapped is None or hasattr(wrapped, "_wrapped_by_lr_sched"))


@contextmanager
def fused(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Context in which torch's optimizers make a step in one kernel, where their user left open how
    they make it.
    """
    known = [each for each in optimizers if type(each) in (Adam, AdamW, SGD)]
    groups = [
        (each.state, group) for each in known for group in each.param_groups if _is_open(group)
    ]
    for states, group in groups:
        group["fused"] = True
        for parameter in group["params"]:
            state = states.get(parameter, {})
            if isinstance(
                count := state.get("step"), Tensor
            ):  # the kernel reads it where the parameter lies
                state["step"] = count.to(parameter.device, torch.float32)
    try:
        yield
    finally:
        for _, group in groups:
            group["fused"] = None


def _is_open(group: Mapping[str, Any]) -> bool:
    is_said = group["fused"] is not None or group["foreach"] is not None or group["differentiable"]
    return not is_said and all(p.is_floating_point() for p in group["params"])
