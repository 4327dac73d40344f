"""An optimizer's step bucket by bucket: parameters whose gradients are complete are stepped while
the gradients of other buckets are still reduced.

The user sees one step: when it ends, the gradients that it used are back, and its hooks and
schedulers have been called once.
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
    """Steps some parameters of an optimizer before the others, between a backward and the
    optimizer's own step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

        # Parameters that are stepped already, with the gradients that were used.
        self._stepped: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step `parameters`, and hide their gradients from the optimizer's own step."""
        selected = set(parameters)
        gradients: dict[nn.Parameter, Tensor] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients[parameter] = parameter.grad

        for parameter in gradients.keys() - selected:
            parameter.grad = None

        # The class's method: schedulers have wrapped the object's own to count its calls.
        type(self._optimizer).step(self._optimizer)

        for parameter, grad in gradients.items():
            if parameter in selected:
                parameter.grad = None
                self._stepped.append((parameter, grad))
            else:
                parameter.grad = grad

    def end(self) -> None:
        """Put all gradients back, after the optimizer's own step."""
        for parameter, grad in self._stepped:
            parameter.grad = grad
        self._stepped.clear()


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Return whether steps of some parameters each give the same result as one step of all.

    True for torch's own optimizers, whose state and counters are per parameter, as long as no hook
    of the step is registered and nothing but a scheduler has wrapped it.
    """
    is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim.")
    has_hooks = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_pre
        or _global_post
    )
    if not is_torch_optimizer or has_hooks:
        return False

    # Only schedulers may have wrapped the object's step.
    wrapped = vars(optimizer).get("step")
    return wrapped is None or hasattr(wrapped, "_wrapped_by_lr_sched")


@contextmanager
def fused(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Context in which torch's Adam, AdamW and SGD (no subclasses) step in fused kernels.

    Groups stay as they are if their user has chosen an implementation, if they are differentiable,
    or if a parameter is not of floating point. At the end, `fused` is None again in the others;
    their step counts stay in fp32 on the parameters' devices.
    """
    groups: list[tuple[Mapping[Any, Any], dict[str, Any]]] = []
    for optimizer in optimizers:
        if type(optimizer) not in (Adam, AdamW, SGD):
            continue
        for group in optimizer.param_groups:
            if _may_be_fused(group):
                groups.append((optimizer.state, group))

    for states, group in groups:
        group["fused"] = True
        for parameter in group["params"]:
            state = states.get(parameter, {})
            count = state.get("step")
            if isinstance(count, Tensor):
                # The kernel reads the step count on the parameter's device.
                state["step"] = count.to(parameter.device, torch.float32)
    try:
        yield
    finally:
        for _, group in groups:
            group["fused"] = None


def _may_be_fused(group: Mapping[str, Any]) -> bool:
    """Whether a group is not differentiable, the user left the implementation open, and the fused
    kernel has the dtypes.
    """
    is_chosen = group["fused"] is not None or group["foreach"] is not None
    if is_chosen or group["differentiable"]:
        return False
    return all(parameter.is_floating_point() for parameter in group["params"])
