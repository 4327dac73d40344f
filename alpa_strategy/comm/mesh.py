"""Meshes of a running job: one process group per mesh axis, and the collectives of all other code.

NCCL on GPUs, gloo on CPUs. In tests, `proofs/thread_mesh.py` replaces it among threads.

`new_group` is collective over all ranks of the job: every rank makes every group of every mesh, in
the same order, with ascending ranks. If the job is divided into replicas (`Replica`), a mesh is
that of one replica, which makes its groups without the others. Its ranks are counted from 0.
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

from alpa_strategy.comm.collectives import group_of_host, lasting_group, rank_in, world_size
from alpa_strategy.errors import OptionError, RuntimeMismatchError, check_names
from alpa_strategy.ir.placement import chunk_sizes

# Between polls of a collective, which then take 1/20 of a core.
POLL_SECONDS = 5e-5


class Pending:
    """A collective that may still be running; `wait` returns its result.

    Args:
        finish: computes the result when the collective has ended.
        work: the collective's handle; None: `finish` is all there is to do.
        is_polled: whether `work` is polled, as gloo's is. A thread that gloo wakes up may be
            scheduled on a core that computes, and wait there for a time slice (4 ms). A thread that
            sleeps and polls stays on its core (`scripts/bench_waits.py`).
    """

    def __init__(
        self, finish: Callable[[], Tensor], work: Any = None, is_polled: bool = False
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._work = work
        self._is_polled = is_polled
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the result and return it; the same object every time."""
        if self._finish is not None:
            if self._work is not None:
                # Not by `is_completed`: that keeps the GIL while it waits for a lock. Under a
                # profiler, gloo's thread holds this lock until it gets the GIL (for
                # saved_tensors_hooks).
                future = self._work.get_future() if self._is_polled else None
                while future is not None and not future.done():
                    time.sleep(POLL_SECONDS)
                # Raises the collective's error.
                self._work.wait()
            self._result = self._finish()
            self._finish = self._work = None
        assert self._result is not None
        return self._result


class AxisComm:
    """Collectives among the devices that differ in one mesh coordinate alone.

    They are not differentiable. Only `start_all_reduce` writes to its argument. Collectives of
    `start_*` are launched and not waited for; their order relative to those of other axes does not
    matter. The others use shared memory if possible. Making an object is collective over the axis.

    Args:
        size: devices on the axis.
        index: this device's coordinate on it.
        group: process group of the axis, None for the default group (not used if `size` is 1).
        library: module with the collectives (see `select_backend`).
        name: of the axis in traces.
    """

    def __init__(
        self, size: int, index: int, group: Any, library: Any, name: str = "all devices"
    ) -> None:
        self.name = name
        self.size = size
        self.index = index
        self.group = group
        self._library = library
        self._all_gather = _renamed(library, "all_gather_single", "all_gather_into_tensor")
        self._reduce_scatter = _renamed(library, "reduce_scatter_single", "reduce_scatter_tensor")
        self._is_gloo = self._is_polled = size > 1 and dist.get_backend(group) == "gloo"
        # The same axis through shared memory: for collectives that are waited for at once, and for
        # sums that are launched.
        self._shared: AxisComm | None = None
        self._shared_sums: AxisComm | None = None
        self._shared = self._in_shared_memory() if self._is_gloo else None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the `sum` or `max` over the axis (of booleans: whether any is True), the same bits
        everywhere; `tensor` on one device.
        """
        if self.size == 1:
            return tensor
        # A sum of booleans is "any", as a maximum is.
        if tensor.dtype == torch.bool:
            return self.all_reduce(tensor.to(torch.uint8), "max").to(torch.bool)
        # A copy: the collective writes where it reads.
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._at_once(result)._start_all_reduce(result, op).wait()

    def all_gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """Concatenate the chunks of the axis along `dim`.

        Chunk i has size `chunk_sizes(total, size)[i]` in `dim`.

        Raises:
            RuntimeMismatchError: this device's chunk has another size.
        """
        return self.start_all_gather(tensor, dim, total, at_once=True).wait()

    def start_all_gather(
        self, tensor: Tensor, dim: int, total: int, at_once: bool = False
    ) -> Pending:
        """Launch `all_gather` for a `Pending` joined tensor; RuntimeMismatchError at a wrong size.

        Args:
            dim: along which the chunks are joined.
            total: size of that dim in the result.
            at_once: the caller waits for it at once.
        """
        sizes = chunk_sizes(total, self.size)
        self._check_size(tensor, dim, sizes[self.index])
        if self.size == 1:
            return Pending(lambda: tensor)
        chunk = _padded(tensor.detach(), dim, sizes[0]).contiguous()
        # [devices, *chunk]
        gathered = chunk.new_empty((self.size, *chunk.shape))
        axis = self._at_once(chunk) if at_once else self
        work = axis._all_gather(as_bytes(gathered), as_bytes(chunk), axis.group, True)

        def finish() -> Tensor:
            if sizes[0] != sizes[-1]:
                chunks = [gathered[i].narrow(dim, 0, size) for i, size in enumerate(sizes)]
                return torch.cat(chunks, dim)
            return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous()

        return Pending(finish, work, axis._is_polled)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this device's chunk in `dim` of the sum over the axis.

        The chunk is `chunk_range(shape[dim], size, index)`.
        """
        return self.start_reduce_scatter_of(tensor, dim, at_once=True).wait()

    def start_reduce_scatter_of(self, tensor: Tensor, dim: int, at_once: bool = False) -> Pending:
        """Launch `reduce_scatter`; its `Pending` gives this device's chunk of the sum.

        Args:
            dim: along which the sum is split.
            at_once: the caller waits for it at once.
        """
        if self.size == 1:
            return Pending(lambda: tensor)
        tensor = tensor.detach()
        sizes = chunk_sizes(tensor.shape[dim], self.size)
        if dim == 0 and sizes[0] == sizes[-1]:
            # The chunks are in memory as they are sent.
            rows = tensor.contiguous().unflatten(0, (self.size, sizes[0]))
        else:
            chunks = [_padded(chunk, dim, sizes[0]) for chunk in tensor.split(sizes, dim)]
            # Contiguous, as a stack keeps the strides of its tensors.
            rows = torch.stack(chunks).contiguous()
        axis = self._at_once(rows) if at_once else self
        pending = axis.start_reduce_scatter(rows)
        if sizes[self.index] == sizes[0]:
            return pending
        return Pending(lambda: pending.wait().narrow(dim, 0, sizes[self.index]).contiguous())

    def all_to_all(
        self, tensor: Tensor, gather_dim: int, gather_total: int, split_dim: int
    ) -> Tensor:
        """Redistribute Shard(gather_dim) to Shard(split_dim).

        Args:
            gather_total: size of the full tensor in `gather_dim`.

        Raises:
            RuntimeMismatchError: this device's chunk of `gather_dim` has another size.
        """
        gather_sizes = chunk_sizes(gather_total, self.size)
        self._check_size(tensor, gather_dim, gather_sizes[self.index])
        if self.size == 1:
            return tensor
        tensor = tensor.detach()
        split_sizes = chunk_sizes(tensor.shape[split_dim], self.size)
        # Flat, as chunks may be uneven.
        sent = [chunk.reshape(-1) for chunk in tensor.split(split_sizes, split_dim)]
        flat = torch.cat(sent)
        shapes = []
        for size in gather_sizes:
            shape = [*tensor.shape]
            shape[gather_dim] = size
            shape[split_dim] = split_sizes[self.index]
            shapes.append(shape)
        num_received = [math.prod(shape) for shape in shapes]
        if len({*gather_sizes}) == len({*split_sizes}) == 1:
            output = self._at_once(flat)._start_even_exchange(flat).wait()
        else:
            num_sent = [chunk.numel() for chunk in sent]
            output = self.start_exchange(flat, num_sent, num_received).wait()
        received = []
        for chunk, shape in zip(output.split(num_received), shapes, strict=True):
            received.append(chunk.view(shape))
        return torch.cat(received, gather_dim)

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Launch an exchange of flat tensors; the result is what is received, flat.

        Args:
            flat: [elements], contiguous; the first `sent[0]` are sent to device 0, and so on.
            sent: number of elements for each device.
            received: number of elements from each device.
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
        """Launch the sum of `tensor` (contiguous) over the axis, in place."""
        if self.size == 1:
            return Pending(lambda: tensor)
        return self._for_sums(tensor)._start_all_reduce(tensor, "sum")

    def _start_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Launch an all-reduce of `tensor` in place."""
        work = self._library.all_reduce(
            tensor, getattr(self._library.ReduceOp, op.upper()), self.group, True
        )
        return Pending(lambda: tensor, work, self._is_polled)

    def start_reduce_scatter(self, rows: Tensor) -> Pending:
        """Launch the sum of `rows` [size, ...], contiguous, over the axis; the result is row
        `index`.
        """
        if self.size == 1:
            return Pending(lambda: rows[0])
        if self._is_gloo:
            # gloo does a full all-reduce: all-to-all and a local sum move half the bytes.
            coming = self._for_sums(rows)._start_even_exchange(rows)
            return Pending(lambda: coming.wait().sum(0, dtype=rows.dtype))
        row = torch.empty_like(rows[0])
        work = self._reduce_scatter(
            row.view(-1), rows.view(-1), self._library.ReduceOp.SUM, self.group, True
        )
        return Pending(lambda: row, work, self._is_polled)

    def _start_even_exchange(self, rows: Tensor) -> Pending:
        """Launch an exchange: chunk i of `rows` goes to device i, as chunk i comes from it."""
        received = torch.empty_like(rows)
        work = self._library.all_to_all_single(
            as_bytes(received), as_bytes(rows), None, None, self.group, True
        )
        return Pending(lambda: received, work, self._is_polled)

    def _at_once(self, tensor: Tensor) -> "AxisComm":
        """Return the fastest axis for a collective on `tensor` that is waited for at once."""
        if self._shared is None or tensor.is_cuda:
            return self
        return self._shared

    def _for_sums(self, tensor: Tensor) -> "AxisComm":
        """Return the fastest axis for sums that are launched. Collective at the first call."""
        if self._shared is None or tensor.is_cuda:
            return self
        if self._shared_sums is None:
            self._shared_sums = self._in_shared_memory() or self
        return self._shared_sums

    def _in_shared_memory(self) -> "AxisComm | None":
        """Return this axis with a shared-memory group that no other axis uses; None if there is
        none. Collective.
        """
        shared = group_of_host(self.group, self.index, self.size)
        if shared is None:
            return None
        axis = copy.copy(self)
        axis.group = shared
        axis._is_polled = False
        axis._shared = None
        return axis

    def _check_size(self, tensor: Tensor, dim: int, expected: int) -> None:
        """Check that dim `dim` of a local tensor has the planned size.

        Raises:
            RuntimeMismatchError: it has another.
        """
        if tensor.shape[dim] != expected:
            raise RuntimeMismatchError(
                f"device {self.index} of an axis of {self.size} holds {tensor.shape[dim]} rows of"
                f" dim {dim}, "
                f"the plan says {expected}",
                "shapes at run time must be those that were planned; drop the odd last batch or"
                " plan for it",
            )


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """`tensor` padded with zeros to `size` in `dim`: collectives require equal chunks."""
    if tensor.shape[dim] == size:
        return tensor
    return torch.nn.functional.pad(
        tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, size - tensor.shape[dim]]
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat bytes, which can be sent whatever its dtype is."""
    # A conjugate is a flag, not in the bytes.
    return tensor.resolve_conj().view(-1).view(torch.uint8)


def _renamed(library: Any, new: str, old: str) -> Callable[..., Any]:
    """Return a library's collective by its name in torch 2.13, `new`, or by the one before it."""
    return getattr(library, new, None) or getattr(library, old)


@dataclass(frozen=True)
class MeshComm:
    """A logical mesh at run time."""

    shape: tuple[int, ...]
    # of this rank
    coordinate: tuple[int, ...]
    axes: tuple[AxisComm, ...]
    # all devices as one axis, row-major
    all_devices: AxisComm
    # of the job, or of the replica; row-major
    ranks: tuple[int, ...]

    @cached_property
    def is_in_order(self) -> bool:
        """Whether devices have their places in the order of ranks."""
        return self.ranks == tuple(sorted(self.ranks))

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Exchange chunks of a batch, of equal size, from the order of ranks to that of the mesh.

        Collective. Rank i passes chunk i; the device at position i of the mesh gets chunk i.
        """
        rank = self.ranks[self.all_devices.index]
        if self.is_in_order:
            return rows
        count = rows.numel()
        sent = [count * (place == rank) for place in range(len(self.ranks))]
        received = [count * (other == self.all_devices.index) for other in self.ranks]
        return (
            self.all_devices.start_exchange(rows.reshape(-1), sent, received)
            .wait()
            .view(rows.shape)
        )


@dataclass(frozen=True)
class Replica:
    """Consecutive ranks that run the steps of one batch together, as a separate job would."""

    # which of the replicas it is
    index: int
    # number of replicas
    count: int
    # its process group; None: all ranks of the job
    group: Any
    # this rank and the ranks in its position in other replicas, which store the same shards
    across: AxisComm


def divide(count: int) -> Replica:
    """Return this rank's replica of `count`; collective over the job at the first call.

    `count` must divide the number of ranks.
    """
    return _divide(dist.group.WORLD if dist.is_initialized() else None, count)


# Only the last one: the process may be in another job later.
@lru_cache(maxsize=1)
def _divide(world: Any, count: int) -> Replica:
    """Split the job's ranks into `count` replicas of consecutive ranks, and return this rank's.
    Collective.
    """
    size = world_size() // count
    index, position = divmod(rank_in(world), size)
    replica_ranks = range(index * size, (index + 1) * size)
    same_position = range(position, world_size(), size)
    group = None
    if count > 1:
        # With a device, NCCL's groups would be split from that of all ranks, which is collective
        # over all of them.
        world.bound_device_id = None
        group = lasting_group("replica", replica_ranks, use_local_synchronization=True)
    across = _group_of(tuple(same_position), "across", local=True)
    return Replica(index, count, group, AxisComm(count, index, across, dist))


def build_mesh(
    shape: Sequence[int], backend: str = "auto", own_group: str = "", group: Any = None
) -> MeshComm:
    """Return the logical mesh of `shape` on all ranks (of `group`). Collective over them.

    Args:
        backend: `auto`, `torch` or `deepspeed` (see `select_backend`).
        own_group: name of the use of a mesh with groups that no other mesh shares, so that its
            collectives may run in any order relative to those of others; "": it may share them.
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
    """Make the meshes of a pipeline's stages, in order; None for those without this rank.

    Collective over the job, or the replica of `group`: every rank passes the same list.

    Args:
        meshes: (shape, ranks in `group`) of each; stages may share ranks. Equal ones are one mesh.
        backend, own_groups, group: as for `build_mesh`; OptionError as of `select_backend`.
    """
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    library = select_backend(backend, "cuda" if is_nccl else "cpu")
    built: dict[tuple[tuple[int, ...], tuple[int, ...]], MeshComm | None] = {}
    result = []
    for shape, ranks in meshes:
        key = (tuple(shape), tuple(ranks))
        if key not in built:
            built[key] = _build_one(*key, group, library, own_groups)
        result.append(built[key])
    return result


def message_groups(channels: Sequence[Sequence[int]], group: Any = None) -> list[tuple[Any, Any]]:
    """Return the process groups of (forward, backward) messages of each channel.

    Collective as meshes are. gloo tells messages apart by their tags, so that the default group
    (None) is used for all, whatever `group` is. NCCL pairs messages by their order: each channel
    and direction needs a communicator, in which the micro-batches have one order.

    Args:
        channels: the ranks of each in `group`, ascending.
    """
    # Without channels there may be one device alone, and no process group.
    if not channels or dist.get_backend() == "gloo":
        return [(None, None)] * len(channels)
    groups = []
    for i, ranks in enumerate(channels):
        forward = _group_of(tuple(ranks), (i, 0), group, True)
        backward = _group_of(tuple(ranks), (i, 1), group, True)
        groups.append((forward, backward))
    return groups


def _build_one(
    shape: tuple[int, ...], ranks: tuple[int, ...], group: Any, library: Any, own_groups: str
) -> MeshComm | None:
    """Make a mesh, with its process groups; None if this rank is not on it. Collective.

    Args:
        ranks: of the mesh, numbered in `group`, in row-major order.
        group: process group of the job or replica; None: all ranks.
        library: that runs the collectives.
        own_groups: the mesh's purpose if it has process groups of its own; empty: it shares those
            of other meshes.
    """
    rank = rank_in(group)
    grid = np.array(ranks).reshape(shape)
    mesh_group = _group_of(ranks, (own_groups, shape), group, bool(own_groups))
    axes: list[AxisComm] = []
    for axis, size in enumerate(shape):
        # [groups, size]: the ranks of each group.
        for line in np.moveaxis(grid, axis, -1).reshape(-1, size):
            members = tuple(line.tolist())
            # Every rank makes every group: `new_group` waits for all ranks of the job.
            axis_group = mesh_group
            if members != ranks:
                axis_group = _group_of(members, (shape, axis), group)
            if rank in members:
                name = f"mesh axis {axis}"
                axes.append(AxisComm(size, members.index(rank), axis_group, library, name))
    if rank not in ranks:
        return None
    coordinate = tuple(int(i) for i in np.unravel_index(ranks.index(rank), shape))
    all_axes = AxisComm(len(ranks), ranks.index(rank), mesh_group, library)
    return MeshComm(shape, coordinate, tuple(axes), all_axes, ranks)


def _group_of(
    ranks: tuple[int, ...], use: Any, group: Any = None, is_own: bool = False, local: bool = False
) -> Any:
    """Return a process group of `ranks` of `group`, as of `lasting_group`.

    It is `group` itself if that has the same ranks in the same order, or if there is one rank.

    Args:
        use: as for `lasting_group`.
        is_own: whether the group must not be `group`.
        local: whether its ranks alone make it, as those of a replica do.

    Raises:
        RuntimeMismatchError: this version of PyTorch has no groups in the order of `ranks`.
    """
    ascending = ranks == tuple(sorted(ranks))
    if len(ranks) == 1 or (len(ranks) == world_size(group) and not is_own and ascending):
        return group
    if group is not None:
        job_ranks = dist.get_process_group_ranks(group)
        ranks = tuple(job_ranks[rank] for rank in ranks)
        local = True
    if ascending:
        return lasting_group(use, ranks, use_local_synchronization=local)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise RuntimeMismatchError(
            f"the plan has devices in the order {list(ranks)}, for which this PyTorch"
            f" ({torch.__version__}) has no "
            "process groups",
            "write `order: numbered` into the cluster file, or take PyTorch 2.13",
        )
    # A rank's index in the group is its coordinate on the axis.
    return lasting_group(use, ranks, use_local_synchronization=local, sort_ranks=False)


BACKEND_NAMES = ("auto", "torch", "deepspeed")


def select_backend(name: str = "auto", device_type: str = "cpu") -> Any:
    """Return the module with the collectives: `torch.distributed`, or `deepspeed.comm`.

    Both have the same functions. Before there is a process group, it is `torch.distributed`.

    Args:
        name: `torch`, `deepspeed` (which uses the existing process group), or `auto`: DeepSpeed on
            CUDA if it is installed.

    Raises:
        OptionError: there is no such backend, or DeepSpeed is not installed.
    """
    check_names([name], BACKEND_NAMES, "there is no communication backend")
    installed = importlib.util.find_spec("deepspeed") is not None
    if name == "deepspeed" and not installed:
        raise OptionError(
            'backend="deepspeed": the package deepspeed is not installed',
            'pip install deepspeed, or leave backend at "auto"',
        )
    is_deepspeed = name == "deepspeed"
    if name == "auto" and device_type == "cuda":
        is_deepspeed = installed
    if is_deepspeed and dist.is_initialized():
        return _deepspeed(device_type)
    return dist


def _deepspeed(device_type: str) -> Any:
    """Return `deepspeed.comm`, initialized on the process group of torch.distributed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device_type == "cuda" else "cpu")
    import deepspeed.comm as ds

    # The attribute `torch` of the package is PyTorch itself.
    ds_torch: Any = importlib.import_module("deepspeed.comm.torch")

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
