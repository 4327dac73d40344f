"""ShardedParameter: one parameter on one mesh: what it is as a whole, which part this device holds,
how it moves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.comm.mesh import MeshComm, Pending
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, Layout, shard, value_layout
from alpa_strategy.ir.plan import ParameterPlan, Storage
from alpa_strategy.runtime.host_parameters import HostLink, host_copy


class Chunk(NamedTuple):
    """A box of a whole tensor: where it begins, and its elements (a view of this process's
    memory).
    """

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(eq=False)
class ShardedParameter:
    """The first fields are for good; those with a default are the state of one training step."""

    name: str  # the step's first name of it
    plan: ParameterPlan  # how it is stored; its layout has dims of `shape`
    parameter: nn.Parameter
    mesh: MeshComm
    shape: torch.Size  # of the whole in the step
    # of the whole in the module: `shape`, or with its first two dims in one (a segmented weight)
    module_shape: torch.Size
    # to_use, to_whole: from storage to where the step uses it, and to the whole on every device
    to_use: Reshard
    to_whole: Reshard
    is_gathered_once: (
        bool  # the step uses a copy on the device, `leaf`, which is made once per step
    )
    link: HostLink | None = None  # of a parameter in host memory, once it is there
    # autograd's node that adds to `grad`; kept alive, as it carries our hook
    accumulator: torch.autograd.graph.Node | None = None
    gathering: Pending | None = None  # of the copy, begun with the step
    leaf: Tensor | None = (
        None  # the gathered copy, from the first use in a step to the optimizer's step
    )
    # dtypes that programs read it in; where they are one, the copy is gathered in it
    read_in: frozenset[torch.dtype] = frozenset()
    partial: Tensor | None = (
        None  # the gradient of a copy in another dtype, which this step has made before
    )
    complete: Tensor | None = (
        None  # an earlier, already reduced gradient, set aside while a new one is made
    )
    is_complete: bool = False  # whether `parameter.grad` was left by a reduction
    is_taken: bool = False  # whether this backward's gradient is on its way through a reduction
    # of a gradient that was sparse: which rows it has, bool [rows]. It is summed as a dense one.
    sparse_rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        given: ParameterInput,
        plan: ParameterPlan,
        parameter: nn.Parameter,
        mesh: MeshComm,
        replicas: MeshComm | None = None,
    ) -> "ShardedParameter":
        """The module's `parameter` under its plan.

        Args:
            replicas: each rank uses all of it, for a step of its own; gradients are summed over
                this mesh.
        """
        shape = torch.Size(given.meta.shape)
        module_shape = torch.Size(given.module_shape or shape)
        storage = tuple(
            shard(p.dim) if isinstance(p, Shard) else INVARIANT for p in plan.layout
        )  # gradients too
        used = plan.step_layout()
        if (
            replicas is not None
        ):  # whole, its gradient a summand (of a parameter that does not train: nothing)
            used = tuple(
                INVARIANT if mode.storage is Storage.INVARIANT else REPLICATE for mode in plan.modes
            )
        to_use = Reshard(storage, used, shape, replicas or mesh)
        to_whole = Reshard(storage, (INVARIANT,) * len(mesh.shape), shape, mesh)
        once = replicas is None and (
            plan.is_gathered_once or (plan.on_host and not plan.is_fetched)
        )
        return cls(
            given.name,
            plan,
            parameter,
            mesh,
            shape,
            module_shape,
            to_use,
            to_whole,
            is_gathered_once=once,
        )

    @property
    def is_whole(self) -> bool:
        """Whether every device of the mesh holds all of it."""
        return not self.to_whole.forward_steps and self.link is None

    @property
    def is_used_in_place(self) -> bool:
        """Whether the step uses it as it is stored, and the backward leaves its gradient complete
        where it belongs.
        """
        return not (self.is_gathered_once or self.to_use.backward_steps)

    @property
    def device(self) -> torch.device:
        """Where it is used, and its gradients are made."""
        return self.parameter.device if self.link is None else self.link.device

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this device's part, as the module holds it."""
        local = self._local_step_shape
        if self.module_shape == self.shape:
            return local
        return torch.Size(
            (local[0] * local[1], *local[2:])
        )  # [segments, rows, ...] -> [segments * rows, ...]

    @property
    def used_shape(self) -> tuple[int, ...]:
        """Shape of what the step uses here, dims of `shape`."""
        return self._use.local_shape(self.shape, self.mesh.shape, self.mesh.coordinate)

    def in_step(self, tensor: Tensor) -> Tensor:
        """A tensor of `local_shape` in the dims of the step (a view)."""
        return tensor if self.module_shape == self.shape else tensor.view(self._local_step_shape)

    def gather_like(self, tensor: Tensor) -> Tensor:
        """The whole (`module_shape`) of a tensor laid out as this parameter: itself, a moment of
        its optimizer.

        Collective. Tensors of another shape than `local_shape` (step counters) are returned as they
        are.
        """
        if tensor.shape != self.local_shape:
            return tensor
        return self.to_whole.values(self.in_step(tensor.to(self.device))).view(self.module_shape)

    def shard_like(self, whole: Tensor) -> Tensor:
        """This device's part (`local_shape`, a copy) of a tensor of `module_shape`; other shapes as
        they are.
        """
        if whole.shape != self.module_shape:
            return whole
        piece = self._piece(whole, self.plan.layout)
        part = (
            piece.clone(memory_format=torch.contiguous_format)
            if self.link is None
            else host_copy(piece)
        )
        return part.view(self.local_shape)

    def take_whole(self, whole: Tensor, part: Tensor) -> None:
        """Write this device's part of `whole` into `part`, and into a copy that is gathered for the
        step.
        """
        part.copy_(self.shard_like(whole))
        if self.leaf is not None:
            self.leaf.data.copy_(self._piece(whole, self._use))
        else:
            self.drop_copy()

    def drop_copy(self) -> None:
        """The copy that was gathered for a step, or is being gathered, holds old values."""
        if self.gathering is not None:  # the step did not use it
            self.gathering.wait()
        self.leaf = self.gathering = self.partial = None

    def will_be_read_in(self, dtype: torch.dtype) -> None:
        """A program takes the parameter in `dtype`: its own, or what all uses cast it to. The same
        on all devices.
        """
        before, self.read_in = self.gather_dtype, self.read_in | {dtype}
        if self.gather_dtype != before:
            partial = None if self.leaf is None else self.leaf.grad
            self.drop_copy()
            self.partial = partial

    @property
    def gather_dtype(self) -> torch.dtype:
        """Of the step's copy: a cast of every element is the same before the gathering, with fewer
        bytes to move.
        """
        return next(iter(self.read_in)) if len(self.read_in) == 1 else self.parameter.dtype

    def begin_gathering(self, part: Tensor | None = None) -> Pending:
        """The gathering of the step's copy, begun now where it is not under way.

        Args:
            part: a copy on the device of what lies in host memory.
        """
        if self.gathering is None:
            with torch.no_grad():
                part = self.parameter.detach() if part is None else part
                self.gathering = self.to_use.start(self.in_step(part).to(self.gather_dtype))
        return self.gathering

    # Its gradient in a step: the backward adds to `used.grad`, `take_gradient` hands that to a
    # reduction (`is_taken`), `put_gradient` brings the sum (`is_complete`). What was complete
    # before waits in `complete`, and is added to it.

    @property
    def used(self) -> Tensor | None:
        """The tensor whose `.grad` the backward makes: the parameter, or its gathered copy, None
        without a use.
        """
        return self.leaf if self.is_gathered_once else self.parameter

    @property
    def used_bytes(self) -> int:
        """Bytes of the gradient that the backward makes."""
        return torch.Size(self.used_shape).numel() * self.parameter.element_size()

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the sum over devices: a copy's gradients come in its dtype, but fp16 could overflow in
        a sum.
        """
        if self.plan.sums_in_fp32:
            return torch.promote_types(self.parameter.dtype, torch.float32)
        if self.is_gathered_once and self.leaf is not None and self.leaf.dtype == torch.bfloat16:
            return torch.bfloat16
        return self.parameter.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether the backward made one."""
        return self.used is not None and self.used.grad is not None

    def take_gradient(self) -> Tensor:
        """Remove and return what the backward made; zeros in the place of a gradient that is not
        there.
        """
        used, self.is_taken = self.used, True
        if used is None or used.grad is None:
            return self.no_gradient()
        if not self.has_local_gradient:
            self.complete = used.grad
            return self.no_gradient()
        grad, used.grad = used.grad, None
        return self._dense(grad).to(self.reduce_dtype)

    def _dense(self, grad: Tensor) -> Tensor:
        """The gradient with all of its rows; which it had is kept for `make_sparse`."""
        if not grad.is_sparse:
            return grad
        if self.sparse_rows is None:
            self.sparse_rows = torch.zeros(grad.size(0), dtype=torch.bool, device=grad.device)
        self.sparse_rows[grad._indices()[0]] = True
        return grad.to_dense()

    def no_gradient(self) -> Tensor:
        """Zeros, what this device adds where another has a gradient."""
        device = self.device if self.is_gathered_once else self.parameter.device
        return torch.zeros(self.used_shape, dtype=self.reduce_dtype, device=device)

    def put_gradient(self, grad: Tensor) -> None:
        """Keep a reduced gradient, in addition to an earlier one that the user has not cleared.

        In host memory it is there after `HostLink.settle`.
        """
        grad = grad.view_as(self.parameter).to(self.parameter.dtype)
        if self.link is not None:
            grad = self.link.send(grad)
            if self.complete is not None or self.parameter.grad is not None:
                self.link.settle()
        if self.complete is not None:
            grad, self.complete = grad + self._dense(self.complete), None
        elif self.is_gathered_once and self.parameter.grad is not None:
            grad = grad + self.parameter.grad
        self.parameter.grad = grad
        self.is_complete, self.is_taken = True, False

    @property
    def is_sparse(self) -> bool:
        """Whether this backward made a sparse gradient, which may have been taken since."""
        return self.sparse_rows is not None or (
            self.used is self.parameter and getattr(self.parameter.grad, "is_sparse", False)
        )

    def make_sparse(self, rows: Tensor) -> None:
        """The reduced gradient as the optimizer would have it without a reduction: with these
        `rows` alone.
        """
        if self.is_whole and self.parameter.grad is not None:
            grad, index = self.parameter.grad, rows.nonzero().T  # [1, rows]
            self.parameter.grad = torch.sparse_coo_tensor(
                index, grad[index[0]], grad.shape, is_coalesced=True
            )

    @property
    def has_local_gradient(self) -> bool:
        """Whether there is one that no reduction has left."""
        return self.has_gradient and not (self.is_complete and self.used is self.parameter)

    def add_gradient(self, grad: Tensor) -> None:
        """As if the backward made it now, in addition to a reduced one."""
        assert self.used is not None
        if self.used is self.parameter:
            self.complete, self.is_complete = self.parameter.grad, False
        self.used.grad = grad

    def set_complete_aside(self, grads: tuple[Tensor, ...]) -> None:
        """Before the backward adds to `grad`: what an earlier backward reduced is not summed over
        the devices again.

        Args:
            grads: what is about to be added, as autograd's hooks get it.
        """
        if self.is_taken:
            return
        if self.parameter.grad is None:
            self.complete = None
        elif self.is_complete:
            self.complete, self.parameter.grad = self.parameter.grad, None
        self.is_complete = False

    def chunks(self, tensor: Tensor) -> list[Chunk]:
        """The boxes of the whole that this device holds.

        More than one where the step sees the parameter in segments.

        Args:
            tensor: laid out as the parameter.
        """
        ranges = self.plan.layout.slices(self.shape, self.mesh.shape, self.mesh.coordinate)
        starts = tuple(start for start, _ in ranges)
        if self.module_shape == self.shape:
            return [Chunk(starts, tensor)]
        (first, last), (start, stop) = ranges[:2]
        size = self.shape[1]
        if (start, stop) == (0, size):  # whole segments lie one after the other
            return [Chunk((first * size, *starts[2:]), tensor)]
        segments = zip(range(first, last), self.in_step(tensor).unbind(0), strict=True)
        return [Chunk((i * size + start, *starts[2:]), part) for i, part in segments]

    def replica(self) -> tuple[int, int]:
        """Of the devices that hold the same part: which one this is, and how many they are."""
        index, count = 0, 1
        for placement, size, coordinate in zip(
            self.plan.layout, self.mesh.shape, self.mesh.coordinate, strict=True
        ):
            if not isinstance(placement, Shard):
                index, count = index * size + coordinate, count * size
        return index, count

    @property
    def _use(self) -> Layout:
        return value_layout(self.to_use.dst)

    @property
    def _local_step_shape(self) -> torch.Size:
        return torch.Size(
            self.plan.layout.local_shape(self.shape, self.mesh.shape, self.mesh.coordinate)
        )

    def _piece(self, whole: Tensor, layout: Layout) -> Tensor:
        ranges = layout.slices(self.shape, self.mesh.shape, self.mesh.coordinate)
        return whole.view(self.shape)[tuple(slice(*r) for r in ranges)]


def are_held(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Of each whether something else holds its memory too, and would not follow it into parts: a
    view
    (`self.view = layer.weight.data`), a NumPy array, a state dict that is kept, another
    parameter."""
    found = [(parameter.untyped_storage(), parameter.storage_offset()) for parameter in parameters]
    sharing = Counter(
        storage._cdata for storage, _ in found
    )  # an RNN's weights are parts of one memory on GPUs
    at = Counter((storage._cdata, offset) for storage, offset in found)
    uses = [
        torch._C._storage_Use_Count(storage._cdata) - 1 for storage, _ in found
    ]  # but for `found`
    return [
        n > sharing[s._cdata] or at[s._cdata, offset] > 1
        for n, (s, offset) in zip(uses, found, strict=True)
    ]


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """`parameter.data = data`, of any shape, and gradients have that shape from now on.

    A graph that is still alive (a weight that weight normalization computed when the module was
    built, a loss that somebody keeps) holds the node that adds to `parameter.grad`, and that node
    remembers the shape of the data that it was made for. PyTorch makes a new node when the dtype
    changes, so it is changed there and back.
    """
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
