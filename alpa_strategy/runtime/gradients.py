"""The once-per-step reduction of gradients: in buckets, while the backward still runs.

A gradient that is Partial on some axes is all-reduced there (data parallel) or reduce-scattered to its owner (ZeRO).
Gradients of one kind share buckets, in the order in which the backward makes them; a bucket starts when its last
gradient is there, and buckets start in one fixed order, the same on all devices. The first backward only observes:
which parameters get gradients, and when, is then agreed upon between the devices. Another step may use others: what
has no gradient in it keeps none, as on one device (optimizers pass it over), and what is new gets buckets of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from alpa_strategy.comm.mesh import (
    AxisComm,
    MeshComm,
    all_reduce_over,
)
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.options import bucket_limit
from alpa_strategy.runtime.sharded_parameter import ShardedParameter

WHOLE_MESH = -1  # stands for all axes at once


@dataclass(frozen=True)
class _Collective:
    """One of a gradient's reduction: over `axis`, an all_reduce, or a reduce_scatter of `dim`."""

    axis: int
    dim: int | None = None


class GradientReducer:
    """Reduces gradients once per step. Every device of the mesh makes the same calls.

    Args:
        mesh: the mesh of the stage.
        parameters: all trainable ones, in one order on all devices; those with nothing to reduce as well.
        bucket_bytes: a bucket is closed when it holds so many bytes, or an eighth of all.
        is_used_up: whether the optimizer has used this backward's gradient of a parameter already.
    """

    def __init__(
        self,
        mesh: MeshComm,
        parameters: Sequence[ShardedParameter],
        bucket_bytes: int,
        is_used_up: Callable[[nn.Parameter], bool] = lambda _: False,
    ) -> None:
        self._mesh, self._is_used_up = mesh, is_used_up
        self._parameters = tuple(parameters)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] | None = None  # None until the devices have agreed
        self._rest: list[ShardedParameter] = []  # used, but not in a bucket
        self._unused: list[ShardedParameter] = []
        self._only_somewhere: frozenset[str] = frozenset()  # gradients that some devices had and others not
        self.enabled = True
        self.reset()

    def reset(self) -> None:
        """Forget a backward that was interrupted."""
        self._seen: dict[str, None] = {}
        self._num_started = 0
        self.held: frozenset[str] = frozenset()  # more is still added to these
        for bucket in self._buckets or ():
            bucket.running = None

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
            if not all(each.name in self._seen for each in bucket.parameters):
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
        new = [each for each in self._unused if self._has_gradient(each)]
        if new:  # all devices run the same step: they all see this
            self._unused = [each for each in self._unused if each not in new]
            self._build(new)
        for bucket in self._buckets[self._num_started :]:  # gradients that no hook announced
            bucket.start()
        running = self._buckets
        while running:  # all devices go through the buckets in the same order
            running = [bucket for bucket in running if bucket.advance()]
        for each in self._rest:
            if self._is_used_up(each.parameter):
                continue
            if each.has_gradient or each.name in self._only_somewhere:
                each.put_gradient(each.to_use.gradients(each.take_gradient()))
        self.reset()

    def _has_gradient(self, each: ShardedParameter) -> bool:
        """Whether there is one now, or was and is used up."""
        return each.has_gradient or self._is_used_up(each.parameter)

    def _agree(self) -> None:
        """Find out which gradients exist on any device, and take the first device's order for all."""
        self._buckets = []
        if not self._parameters:  # a stage of frozen layers
            return
        last = len(self._parameters)
        seen = {name: i for i, name in enumerate(self._seen)}
        used, order = [], []
        for i, each in enumerate(self._parameters):
            used.append(int(self._has_gradient(each)))
            order.append(seen.get(each.name, last + i))
        is_first = not any(self._mesh.coordinate)
        table = [used, [1 - here for here in used], order if is_first else [-1] * len(order)]
        device = self._parameters[0].parameter.device
        used, missing, order = all_reduce_over(self._mesh, torch.tensor(table, device=device), "max").tolist()
        both = zip(self._parameters, used, missing, strict=True)
        self._only_somewhere = frozenset(each.name for each, here, there in both if here and there)
        in_order = sorted(range(last), key=order.__getitem__)
        self._unused = [self._parameters[i] for i in in_order if not used[i]]
        self._build([self._parameters[i] for i in in_order if used[i]])

    def _build(self, parameters: Iterable[ShardedParameter]) -> None:
        """Add buckets, gradients of one kind together; order them by when their last gradient comes."""
        parameters = list(parameters)
        limit = bucket_limit(sum(each.used_bytes for each in parameters), self._bucket_bytes)
        closed: list[tuple[int, _Bucket]] = []
        open_buckets: dict[tuple, list[tuple[int, ShardedParameter]]] = {}

        def close(key: tuple) -> None:
            members = open_buckets.pop(key)
            bucket = _Bucket(self._mesh, [each for _, each in members], self._only_somewhere)
            closed.append((members[-1][0], bucket))

        for position, each in enumerate(parameters):
            collectives = collectives_of(each.to_use, self._mesh)
            if not collectives:
                self._rest.append(each)
                continue
            kinds = tuple((collective.axis, collective.dim is None) for collective in collectives)
            key = (each.parameter.dtype, each.parameter.device, kinds)
            open_buckets.setdefault(key, []).append((position, each))
            if sum(member.used_bytes for _, member in open_buckets[key]) >= limit:
                close(key)
        for key in list(open_buckets):
            close(key)
        assert self._buckets is not None
        self._buckets += [bucket for _, bucket in sorted(closed, key=lambda item: item[0])]


def collectives_of(reshard: Reshard, mesh: MeshComm) -> tuple[_Collective, ...]:
    """The collectives of a reduction, or () when it needs more than all_reduce and reduce_scatter (or nothing)."""
    found: list[_Collective] = []
    for step in reshard.backward_steps:
        match step.src, step.dst:
            case Partial(), Replicate():
                found.append(_Collective(step.axis))
            case Partial(), Shard(dim=dim):
                found.append(_Collective(step.axis, dim))
            case _:
                return ()
    if mesh.whole is not None and len(found) == len(mesh.shape) > 1 and all(each.dim is None for each in found):
        return (_Collective(WHOLE_MESH),)
    return tuple(found)


class _Bucket:
    """Gradients that go through the same collectives together; `needed`: those that are there after it in any case."""

    def __init__(self, mesh: MeshComm, parameters: list[ShardedParameter], needed: frozenset[str]) -> None:
        self._mesh, self.parameters, self._needed = mesh, parameters, needed
        # Per collective what each gradient wants of it: the same axis, dims of their own.
        self._collectives = list(zip(*(collectives_of(each.to_use, mesh) for each in parameters), strict=True))
        self.running: Iterator[None] | None = None

    def start(self) -> None:
        """Start the first collective; takes the local gradients."""
        self.running = self._reduce()
        next(self.running)

    def advance(self) -> bool:
        """Wait for the collective under way and start the next; False when there was none left."""
        assert self.running is not None
        return next(self.running, False) is None

    def _reduce(self) -> Iterator[None]:
        """One collective after the other; stops while each is under way, and hands the gradients over in the end."""
        is_there = [each.has_gradient or each.name in self._needed for each in self.parameters]
        grads = [each.take_gradient() for each in self.parameters]
        for wanted in self._collectives:
            axis = self._axis(wanted[0].axis)
            shapes = [grad.shape for grad in grads]
            dims = [each.dim for each in wanted if each.dim is not None]
            if not dims:
                pending = axis.start_all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
            else:
                pending = axis.start_reduce_scatter(_rows(grads, dims, axis.size))
                cuts = list(zip(shapes, dims, strict=True))
                columns = [chunk_shape(shape, dim, axis.size, 0).numel() for shape, dim in cuts]
                shapes = [chunk_shape(shape, dim, axis.size, axis.index) for shape, dim in cuts]
            grads = []  # they are in what is under way: not twice in memory
            yield
            sizes = columns if dims else [shape.numel() for shape in shapes]
            parts = pending.wait().split(sizes)
            grads = [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for each, grad, needed in zip(self.parameters, grads, is_there, strict=True):
            if needed:
                each.put_gradient(grad)

    def _axis(self, axis: int) -> AxisComm:
        if axis != WHOLE_MESH:
            return self._mesh.axes[axis]
        assert self._mesh.whole is not None
        return self._mesh.whole


def _rows(grads: Sequence[Tensor], dims: Sequence[int], count: int) -> Tensor:
    """[count, elements]: one row per device, its chunks of all gradients, each padded to the largest chunk."""
    columns = [chunk_shape(grad.shape, dim, count, 0).numel() for grad, dim in zip(grads, dims, strict=True)]
    rows = grads[0].new_zeros((count, sum(columns)))
    for grad, dim, column in zip(grads, dims, rows.split(columns, 1), strict=True):
        for row, part in zip(column, grad.split(chunk_sizes(grad.shape[dim], count), dim), strict=True):
            row[: part.numel()].view(part.shape).copy_(part)
    return rows


def chunk_shape(shape: torch.Size, dim: int, count: int, index: int) -> torch.Size:
    """Shape of chunk `index` of `count` along `dim`; the first is the largest."""
    sizes = list(shape)
    sizes[dim] = chunk_sizes(shape[dim], count)[index]
    return torch.Size(sizes)
