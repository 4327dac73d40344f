"""The once-per-step reduction of gradients: in buckets, while the backward still runs.

A gradient that is Partial on some axes is all-reduced there (data parallel) or reduce-scattered to
its owner (ZeRO). Gradients of one kind share buckets, in the order in which the backward makes
them; a bucket starts when its last gradient is there, and buckets start in one fixed order, the
same on all devices. The first backward only observes:
which parameters get gradients, and when, is then agreed upon between the devices. Another step may
use others: what has no gradient in it keeps none, as on one device (optimizers pass it over), and
what is new gets buckets of its own.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from alpa_strategy.comm.collectives import all_reduce_max
from alpa_strategy.comm.mesh import AxisComm, MeshComm, Pending
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.options import bucket_limit
from alpa_strategy.runtime.sharded_parameter import ShardedParameter

Completed = Callable[
    [Sequence[nn.Parameter]], None
]  # gradients of these are complete, others not yet


class GradientReducer:
    """Reduces gradients once per step. Every device of the mesh makes the same calls.

    Args:
        mesh: the mesh of the stage.
        parameters: all trainable ones, in one order on all devices; those with nothing to reduce as
            well.
        bucket_bytes: a bucket is closed when it holds so many bytes, or an eighth of all.
    """

    def __init__(
        self, mesh: MeshComm, parameters: Sequence[ShardedParameter], bucket_bytes: int
    ) -> None:
        self._mesh, self._scale = mesh, 1.0
        self._parameters = tuple(parameters)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] | None = None  # None until the devices have agreed
        self._rest: list[ShardedParameter] = []  # used, but not in a bucket
        self._unused: list[ShardedParameter] = []
        self._only_somewhere: frozenset[str] = (
            frozenset()
        )  # gradients that some devices had and others not
        # the next backward ends with the reduction: not for a micro-batch before a step's last
        self.enabled = True
        self.reset()

    def reset(self) -> None:
        """Forget a backward that was interrupted."""
        self._seen: dict[str, None] = {}
        self._num_started = 0
        self.held: frozenset[str] = frozenset()  # more is still added to these
        for bucket in self._buckets or ():
            bucket.running = None
        for each in self._parameters:
            each.is_taken = False
            each.sparse_rows = None

    def mark_ready(self, name: str) -> None:
        """The local gradient of `name` is complete (called by a hook of the backward); may start
        collectives.
        """
        if not self.enabled or name in self.held:
            return
        if name in self._seen:
            raise RuntimeMismatchError(
                f"the gradient of {name} was made twice before its reduction",
                "call backward once per training step, or accumulate gradients with"
                " accumulate_grad_batches",
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

    def finish(self, completed: Completed | None = None) -> None:
        """Reduce what is left, wait, hand every gradient to its owner; `completed` is told of each
        bucket's.
        """
        if not self.enabled:
            return
        if self._buckets is None:
            self._agree()
        assert self._buckets is not None
        new = [each for each in self._unused if each.has_gradient]
        if new:  # all devices run the same step: they all see this
            self._unused = [each for each in self._unused if each not in new]
            self._build(new)
        for bucket in self._buckets[self._num_started :]:  # gradients that no hook announced
            bucket.start()
        _run(self._buckets, completed)
        for each in self._rest:
            if each.has_gradient and (each.plan.is_fetched or each.is_used_in_place):
                continue
            if each.has_gradient or each.name in self._only_somewhere:
                each.put_gradient(each.to_use.gradients(each.take_gradient()))
        self.reset()

    def _agree(self) -> None:
        """Find out which gradients exist on any device, and take the first device's order for
        all.
        """
        self._buckets = []
        if not self._parameters:  # a stage of frozen layers
            return
        here = [int(each.has_gradient) for each in self._parameters]
        table = torch.tensor(
            [here, [1 - there for there in here]], device=self._parameters[0].device
        )
        used, missing = self._mesh.whole.all_reduce(table, "max").tolist()
        found = {
            each.name: both for each, *both in zip(self._parameters, used, missing, strict=True)
        }
        self._only_somewhere = frozenset(name for name, both in found.items() if all(both))
        in_order = self._in_order(self._parameters)
        self._unused = [each for each in in_order if not found[each.name][0]]
        self._build(each for each in in_order if found[each.name][0])

    def _in_order(self, parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
        """As the first device's backward came to them; what it has not seen comes last.
        Collective.
        """
        seen = {name: i for i, name in enumerate(self._seen)}
        is_first = not any(self._mesh.coordinate)
        order = [
            seen.get(each.name, len(seen) + i) if is_first else -1
            for i, each in enumerate(parameters)
        ]
        table = torch.tensor(order, device=parameters[0].device)
        order = self._mesh.whole.all_reduce(table, "max").tolist()
        return [parameters[i] for i in sorted(range(len(order)), key=order.__getitem__)]

    def _build(self, parameters: Iterable[ShardedParameter]) -> None:
        """Add buckets, gradients of one kind together; order them by when their last gradient
        comes.
        """
        parameters = list(parameters)
        limit = bucket_limit(sum(each.used_bytes for each in parameters), self._bucket_bytes)
        closed: list[tuple[int, _Bucket]] = []
        open_buckets: dict[tuple, list[tuple[int, ShardedParameter]]] = {}

        def close(key: tuple) -> None:
            members = open_buckets.pop(key)
            bucket = _Bucket([each for _, each in members], self._only_somewhere, self._scale)
            closed.append((members[-1][0], bucket))

        for position, each in enumerate(parameters):
            sums = each.to_use.gradient_sums
            if not sums:  # it needs more than sums, or nothing
                self._rest.append(each)
                continue
            kinds = tuple((each_sum.axis, each_sum.dim is None) for each_sum in sums)
            key = (each.reduce_dtype, each.device, kinds)
            open_buckets.setdefault(key, []).append((position, each))
            if sum(member.used_bytes for _, member in open_buckets[key]) >= limit:
                close(key)
        for key in list(open_buckets):
            close(key)
        assert self._buckets is not None
        self._buckets += [bucket for _, bucket in sorted(closed, key=lambda item: item[0])]


@dataclass(frozen=True)
class Replicas:
    """How ranks with steps of their own average gradients."""

    mesh: MeshComm  # of all of them
    # the largest of some numbers over all ranks, in a group of its own: others may have started
    # more buckets
    agree: Callable[[Sequence[int]], list[int]]


class ReplicaReducer(GradientReducer):
    """The mean over ranks that each run a step of their own: gradients may be made by some of them
    alone, in any order, several times in a backward (reentrant checkpoints), by several backwards
    of a step.
    """

    def __init__(
        self, replicas: Replicas, parameters: Sequence[ShardedParameter], bucket_bytes: int
    ) -> None:
        super().__init__(replicas.mesh, parameters, bucket_bytes)
        self._scale, self._agree_on = 1.0 / math.prod(replicas.mesh.shape), replicas.agree
        self._buckets, self._unused = (
            [],
            list(self._parameters),
        )  # a bucket is made when somebody has a gradient for it

    @property
    def has_begun(self) -> bool:
        """Whether a backward has made gradients that wait for `finish`."""
        return bool(self._seen)

    def mark_ready(self, name: str) -> None:
        """See GradientReducer. What comes after a bucket has left goes in a second one."""
        if name not in self._seen:
            super().mark_ready(name)

    def finish(self, completed: Completed | None = None) -> None:
        """See GradientReducer; what no rank has a gradient for keeps the one that it has."""
        if not self.enabled or not self._parameters:
            return
        assert self._buckets is not None
        here = [each.is_taken or each.has_local_gradient for each in self._parameters]
        late = [
            each.is_taken and each.has_local_gradient for each in self._parameters
        ]  # made after its bucket left
        # 0: no gradient, 1: a sparse one, 2: a dense one; the largest of all ranks is what their
        # sum is.
        kinds = [
            is_there * (1 if each.is_sparse else 2)
            for is_there, each in zip(here, self._parameters, strict=True)
        ]
        largest = self._agree_on([*kinds, *late])
        agreed = list(
            zip(self._parameters, largest[: len(kinds)], largest[len(kinds) :], strict=True)
        )
        needed = {each.name for each, kind, _ in agreed if kind}
        late_ones = [each for each, _, is_late in agreed if is_late]
        late_gradients = [each.take_gradient() for each in late_ones]
        # Those of earlier steps first, as ranks that had all of a bucket have started it: all then
        # agree on new ones.
        running = self._start(self._buckets, needed)
        if new := [each for each in self._unused if each.name in needed]:
            self._unused = [each for each in self._unused if each.name not in needed]
            known = len(self._buckets)
            self._build(self._in_order(new))
            running += self._start(self._buckets[known:], needed)
        # Late gradients are added to what the buckets bring, and sparse ones get another form: not
        # complete yet.
        _run(running, None if late_ones or 1 in largest[: len(kinds)] else completed)
        for each in self._rest:  # one rank
            if each.has_local_gradient:
                each.put_gradient(each.take_gradient())
        for each, grad in zip(late_ones, late_gradients, strict=True):
            each.add_gradient(grad)
        if late_ones:
            again = _Bucket(late_ones, {each.name for each in late_ones}, self._scale)
            again.start()
            _run([again])
        for each in (each for each, kind, _ in agreed if kind == 1):
            self._make_sparse(each)
        self.reset()

    def _make_sparse(self, each: ShardedParameter) -> None:
        """A gradient that was sparse on every rank that made one has the rows of all of them, as
        under DDP.
        """
        rows = each.sparse_rows
        if rows is None:  # none was made here
            rows = torch.zeros(each.shape[:1], dtype=torch.bool, device=each.parameter.device)
        each.make_sparse(self._mesh.whole.all_reduce(rows.int(), "max").bool())

    def _start(self, buckets: "Sequence[_Bucket]", needed: Set[str]) -> "list[_Bucket]":
        """Those that hold what is needed, all of them started."""
        running = [
            bucket
            for bucket in buckets
            if not needed.isdisjoint(each.name for each in bucket.parameters)
        ]
        for bucket in running:  # one that has left already has all that it needs
            if bucket.running is None:
                bucket.needed = needed
                bucket.start()
        return running


def average(
    parameters: Iterable[nn.Parameter], axis: AxisComm, device: torch.device, bucket_bytes: int
) -> None:
    """Let complete gradients become their mean over `axis`, whose devices hold the same parts.
    Collective over it.

    As DDP has it, one that some lack is zero there, and what none has a gradient for keeps none.

    Args:
        device: of the collectives; some gradients may lie in host memory.
    """
    here = list(parameters)
    there = (
        all_reduce_max([p.grad is not None for p in here], axis.group)
        if axis.size > 1
        else [0] * len(here)
    )
    buckets: dict[tuple[torch.dtype, int], list[nn.Parameter]] = {}
    total = 0
    for p in (p for p, is_there in zip(here, there, strict=True) if is_there and p.numel()):
        buckets.setdefault((p.dtype, total // bucket_bytes), []).append(p)
        total += p.numel() * p.element_size()
    begun: list[tuple[list[nn.Parameter], tuple[int, ...], Pending]] = []
    for bucket in buckets.values():
        flat = _flat(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket], 1 / axis.size
        ).to(device)
        sizes = chunk_sizes(flat.numel(), axis.size)
        begun.append(
            (bucket, sizes, axis.start_exchange(flat, sizes, [sizes[axis.index]] * axis.size))
        )
        for p in bucket:  # it is in what is under way: not twice in memory
            p.grad = None
    gathered: list[tuple[list[nn.Parameter], Pending]] = []
    for bucket, sizes, pending in begun:
        # In one order, where an all_reduce's depends on the place in the bucket: copies of a
        # parameter on several ranks of a replica, which lie at other places there, stay the same
        # bit by bit.
        own = reduce(torch.add, pending.wait().view(axis.size, sizes[axis.index]))
        gathered.append((bucket, axis.start_all_gather(own, 0, sum(sizes))))
    for bucket, pending in gathered:
        for p, part in zip(bucket, pending.wait().split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view(p.shape).to(p.device)


def _run(buckets: "list[_Bucket]", completed: Completed | None = None) -> None:
    """Wait for buckets that have started; all devices go through them in the same order."""
    while buckets:
        running = []
        for bucket in buckets:
            if bucket.advance():
                running.append(bucket)
            elif completed is not None and (
                running or bucket is not buckets[-1]
            ):  # others are under way
                completed([each.parameter for each in bucket.parameters])
        buckets = running


class _Bucket:
    """Gradients that go through the same collectives together; `needed`: those that are there after
    it in any case.

    scale: what their sums are multiplied by.
    """

    def __init__(
        self, parameters: list[ShardedParameter], needed: Collection[str], scale: float
    ) -> None:
        self.parameters, self.needed, self._scale = parameters, needed, scale
        # Per collective what each gradient wants of it: the same axis, dims of their own.
        self._collectives = list(
            zip(*(each.to_use.gradient_sums for each in parameters), strict=True)
        )
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
        """One collective after the other; stops while each is under way, and hands the gradients
        over in the end.
        """
        # What an earlier backward has reduced, and this one does not add to, stays as it is.
        is_there = [each.has_local_gradient or each.name in self.needed for each in self.parameters]
        both = list(zip(self.parameters, is_there, strict=True))
        grads = [each.take_gradient() if there else each.no_gradient() for each, there in both]
        for wanted in self._collectives:
            axis, shapes = wanted[0].axis, [grad.shape for grad in grads]
            dims = [each.dim for each in wanted if each.dim is not None]
            if not dims:
                pending = axis.start_all_reduce(_flat(grads, self._scale))
            else:
                pending = axis.start_reduce_scatter(_rows(grads, dims, axis.size, self._scale))
                cuts = list(zip(shapes, dims, strict=True))
                columns = [chunk_shape(shape, dim, axis.size, 0).numel() for shape, dim in cuts]
                shapes = [chunk_shape(shape, dim, axis.size, axis.index) for shape, dim in cuts]
            grads = []  # they are in what is under way: not twice in memory
            yield
            sizes = columns if dims else [shape.numel() for shape in shapes]
            parts = pending.wait().split(sizes)
            grads = [
                part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)
            ]
        for (each, there), grad in zip(both, grads, strict=True):
            if there:
                each.put_gradient(grad)


def _flat(grads: Sequence[Tensor], scale: float) -> Tensor:
    """[elements] of all of them, multiplied by `scale`."""
    if scale == 1.0:
        return torch.cat([grad.reshape(-1) for grad in grads])
    flat = grads[0].new_empty(sum(grad.numel() for grad in grads))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        torch.mul(
            grad, scale, out=part.view(grad.shape)
        )  # in the one pass that copies, as DDP does
    return flat


def _rows(grads: Sequence[Tensor], dims: Sequence[int], count: int, scale: float) -> Tensor:
    """[count, elements]: one row per device, its chunks of all gradients * scale, each padded to
    the largest chunk.
    """
    columns = [
        chunk_shape(grad.shape, dim, count, 0).numel()
        for grad, dim in zip(grads, dims, strict=True)
    ]
    rows = grads[0].new_zeros((count, sum(columns)))
    for grad, dim, column in zip(grads, dims, rows.split(columns, 1), strict=True):
        for row, part in zip(
            column, grad.split(chunk_sizes(grad.shape[dim], count), dim), strict=True
        ):
            torch.mul(part, scale, out=row[: part.numel()].view(part.shape))
    return rows


def chunk_shape(shape: torch.Size, dim: int, count: int, index: int) -> torch.Size:
    """Shape of chunk `index` of `count` along `dim`; the first is the largest."""
    sizes = list(shape)
    sizes[dim] = chunk_sizes(shape[dim], count)[index]
    return torch.Size(sizes)
