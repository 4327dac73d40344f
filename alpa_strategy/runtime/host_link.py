"""Tensors in host memory while steps run: copies between one device and the host.

On a GPU each direction has a stream of its own, so that copies overlap with what the device
computes. Device memory belongs to the stream that computes: a copy starts when the work before it
is done, so that the memory of its destination is free by then, and a reader waits for its event.
Host tensors are pinned, by torch's allocator, which reuses a block only after the copies that use
it.

If host and device are the same memory (CPU), copies are made all the same, synchronously.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import Pending


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned if `tensor` is on a GPU. Waits for the copy."""
    return _host_like(tensor).copy_(tensor)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class HostLink:
    """Copies tensors between one device and host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._to_device_stream = torch.cuda.Stream(device) if is_cuda else None
        self._to_host_stream = torch.cuda.Stream(device) if is_cuda else None

        # Tensors whose copies into host memory are in flight, with the events of the copies' ends.
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def to_device(self, tensor: Tensor) -> Pending:
        """Start to copy a host tensor to the device, and return the pending copy. It must not
        change before `settle`.

        On a CPU the copy is made at once.
        """
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if self._to_device_stream is None or self._to_host_stream is None:
            copy.copy_(tensor)
            return Pending(lambda: copy, None)

        # The memory of `copy` belonged to work of the current stream until now.
        self._to_device_stream.wait_stream(torch.cuda.current_stream(self.device))

        # `tensor` itself may still be in flight to the host.
        self._to_device_stream.wait_stream(self._to_host_stream)
        with torch.cuda.stream(self._to_device_stream):
            copy.copy_(tensor, non_blocking=True)
            arrived = self._to_device_stream.record_event()
        return Pending(lambda: copy, arrived)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a device tensor into host memory. The result is valid after `settle`."""
        copy = _host_like(tensor)
        if self._to_host_stream is None:
            return copy.copy_(tensor)

        current = torch.cuda.current_stream(self.device)
        self._to_host_stream.wait_stream(current)
        with torch.cuda.stream(self._to_host_stream):
            copy.copy_(tensor, non_blocking=True)
            self._leaving.append((tensor, self._to_host_stream.record_event()))

        # A tensor is kept alive until it is copied. The current stream waits for the copy before
        # the last one, so that no more than two of these tensors are in device memory.
        while len(self._leaving) > 1:
            _, copied = self._leaving.popleft()
            current.wait_event(copied)
        return copy

    def settle(self) -> None:
        """Wait until all copies are made."""
        for stream in (self._to_device_stream, self._to_host_stream):
            if stream is not None:
                stream.synchronize()
        self._leaving.clear()


class StoredTensors:
    """Results of ops that are stored in host memory from the forward to the backward."""

    def __init__(self) -> None:
        self._link: HostLink | None = None
        self._last: weakref.ref[_Stored] | None = None

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy `tensor` into host memory.

        Returns:
            A function that returns it on the device again, to be called once. It also prefetches
            the tensor that was stored before: the backward needs that one next.
        """
        self._link = self._link or HostLink(tensor.device)
        stored = _Stored(self._link, self._link.to_host(tensor), self._last)
        self._last = weakref.ref(stored)
        return stored.take


@dataclass(eq=False)
class _Stored:
    """One tensor in host memory, prefetched once the backward has come near it."""

    # The link over which it was sent.
    link: HostLink

    # The copy in host memory.
    copy: Tensor

    # What was stored before it.
    previous: "weakref.ref[_Stored] | None"

    # Its copy to the device, in flight.
    arriving: Pending | None = None

    def start(self) -> Pending:
        """Start to copy the tensor to the device, unless that is done already."""
        self.arriving = self.arriving or self.link.to_device(self.copy)
        return self.arriving

    def take(self) -> Tensor:
        """Return the tensor on the device, for the only time; start to fetch the one that is needed
        next.
        """
        arriving = self.start()
        self.arriving = None
        previous = None if self.previous is None else self.previous()
        if previous is not None:
            previous.start()
        return arriving.wait()
