"""The communication layer: one process group per mesh axis, and the few collectives that everything else uses.

NCCL on GPUs, gloo on CPUs; no collective is written by hand. This is the only module that makes process groups.
"""

from __future__ import annotations

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
