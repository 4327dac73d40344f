"""Parameters in host memory: copied to the device when a step uses them.

The next parameter is prefetched while one is used. Which one that is follows from the step before:
the parameter that came after the same two, in forward and backward. Gradients go back to host
memory.

Autograd gets a copy that is not saved for the backward; `comm/saved_tensor_hooks.py` has it fetched
once more. Gradients do not pass through the parameter's own `AccumulateGrad` node, which would add
them before they have arrived in host memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.saved_tensor_hooks import active_regather
from alpa_strategy.runtime.host_link import HostLink
from alpa_strategy.runtime.sharded_parameter import ShardedParameter


class HostParameters:
    """Fetches the parameters of one mesh that are stored in host memory.

    Args:
        device: on which they are used.
        look: is called with a parameter's name, and with the parameter whose `grad` is the local
            gradient of one backward; None: nothing is called.
    """

    def __init__(self, device: torch.device, look: Callable[[str, Tensor], None] | None) -> None:
        self.link = HostLink(device)
        self._look = look

        # Two parameters in the order of their last uses -> the one that followed.
        self._next: dict[tuple[ShardedParameter | None, ShardedParameter], ShardedParameter] = {}

        # The last two parameters that were used.
        self._last: tuple[ShardedParameter | None, ShardedParameter | None] = (None, None)

        # Copies to the device in flight that no use has waited for.
        self._arriving: dict[ShardedParameter, Pending] = {}

        # Name and gradient of this backward, copied to host memory.
        self._gradients: dict[nn.Parameter, tuple[str, Tensor]] = {}

    def to_device(self, sharded: ShardedParameter) -> Tensor:
        """Return a copy of this rank's shard on the device, and prefetch the next parameter."""
        prefetched = self._arriving.pop(sharded, None)
        arriving = prefetched or self.link.to_device(sharded.parameter.detach())

        earlier, last = self._last
        if last is not None:
            self._next[earlier, last] = sharded
        self._last = (last, sharded)

        self._drop_arriving()
        following = self._next.get((last, sharded))
        if following is not None:
            self._arriving[following] = self.link.to_device(following.parameter.detach())
        return arriving.wait()

    def fetch(self, sharded: ShardedParameter) -> Tensor:
        """Return a copy of this rank's shard on the device, whose backward gives the gradient."""
        to_device = partial(self.to_device, sharded)
        copy = _Fetched.apply(sharded.parameter, to_device, partial(self._take, sharded))
        regather = active_regather()
        if regather is not None:
            regather.know(sharded.parameter.detach(), lambda: Pending(to_device), copy)
        return copy

    def finish(self) -> None:
        """End a backward: wait for all copies, and add the gradients to the parameters'.

        Afterwards parameters may change.
        """
        self._drop_arriving()
        self._last = (None, None)
        self._accumulate()

    def _take(self, sharded: ShardedParameter, grad: Tensor) -> None:
        """Start to copy a gradient of the backward into host memory.

        Args:
            sharded: its parameter.
            grad: this rank's shard of the gradient, on the device.
        """
        parameter = sharded.parameter
        if parameter in self._gradients:
            self._accumulate()
        self._gradients[parameter] = (sharded.name, self.link.to_host(grad))
        if self._look is not None:
            self._accumulate()

    def _accumulate(self) -> None:
        """Wait for the copied gradients, show each to `look`, and add them to `parameter.grad`."""
        self.link.settle()
        for parameter, (name, grad) in self._gradients.items():
            if self._look is not None:
                # `look` gets the gradient of this backward alone.
                earlier = parameter.grad
                parameter.grad = grad
                self._look(name, parameter)
                parameter.grad = earlier
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._gradients.clear()

    def _drop_arriving(self) -> None:
        """Wait for copies in flight, and free them."""
        for arriving in self._arriving.values():
            # Its memory is written to until then.
            arriving.wait()
        self._arriving.clear()


class _Fetched(torch.autograd.Function):
    """(parameter, function that returns the copy, function that takes the gradient) -> the copy.

    `is_made_of_parameters` lets the backward re-gather what is gathered of the copy.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, to_device: Callable[[], Tensor], take: Callable[[Tensor], None]
    ) -> Tensor:
        """Return the copy; `take` gets its gradient in the backward."""
        ctx.take = take
        ctx.is_made_of_parameters = True
        return to_device()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.take(grad)
        return None, None, None
