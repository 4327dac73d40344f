"""The communication layer: one process group per mesh axis, and the few collectives that everything else uses.

NCCL on GPUs, gloo on CPUs; no collective is written by hand. `torch_comm.py` implements these protocols and is the only
module that makes process groups; `tools/thread_mesh.py` implements them among threads, for tests and proofs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class AxisComm(Protocol):
    """Collectives among the devices that differ only in one mesh coordinate. None is differentiable; none mutates."""

    size: int
    index: int  # this device's coordinate on the axis

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Element-wise `sum` or `max` over the axis."""
        ...

    def all_gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """Concatenate the axis' chunks along `dim`; chunk i has `chunk_sizes(total, size)[i]` rows (uneven is fine)."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the axis, keep this device's chunk (`chunk_range(shape[dim], size, index)`) of `dim`."""
        ...

    def all_to_all(self, tensor: Tensor, gather_dim: int, gather_total: int, split_dim: int) -> Tensor:
        """Shard(gather_dim) -> Shard(split_dim): own chunk of `split_dim`, all of `gather_dim`."""
        ...


class MeshComm(Protocol):
    """A logical mesh at run time."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    axes: tuple[AxisComm, ...]


class Pending:
    """A collective that may still be running: `wait()` returns its result (and is cheap to call again)."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once it is there; the same one every time."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        assert self._result is not None
        return self._result


class AsyncAxisComm(AxisComm, Protocol):
    """An `AxisComm` that can also start a collective and go on."""

    def start_all_gather(self, tensor: Tensor, dim: int, total: int) -> Pending:
        """`all_gather`, without waiting."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Sum `tensor` over the axis **in place**, without waiting."""
        ...

    def start_reduce_scatter(self, rows: Tensor) -> Pending:
        """Sum over the axis `rows` [size, ...], this device keeps row `index`, without waiting."""
        ...


def start_all_gather(axis: AxisComm, tensor: Tensor, dim: int, total: int) -> Pending:
    """`AsyncAxisComm.start_all_gather`, at once where the axis cannot wait."""
    if hasattr(axis, "start_all_gather"):
        return axis.start_all_gather(tensor, dim, total)
    result = axis.all_gather(tensor, dim, total)
    return Pending(lambda: result)


def start_all_reduce(axis: AxisComm, tensor: Tensor) -> Pending:
    """`AsyncAxisComm.start_all_reduce`, at once where the axis cannot wait. `tensor` may be overwritten."""
    if hasattr(axis, "start_all_reduce"):
        return axis.start_all_reduce(tensor)
    result = axis.all_reduce(tensor)
    return Pending(lambda: result)


def start_reduce_scatter(axis: AxisComm, rows: Tensor) -> Pending:
    """`AsyncAxisComm.start_reduce_scatter`, at once where the axis cannot wait. rows [size, ...] -> [...]."""
    if hasattr(axis, "start_reduce_scatter"):
        return axis.start_reduce_scatter(rows)
    result = axis.reduce_scatter(rows, 0)
    return Pending(lambda: result[0])


def all_reduce_over(mesh: MeshComm, tensor: Tensor, op: str = "sum") -> Tensor:
    """`sum` or `max` over all devices of the mesh; the result has the same bits on each of them."""
    whole = getattr(mesh, "whole", None)
    for axis in mesh.axes if whole is None else (whole,):
        tensor = axis.all_reduce(tensor, op)
    return tensor
