"""The once-per-step reduction of gradients: in buckets, while the backward still runs.

A gradient that is Partial on some axes is all-reduced there (data parallel) or reduce-scattered to its owner (ZeRO).
Gradients of one kind share buckets, in the order in which the backward makes them; a bucket starts when its last
gradient is there, and buckets start in one fixed order, the same on all devices. The first backward only observes:
which parameters get gradients, and when, is then agreed upon between the devices. Another step may use others: what
has no gradient in it keeps none, as on one device (optimizers pass it over), and what is new gets buckets of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from alpa_strategy.comm.mesh import (
    AxisComm,
    MeshComm,
    Pending,
    all_reduce_over,
)
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.options import bucket_limit

WHOLE_MESH = -1  # stands for all axes at once


@dataclass(frozen=True)
class _Stage:
    """One collective of a reduction: over `axis`, an all_reduce, or a reduce_scatter of `dim`."""

    axis: int
    dim: int | None = None


@dataclass(frozen=True)
class GradientEntry:
    """One gradient to reduce.

    Attributes:
        name: the parameter's name.
        reshard: storage -> use; its backward is the reduction to do.
        shape, dtype, device: of the local gradient before the reduction.
        holder: the tensor whose `.grad` is the local gradient (None where there is none).
        put: stores the reduced gradient.
        is_used_up: whether the optimizer has used this backward's gradient already.
    """

    name: str
    reshard: Reshard
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    holder: Callable[[], Tensor | None]
    put: Callable[[Tensor], None]
    is_used_up: Callable[[], bool] = lambda: False

    @property
    def num_bytes(self) -> int:
        """Bytes of the local gradient."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def has_gradient(self) -> bool:
        """Whether there is one now, or was and is used up."""
        if self.is_used_up():
            return True
        holder = self.holder()
        return holder is not None and holder.grad is not None

    def take_or_zeros(self) -> Tensor:
        """Remove and return the local gradient; zeros in the place of one that is not there."""
        holder = self.holder()
        if holder is None or holder.grad is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        grad, holder.grad = holder.grad, None
        return grad


class GradientReducer:
    """Reduces the gradients of `entries` once per step. Every device of the mesh makes the same calls.

    Args:
        mesh: the mesh of the stage.
        entries: all trainable parameters, in one order on all devices; those with nothing to reduce as well.
        bucket_bytes: a bucket is closed when it holds so many bytes, or an eighth of all.
    """

    def __init__(self, mesh: MeshComm, entries: Sequence[GradientEntry], bucket_bytes: int) -> None:
        self._mesh = mesh
        self._entries = tuple(entries)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] | None = None  # None until the devices have agreed
        self._rest: list[GradientEntry] = []  # used, but not in a bucket
        self._unused: list[GradientEntry] = []
        self._only_somewhere: frozenset[str] = frozenset()  # gradients that some devices had and others not
        self.enabled = True
        self.reset()

    def reset(self) -> None:
        """Forget a backward that was interrupted."""
        self._seen: dict[str, None] = {}
        self._num_started = 0
        self.held: frozenset[str] = frozenset()  # more is still added to these
        for bucket in self._buckets or ():
            bucket.pending = None

    def mark_ready(self, name: str) -> None:
        """The local gradient of `name` is complete (called by a hook of the backward); may start collectives."""
        if not self.enabled or name in self.held:
            return
        if name in self._seen:
            raise RuntimeMismatchError(
                f"the gradient of {name} was made twice before its reduction",
                "call backward once per training step, or accumulate gradients with accumulate_grad_batches",
            )
        self._seen[name] = None
        if self._buckets is None:
            return
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if not all(entry.name in self._seen for entry in bucket.entries):
                return
            bucket.start()
            self._num_started += 1

    def finish(self) -> None:
        """Reduce what is left, wait, and hand every gradient to its owner."""
        if not self.enabled:
            return
        if self._buckets is None:
            self._agree()
        assert self._buckets is not None
        new = [entry for entry in self._unused if entry.has_gradient()]
        if new:  # all devices run the same step: they all see this
            self._unused = [entry for entry in self._unused if not entry.has_gradient()]
            self._build(new)
        for bucket in self._buckets[self._num_started :]:  # gradients that no hook announced
            bucket.start()
        for stage in range(max((len(bucket.stages) for bucket in self._buckets), default=0)):
            for bucket in self._buckets:
                bucket.advance(stage)
        for entry in self._rest:
            if entry.is_used_up() or not (entry.has_gradient() or entry.name in self._only_somewhere):
                continue
            entry.put(entry.reshard.gradients(entry.take_or_zeros()))
        self.reset()

    def _agree(self) -> None:
        """Find out which gradients exist on any device, and take the first device's order for all."""
        self._buckets = []
        if not self._entries:  # a stage of frozen layers
            return
        last = len(self._entries)
        seen = {name: i for i, name in enumerate(self._seen)}
        used, order = [], []
        for i, entry in enumerate(self._entries):
            used.append(int(entry.has_gradient()))
            order.append(seen.get(entry.name, last + i))
        is_first = not any(self._mesh.coordinate)
        table = [used, [1 - here for here in used], order if is_first else [-1] * len(order)]
        found = all_reduce_over(self._mesh, torch.tensor(table, device=self._entries[0].device), "max").tolist()
        used, missing, order = found
        both = zip(self._entries, used, missing, strict=True)
        self._only_somewhere = frozenset(entry.name for entry, here, there in both if here and there)
        in_order = sorted(range(last), key=order.__getitem__)
        self._unused = [self._entries[i] for i in in_order if not used[i]]
        self._build([self._entries[i] for i in in_order if used[i]])

    def _build(self, entries: Iterable[GradientEntry]) -> None:
        """Add buckets, gradients of one kind together; order them by when their last gradient comes."""
        entries = list(entries)
        limit = bucket_limit(sum(entry.num_bytes for entry in entries), self._bucket_bytes)
        closed: list[tuple[int, _Bucket]] = []
        open_buckets: dict[tuple, list[tuple[int, GradientEntry]]] = {}

        def close(key: tuple) -> None:
            members = open_buckets.pop(key)
            bucket = _Bucket(self._mesh, [entry for _, entry in members], self._only_somewhere)
            closed.append((members[-1][0], bucket))

        for position, entry in enumerate(entries):
            stages = bucket_stages(entry.reshard, len(self._mesh.shape), self._mesh.whole is not None)
            if not stages:
                self._rest.append(entry)
                continue
            key = (entry.dtype, entry.device, tuple((stage.axis, stage.dim is None) for stage in stages))
            open_buckets.setdefault(key, []).append((position, entry))
            if sum(member.num_bytes for _, member in open_buckets[key]) >= limit:
                close(key)
        for key in list(open_buckets):
            close(key)
        assert self._buckets is not None
        self._buckets += [bucket for _, bucket in sorted(closed, key=lambda item: item[0])]


def bucket_stages(reshard: Reshard, num_axes: int, has_whole: bool) -> tuple[_Stage, ...]:
    """The collectives of a reduction, or () when it needs more than all_reduce and reduce_scatter (or nothing)."""
    stages: list[_Stage] = []
    for step in reshard.backward_steps:
        match step.src, step.dst:
            case Partial(), Replicate():
                stages.append(_Stage(step.axis))
            case Partial(), Shard(dim=dim):
                stages.append(_Stage(step.axis, dim))
            case _:
                return ()
    if has_whole and len(stages) == num_axes > 1 and all(stage.dim is None for stage in stages):
        return (_Stage(WHOLE_MESH),)
    return tuple(stages)


class _Bucket:
    """Gradients that go through the same collectives together; `needed`: those that are there after it in any case."""

    def __init__(self, mesh: MeshComm, entries: list[GradientEntry], needed: frozenset[str]) -> None:
        self._needed = needed
        has_whole = mesh.whole is not None
        self._mesh = mesh
        self.entries = entries
        self.stages_of = [bucket_stages(entry.reshard, len(mesh.shape), has_whole) for entry in entries]
        self.stages = self.stages_of[0]
        self.pending: Pending | None = None
        self._shapes: list[list[int]] = []
        self._is_there: list[bool] = []

    def start(self) -> None:
        """Start the first collective; takes the local gradients."""
        self._is_there = [entry.has_gradient() or entry.name in self._needed for entry in self.entries]
        self._launch(0, [entry.take_or_zeros() for entry in self.entries])

    def advance(self, stage: int) -> None:
        """Wait for collective `stage`; start the next, or hand the gradients over."""
        if stage >= len(self.stages):
            return
        assert self.pending is not None
        flat = self.pending.wait()
        grads = self._unpack(stage, flat)
        if stage + 1 < len(self.stages):
            self._launch(stage + 1, grads)
            return
        self.pending = None
        for entry, grad, is_there in zip(self.entries, grads, self._is_there, strict=True):
            if is_there:
                entry.put(grad)

    def _axis(self, stage: int) -> AxisComm:
        index = self.stages[stage].axis
        return self._mesh.whole if index == WHOLE_MESH else self._mesh.axes[index]  # type: ignore[attr-defined]

    def _launch(self, stage: int, grads: list[Tensor]) -> None:
        axis = self._axis(stage)
        self._shapes = [list(grad.shape) for grad in grads]
        if self.stages[stage].dim is None:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self.pending = axis.start_all_reduce(flat)
            return
        # One row per device of the axis: its chunks of all gradients, each padded to the largest chunk.
        columns = [self._chunk_shape(stage, i, axis.size, 0).numel() for i in range(len(grads))]
        rows = grads[0].new_zeros((axis.size, sum(columns)))
        for i, (grad, column) in enumerate(zip(grads, rows.split(columns, 1), strict=True)):
            dim = self.stages_of[i][stage].dim
            assert dim is not None  # as that of the first gradient
            for row, part in zip(column, grad.split(chunk_sizes(grad.shape[dim], axis.size), dim), strict=True):
                row[: part.numel()].view(part.shape).copy_(part)
        self.pending = axis.start_reduce_scatter(rows)

    def _unpack(self, stage: int, flat: Tensor) -> list[Tensor]:
        """Gradients after collective `stage`: views of its result."""
        if self.stages[stage].dim is None:
            sizes = [torch.Size(shape).numel() for shape in self._shapes]
            return [part.view(shape) for part, shape in zip(flat.split(sizes), self._shapes, strict=True)]
        axis = self._axis(stage)
        padded = [self._chunk_shape(stage, i, axis.size, 0).numel() for i in range(len(self._shapes))]
        own = [self._chunk_shape(stage, i, axis.size, axis.index) for i in range(len(self._shapes))]
        return [part[: shape.numel()].view(shape) for part, shape in zip(flat.split(padded), own, strict=True)]

    def _chunk_shape(self, stage: int, i: int, num_chunks: int, index: int) -> torch.Size:
        shape, dim = list(self._shapes[i]), self.stages_of[i][stage].dim
        assert dim is not None
        shape[dim] = chunk_sizes(shape[dim], num_chunks)[index]
        return torch.Size(shape)
