"""Tensors in host memory while steps run: parameters, and results of ops that wait for their
backward.

On a GPU each direction has a stream of its own, beside what the device computes. Memory is that of
the stream that
computes: a copy begins when the work before it is done, so that its bytes are free by then, and who
reads it waits for its event. Host tensors are pinned, by the allocator of torch's, which does not
give a block away before the copies that use it are done. Elsewhere, where host and device are the
same memory, copies are made all the same, at once.

Each parameter comes to the device when it is used, and its gradient goes back. The next one is on
its way while one is
used: which that is, is what came after the same two the last time, in forward and backward.
Autograd is given a copy that is not kept for the backward (`comm/saved_tensor_hooks.py` has it
fetched again). Gradients do not pass through the parameter's own node, which would add them before
they have arrived.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import Pending
from alpa_strategy.comm.saved_tensor_hooks import active_regather

if TYPE_CHECKING:
    from alpa_strategy.runtime.sharded_parameter import ShardedParameter


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, there when this returns: pinned where `tensor` lies on a GPU."""
    return _host_like(tensor).copy_(tensor)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class HostLink:
    """The way between one device and host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._inward = torch.cuda.Stream(device) if is_cuda else None
        self._outward = torch.cuda.Stream(device) if is_cuda else None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def bring(self, tensor: Tensor) -> Pending:
        """Begin a copy of a host tensor, which must not change before `settle`."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        arrived: torch.cuda.Event | None = (
            None  # whose `wait` holds back the stream that is the current one then
        )
        if self._inward is None or self._outward is None:
            copy.copy_(tensor)
        else:
            self._inward.wait_stream(
                torch.cuda.current_stream(self.device)
            )  # whose memory it was until now
            self._inward.wait_stream(self._outward)  # it may be on its way there yet
            with torch.cuda.stream(self._inward):
                copy.copy_(tensor, non_blocking=True)
                arrived = self._inward.record_event()
        return Pending(lambda: copy, arrived)

    def send(self, tensor: Tensor) -> Tensor:
        """Begin a copy into host memory, which is there after `settle`."""
        copy = _host_like(tensor)
        if self._outward is None:
            return copy.copy_(tensor)
        current = torch.cuda.current_stream(self.device)
        self._outward.wait_stream(current)
        with torch.cuda.stream(self._outward):
            copy.copy_(tensor, non_blocking=True)
            self._leaving.append((tensor, self._outward.record_event()))
        # Kept until it has left; what computes waits for the one before it, so that no more than
        # two are there.
        while len(self._leaving) > 1:
            current.wait_event(self._leaving.popleft()[1])
        return copy

    def settle(self) -> None:
        """Wait until all copies have been made."""
        for stream in (self._inward, self._outward):
            if stream is not None:
                stream.synchronize()
        self._leaving.clear()


class StoredTensors:
    """Tensors of a forward that wait in host memory for its backward."""

    def __init__(self) -> None:
        self._link: HostLink | None = None
        self._last: weakref.ref[_Stored] | None = None

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send it; gives what brings it back once, and starts to bring the one that was sent before
        it.
        """
        self._link = self._link or HostLink(tensor.device)
        stored = _Stored(self._link, self._link.send(tensor), self._last)
        self._last = weakref.ref(stored)
        return stored.take


@dataclass(eq=False)
class _Stored:
    """A copy in host memory, on its way back where the backward has come near it."""

    link: HostLink
    copy: Tensor
    before: "weakref.ref[_Stored] | None"
    coming: Pending | None = None

    def start(self) -> Pending:
        self.coming = self.coming or self.link.bring(self.copy)
        return self.coming

    def take(self) -> Tensor:
        arriving, self.coming = self.start(), None
        if self.before is not None and (before := self.before()) is not None:
            before.start()
        return arriving.wait()


class HostParameters:
    """Those of one mesh that use one link.

    Args:
        look: is shown a parameter's name, and the parameter with the gradient that this rank has
            made.
    """

    def __init__(self, device: torch.device, look: Callable[[str, Tensor], None] | None) -> None:
        self.link, self._look = HostLink(device), look
        self._next: dict[tuple[ShardedParameter | None, ShardedParameter], ShardedParameter] = {}
        self._last: tuple[ShardedParameter | None, ShardedParameter | None] = (None, None)
        self._coming: dict[ShardedParameter, Pending] = {}
        self._returning: dict[nn.Parameter, tuple[str, Tensor]] = {}

    def bring(self, sharded: "ShardedParameter") -> Tensor:
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

    def fetch(self, sharded: "ShardedParameter") -> Tensor:
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

    def _take(self, sharded: "ShardedParameter", grad: Tensor) -> None:
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
    def forward(
        ctx: Any, parameter: Tensor, bring: Callable[[], Tensor], take: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.take, ctx.is_made_of_parameters = take, True
        return bring()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.take(grad)
        return None, None, None
