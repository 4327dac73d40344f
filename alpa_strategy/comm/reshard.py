"""Resharding at run time: one autograd node that redistributes a local tensor from one dual layout
to another.

The steps are those of `sharding/redistribute.py`. Nothing is saved for backward: the gradient takes
the steps in reverse.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.comm.mesh import AxisComm, MeshComm, Pending
from alpa_strategy.comm.saved_tensor_hooks import active_regather
from alpa_strategy.ir.placement import (
    REPLICATE,
    DualLayout,
    Layout,
    chunk_range,
    dual_layout_to_str,
    shard,
)
from alpa_strategy.sharding.redistribute import reshard_steps, sums_of


@dataclass(frozen=True)
class LocalStep:
    """One mesh axis changes from `src` to `dst`."""

    axis: int
    src: Placement
    dst: Placement
    # of the tensor that the devices of this device's group on the axis store together
    shape: tuple[int, ...]


class Reshard:
    """Callable on a local tensor: values go `src` -> `dst`, gradients `dst.grad` -> `src.grad`.

    Args:
        src, dst: dual layouts, one dual placement per mesh axis.
        shape: global shape of the tensor.
        mesh: mesh of the tensor; all of its devices must call.
        sums_in_fp32: whether gradients in half precision are summed in float32.
        cast: dtype in which values are moved; gradients keep the dtype of their sum.
        subject: name of the tensor in traces, such as a parameter's.

    Attributes:
        forward_steps, backward_steps: what is done in each direction.
        value_sums, gradient_sums: the sums over devices in each direction, if it consists of sums
            alone; else ().
    """

    def __init__(
        self,
        src: DualLayout,
        dst: DualLayout,
        shape: Sequence[int],
        mesh: MeshComm,
        sums_in_fp32: bool = False,
        cast: torch.dtype | None = None,
        subject: str = "",
    ) -> None:
        self.subject = subject
        self.src = src
        self.dst = dst
        self.shape = tuple(shape)
        self._sums_in_fp32 = sums_in_fp32
        self._cast = cast
        self._mesh = mesh

        forward: list[LocalStep] = []
        backward: list[LocalStep] = []
        current = list(src)
        for step in reshard_steps(src, dst, mesh.shape):
            # The group's tensor: sharded as before on the other axes, full on this one.
            others = [dual.value for dual in current]
            others[step.axis] = Replicate()
            group_shape = Layout(others).local_shape(self.shape, mesh.shape, mesh.coordinate)
            current[step.axis] = step.dst
            if mesh.shape[step.axis] == 1:
                continue
            # A step may be idle in one direction: Invariant -> Replicate moves no values, but sums
            # gradients.
            if step.src.value != step.dst.value:
                forward.append(LocalStep(step.axis, step.src.value, step.dst.value, group_shape))
            if step.dst.grad != step.src.grad:
                backward.append(LocalStep(step.axis, step.dst.grad, step.src.grad, group_shape))

        self.forward_steps = tuple(forward)
        self.backward_steps = tuple(reversed(backward))
        self.value_sums = _sums(self.forward_steps, mesh)
        self.gradient_sums = _sums(self.backward_steps, mesh)

    @property
    def is_idle(self) -> bool:
        """Whether values and gradients stay as they are: an axis of one device, for example."""
        has_steps = bool(self.forward_steps or self.backward_steps)
        return self._cast is None and not has_steps

    def __call__(self, tensor: Tensor, coming: Pending | None = None) -> Tensor:
        """Return the local tensor under `dst.value` for the one under `src.value`.

        Args:
            coming: the result of `start` for the same tensor, if that was called.
        """
        has_steps = bool(self.forward_steps or self.backward_steps)
        is_recorded = tensor.requires_grad and torch.is_grad_enabled()
        if not is_recorded or not has_steps:
            return self.values(tensor) if coming is None else coming.wait()
        result = _ReshardNode.apply(tensor, self, False, coming)
        hooks = active_regather()
        if hooks is not None:
            hooks.note(self, tensor, result)
        return result

    def values(self, tensor: Tensor) -> Tensor:
        """Run the forward alone, without autograd."""
        return _run(self.forward_steps, self._to_cast(tensor), self._mesh)

    def start(self, tensor: Tensor) -> Pending:
        """Launch `values`.

        The first collective is launched if it is an all-gather, or if the forward is one sum. All
        else is done when the result is waited for.
        """
        tensor = self._to_cast(tensor)
        match self.forward_steps:
            case (LocalStep(axis=axis, src=Shard(dim=dim), dst=Replicate(), shape=shape), *rest):
                first = self._mesh.axes[axis].start_all_gather(tensor, dim, shape[dim])
                if not rest:
                    return first
                return Pending(lambda: _run(rest, first.wait(), self._mesh))
        # A sum of booleans is no boolean.
        if len(self.value_sums) == 1 and tensor.dtype != torch.bool:
            return self.value_sums[0].start(tensor)
        return Pending(lambda: self.values(tensor))

    def gradients(self, grad: Tensor) -> Tensor:
        """Run the backward alone: local gradient under `dst.grad` -> under `src.grad`."""
        return _run(self.backward_steps, self._to_sum(grad), self._mesh)

    def start_gradients(self, grad: Tensor) -> Pending | None:
        """Launch `gradients` if it is one sum; else return None."""
        if len(self.gradient_sums) != 1:
            return None
        return self.gradient_sums[0].start(self._to_sum(grad))

    def _to_cast(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the dtype in which it is communicated."""
        return tensor if self._cast is None else tensor.to(self._cast)

    def _to_sum(self, grad: Tensor) -> Tensor:
        """`grad` in the dtype in which it is summed."""
        if not self._sums_in_fp32:
            return grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32))

    def __repr__(self) -> str:
        return (
            f"Reshard({dual_layout_to_str(self.src)} -> {dual_layout_to_str(self.dst)},"
            f" {list(self.shape)})"
        )


def stacked(tensor: Tensor, axis: AxisComm) -> Tensor:
    """Return `tensor` of every device on `axis`, [devices, ...]; their gradients are summed."""
    mesh = MeshComm((axis.size,), (axis.index,), (axis,), axis, tuple(range(axis.size)))
    gather = Reshard((shard(0),), (REPLICATE,), (axis.size, *tensor.shape), mesh)
    return gather(tensor[None])


class _ReshardNode(torch.autograd.Function):
    """A resharding, or its transpose if `swapped`.

    Its backward is such a node too, with the directions swapped. Resharding is linear, so
    derivatives of any order are right.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, reshard: Reshard, swapped: bool, coming: Pending | None = None
    ) -> Tensor:
        """Return the local tensor in the other layout, always a new tensor object.

        Args:
            tensor: a local tensor in the layout `reshard.src`; if `swapped`, a gradient in that of
                `reshard.dst`.
            reshard: the resharding.
            swapped: whether to run its transpose.
            coming: the result if its communication was launched already; it is waited for.
        """
        ctx.reshard = reshard
        ctx.swapped = swapped
        ctx.entrance = _entrance_of(tensor)
        ctx.shape = tensor.shape
        ctx.dtype = tensor.dtype
        if coming is not None:
            result = coming.wait()
        else:
            result = reshard.gradients(tensor) if swapped else reshard.values(tensor)
        # Autograd must not be given an input as the result.
        return tensor.view_as(tensor) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of `tensor`: that of the result, redistributed the other way.

        If the tensor is a parameter and the sum over devices can be launched, it is, and the
        gradient is zero: `Entrance.backward` adds the sum later.
        """
        if ctx.entrance is not None and not torch.is_grad_enabled():
            coming = ctx.reshard.start_gradients(grad)
            if coming is not None:
                ctx.entrance.coming.append(coming)
                ctx.entrance.sums.add(coming, grad.nbytes)
                # The entrance adds the sum; until then the gradient is zero.
                zeros = grad.new_zeros((), dtype=ctx.dtype).expand(ctx.shape)
                return zeros, None, None, None
        return _ReshardNode.apply(grad, ctx.reshard, not ctx.swapped), None, None, None


# --- Gradients of parameters, reduced while the backward goes on.
#
# Of all nodes that are ready, autograd runs the one that was created last. So a node through which
# a parameter enters the step before its first op waits for its gradient's sums only when the
# backward has no other work. Until then the gradient that autograd passes to it, through casts and
# views, is zero.


class Sums:
    """Sums of gradients in flight during a backward, of at most `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._in_flight: deque[tuple[Pending, int]] = deque()

    def add(self, coming: Pending, num_bytes: int) -> None:
        """Record a sum that was launched; wait for the oldest ones if they have too many bytes.

        Args:
            coming: the sum.
            num_bytes: of it.
        """
        self._in_flight.append((coming, num_bytes))
        self._bytes += num_bytes
        while self._bytes > self._most_bytes:
            oldest, size = self._in_flight.popleft()
            oldest.wait()
            self._bytes -= size


class Entrance(torch.autograd.Function):
    """A parameter enters a step, before its first op.

    Its backward waits for the sums of the parameter's gradients, and adds them.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sums: Sums) -> Tensor:
        """Return a view of the parameter.

        Args:
            parameter: enters the step.
            sums: records the sums of its gradients that are launched in the backward.
        """
        # Read by `SavedTensorHooks`.
        ctx.is_made_of_parameters = True
        ctx.sums = sums
        # Sums of the parameter's gradients in flight.
        ctx.coming = []
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient plus the sums of it that are in flight, which are waited for."""
        in_flight = ctx.coming
        ctx.coming = []
        total = grad
        for coming in in_flight:
            total = total + coming.wait().view(grad.shape).to(grad.dtype)
        return total, None


def _entrance_of(tensor: Tensor) -> Any:
    """Return the `Entrance` node of the parameter of which `tensor` is a cast or view; None for
    others.
    """
    node: Any = tensor.grad_fn
    while node is not None and type(node).__name__ in (
        "ToCopyBackward0",
        "ViewBackward0",
        "AliasBackward0",
    ):
        node = node.next_functions[0][0]
    return node if hasattr(node, "sums") else None


@dataclass(frozen=True)
class Sum:
    """A sum over the devices of a mesh axis, or of the full mesh."""

    axis: AxisComm
    # the dim of which this device gets its shard of the sum; None: it gets the full sum
    dim: int | None

    def start(self, tensor: Tensor) -> Pending:
        """Launch the sum of `tensor`, which is not changed."""
        if self.dim is not None:
            return self.axis.start_reduce_scatter_of(tensor, self.dim)
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self.axis.start_all_reduce(copy)


def _sums(steps: tuple[LocalStep, ...], mesh: MeshComm) -> tuple[Sum, ...]:
    """Return the sums over devices that the resharding `steps` are, one per step or one over all
    axes at once; () if they are anything else.
    """
    sums = []
    for axes, dim in sums_of([(step.axis, step.src, step.dst) for step in steps], mesh.shape):
        devices = mesh.axes[axes[0]] if len(axes) == 1 else mesh.all_devices
        sums.append(Sum(devices, dim))
    return tuple(sums)


def _run(steps: Sequence[LocalStep], tensor: Tensor, mesh: MeshComm) -> Tensor:
    """Take the steps one after the other."""
    for step in steps:
        tensor = _redistribute(tensor, step, mesh.axes[step.axis])
    return tensor


def _redistribute(tensor: Tensor, step: LocalStep, axis: AxisComm) -> Tensor:
    """Return the local tensor redistributed on one axis, from `step.src` to `step.dst`.

    May be `tensor` itself; else it shares no memory with it. Collective on `axis` unless the target
    is a part of the source.
    """
    match step.src, step.dst:
        case Shard(dim=gathered), Shard(dim=split):
            return axis.all_to_all(tensor, gathered, step.shape[gathered], split)
        case Shard(dim=dim), Replicate():
            return axis.all_gather(tensor, dim, step.shape[dim])
        case Partial(), Replicate():
            return axis.all_reduce(tensor)
        case Partial(), Shard(dim=dim):
            # Half of an all-reduce's bytes.
            return axis.reduce_scatter(tensor, dim)
        case Replicate(), Shard(dim=dim):
            start, stop = chunk_range(step.shape[dim], axis.size, axis.index)
            # A copy: a view would keep the full tensor alive as long as the shard.
            return tensor.narrow(dim, start, stop - start).clone(
                memory_format=torch.contiguous_format
            )
        case Replicate(), Partial():
            return tensor if axis.index == 0 else torch.zeros_like(tensor)
        case Shard(dim=dim), Partial():
            start, stop = chunk_range(step.shape[dim], axis.size, axis.index)
            full_shape = (*tensor.shape[:dim], step.shape[dim], *tensor.shape[dim + 1 :])
            full = tensor.new_zeros(full_shape)
            full.narrow(dim, start, stop - start).copy_(tensor)
            return full
    raise AssertionError(f"no redistribution {step.src} -> {step.dst}")
