"""Resharding at run time: one autograd node that brings a local tensor from one dual layout to
another, and back.

The steps are `sharding.redistribute`'s. Nothing is saved for the backward: the gradient takes the
steps in reverse.
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
from alpa_strategy.sharding.redistribute import reshard_steps


@dataclass(frozen=True)
class LocalStep:
    """One axis changes from `src` to `dst`; `shape` is what this device's axis group holds
    together, exactly.
    """

    axis: int
    src: Placement
    dst: Placement
    shape: tuple[int, ...]


class Reshard:
    """Callable on a local tensor: values go `src` -> `dst`, gradients `dst.grad` -> `src.grad`.

    Args:
        src, dst: dual layouts, one dual placement per mesh axis.
        shape: global shape of the tensor.
        mesh: the mesh that the tensor lies on; all its devices must call.
        sums_in_fp32: of gradients in half precision. cast: dtype in which values are moved;
            gradients stay as summed.

    `forward_steps` and `backward_steps` are what is done in each direction, `value_sums` and
    `gradient_sums` the sums over devices that this is; () where it is something else.
    """

    def __init__(
        self,
        src: DualLayout,
        dst: DualLayout,
        shape: Sequence[int],
        mesh: MeshComm,
        sums_in_fp32: bool = False,
        cast: torch.dtype | None = None,
    ) -> None:
        self.src, self.dst, self.shape = src, dst, tuple(shape)
        self._sums_in_fp32, self._cast = sums_in_fp32, cast
        self._mesh = mesh
        forward: list[LocalStep] = []
        backward: list[LocalStep] = []
        current = list(src)
        for step in reshard_steps(src, dst, mesh.shape):
            others = [
                Replicate() if axis == step.axis else dual.value
                for axis, dual in enumerate(current)
            ]
            seen = Layout(others).local_shape(self.shape, mesh.shape, mesh.coordinate)
            current[step.axis] = step.dst
            if mesh.shape[step.axis] == 1:
                continue
            # A step may be idle one way: Invariant -> Replicate moves no values, its gradients are
            # summed.
            if step.src.value != step.dst.value:
                forward.append(LocalStep(step.axis, step.src.value, step.dst.value, seen))
            if step.dst.grad != step.src.grad:
                backward.append(LocalStep(step.axis, step.dst.grad, step.src.grad, seen))
        self.forward_steps, self.backward_steps = tuple(forward), tuple(reversed(backward))
        self.value_sums, self.gradient_sums = (
            _sums(self.forward_steps, mesh),
            _sums(self.backward_steps, mesh),
        )

    @property
    def is_idle(self) -> bool:
        """Whether values and gradients stay as they are: an axis of one device, say."""
        return self._cast is None and not (self.forward_steps or self.backward_steps)

    def __call__(self, tensor: Tensor, coming: Pending | None = None) -> Tensor:
        """tensor: the local tensor under `src.value` -> the local tensor under `dst.value`.

        Args:
            coming: what `start` of the same tensor gave.
        """
        if not (tensor.requires_grad and torch.is_grad_enabled()) or not (
            self.forward_steps or self.backward_steps
        ):
            return self.values(tensor) if coming is None else coming.wait()
        result = _ReshardNode.apply(tensor, self, False, coming)
        regather = active_regather()
        if regather is not None:
            regather.note(self, tensor, result)
        return result

    def values(self, tensor: Tensor) -> Tensor:
        """The forward alone, without autograd."""
        return _run(
            self.forward_steps, tensor if self._cast is None else tensor.to(self._cast), self._mesh
        )

    def start(self, tensor: Tensor) -> Pending:
        """`values`, without waiting where it begins with a gathering or is a sum; what is left is
        done by `wait`.
        """
        tensor = tensor if self._cast is None else tensor.to(self._cast)
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
        """The backward alone: local gradient under `dst.grad` -> under `src.grad`."""
        return _run(self.backward_steps, self._to_sum(grad), self._mesh)

    def start_gradients(self, grad: Tensor) -> Pending | None:
        """`gradients`, without waiting, where it is one sum; else None."""
        return (
            self.gradient_sums[0].start(self._to_sum(grad))
            if len(self.gradient_sums) == 1
            else None
        )

    def _to_sum(self, grad: Tensor) -> Tensor:
        return (
            grad.to(torch.promote_types(grad.dtype, torch.float32)) if self._sums_in_fp32 else grad
        )

    def __repr__(self) -> str:
        return (
            f"Reshard({dual_layout_to_str(self.src)} -> {dual_layout_to_str(self.dst)},"
            f" {list(self.shape)})"
        )


def stacked(tensor: Tensor, axis: AxisComm) -> Tensor:
    """`tensor` of every device on `axis`, [devices, ...]; gradients of all of them are summed."""
    mesh = MeshComm((axis.size,), (axis.index,), (axis,), axis, tuple(range(axis.size)))
    return Reshard((shard(0),), (REPLICATE,), (axis.size, *tensor.shape), mesh)(tensor[None])


class _ReshardNode(torch.autograd.Function):
    """The backward is such a node too, directions swapped: resharding is linear, and derivatives of
    any order right.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, reshard: Reshard, swapped: bool, coming: Pending | None = None
    ) -> Tensor:
        ctx.reshard, ctx.swapped = reshard, swapped
        ctx.entrance, ctx.shape, ctx.dtype = _entrance_of(tensor), tensor.shape, tensor.dtype
        if coming is not None:
            result = coming.wait()
        else:
            result = reshard.gradients(tensor) if swapped else reshard.values(tensor)
        return tensor.view_as(tensor) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.entrance is not None and not torch.is_grad_enabled():
            coming = ctx.reshard.start_gradients(grad)
            if coming is not None:
                ctx.entrance.coming.append(coming)
                ctx.entrance.sums.add(coming, grad.nbytes)
                return grad.new_zeros((), dtype=ctx.dtype).expand(ctx.shape), None, None, None
        return _ReshardNode.apply(grad, ctx.reshard, not ctx.swapped), None, None, None


# --- Gradients of parameters on their way. Autograd takes of all nodes that are ready the one that
# was made last. So a node through which a parameter has entered the step before all else waits for
# its sums when the backward has no other work. Until then what passes for its gradient, through
# casts and views, is zero.


class Sums:
    """Sums of gradients that have begun in a backward: of at most `most_bytes`, the oldest are
    waited for.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._begun: deque[tuple[Pending, int]] = deque()

    def add(self, coming: Pending, num_bytes: int) -> None:
        """One more has begun."""
        self._begun.append((coming, num_bytes))
        self._bytes += num_bytes
        while self._bytes > self._most_bytes:
            oldest, size = self._begun.popleft()
            oldest.wait()
            self._bytes -= size


class Entrance(torch.autograd.Function):
    """A parameter enters a step, before its first op. `is_made_of_parameters` is for `regather`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sums: Sums) -> Tensor:
        ctx.is_made_of_parameters, ctx.sums, ctx.coming = True, sums, []
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        begun, ctx.coming = ctx.coming, []
        return sum(
            (coming.wait().view(grad.shape).to(grad.dtype) for coming in begun), start=grad
        ), None


def _entrance_of(tensor: Tensor) -> Any:
    """The node by which a parameter has entered of which `tensor` is nothing but a cast or a view;
    None for others.
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
    """Over an axis, or over all at once; `dim`: of which this device keeps its part, None: it keeps
    the whole.
    """

    axis: AxisComm
    dim: int | None

    def start(self, tensor: Tensor) -> Pending:
        """The sum of `tensor`, which stays as it is."""
        if self.dim is not None:
            return self.axis.start_reduce_scatter_of(tensor, self.dim)
        return self.axis.start_all_reduce(
            tensor.detach().clone(memory_format=torch.contiguous_format)
        )


def _sums(steps: tuple[LocalStep, ...], mesh: MeshComm) -> tuple[Sum, ...]:
    """See `Reshard`: one for each step, or one over all axes at once."""
    for step in steps:
        if step.src != Partial() or not isinstance(step.dst, Replicate | Shard):
            return ()
    covered = {step.axis for step in steps if step.dst == Replicate()}
    is_of_all = all(axis in covered or size == 1 for axis, size in enumerate(mesh.shape))
    if len(covered) == len(steps) > 1 and is_of_all:
        return (Sum(mesh.whole, None),)
    return tuple(Sum(mesh.axes[step.axis], getattr(step.dst, "dim", None)) for step in steps)


def _run(steps: Sequence[LocalStep], tensor: Tensor, mesh: MeshComm) -> Tensor:
    for step in steps:
        tensor = _redistribute(tensor, step, mesh.axes[step.axis])
    return tensor


def _redistribute(tensor: Tensor, step: LocalStep, axis: AxisComm) -> Tensor:
    """One axis, one direction."""
    match step.src, step.dst:
        case Shard(dim=gathered), Shard(dim=split):
            return axis.all_to_all(tensor, gathered, step.shape[gathered], split)
        case Shard(dim=dim), Replicate():
            return axis.all_gather(tensor, dim, step.shape[dim])
        case Partial(), Replicate():
            return axis.all_reduce(tensor)
        case Partial(), Shard(
            dim=dim
        ):  # the sum and the cut at once: half of an all_reduce's bytes
            return axis.reduce_scatter(tensor, dim)
        case Replicate(), Shard(dim=dim):
            start, stop = chunk_range(step.shape[dim], axis.size, axis.index)
            # A copy: a view would keep the whole tensor alive for as long as the shard lives.
            return tensor.narrow(dim, start, stop - start).clone(
                memory_format=torch.contiguous_format
            )
        case Replicate(), Partial():
            return tensor if axis.index == 0 else torch.zeros_like(tensor)
        case Shard(dim=dim), Partial():
            start, stop = chunk_range(step.shape[dim], axis.size, axis.index)
            whole = tensor.new_zeros(
                (*tensor.shape[:dim], step.shape[dim], *tensor.shape[dim + 1 :])
            )
            whole.narrow(dim, start, stop - start).copy_(tensor)
            return whole
    raise AssertionError(f"no redistribution {step.src} -> {step.dst}")
