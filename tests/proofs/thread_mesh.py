"""A logical mesh whose ranks are threads of one process: the collectives of `runtime.comm` without
process groups.

What proves rules, local ops and lowered programs in milliseconds. Not for speed: every exchange
copies.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import AxisComm, Pending
from alpa_strategy.ir.placement import chunk_range

T = TypeVar("T")


class _Exchange:
    """Lets the threads of one group see each other's tensor. One barrier a round: slots alternate,
    so that a slot is
    written again only when everybody has passed the round after the one that read it."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size = size
        self.slots: tuple[list, list] = ([None] * size, [None] * size)
        self.barrier = threading.Barrier(size, timeout=timeout_seconds)


@dataclass(eq=False)
class ThreadAxis(AxisComm):
    """`AxisComm` among threads. `record`: (kind, bytes of the full tensor on the axis) of every
    collective so far.
    """

    size: int
    index: int
    exchange: _Exchange
    record: list[tuple[str, int]] = field(default_factory=list)
    _round: int = 0

    def _share(self, tensor: Tensor) -> list[Tensor]:
        slots = self.exchange.slots[self._round % 2]
        self._round += 1
        slots[self.index] = (
            tensor.detach().clone()
        )  # a copy: the owner may change its tensor once the collective is over
        self.exchange.barrier.wait()
        return list(slots)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See `AxisComm`."""
        self.record.append(("all_reduce", tensor.nbytes))
        combine = {"sum": torch.add, "max": torch.maximum}[op]
        parts = self._share(tensor)
        return reduce(combine, parts[1:], parts[0].clone())

    def all_gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """See `AxisComm`."""
        gathered = torch.cat(self._share(tensor), dim)
        if gathered.shape[dim] != total:
            raise ValueError(
                f"all_gather of dim {dim}: the chunks hold {gathered.shape[dim]} rows, expected"
                f" {total}"
            )
        self.record.append(("all_gather", gathered.nbytes))
        return gathered

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See `AxisComm`."""
        self.record.append(("reduce_scatter", tensor.nbytes))
        parts = self._share(tensor)
        return self._own_chunk(reduce(torch.add, parts[1:], parts[0].clone()), dim)

    def all_to_all(
        self, tensor: Tensor, gather_dim: int, gather_total: int, split_dim: int
    ) -> Tensor:
        """See `AxisComm`."""
        gathered = torch.cat(self._share(tensor), gather_dim)
        if gathered.shape[gather_dim] != gather_total:
            raise ValueError(
                f"all_to_all: chunks hold {gathered.shape[gather_dim]} rows, expected"
                f" {gather_total}"
            )
        self.record.append(("all_to_all", gathered.nbytes))
        return self._own_chunk(gathered, split_dim)

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """See `AxisComm`."""
        self.record.append(("exchange", flat.nbytes))
        rows = [
            each.split(splits.tolist())[self.index]
            for each, splits in zip(self._share(flat), self._share(torch.tensor(sent)), strict=True)
        ]
        if [len(row) for row in rows] != list(received):
            raise ValueError(
                f"exchange: {[len(row) for row in rows]} elements came, expected {list(received)}"
            )
        return Pending(lambda: torch.cat(rows))

    def start_all_gather(self, tensor: Tensor, dim: int, total: int) -> Pending:
        result = self.all_gather(tensor, dim, total)
        return Pending(lambda: result)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        tensor.copy_(self.all_reduce(tensor))
        return Pending(lambda: tensor)

    def start_reduce_scatter(self, rows: Tensor) -> Pending:
        result = self.reduce_scatter(rows, 0)
        return Pending(lambda: result[0])

    def _own_chunk(self, tensor: Tensor, dim: int) -> Tensor:
        start, stop = chunk_range(tensor.shape[dim], self.size, self.index)
        return tensor.narrow(dim, start, stop - start).contiguous()


@dataclass(frozen=True)
class ThreadMesh:
    """`MeshComm` of one thread."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    axes: tuple[ThreadAxis, ...]
    all_devices: ThreadAxis
    is_in_order: bool = True


def run_on_threads(
    mesh_shape: Sequence[int], fn: Callable[[ThreadMesh], T], timeout_seconds: float = 60.0
) -> list[T]:
    """Run `fn(mesh)` once per rank of a logical mesh, each in its own thread; results in rank
    order.

    An exception on one rank ends all ranks and is raised here (the first cause, not the broken
    barriers that follow).
    """
    shape = tuple(mesh_shape)
    coordinates = list(itertools.product(*map(range, shape)))
    exchanges: dict[tuple[int, tuple[int, ...]], _Exchange] = {}

    def exchange(axis: int, coordinate: tuple[int, ...]) -> _Exchange:
        others = coordinate[:axis] + coordinate[axis + 1 :]
        return exchanges.setdefault((axis, others), _Exchange(shape[axis], timeout_seconds))

    of_all = exchanges[-1, ()] = _Exchange(len(coordinates), timeout_seconds)
    meshes = [
        ThreadMesh(
            shape,
            c,
            tuple(ThreadAxis(shape[a], c[a], exchange(a, c)) for a in range(len(shape))),
            ThreadAxis(len(coordinates), rank, of_all),
        )
        for rank, c in enumerate(coordinates)
    ]
    results: list[T | None] = [None] * math.prod(shape)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(meshes[rank])
        except BaseException as error:
            errors.append(error)
            for each in exchanges.values():
                each.barrier.abort()

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(meshes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds)
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a rank did not end within {timeout_seconds} s")
    return results  # type: ignore[return-value]
