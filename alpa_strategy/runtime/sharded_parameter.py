"""One parameter on one mesh: its full shape, the shard on this rank, and how values and gradients
move between storage and step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement, Shard

from alpa_strategy.comm.mesh import MeshComm, Pending
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.placement import (
    INVARIANT,
    REPLICATE,
    DualPlacement,
    Layout,
    shard,
    value_layout,
)
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Storage
from alpa_strategy.runtime.host_link import HostLink, host_copy


class Chunk(NamedTuple):
    """A box of a full tensor."""

    # Index of its first element in the full tensor, by dim.
    offsets: tuple[int, ...]

    # Its elements, a view of this process's memory.
    tensor: Tensor


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of the module under its plan.

    The fields without a default are fixed; those with a default are the state of one training step.

    Shapes: the step may see the parameter in segments, `[segments, n, ...]`, and the module as
    `[segments * n, ...]` (a fused projection of query, key and value).
    """

    # The first of its names in the step.
    name: str

    # How it is stored; the layout has the dims of `shape`.
    plan: ParameterPlan

    # The module's own object, whose data is this rank's shard.
    parameter: nn.Parameter

    # The devices of its stage.
    mesh: MeshComm

    # Full shape in the step.
    shape: torch.Size

    # Full shape in the module: `shape`, or with its first two dims flattened (segments).
    module_shape: torch.Size

    # Moves it from storage to the layout that the step uses.
    to_use: Reshard

    # Moves it from storage to the full parameter on every device.
    to_full: Reshard

    # Whether the step uses a gathered copy, `leaf`, which is made once per step.
    is_gathered_once: bool

    # Index in `mesh.all_devices` of the device that steps it in full, and has all of its optimizer
    # state. None: each device steps its shard.
    owner: int | None = None

    # To host memory, once the parameter is stored there.
    link: HostLink | None = None

    # Autograd's node that adds to `grad`; kept alive, because it carries the hooks of gradients.
    accumulator: torch.autograd.graph.Node | None = None

    # The gathering of `leaf` in flight, launched when the step starts.
    gathering: Pending | None = None

    # The gathered copy, from its first use in a step until the optimizer's step.
    leaf: Tensor | None = None

    # Dtypes in which programs read it; if there is only one, the copy is gathered in it.
    read_in: frozenset[torch.dtype] = frozenset()

    # The gradient of an earlier copy of this step, which had another dtype.
    partial: Tensor | None = None

    # A gradient that is reduced already, set aside while the backward makes a new one.
    complete: Tensor | None = None

    # Whether `parameter.grad` is the result of a reduction.
    is_complete: bool = False

    # Whether the reduction of this backward's gradient is in flight.
    is_taken: bool = False

    # Of a gradient that was sparse: which indices of the first dim it has, bool [shape[0]]. It is
    # summed as a dense one.
    sparse_rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        parameter_input: ParameterInput,
        plan: ParameterPlan,
        parameter: nn.Parameter,
        mesh: MeshComm,
        replicas: MeshComm | None = None,
    ) -> "ShardedParameter":
        """Return the module's `parameter` under its plan.

        Args:
            parameter_input: the parameter as an input of the step.
            plan: how it is stored.
            parameter: of the module, still with its full data.
            mesh: the devices of its stage.
            replicas: set if each rank uses the full parameter for a step of its own; gradients are
                summed over this mesh.
        """
        shape = torch.Size(parameter_input.meta.shape)
        module_shape = torch.Size(parameter_input.module_shape or shape)

        # Values and gradients are stored alike.
        storage = tuple(map(_storage_placement, plan.layout))
        used = plan.step_layout()
        if replicas is not None:
            # The step uses the full parameter, and its gradient is a partial value. One that is not
            # trained has no gradient to sum.
            used = tuple(map(_replicated_placement, plan.modes))

        is_copied_from_host = plan.on_host and not plan.is_fetched
        is_copied_once = plan.is_gathered_once or is_copied_from_host
        name = parameter_input.name
        return cls(
            name,
            plan,
            parameter,
            mesh,
            shape,
            module_shape,
            to_use=Reshard(storage, used, shape, replicas or mesh, subject=name),
            to_full=Reshard(storage, (INVARIANT,) * len(mesh.shape), shape, mesh, subject=name),
            is_gathered_once=replicas is None and is_copied_once,
        )

    @property
    def is_unsharded(self) -> bool:
        """Whether every device of the mesh stores the full parameter."""
        return not self.to_full.forward_steps and self.link is None

    @property
    def is_used_in_place(self) -> bool:
        """Whether the step uses it as it is stored, and the backward leaves its gradient complete
        in
        the stored layout: nothing is gathered and nothing reduced.
        """
        return not (self.is_gathered_once or self.to_use.backward_steps)

    @property
    def device(self) -> torch.device:
        """The device on which it is used, and its gradients are made."""
        return self.parameter.device if self.link is None else self.link.device

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's shard in the module."""
        local = self._local_step_shape
        if self.module_shape == self.shape:
            return local
        # [segments, n, ...] -> [segments * n, ...]
        return torch.Size((local[0] * local[1], *local[2:]))

    @property
    def used_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the step uses on this rank, with the dims of `shape`."""
        return self._use.local_shape(self.shape, self.mesh.shape, self.mesh.coordinate)

    def in_step(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor of `local_shape` with the dims of the step."""
        return tensor if self.module_shape == self.shape else tensor.view(self._local_step_shape)

    def gather_like(self, tensor: Tensor) -> Tensor:
        """Gather the full tensor (`module_shape`) of a tensor laid out as this parameter: itself,
        or a moment of its optimizer.

        Collective. Tensors of another shape than `local_shape` (step counters) are returned
        unchanged.
        """
        if tensor.shape != self.local_shape:
            return tensor
        return self.to_full.values(self.in_step(tensor.to(self.device))).view(self.module_shape)

    def shard_like(self, full: Tensor) -> Tensor:
        """Return this rank's shard (`local_shape`, a copy) of a full tensor of `module_shape`.

        Tensors of another shape are returned unchanged.
        """
        if full.shape != self.module_shape:
            return full
        piece = self._piece(full, self.plan.layout)
        if self.link is None:
            local = piece.clone(memory_format=torch.contiguous_format)
        else:
            local = host_copy(piece)
        return local.view(self.local_shape)

    def load_full(self, full: Tensor, shard: Tensor) -> None:
        """Write new values into the shard, and into the copy that is gathered for the step.

        Args:
            full: the full new values, of `module_shape`.
            shard: the shard to write to, of `local_shape`.
        """
        shard.copy_(self.shard_like(full))
        if self.leaf is not None:
            self.leaf.data.copy_(self._piece(full, self._use))
        else:
            self.drop_copy()

    def drop_copy(self) -> None:
        """Drop the copy that was gathered for a step, or is in flight, and the sum of its gradients
        so far: the copy has old values.
        """
        if self.gathering is not None:
            # The step has not used it.
            self.gathering.wait()
        self.leaf = None
        self.gathering = None
        self.partial = None

    def will_be_read_in(self, dtype: torch.dtype) -> None:
        """Record that a program reads the parameter in `dtype`. The same on all devices.

        Args:
            dtype: the parameter's own, or the one to which all uses cast it.
        """
        earlier_dtype = self.gather_dtype
        self.read_in |= {dtype}
        if self.gather_dtype != earlier_dtype:
            # The copy is gathered anew in the other dtype; its gradient so far is not lost.
            partial = None if self.leaf is None else self.leaf.grad
            self.drop_copy()
            self.partial = partial

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which the step's copy is gathered.

        If all programs read one dtype, the cast is made before the gathering: same values, fewer
        bytes to move.
        """
        return next(iter(self.read_in)) if len(self.read_in) == 1 else self.parameter.dtype

    def begin_gathering(self, part: Tensor | None = None) -> Pending:
        """Return the gathering of the step's copy, and launch it if it is not in flight.

        Args:
            part: the shard on the device, if the parameter is stored in host memory.
        """
        if self.gathering is None:
            with torch.no_grad():
                local = self.parameter.detach() if part is None else part
                self.gathering = self.to_use.start(self.in_step(local).to(self.gather_dtype))
        return self.gathering

    # Its gradient in a step: the backward adds to `used.grad`, `take_gradient` passes that to a
    # reduction (`is_taken`), `put_gradient` stores the sum (`is_complete`). A gradient that was
    # complete before waits in `complete`, and is added to the sum.

    @property
    def used(self) -> Tensor | None:
        """The tensor whose `.grad` the backward makes: the parameter, or its gathered copy.

        None if the step has not used the copy.
        """
        return self.leaf if self.is_gathered_once else self.parameter

    @property
    def used_bytes(self) -> int:
        """Bytes of the gradient that the backward makes on this rank."""
        return torch.Size(self.used_shape).numel() * self.parameter.element_size()

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient's sum over devices.

        At least float32 if the plan asks for it, else bfloat16 for a copy that was gathered in it;
        not fp16, whose sums could overflow.
        """
        if self.plan.sums_in_fp32:
            return torch.promote_types(self.parameter.dtype, torch.float32)
        if self.is_gathered_once and self.leaf is not None and self.leaf.dtype == torch.bfloat16:
            return torch.bfloat16
        return self.parameter.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether the backward has made a gradient."""
        return self.used is not None and self.used.grad is not None

    def take_gradient(self) -> Tensor:
        """Remove and return the local gradient of the backward, in `reduce_dtype`; zeros if there
        is none. One that is reduced already is set as `complete` instead.
        """
        used = self.used
        self.is_taken = True
        if used is None or used.grad is None:
            return self.no_gradient()
        if not self.has_local_gradient:
            self.complete = used.grad
            return self.no_gradient()

        grad = used.grad
        used.grad = None
        return self._dense(grad).to(self.reduce_dtype)

    def _dense(self, grad: Tensor) -> Tensor:
        """Return the gradient as a dense tensor, and record its indices for `make_sparse`."""
        if not grad.is_sparse:
            return grad
        rows = rows_of(grad)
        self.sparse_rows = rows if self.sparse_rows is None else self.sparse_rows | rows
        return grad.to_dense()

    def no_gradient(self) -> Tensor:
        """Return zeros: the addend of a device that has no gradient when another has one."""
        device = self.device if self.is_gathered_once else self.parameter.device
        return torch.zeros(self.used_shape, dtype=self.reduce_dtype, device=device)

    def put_gradient(self, grad: Tensor) -> None:
        """Store a reduced gradient, added to `complete` or, if gathered once, to the present one.

        In host memory it is valid after `HostLink.settle`.
        """
        grad = grad.view_as(self.parameter).to(self.parameter.dtype)
        if self.link is not None:
            grad = self.link.to_host(grad)
            if self.complete is not None or self.parameter.grad is not None:
                self.link.settle()

        if self.complete is not None:
            grad = grad + self._dense(self.complete)
            self.complete = None
        elif self.is_gathered_once and self.parameter.grad is not None:
            grad = grad + self.parameter.grad

        self.parameter.grad = grad
        self.is_complete = True
        self.is_taken = False

    @property
    def is_sparse(self) -> bool:
        """Whether this backward has made a sparse gradient, taken by the reduction or not."""
        if self.sparse_rows is not None:
            return True
        return self.used is self.parameter and getattr(self.parameter.grad, "is_sparse", False)

    def make_sparse(self, rows: Tensor) -> None:
        """Make the reduced gradient sparse, as the optimizer would get it without a reduction.

        Args:
            rows: which indices of the first dim it has, bool [shape[0]].
        """
        if self.is_unsharded and self.parameter.grad is not None:
            self.parameter.grad = sparse_copy(self.parameter.grad, rows)

    @property
    def has_local_gradient(self) -> bool:
        """Whether there is a gradient that no reduction has seen."""
        is_reduced = self.is_complete and self.used is self.parameter
        return self.has_gradient and not is_reduced

    def add_gradient(self, grad: Tensor) -> None:
        """Set the local gradient, as if the backward made it now in addition to a reduced one."""
        assert self.used is not None
        if self.used is self.parameter:
            self.complete = self.parameter.grad
            self.is_complete = False
        self.used.grad = grad

    def set_complete_aside(self, grads: tuple[Tensor, ...]) -> None:
        """Set the reduced gradient of an earlier backward aside, so that it is not summed over the
        devices again. To be called before the backward adds to `grad`. Does nothing if a bucket has
        taken the gradient.

        Args:
            grads: the addends, which autograd passes to its hooks; not used.
        """
        if self.is_taken:
            return
        if self.parameter.grad is None:
            self.complete = None
        elif self.is_complete:
            self.complete = self.parameter.grad
            self.parameter.grad = None
        self.is_complete = False

    def chunks(self, tensor: Tensor) -> list[Chunk]:
        """Return the boxes of the full tensor (`module_shape`) that this rank stores.

        More than one if the step sees the parameter in segments, of which each is sharded.

        Args:
            tensor: of `local_shape`, laid out as the parameter.
        """
        ranges = self.plan.layout.slices(self.shape, self.mesh.shape, self.mesh.coordinate)
        starts = tuple(start for start, _ in ranges)
        if self.module_shape == self.shape:
            return [Chunk(starts, tensor)]

        (first_segment, last_segment), (start, stop) = ranges[:2]
        size = self.shape[1]
        if (start, stop) == (0, size):
            # Full segments are contiguous in the module's tensor.
            return [Chunk((first_segment * size, *starts[2:]), tensor)]

        chunks = []
        segments = self.in_step(tensor).unbind(0)
        for index, segment in zip(range(first_segment, last_segment), segments, strict=True):
            chunks.append(Chunk((index * size + start, *starts[2:]), segment))
        return chunks

    def replica(self) -> tuple[int, int]:
        """Return (index of this device, number of devices) among those that store the same
        shard.
        """
        index = 0
        count = 1
        layout = self.plan.layout
        for placement, size, coordinate in zip(
            layout, self.mesh.shape, self.mesh.coordinate, strict=True
        ):
            if not isinstance(placement, Shard):
                index = index * size + coordinate
                count *= size
        return index, count

    @property
    def _use(self) -> Layout:
        """The layout in which the step uses the parameter."""
        return value_layout(self.to_use.dst)

    @cached_property
    def _local_step_shape(self) -> torch.Size:
        """The shape of this device's shard, as the step sees it."""
        return torch.Size(
            self.plan.layout.local_shape(self.shape, self.mesh.shape, self.mesh.coordinate)
        )

    def piece_at(self, full: Tensor, coordinate: Sequence[int]) -> Tensor:
        """Return the view of a full tensor that the device at `coordinate` of the mesh stores.

        It has the dims of the step.
        """
        return self._piece(full, self.plan.layout, coordinate)

    def _piece(
        self, full: Tensor, layout: Layout, coordinate: Sequence[int] | None = None
    ) -> Tensor:
        """Return the view of the full tensor that a device, this one by default, stores under
        `layout`.
        """
        if coordinate is None:
            coordinate = self.mesh.coordinate
        ranges = layout.slices(self.shape, self.mesh.shape, coordinate)
        return full.view(self.shape)[tuple(slice(start, stop) for start, stop in ranges)]


def _storage_placement(placement: Placement) -> DualPlacement:
    return shard(placement.dim) if isinstance(placement, Shard) else INVARIANT


def _replicated_placement(mode: ParameterMode) -> DualPlacement:
    return INVARIANT if mode.storage is Storage.INVARIANT else REPLICATE


def have_other_users(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether another object uses its memory, and would not follow it
    when its data is replaced by a shard.

    Such objects are a view (`self.view = layer.weight.data`), a NumPy array, a state dict, another
    parameter.
    """
    storages = [parameter.untyped_storage() for parameter in parameters]
    offsets = [parameter.storage_offset() for parameter in parameters]

    # The weights of an RNN share one memory on GPUs, at different offsets.
    num_in_storage = Counter(storage._cdata for storage in storages)
    num_at_offset = Counter(
        (storage._cdata, offset) for storage, offset in zip(storages, offsets, strict=True)
    )

    are_shared = []
    for storage, offset in zip(storages, offsets, strict=True):
        # The list `storages` is one use more.
        num_uses = torch._C._storage_Use_Count(storage._cdata) - 1
        has_other_user = num_uses > num_in_storage[storage._cdata]
        is_tied = num_at_offset[storage._cdata, offset] > 1
        are_shared.append(has_other_user or is_tied)
    return are_shared


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Set `parameter.data`, also to a tensor of another shape, which gradients have from then on.

    A graph that is still alive (a weight that weight normalization computed when the module was
    built, a loss that user code stores) refers to the node that adds to `parameter.grad`, and that
    node remembers the shape of the data for which it was made. PyTorch makes a new node when the
    dtype changes, so it is changed to another one and back.
    """
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


def set_data(tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Set `parameter.data` for pairs of (parameter, data), under any grad or inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in tensors:
            parameter.data = data


def rows_of(grad: Tensor) -> Tensor:
    """Return which indices of the first dim a sparse gradient has, bool [shape[0]]."""
    rows = torch.zeros(grad.size(0), dtype=torch.bool, device=grad.device)
    rows[grad._indices()[0]] = True
    return rows


def sparse_copy(grad: Tensor, rows: Tensor) -> Tensor:
    """Return a dense gradient as a sparse one.

    Args:
        rows: which indices of the first dim it has, bool [shape[0]].
    """
    index = rows.nonzero().T  # [1, number of indices]
    return torch.sparse_coo_tensor(index, grad[index[0]], grad.shape, is_coalesced=True)
