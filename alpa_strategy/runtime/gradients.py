"""The once-per-step reduction of gradients: in buckets, while the backward still runs.

A gradient that is Partial on some axes is all-reduced there (data parallel) or reduce-scattered to
the devices that store it (ZeRO). Gradients of one kind share buckets, in the order in which the
backward makes them. A bucket starts when its last gradient is there, and buckets start in one fixed
order, the same on all devices.

The first backward only observes: which parameters get gradients, and when, is then agreed between
the devices. A later step may use other parameters. One without a gradient in it has none
afterwards, as on one device (optimizers skip it), and new ones get buckets of their own.
"""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from alpa_strategy.comm.collectives import all_reduce_max
from alpa_strategy.comm.mesh import AxisComm, MeshComm, Pending
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.options import bucket_limit
from alpa_strategy.runtime.gradient_buckets import (
    Bucket,
    Completed,
    finish_buckets,
    flat_gradients,
)
from alpa_strategy.runtime.sharded_parameter import ShardedParameter, rows_of, sparse_copy


class GradientReducer:
    """Reduces gradients once per step. Every device of the mesh makes the same calls.

    Args:
        mesh: the mesh of the stage.
        parameters: all trainable ones, in the same order on all devices; also those with nothing to
            reduce.
        bucket_bytes: a bucket is closed when it has this many bytes, or an eighth of all.
    """

    def __init__(
        self, mesh: MeshComm, parameters: Sequence[ShardedParameter], bucket_bytes: int
    ) -> None:
        self._mesh = mesh
        self._parameters = tuple(parameters)
        self._bucket_bytes = bucket_bytes

        # By what sums are multiplied.
        self._scale = 1.0

        # None until the devices have agreed on the gradients.
        self._buckets: list[Bucket] | None = None

        # Parameters whose gradient is in no bucket, nor complete after the backward.
        self._rest: list[ShardedParameter] = []

        # Parameters without a gradient so far.
        self._unused: list[ShardedParameter] = []

        # Names of parameters of which some devices have gradients and others have not.
        self._only_somewhere: frozenset[str] = frozenset()

        # Whether the next backward ends with the reduction: false for all micro-batches of a step
        # but the last.
        self.enabled = True
        self.reset()

    def reset(self) -> None:
        """Forget a backward that was interrupted."""
        # Names of complete local gradients, in the order of the backward.
        self._seen: dict[str, None] = {}
        self._num_started = 0

        # Names of parameters to whose gradients more will be added.
        self.held: frozenset[str] = frozenset()

        for bucket in self._buckets or ():
            bucket.running = None
        for sharded in self._parameters:
            sharded.is_taken = False
            sharded.sparse_rows = None

    def mark_ready(self, name: str) -> None:
        """Record that the local gradient of `name` is complete, and start the buckets that are
        full; nothing while `enabled` is False or `name` is in `held`.

        Called by hooks of the backward.

        Raises:
            RuntimeMismatchError: the gradient was complete before in this step.
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
            is_full = all(sharded.name in self._seen for sharded in bucket.parameters)
            if not is_full:
                return
            bucket.start()
            self._num_started += 1

    def finish(self, completed: Completed | None = None) -> None:
        """Reduce the remaining gradients, wait for all, and store every one in its parameter;
        nothing while `enabled` is False.

        Args:
            completed: as of `finish_buckets`.
        """
        if not self.enabled:
            return
        if self._buckets is None:
            self._agree()
        assert self._buckets is not None
        if self._is_idle:
            return

        # All devices run the same step: they all have the same new gradients.
        new = [sharded for sharded in self._unused if sharded.has_gradient]
        if new:
            self._unused = [sharded for sharded in self._unused if sharded not in new]
            self._build(new)

        # Buckets with gradients that no hook has announced.
        for bucket in self._buckets[self._num_started :]:
            bucket.start()
        finish_buckets(self._buckets, completed)

        for sharded in self._rest:
            if self._is_complete(sharded) and sharded.has_gradient:
                continue
            if sharded.has_gradient or sharded.name in self._only_somewhere:
                sharded.put_gradient(sharded.to_use.gradients(sharded.take_gradient()))
        self.reset()

    @property
    def _is_idle(self) -> bool:
        """Whether the backward has left all gradients as they are to be stored, as on one
        device.
        """
        waits = self._buckets or self._rest or self._unused
        return not (waits or self._seen or self.held)

    def _is_complete(self, sharded: ShardedParameter) -> bool:
        """Whether the backward leaves the parameter's gradient as it is to be stored."""
        return sharded.plan.is_fetched or sharded.is_used_in_place

    def _agree(self) -> None:
        """Find out which gradients exist on any device, and build buckets in the order in which the
        first device made them. Collective.
        """
        self._buckets = []
        if not self._parameters:
            # A stage of frozen layers.
            return

        is_here = [int(sharded.has_gradient) for sharded in self._parameters]
        is_missing = [1 - here for here in is_here]
        table = torch.tensor([is_here, is_missing], device=self._parameters[0].device)
        used, missing = self._mesh.all_devices.all_reduce(table, "max").tolist()

        used_names: set[str] = set()
        only_somewhere: set[str] = set()
        for sharded, is_used, lacks in zip(self._parameters, used, missing, strict=True):
            if is_used:
                used_names.add(sharded.name)
            if is_used and lacks:
                only_somewhere.add(sharded.name)
        self._only_somewhere = frozenset(only_somewhere)

        in_order = self._in_order(self._parameters)
        self._unused = [sharded for sharded in in_order if sharded.name not in used_names]
        self._build(sharded for sharded in in_order if sharded.name in used_names)

    def _in_order(self, parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
        """Sort parameters by when the first device's backward made their gradients; those without a
        gradient there come last. Collective.
        """
        is_first_device = not any(self._mesh.coordinate)
        positions = [-1] * len(parameters)
        if is_first_device:
            seen = {name: index for index, name in enumerate(self._seen)}
            for index, sharded in enumerate(parameters):
                positions[index] = seen.get(sharded.name, len(seen) + index)

        # -1 of all other devices is smaller than the first device's.
        table = torch.tensor(positions, device=parameters[0].device)
        positions = self._mesh.all_devices.all_reduce(table, "max").tolist()
        indices = sorted(range(len(positions)), key=positions.__getitem__)
        return [parameters[index] for index in indices]

    def _build(self, parameters: Iterable[ShardedParameter]) -> None:
        """Add buckets of gradients of one kind each, ordered by when their last gradient is
        made. Gradients that need no sum, or another collective, are in no bucket.

        Args:
            parameters: in the order in which their gradients are made.
        """
        parameters = list(parameters)
        all_bytes = sum(sharded.used_bytes for sharded in parameters)
        limit = bucket_limit(all_bytes, self._bucket_bytes)

        # By kind: (position, parameter) of the bucket that is not full yet. Closed ones have the
        # position of their last gradient.
        open_buckets: dict[tuple, list[tuple[int, ShardedParameter]]] = {}
        closed: list[tuple[int, Bucket]] = []

        def close(key: tuple) -> None:
            members = open_buckets.pop(key)
            last_position, _ = members[-1]
            bucket_parameters = [sharded for _, sharded in members]
            bucket = Bucket(bucket_parameters, self._only_somewhere, self._scale)
            closed.append((last_position, bucket))

        for position, sharded in enumerate(parameters):
            sums = sharded.to_use.gradient_sums
            if not sums:
                # Its gradient needs no sum, or another collective than sums.
                if not self._is_complete(sharded) or sharded.name in self._only_somewhere:
                    self._rest.append(sharded)
                continue
            kinds = tuple((gradient_sum.axis, gradient_sum.dim is None) for gradient_sum in sums)
            key = (sharded.reduce_dtype, sharded.device, kinds)
            members = open_buckets.setdefault(key, [])
            members.append((position, sharded))
            if sum(member.used_bytes for _, member in members) >= limit:
                close(key)
        for key in list(open_buckets):
            close(key)

        closed.sort(key=lambda item: item[0])
        assert self._buckets is not None
        self._buckets += [bucket for _, bucket in closed]


@dataclass(frozen=True)
class Replicas:
    """How ranks average the gradients of steps of their own."""

    # All of these ranks.
    mesh: MeshComm

    # Returns the elementwise maximum of integers over all ranks. Uses a group of its own, because
    # ranks may have started different buckets.
    agree: Callable[[Sequence[int]], list[int]]


# Kinds of gradients on a rank; the largest of all ranks is the kind of their sum.
_NO_GRADIENT = 0
_SPARSE = 1
_DENSE = 2


class ReplicaReducer(GradientReducer):
    """Averages gradients over ranks that each run a step of their own.

    Gradients may be made on some ranks alone, in any order, several times in a backward (reentrant
    checkpoints), and by several backwards of a step.
    """

    def __init__(
        self, replicas: Replicas, parameters: Sequence[ShardedParameter], bucket_bytes: int
    ) -> None:
        super().__init__(replicas.mesh, parameters, bucket_bytes)
        self._scale = 1.0 / math.prod(replicas.mesh.shape)
        self._agree_on = replicas.agree

        # A bucket is made when any rank has a gradient for it.
        self._buckets = []
        self._unused = list(self._parameters)

    @property
    def has_begun(self) -> bool:
        """Whether a backward has made gradients that wait for `finish`."""
        return bool(self._seen)

    def mark_ready(self, name: str) -> None:
        """Record that the local gradient of `name` is complete, as `GradientReducer` does.

        A gradient that is made once more after its bucket has started goes into a second one.
        """
        if name not in self._seen:
            super().mark_ready(name)

    def finish(self, completed: Completed | None = None) -> None:
        """Reduce the remaining gradients, wait for all, and store every one in its parameter;
        nothing while `enabled` is False.

        A parameter for which no rank has a gradient keeps the gradient that it has.

        Args:
            completed: as of `finish_buckets`; not called on one rank, nor if gradients are sparse
                or were made twice.
        """
        if not self.enabled or not self._parameters:
            return
        assert self._buckets is not None
        if self._mesh.all_devices.size == 1:
            # The only rank's gradients are the means already.
            for sharded in self._parameters:
                if sharded.link is not None and sharded.has_local_gradient:
                    sharded.put_gradient(sharded.take_gradient())
            self.reset()
            return

        kinds, is_late = self._agree_on_kinds()
        agreed = list(zip(self._parameters, kinds, strict=True))
        required = {sharded.name for sharded, kind in agreed if kind}
        late = [s for s, flag in zip(self._parameters, is_late, strict=True) if flag]
        late_gradients = [sharded.take_gradient() for sharded in late]

        # Buckets of earlier steps come first, because ranks that had all gradients of one have
        # started it. Then all ranks agree on new ones.
        running = self._start(self._buckets, required)
        new = [sharded for sharded in self._unused if sharded.name in required]
        if new:
            self._unused = [s for s in self._unused if s.name not in required]
            num_known = len(self._buckets)
            self._build(self._in_order(new))
            running += self._start(self._buckets[num_known:], required)

        # Late gradients are added to the sums, and sparse ones are converted: gradients are not
        # complete when their buckets are.
        are_complete = not late and _SPARSE not in kinds
        finish_buckets(running, completed if are_complete else None)

        for sharded, grad in zip(late, late_gradients, strict=True):
            sharded.add_gradient(grad)
        if late:
            second = Bucket(late, {sharded.name for sharded in late}, self._scale)
            second.start()
            finish_buckets([second])

        for sharded, kind in agreed:
            if kind == _SPARSE:
                self._make_sparse(sharded)
        self.reset()

    def _agree_on_kinds(self) -> tuple[list[int], list[int]]:
        """Return for each parameter the kind of its summed gradient, and whether on any rank the
        gradient was made once more after its bucket had started. Collective.
        """
        kinds: list[int] = []
        is_late: list[int] = []
        for sharded in self._parameters:
            has_local = sharded.has_local_gradient
            if not (sharded.is_taken or has_local):
                kinds.append(_NO_GRADIENT)
            else:
                kinds.append(_SPARSE if sharded.is_sparse else _DENSE)
            is_late.append(sharded.is_taken and has_local)

        largest = self._agree_on([*kinds, *is_late])
        return largest[: len(kinds)], largest[len(kinds) :]

    def _make_sparse(self, sharded: ShardedParameter) -> None:
        """Make a summed gradient sparse that was sparse on every rank that made one.

        It has the indices of all ranks, as under DDP. Collective.
        """
        device = sharded.parameter.device
        axis = self._mesh.all_devices
        sharded.make_sparse(_rows_anywhere(sharded.sparse_rows, sharded.shape[0], axis, device))

    def _start(self, buckets: "Sequence[Bucket]", required: Set[str]) -> "list[Bucket]":
        """Start those of `buckets` that have a required gradient, and return these."""
        running = []
        for bucket in buckets:
            names = [sharded.name for sharded in bucket.parameters]
            if required.isdisjoint(names):
                continue
            running.append(bucket)
            if bucket.running is None:
                # One that has started already has all that it needs.
                bucket.needed = required
                bucket.start()
        return running


def average(
    parameters: Iterable[nn.Parameter], axis: AxisComm, device: torch.device, bucket_bytes: int
) -> None:
    """Replace complete gradients by their mean over `axis`, whose devices store the same shards.

    As under DDP, a gradient that some devices lack is zero there, and a parameter without a
    gradient on any device keeps none. A gradient that is sparse wherever there is one stays so.
    Collective over `axis`; nothing on one device.

    Args:
        parameters: in the same order on all devices.
        axis: between the replicas.
        device: of the collectives; some gradients may be in host memory.
        bucket_bytes: a bucket is closed when it has this many bytes.
    """
    parameters = list(parameters)
    kinds = _kinds_anywhere(parameters, axis)
    # Those whose gradient is sparse, with the indices that it has here.
    sparse_rows: list[tuple[nn.Parameter, Tensor | None]] = []
    for p, kind in zip(parameters, kinds, strict=True):
        if kind == _SPARSE and p.numel():
            sparse_rows.append((p, None if p.grad is None else rows_of(p.grad)))

    averaged: list[tuple[list[nn.Parameter], tuple[int, ...], Pending]] = []
    for bucket in _buckets_to_average(parameters, kinds, bucket_bytes):
        flat = flat_gradients(list(map(_gradient_or_zeros, bucket)), 1 / axis.size).to(device)
        sizes = chunk_sizes(flat.numel(), axis.size)
        pending = axis.start_exchange(flat, sizes, [sizes[axis.index]] * axis.size)
        averaged.append((bucket, sizes, pending))

        # The gradients are in the exchange: not twice in memory.
        for p in bucket:
            p.grad = None

    gathered: list[tuple[list[nn.Parameter], Pending]] = []
    for bucket, sizes, pending in averaged:
        # Summed in one order. An all_reduce's order depends on the offset in the bucket: copies of
        # a parameter on several ranks of a replica are at different offsets there, and would not
        # stay equal bit by bit.
        local = reduce(torch.add, pending.wait().view(axis.size, sizes[axis.index]))
        gathered.append((bucket, axis.start_all_gather(local, 0, sum(sizes))))

    for bucket, pending in gathered:
        means = pending.wait().split([p.numel() for p in bucket])
        for p, mean in zip(bucket, means, strict=True):
            p.grad = mean.view(p.shape).to(p.device)

    for p, rows in sparse_rows:
        assert p.grad is not None
        rows_of_all = _rows_anywhere(rows, p.shape[0], axis, device)
        p.grad = sparse_copy(p.grad, rows_of_all.to(p.device))


def _kinds_anywhere(parameters: list[nn.Parameter], axis: AxisComm) -> list[int]:
    """Return the kind of each parameter's gradient over all devices of `axis`. Collective.

    On one device there is nothing to average: no kinds.
    """
    if axis.size == 1:
        return [_NO_GRADIENT] * len(parameters)
    kinds: list[int] = []
    for p in parameters:
        if p.grad is None:
            kinds.append(_NO_GRADIENT)
        else:
            kinds.append(_SPARSE if p.grad.is_sparse else _DENSE)
    return all_reduce_max(kinds, axis.group)


def _rows_anywhere(
    rows: Tensor | None, num_rows: int, axis: AxisComm, device: torch.device
) -> Tensor:
    """Return which indices of the first dim a sparse gradient has on any device of `axis`, bool
    [num_rows]. Collective.

    Args:
        rows: those that it has here; None: this device has no gradient.
        num_rows: size of the first dim.
        axis: of the devices.
        device: of the collective.
    """
    if rows is None:
        rows = torch.zeros(num_rows, dtype=torch.bool, device=device)
    return axis.all_reduce(rows.int().to(device), "max").bool()


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return the local gradient as a dense tensor."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _buckets_to_average(
    parameters: list[nn.Parameter], kinds: list[int], bucket_bytes: int
) -> list[list[nn.Parameter]]:
    """Divide the parameters with elements and a gradient on any device into buckets of one dtype,
    of about `bucket_bytes` each.

    Args:
        kinds: of each parameter `_NO_GRADIENT`, `_DENSE` or `_SPARSE`.
    """
    buckets: dict[tuple[torch.dtype, int], list[nn.Parameter]] = {}
    total_bytes = 0
    for p, kind in zip(parameters, kinds, strict=True):
        if kind != _NO_GRADIENT and p.numel():
            buckets.setdefault((p.dtype, total_bytes // bucket_bytes), []).append(p)
            total_bytes += p.numel() * p.element_size()
    return list(buckets.values())
