"""Parameters in host memory, while steps run: each comes to the device when it is used, and its gradient goes back.

The next one is on its way while one is used: which that is, is what came after the same two the last time, in forward
and backward. Autograd is given a copy that is not kept for the backward (`comm/regather.py` has it brought again).
Gradients do not pass through the parameter's own node, which would add them before they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.regather import active_regather
from alpa_strategy.runtime.host_link import Arriving, HostLink
from alpa_strategy.runtime.sharded_parameter import ShardedParameter


class HostParameters:
    """Those of one mesh that use one link.

    Args:
        look: is shown a parameter's name, and the parameter with the gradient that this rank has made.
    """

    def __init__(self, device: torch.device, look: Callable[[str, Tensor], None] | None) -> None:
        self.link, self._look = HostLink(device), look
        self._next: dict[tuple[ShardedParameter | None, ShardedParameter], ShardedParameter] = {}
        self._last: tuple[ShardedParameter | None, ShardedParameter | None] = (None, None)
        self._coming: dict[ShardedParameter, Arriving] = {}
        self._returning: dict[nn.Parameter, tuple[str, Tensor]] = {}

    def bring(self, sharded: ShardedParameter) -> Tensor:
        """A copy of this device's part, on the device."""
        arriving = self._coming.pop(sharded, None) or self.link.bring(sharded.parameter.detach())
        earlier, last = self._last
        if last is not None:
            self._next[earlier, last] = sharded
        self._last = last, sharded
        self._forget_coming()
        following = self._next.get((last, sharded))
        if following is not None:
            self._coming[following] = self.link.bring(following.parameter.detach())
        return arriving.wait()

    def fetch(self, sharded: ShardedParameter) -> Tensor:
        """A copy of this device's part, for autograd too."""
        bring = partial(self.bring, sharded)
        copy = _Fetched.apply(sharded.parameter, bring, partial(self._take, sharded))
        regather = active_regather()
        if regather is not None:
            regather.know(sharded.parameter.detach(), lambda: Pending(bring), copy)
        return copy

    def finish(self) -> None:
        """After a backward: parameters have their gradients, and may change."""
        self._forget_coming()
        self._last = (None, None)
        self._arrive()

    def _take(self, sharded: ShardedParameter, grad: Tensor) -> None:
        """A gradient that the backward has made."""
        parameter = sharded.parameter
        if parameter in self._returning:
            self._arrive()
        self._returning[parameter] = sharded.name, self.link.send(grad)
        if self._look is not None:
            self._arrive()

    def _arrive(self) -> None:
        self.link.settle()
        for parameter, (name, grad) in self._returning.items():
            if self._look is not None:  # is to see this backward's alone
                before, parameter.grad = parameter.grad, grad
                self._look(name, parameter)
                parameter.grad = before
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._returning.clear()

    def _forget_coming(self) -> None:
        for arriving in self._coming.values():
            arriving.wait()  # its memory is written to until then
        self._coming.clear()


class _Fetched(torch.autograd.Function):
    """parameter, how it is brought, what takes its gradient -> the copy.

    `is_made_of_parameters`: what is gathered of it is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, bring: Callable[[], Tensor], take: Callable[[Tensor], None]) -> Tensor:
        ctx.take, ctx.is_made_of_parameters = take, True
        return bring()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.take(grad)
        return None, None, None
