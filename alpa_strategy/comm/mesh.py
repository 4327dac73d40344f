"""Meshes of a running job: one process group per mesh axis, and the few collectives that everything
else uses.

NCCL on GPUs, gloo on CPUs; no collective is written by hand. The only module that makes process
groups. In the tests
`proofs/thread_mesh.py` stands for it among threads.

`new_group` is collective over the whole job: every rank makes every group of every mesh, in one
order, with ascending ranks, and keeps its own. Where a job is divided into replicas (`Replica`),
meshes are of one of them, which makes its groups without the others; its ranks are counted from 0
there.
"""

import copy
import importlib
import importlib.util
import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alpa_strategy.comm.collectives import lasting_group, rank_in, world_size
from alpa_strategy.comm.shared_memory import shared_memory_group
from alpa_strategy.errors import OptionError, RuntimeMismatchError, check_names
from alpa_strategy.ir.placement import chunk_sizes

POLL_SECONDS = 5e-5  # a core does nothing else in 1 of 20 of them


class Pending:
    """A collective that may still be running: `wait()` returns its result (and is cheap to call
    again).

    finish: makes the result, after `work`, the collective's handle, where there is one.
    is_polled: gloo's. Woken by its thread, this one was seen to be put on a core that computes, and
    to wait there for a
        time slice (4 ms); a timer of its own wakes it where it was (`scripts/bench_waits.py`).
    """

    def __init__(
        self, finish: Callable[[], Tensor], work: Any = None, is_polled: bool = False
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._work, self._is_polled = work, is_polled
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once it is there; the same one every time."""
        if self._finish is not None:
            if self._work is not None:
                # `is_completed` keeps the GIL while it waits for a lock, which gloo's thread, under
                # a profiler, holds until it has had the GIL (for saved_tensors_hooks).
                future = self._work.get_future() if self._is_polled else None
                while future is not None and not future.done():
                    time.sleep(POLL_SECONDS)
                self._work.wait()  # raises what went wrong
            self._result = self._finish()
            self._finish = self._work = None
        assert self._result is not None
        return self._result


class AxisComm:
    """Collectives among the devices that differ only in one mesh coordinate. None is
    differentiable.

    None but `start_all_reduce` writes into what it is given; what is begun by `start_*` is not
    waited for, and may come in another order among that of other axes; what is waited for takes
    shared memory where it can. Making one is collective over its devices.

    Args:
        size, index: of the axis, and this device's coordinate on it.
        group: process group of the axis, None for the default group (not used when `size` is 1).
        library: whose collectives these are (see `select_backend`).
    """

    def __init__(self, size: int, index: int, group: Any, library: Any) -> None:
        self.size = size
        self.index = index
        self.group = group
        self._library = library
        self._all_gather = _renamed(library, "all_gather_single", "all_gather_into_tensor")
        self._reduce_scatter = _renamed(library, "reduce_scatter_single", "reduce_scatter_tensor")
        self._is_gloo = self._is_polled = size > 1 and dist.get_backend(group) == "gloo"
        # The same axis through shared memory: for collectives that are waited for, and for sums
        # that are begun.
        self._shared: AxisComm | None = None
        self._shared_sums: AxisComm | None = None
        self._shared = self._in_shared_memory() if self._is_gloo else None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Element-wise `sum` or `max` over the axis; the result has the same bits on each of its
        devices.
        """
        if self.size == 1:
            return tensor
        if tensor.dtype == torch.bool:  # a sum of truth values is "any", as a max is
            return self.all_reduce(tensor.to(torch.uint8), "max").to(torch.bool)
        # A copy: the collective writes where it reads.
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._at_once(result)._start_all_reduce(result, op).wait()

    def all_gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """Concatenate the axis' chunks along `dim`; chunk i has `chunk_sizes(total, size)[i]` rows
        (uneven is fine).
        """
        return self.start_all_gather(tensor, dim, total, at_once=True).wait()

    def start_all_gather(
        self, tensor: Tensor, dim: int, total: int, at_once: bool = False
    ) -> Pending:
        """As `all_gather`. at_once: it is waited for now."""
        sizes = chunk_sizes(total, self.size)
        self._check_size(tensor, dim, sizes[self.index])
        if self.size == 1:
            return Pending(lambda: tensor)
        own = _padded(tensor.detach(), dim, sizes[0]).contiguous()
        gathered = own.new_empty((self.size, *own.shape))  # [devices, *chunk]
        way = self._at_once(own) if at_once else self
        work = way._all_gather(as_bytes(gathered), as_bytes(own), way.group, True)

        def finish() -> Tensor:
            if sizes[0] != sizes[-1]:
                return torch.cat(
                    [gathered[i].narrow(dim, 0, size) for i, size in enumerate(sizes)], dim
                )
            return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous()

        return Pending(finish, work, way._is_polled)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the axis, keep this device's chunk (`chunk_range(shape[dim], size, index)`) of
        `dim`.
        """
        return self.start_reduce_scatter_of(tensor, dim, at_once=True).wait()

    def start_reduce_scatter_of(self, tensor: Tensor, dim: int, at_once: bool = False) -> Pending:
        """As `reduce_scatter`. at_once: it is waited for now."""
        if self.size == 1:
            return Pending(lambda: tensor)
        tensor = tensor.detach()
        sizes = chunk_sizes(tensor.shape[dim], self.size)
        if dim == 0 and sizes[0] == sizes[-1]:  # the rows lie as they are sent
            rows = tensor.contiguous().unflatten(0, (self.size, sizes[0]))
        else:  # contiguous: a stack keeps the strides of its parts
            rows = torch.stack(
                [_padded(part, dim, sizes[0]) for part in tensor.split(sizes, dim)]
            ).contiguous()
        own = (self._at_once(rows) if at_once else self).start_reduce_scatter(rows)
        if sizes[self.index] == sizes[0]:
            return own
        return Pending(lambda: own.wait().narrow(dim, 0, sizes[self.index]).contiguous())

    def all_to_all(
        self, tensor: Tensor, gather_dim: int, gather_total: int, split_dim: int
    ) -> Tensor:
        """Shard(gather_dim) -> Shard(split_dim): own chunk of `split_dim`, all of `gather_dim`."""
        gather_sizes = chunk_sizes(gather_total, self.size)
        self._check_size(tensor, gather_dim, gather_sizes[self.index])
        if self.size == 1:
            return tensor
        tensor = tensor.detach()
        split_sizes = chunk_sizes(tensor.shape[split_dim], self.size)
        sent = [
            part.reshape(-1) for part in tensor.split(split_sizes, split_dim)
        ]  # flat: chunks may be uneven
        shapes = []
        for size in gather_sizes:
            shape = [*tensor.shape]
            shape[gather_dim], shape[split_dim] = size, split_sizes[self.index]
            shapes.append(shape)
        received, flat = [math.prod(shape) for shape in shapes], torch.cat(sent)
        if len({*gather_sizes}) == len({*split_sizes}) == 1:
            output = self._at_once(flat)._start_even_exchange(flat).wait()
        else:
            output = self.start_exchange(flat, [part.numel() for part in sent], received).wait()
        parts = [
            part.view(shape) for part, shape in zip(output.split(received), shapes, strict=True)
        ]
        return torch.cat(parts, gather_dim)

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Of `flat` [elements], the first `sent[0]` go to device 0, ...; what comes: `received[i]`
        of device i, ...
        """
        flat = flat.detach()
        if self.size == 1:
            return Pending(lambda: flat)
        output = flat.new_empty(sum(received))
        itemsize = flat.dtype.itemsize
        output_splits = [count * itemsize for count in received]
        input_splits = [count * itemsize for count in sent]
        work = self._library.all_to_all_single(
            as_bytes(output), as_bytes(flat), output_splits, input_splits, self.group, True
        )
        return Pending(lambda: output, work, self._is_polled)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Sum `tensor` (contiguous) over the axis in place."""
        if self.size == 1:
            return Pending(lambda: tensor)
        return self._for_sums(tensor)._start_all_reduce(tensor, "sum")

    def _start_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        work = self._library.all_reduce(
            tensor, getattr(self._library.ReduceOp, op.upper()), self.group, True
        )
        return Pending(lambda: tensor, work, self._is_polled)

    def start_reduce_scatter(self, rows: Tensor) -> Pending:
        """Sum `rows` [size, ...], contiguous, over the axis; this device keeps row `index`."""
        if self.size == 1:
            return Pending(lambda: rows[0])
        if self._is_gloo:
            # gloo does reduce_scatter as a whole all_reduce: all_to_all and a local sum move half
            # the bytes.
            coming = self._for_sums(rows)._start_even_exchange(rows)
            return Pending(lambda: coming.wait().sum(0, dtype=rows.dtype))
        own = torch.empty_like(rows[0])
        work = self._reduce_scatter(
            own.view(-1), rows.view(-1), self._library.ReduceOp.SUM, self.group, True
        )
        return Pending(lambda: own, work, self._is_polled)

    def _start_even_exchange(self, rows: Tensor) -> Pending:
        """Part i of `rows`, contiguous, goes to device i, parts being equal; what comes, of the
        same shape.
        """
        received = torch.empty_like(rows)
        work = self._library.all_to_all_single(
            as_bytes(received), as_bytes(rows), None, None, self.group, True
        )
        return Pending(lambda: received, work, self._is_polled)

    def _at_once(self, given: Tensor) -> "AxisComm":
        """What is quickest for a collective that is waited for now. given: what this device
        gives.
        """
        if self._shared is None or given.is_cuda:
            return self
        return self._shared

    def _for_sums(self, given: Tensor) -> "AxisComm":
        """What is quickest for sums that are begun. Collective at the first call."""
        if self._shared is None or given.is_cuda:
            return self
        if self._shared_sums is None:
            self._shared_sums = self._in_shared_memory() or self
        return self._shared_sums

    def _in_shared_memory(self) -> "AxisComm | None":
        """This axis with a group that is nobody else's, where it can have one. Collective."""
        shared = shared_memory_group(self.group, self.index, self.size)
        if shared is None:
            return None
        axis = copy.copy(self)
        axis.group, axis._is_polled, axis._shared = shared, False, None
        return axis

    def _check_size(self, tensor: Tensor, dim: int, expected: int) -> None:
        if tensor.shape[dim] != expected:
            raise RuntimeMismatchError(
                f"device {self.index} of an axis of {self.size} holds {tensor.shape[dim]} rows of"
                f" dim {dim}, "
                f"the plan says {expected}",
                "shapes at run time must be those that were planned; drop the odd last batch or"
                " plan for it",
            )


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """With zeros after its rows of `dim`, up to `size` of them: collectives want equal chunks."""
    if tensor.shape[dim] == size:
        return tensor
    return torch.nn.functional.pad(
        tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, size - tensor.shape[dim]]
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as flat bytes: what only moves data then works for every dtype (bool,
    bfloat16, ...).
    """
    return (
        tensor.resolve_conj().view(-1).view(torch.uint8)
    )  # a conjugate is a flag beside the bytes


def _renamed(library: Any, new: str, old: str) -> Callable[..., Any]:
    """A collective by its name in torch 2.13, or by the one of before, which warns there."""
    return getattr(library, new, None) or getattr(library, old)


@dataclass(frozen=True)
class MeshComm:
    """A logical mesh at run time, and this rank's place in it. `whole`: all its devices as one axis
    (row-major).
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    axes: tuple[AxisComm, ...]
    whole: AxisComm
    ranks: tuple[int, ...]  # of the job (of the replica), row-major

    @cached_property
    def is_in_order(self) -> bool:
        """Whether devices have their places in the order of ranks."""
        return self.ranks == tuple(sorted(self.ranks))

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """This rank's `rows`, the job's chunk of its number -> the chunk of its place; of equal
        size. Collective.
        """
        rank = self.ranks[self.whole.index]
        if self.is_in_order:
            return rows
        count = rows.numel()
        sent = [count * (place == rank) for place in range(len(self.ranks))]
        received = [count * (other == self.whole.index) for other in self.ranks]
        return self.whole.start_exchange(rows.reshape(-1), sent, received).wait().view(rows.shape)


@dataclass(frozen=True)
class Replica:
    """Neighbouring ranks that run one batch's steps together, as a job of their own: number `index`
    of `count`.
    """

    index: int
    count: int
    group: Any  # its ranks; None: all of the job's
    across: AxisComm  # this rank and those at its place in the other replicas, which hold the same


def divide(count: int) -> Replica:
    """This rank's replica of `count`, which divides the job's ranks. Collective over the job at the
    first call.
    """
    return _divide(dist.group.WORLD if dist.is_initialized() else None, count)


@lru_cache(maxsize=1)  # the process may have another job later
def _divide(world: Any, count: int) -> Replica:
    size = world_size() // count
    index, place = divmod(rank_in(world), size)
    own, same_place = range(index * size, (index + 1) * size), range(place, world_size(), size)
    group = None
    if count > 1:
        # With a device, NCCL's groups would be split from that of all ranks, which takes all of
        # them.
        world.bound_device_id = None
        group = lasting_group("replica", own, use_local_synchronization=True)
    across = _group_of(tuple(same_place), "across", local=True)
    return Replica(index, count, group, AxisComm(count, index, across, dist))


def build_mesh(
    shape: Sequence[int], backend: str = "auto", own_group: str = "", group: Any = None
) -> MeshComm:
    """The logical mesh of `shape` on all ranks (of `group`). Collective over them.

    Args:
        backend: `auto`, `torch` or `deepspeed` (see `select_backend`).
        own_group: for what use, where its collectives may come in any order among those of others.
    """
    (mesh,) = build_stage_meshes([(shape, range(world_size(group)))], backend, own_group, group)
    assert mesh is not None
    return mesh


def build_stage_meshes(
    meshes: Sequence[tuple[Sequence[int], Sequence[int]]],
    backend: str = "auto",
    own_groups: str = "",
    group: Any = None,
) -> list[MeshComm | None]:
    """Make the (shape, ranks) meshes of a pipeline's stages, in order; None for those that do not
    hold this rank.

    Collective over the whole job, or the replica of `group`: every rank passes the same list.
    Stages may share ranks.
    """
    chosen = select_backend(
        backend, "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    )
    wanted = [(tuple(shape), tuple(ranks)) for shape, ranks in meshes]
    made = {each: _build_one(*each, group, chosen, own_groups) for each in dict.fromkeys(wanted)}
    return [made[each] for each in wanted]


def message_groups(channels: Sequence[Sequence[int]], group: Any = None) -> list[tuple[Any, Any]]:
    """Process groups of messages forward and back, per channel (its ranks, ascending). Collective
    as meshes are.

    gloo keeps messages apart by their tags, so the default group (None) serves all. NCCL pairs
    messages by their order: each channel and direction needs a communicator of its own, in which
    the micro-batches come in one order.
    """
    if (
        not channels or dist.get_backend() == "gloo"
    ):  # no channels: perhaps one device, and no group at all
        return [(None, None)] * len(channels)
    made = [
        [_group_of(tuple(ranks), (i, way), group, True) for way in range(2)]
        for i, ranks in enumerate(channels)
    ]
    return [(forward, back) for forward, back in made]


def _build_one(
    shape: tuple[int, ...], ranks: tuple[int, ...], group: Any, library: Any, own_groups: str
) -> MeshComm | None:
    rank = rank_in(group)
    grid = np.array(ranks).reshape(shape)
    whole_group = _group_of(ranks, (own_groups, shape), group, bool(own_groups))
    axes: list[AxisComm] = []
    for axis, size in enumerate(shape):
        for line in np.moveaxis(grid, axis, -1).reshape(
            -1, size
        ):  # [lines, size]: the ranks of each group
            members = tuple(line.tolist())
            # Every rank makes every group: `new_group` waits for the whole job.
            of_line = whole_group if members == ranks else _group_of(members, (shape, axis), group)
            if rank in members:
                axes.append(AxisComm(size, members.index(rank), of_line, library))
    if rank not in ranks:
        return None
    coordinate = tuple(int(i) for i in np.unravel_index(ranks.index(rank), shape))
    whole = AxisComm(len(ranks), ranks.index(rank), whole_group, library)
    return MeshComm(shape, coordinate, tuple(axes), whole, ranks)


def _group_of(
    ranks: tuple[int, ...], use: Any, group: Any = None, is_own: bool = False, local: bool = False
) -> Any:
    """A process group of these ranks of `group`, which it is itself where it serves, or none is
    needed (one rank).

    Args:
        use: see `lasting_group`.
        local: made by its ranks alone, as those of a replica are.
    """
    ascending = ranks == tuple(sorted(ranks))
    if len(ranks) == 1 or (len(ranks) == world_size(group) and not is_own and ascending):
        return group
    if group is not None:
        ranks, local = tuple(dist.get_process_group_ranks(group)[rank] for rank in ranks), True
    if ascending:
        return lasting_group(use, ranks, use_local_synchronization=local)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise RuntimeMismatchError(
            f"the plan has devices in the order {list(ranks)}, for which this PyTorch"
            f" ({torch.__version__}) has no "
            "process groups",
            "write `order: numbered` into the cluster file, or take PyTorch 2.13",
        )
    # A place in the group is a place on the axis.
    return lasting_group(use, ranks, use_local_synchronization=local, sort_ranks=False)


BACKEND_NAMES = ("auto", "torch", "deepspeed")


def select_backend(name: str = "auto", device_type: str = "cpu") -> Any:
    """The module whose collectives are used: `torch.distributed`, or `deepspeed.comm`, which has
    the same functions.

    Args:
        name: `torch`, `deepspeed` (attaches to the process group there is), or `auto`: DeepSpeed on
            CUDA if installed.
    """
    check_names([name], BACKEND_NAMES, "there is no communication backend")
    installed = importlib.util.find_spec("deepspeed") is not None
    if name == "deepspeed" and not installed:
        raise OptionError(
            'backend="deepspeed": the package deepspeed is not installed',
            "pip install 'alpa-strategy[deepspeed]', or leave backend at \"auto\"",
        )
    is_deepspeed = name == "deepspeed"
    if name == "auto" and device_type == "cuda":
        is_deepspeed = installed
    if is_deepspeed and dist.is_initialized():
        return _deepspeed(device_type)
    return dist


def _deepspeed(device_type: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device_type == "cuda" else "cpu")
    import deepspeed.comm as ds

    ds_torch: Any = importlib.import_module(
        "deepspeed.comm.torch"
    )  # the attribute of that name is torch itself

    if not ds.is_initialized():
        build_shm_op = ds_torch.build_shm_op
        # DeepSpeed would compile a shared-memory op (half a minute) that none of the calls here
        # uses.
        ds_torch.build_shm_op = lambda: None
        try:
            ds.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            ds_torch.build_shm_op = build_shm_op
    return ds
