"""Copies between host memory and a device, beside what the device computes.

On a GPU each direction has a stream of its own. Memory is that of the stream that computes: a copy begins when the work
before it is done, so that its bytes are free by then, and who reads it waits for its event. Host tensors are pinned, by
the allocator of torch's, which does not give a block away before the copies that use it are done. Elsewhere, where host
and device are the same memory, copies are made all the same, at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """A tensor on the device, or on its way there; `done`: None where it has arrived."""

    tensor: Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The tensor, for work that is given to the current stream from now on."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.done)
        return self.tensor


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, there when this returns: pinned where `tensor` lies on a GPU."""
    copy = _host_like(tensor)
    return copy.copy_(tensor)


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

    def bring(self, tensor: Tensor) -> Arriving:
        """Begin a copy of a host tensor, which must not change before `settle`."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if self._inward is None or self._outward is None:
            return Arriving(copy.copy_(tensor))
        self._inward.wait_stream(torch.cuda.current_stream(self.device))  # whose memory it was until now
        self._inward.wait_stream(self._outward)  # it may be on its way there yet
        with torch.cuda.stream(self._inward):
            copy.copy_(tensor, non_blocking=True)
            return Arriving(copy, self._inward.record_event())

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
        # Kept until it has left; what computes waits for the one before it, so that no more than two are there.
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
        """Send it; gives what brings it back once, and starts to bring the one that was sent before it."""
        self._link = self._link or HostLink(tensor.device)
        stored = _Stored(self._link, self._link.send(tensor), self._last)
        self._last = weakref.ref(stored)
        return stored.take


@dataclass(eq=False)
class _Stored:
    """A copy in host memory, on its way back where the backward has come near it."""

    link: HostLink
    copy: Tensor
    before: weakref.ref[_Stored] | None
    coming: Arriving | None = None

    def start(self) -> Arriving:
        self.coming = self.coming or self.link.bring(self.copy)
        return self.coming

    def take(self) -> Tensor:
        arriving, self.coming = self.start(), None
        if self.before is not None and (before := self.before()) is not None:
            before.start()
        return arriving.wait()
