"""The user's parameters as this rank stores them: as shards, gathered for the step, with gradients
reduced to the same shards.

The module keeps its Parameter objects under their names, so optimizers, callbacks and state-dict
keys work unchanged; only `data` is replaced. Values and gradients move by `Reshard`s from the
storage layout to the one that the step uses:

    storage   stored       in the step   gradient after the step
    R         Invariant    R             complete on every device already
    R*        Invariant    R*            Partial, all-reduced once per step
    S<d>      Shard(d)     S<d>          complete on its shard already
    G<d>      Shard(d)     R*            Partial, reduce-scattered once per step

A parameter with `G<d>` is gathered once per step.

`ParameterStore` has the parameters of all stages: for the Trainer, checkpoints and the optimizer's
state. `MeshParameters` (`runtime/mesh_parameters.py`) has those on one mesh: for the stages there,
while a step runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.comm.collectives import all_gather_object, world_size
from alpa_strategy.comm.mesh import AxisComm, MeshComm, build_mesh
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.optimizer_info import Reads
from alpa_strategy.ir.plan import StagePlan, stage_ranks
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.runtime.gradient_buckets import Completed, chunk_shape
from alpa_strategy.runtime.gradients import ReplicaReducer, Replicas
from alpa_strategy.runtime.mesh_parameters import GradientReader, Listening, MeshParameters
from alpa_strategy.runtime.sharded_parameter import Chunk, ShardedParameter, replace_data

T = TypeVar("T")


@dataclass
class _StageParameter:
    """A parameter of any stage, as this rank sees it. The first stage that uses it owns it."""

    # The first of its names in the step.
    name: str

    # Full shape in the module.
    shape: torch.Size

    # The rank that sends its values to ranks outside of the owning stage.
    source: int

    # In the owning stage, if this rank belongs to that; else None.
    owned: ShardedParameter | None

    # In any stage of this rank; None if this rank stores nothing of it.
    local: ShardedParameter | None

    # The rank that has all of its optimizer state, if an optimizer steps it in full.
    stepped_by: int | None = None


class ParameterStore:
    """The parameters that any stage uses, in the stages' order: the same on every rank.

    All other parameters of the module are unsharded on every rank.

    If stages are on different devices, a rank stores the parameters of its own stages only, and the
    others are empty. Everything that gathers is then collective over all ranks: the owning stage
    gathers, and sends to the others.

    Args:
        module: the user's module; its parameters are full, and equal on all ranks, until `shard`.
        inputs: the step's parameters, each of which some stage has.
        stages: whose `parameter_plans` specify, by any of a parameter's names, how it is stored.
        meshes: for each stage this rank's mesh, or None if the stage is on other ranks.
        mesh: of all ranks.
        replicas: set if each rank runs a step of its own on full parameters, and gradients are
            averaged.
        copies: (index of this store, number of stores) of the job: all store the same parameters,
            on the same number of ranks each.

    Raises:
        PlanError: no stage has one of the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[ParameterInput],
        stages: Sequence[StagePlan],
        meshes: Sequence[MeshComm | None],
        mesh: MeshComm,
        replicas: Replicas | None = None,
        copies: tuple[int, int] = (0, 1),
    ) -> None:
        self.mesh = mesh
        self.copies = copies

        # Bytes of full parameters that may be prefetched.
        self.prefetched_bytes = max((stage.prefetched_bytes for stage in stages), default=0)

        # By stage, and by id of the mesh: stages on one mesh share their parameters.
        self.of_stage: dict[int, MeshParameters] = {}
        self._meshes: dict[int, MeshParameters] = {}

        self._known: dict[nn.Parameter, _StageParameter] = {}

        # Whether ranks lack the parameters of other stages.
        self._is_split = len({stage_ranks(stage) for stage in stages}) > 1

        for index, (stage, stage_mesh) in enumerate(zip(stages, meshes, strict=True)):
            if stage_mesh is not None:
                new = MeshParameters(stage_mesh, replicas)
                self.of_stage[index] = self._meshes.setdefault(id(stage_mesh), new)
            for parameter_input in inputs:
                self._add(module, parameter_input, stage, self.of_stage.get(index))

        for parameter_input in inputs:
            if module.get_parameter(parameter_input.name) not in self:
                raise PlanError(
                    f"the plan has no entry for parameter {parameter_input.name}",
                    "plan again for this model",
                )

        # Not full on every rank, in order. All if other ranks may lack what this one stores.
        self.sharded_parameters: dict[nn.Parameter, None] = {}
        for parameter, known in self._known.items():
            is_unsharded = known.local is not None and known.local.is_unsharded
            if self._is_split or not is_unsharded:
                self.sharded_parameters[parameter] = None

    def _add(
        self,
        module: nn.Module,
        parameter_input: ParameterInput,
        stage: StagePlan,
        mesh_parameters: MeshParameters | None,
    ) -> None:
        """Add a parameter of the step as `stage` has it, if it does.

        Args:
            module: the user's module.
            parameter_input: the parameter.
            stage: which is on this rank if `mesh_parameters` is not None.
            mesh_parameters: those of the stage's mesh.
        """
        plans = stage.parameter_plans
        planned_names = [name for name in parameter_input.names if name in plans]
        if not planned_names:
            return

        parameter = module.get_parameter(parameter_input.name)
        sharded = None
        if mesh_parameters is not None:
            sharded = mesh_parameters.add(parameter_input, plans[planned_names[0]], parameter)

        known = self._known.get(parameter)
        if known is None:
            source = stage_ranks(stage)[0]
            self._known[parameter] = _StageParameter(
                parameter_input.name, parameter.shape, source, owned=sharded, local=sharded
            )
        elif known.local is None:
            known.local = sharded

    # Which parameters there are, and what this rank stores of them

    @property
    def device(self) -> torch.device:
        """The device on which parameters are used, wherever they are stored; the CPU if this rank
        has none.
        """
        for known in self._known.values():
            if known.local is not None:
                return known.local.device
        return torch.device("cpu")

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All stages' parameters, in the same order on every rank."""
        return tuple(self._known)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether some stage uses the parameter."""
        return parameter in self._known

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the step's name of one of `parameters`."""
        return self._known[parameter].name

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter in the module."""
        known = self._known.get(parameter)
        return parameter.shape if known is None else known.shape

    def full_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of all `parameters` at their full shapes."""
        return sum(self.full_shape(p).numel() * p.element_size() for p in parameters)

    def is_on_host(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's shard is stored in host memory."""
        known = self._known.get(parameter)
        return known is not None and known.local is not None and known.local.link is not None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank stores any of the parameter, which is empty otherwise."""
        known = self._known.get(parameter)
        return known is None or known.local is not None

    def chunks(self, parameter: nn.Parameter, tensor: Tensor) -> list[Chunk]:
        """Return the boxes of the full parameter that this rank stores; empty if it stores none. A
        parameter that is in no stage is one box.

        Args:
            parameter: of the module.
            tensor: laid out as the parameter, with its local shape.
        """
        known = self._known.get(parameter)
        if known is None:
            return [Chunk((0,) * tensor.dim(), tensor)]
        return [] if known.local is None else known.local.chunks(tensor)

    def replica(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return (index of this rank, number of ranks) among those that store the same shard.

        None outside of the owning stage; all ranks for a parameter that is in no stage.
        """
        known = self._known.get(parameter)
        if known is None:
            return self.mesh.all_devices.index, self.mesh.all_devices.size
        return None if known.owned is None else known.owned.replica()

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's elements count in a sum over all ranks: it is the first of those that
        store the same shard.
        """
        replica = self.replica(parameter)
        return replica is not None and replica[0] == 0

    # Owners: devices that step full parameters

    def assign_owners(self, reads: Mapping[nn.Parameter, Reads]) -> None:
        """Choose the device that steps each parameter of which an optimizer needs the full tensor.
        Collective.

        Args:
            reads: what optimizers look at, by parameter.
        """
        for mesh in self._meshes.values():
            mesh.assign_owners(reads)
        owners: dict[str, int] = {}
        for known in self._known.values():
            sharded = known.owned
            if sharded is not None and sharded.owner is not None:
                owners[known.name] = sharded.mesh.ranks[sharded.owner]
        of_ranks = [owners]
        if self._is_split:
            of_ranks = all_gather_object(owners, self.mesh.all_devices.group)
        for known in self._known.values():
            source = known.source if self._is_split else 0
            known.stepped_by = of_ranks[source].get(known.name)

    def is_stepped_in_full(self, parameter: nn.Parameter) -> bool:
        """Whether one device steps the full parameter, and has all of its optimizer state."""
        known = self._known.get(parameter)
        return known is not None and known.stepped_by is not None

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has optimizer state of the parameter: of its shard, or all of it."""
        known = self._known.get(parameter)
        if known is None:
            return True
        if known.local is None:
            return False
        return known.local.owner in (None, known.local.mesh.all_devices.index)

    def writes_state(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has the state of a parameter that is stepped in full, for checkpoints.

        One rank of the store has it, one store of `copies`.
        """
        rank = self.mesh.ranks[self.mesh.all_devices.index]
        return self._known[parameter].stepped_by == rank and self.copies[0] == 0

    def state_of_owner(self, parameter: nn.Parameter, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Return a state tensor of a parameter that is stepped in full, on every rank. Collective.

        Args:
            parameter: of the module.
            tensor: the state tensor at the owner; elsewhere only its dtype is used.
            shape: of the state tensor.
        """
        rank = self.mesh.ranks[self.mesh.all_devices.index]
        source = self._known[parameter].stepped_by
        if source == rank:
            full = tensor.to(self.device).contiguous()
        else:
            full = torch.empty(shape, dtype=tensor.dtype, device=self.device)
        if self.mesh.all_devices.size > 1:
            dist.broadcast(full, group=self.mesh.all_devices.group, group_src=source)
        return full

    @property
    def sharded(self) -> tuple[ShardedParameter, ...]:
        """The parameters of this rank's meshes, in the same order on the devices of each."""
        return tuple(s for mesh in self._meshes.values() for s in mesh.sharded)

    # Into shards, and out of them

    def shard(
        self,
        values: Callable[[nn.Parameter], Tensor] = Tensor.detach,
        bucket_bytes: int = BUCKET_BYTES,
        look: GradientReader | None = None,
    ) -> None:
        """Replace every parameter's data by this rank's shard, and register the hooks that reduce
        gradients in the backward. To be called once, before training.

        Parameters of stages on other ranks alone become empty. Gradients of sharded ones are
        dropped.

        Args:
            values: returns the full values of a parameter; they are freed before the next call.
            bucket_bytes: a bucket of gradients is closed when it has this many bytes.
            look: is called with the name and the local gradient of every parameter, before any sum
                over ranks.
        """
        for mesh in self._meshes.values():
            mesh.shard(values, bucket_bytes, look)
        for parameter, known in self._known.items():
            if known.local is None:
                replace_data(parameter, parameter.new_empty(0))
                parameter.grad = None

    def unshard(self) -> None:
        """Give every parameter its full data back, on every rank. Collective; ends training with
        this store. Gradients of sharded parameters are dropped.
        """
        for mesh in self._meshes.values():
            mesh.unwatch()
            mesh.after_optimizer_step()
        for parameter in self.sharded_parameters:
            known = self._known[parameter]
            if known.owned is None or not known.owned.is_unsharded:
                # Its gradient is one of a shard.
                parameter.grad = None
            replace_data(parameter, self.gather(parameter))

    # A training step, if the Trainer runs the backward (a pipeline calls its stages itself)

    def sync(self, enabled: bool) -> None:
        """Set whether the next backward ends with the reduction of gradients."""
        for mesh in self._meshes.values():
            mesh.reducer.enabled = enabled

    def listening(self, flag: bool) -> Listening:
        """Context in which gradients are reduced as they are made (`flag`), or stay local."""
        return Listening(self._meshes.values(), flag)

    @property
    def is_syncing(self) -> bool:
        """Whether the next backward ends with the reduction of gradients (`sync`)."""
        return all(mesh.reducer.enabled for mesh in self._meshes.values())

    @property
    def awaits_finish(self) -> bool:
        """Whether a backward of an eager step has made gradients that `finish_backward` has not
        reduced yet.
        """
        for mesh in self._meshes.values():
            if isinstance(mesh.reducer, ReplicaReducer) and mesh.reducer.has_begun:
                return True
        return False

    def finish_backward(self, completed: Completed | None = None) -> None:
        """Complete the gradients of all parameters after a backward. Collective.

        Args:
            completed: called with the parameters of each bucket when it is done.
        """
        for mesh in self._meshes.values():
            mesh.finish_backward(completed)

    def store_gradient(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Store this rank's shard of `full`, a full gradient that is complete already; nothing on
        ranks without a shard. A parameter that is in no stage gets `full` itself.
        """
        known = self._known.get(parameter)
        if known is None:
            parameter.grad = full
        elif known.local is not None:
            known.local.put_gradient(known.local.shard_like(full))

    def after_optimizer_step(self) -> None:
        """Drop the copies that were gathered for the last step: parameters have new values."""
        for mesh in self._meshes.values():
            mesh.after_optimizer_step()

    # Full values: checkpoints, user code, optimizer state

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """Return the full parameter on every rank. Collective."""
        return self.gather_like(parameter, parameter.detach())

    def gather_like(
        self, parameter: nn.Parameter, tensor: Tensor, shape: torch.Size | None = None
    ) -> Tensor:
        """Return the full tensor of one that is laid out as the parameter (its gradient), on every
        rank. Collective.

        Tensors of another shape than the owning stage's shards are returned as they are there. The
        tensor of a parameter that is in no stage is returned itself.

        Args:
            parameter: of the module.
            tensor: this rank's shard; outside of the owning stage only its dtype is used.
            shape: of the full tensor, that of the parameter by default.
        """
        known = self._known.get(parameter)
        if known is None:
            return tensor
        if known.owned is not None:
            full = known.owned.gather_like(tensor)
        else:
            full = torch.empty(shape or known.shape, dtype=tensor.dtype, device=self.device)
        if self._is_split:
            full = full.contiguous()
            dist.broadcast(full, group=self.mesh.all_devices.group, group_src=known.source)
        return full

    def summed_later(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the full copy of a parameter if it has a local gradient to which more batches of
        one update add, else None.
        """
        known = self._known[parameter]
        copy = None if known.local is None else known.local.leaf
        if copy is None or copy.grad is None:
            return None
        is_full = copy.numel() == known.shape.numel()
        return copy if is_full else None

    def start_gather(self, parts: Mapping[nn.Parameter, Tensor]) -> Callable[[], list[Tensor]]:
        """Start to gather full parameters of one dtype. Collective.

        In one collective if all are sharded along one mesh axis, else it gathers them at once and
        waits.

        Args:
            parts: parameter -> its shard on this rank.

        Returns:
            A function that waits, without communication of its own, and returns the full parameters
            in the order of `parts`.
        """
        splits: list[tuple[torch.Size, int]] = []
        for parameter in parts:
            owned = self._known[parameter].owned
            if owned is None or len(owned.plan.layout) != 1:
                continue
            placement = owned.plan.layout[0]
            if isinstance(placement, Shard) and owned.shape == owned.module_shape:
                splits.append((owned.shape, placement.dim))

        if self._is_split or len(splits) < len(parts):
            values = [self.gather_like(parameter, shard) for parameter, shard in parts.items()]
            return lambda: values

        first = self._known[next(iter(parts))].owned
        assert first is not None
        return _start_gather_in_one(list(parts.values()), splits, first.mesh.axes[0], first.device)

    def collect_from_owners(self, local_objects: Mapping[nn.Parameter, T]) -> dict[nn.Parameter, T]:
        """Return for each parameter the object of the stage, or the device, that owns it, on every
        rank. Collective.

        Args:
            local_objects: this rank's objects, small and picklable.
        """
        has_owners = any(known.stepped_by is not None for known in self._known.values())
        if not self._is_split and not has_owners:
            return dict(local_objects)

        owned: dict[str, T] = {}
        for parameter, known in self._known.items():
            if known.owned is not None and parameter in local_objects:
                owned[known.name] = local_objects[parameter]
        of_ranks = all_gather_object(owned, self.mesh.all_devices.group)

        result = {p: value for p, value in local_objects.items() if p not in self}
        for parameter, known in self._known.items():
            rank = known.source if known.stepped_by is None else known.stepped_by
            of_owner = of_ranks[rank]
            if known.name in of_owner:
                result[parameter] = of_owner[known.name]
        return result

    def shard_like(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's shard (a copy, perhaps empty) of a full tensor.

        Tensors of another shape than the full parameter's are returned unchanged, if this rank
        stores any of the parameter. Of a parameter that is in no stage, `full` is returned.
        """
        known = self._known.get(parameter)
        if known is None:
            return full
        return full.new_empty(0) if known.local is None else known.local.shard_like(full)

    def load_full(self, parameter: nn.Parameter, full: Tensor, shard: Tensor) -> None:
        """Write new values into this rank's shard, and into a copy that is gathered for the step.

        Does nothing if this rank stores none of the parameter.

        Args:
            parameter: of the module.
            full: its full new values.
            shard: the shard to write to.
        """
        local = self._known[parameter].local
        if local is not None:
            local.load_full(full, shard)


def _start_gather_in_one(
    shards: Sequence[Tensor],
    splits: Sequence[tuple[torch.Size, int]],
    axis: AxisComm,
    device: torch.device,
) -> Callable[[], list[Tensor]]:
    """Start to gather tensors of one dtype in one collective.

    Args:
        shards: of this rank.
        splits: for each shard the full shape, and the dim that is split over the axis.
        axis: whose devices have the shards.
        device: of the collective; some shards may be in host memory.

    Returns:
        A function that waits, and returns the full tensors.
    """
    # The first chunk of a dim is the largest; the others are padded.
    widths = [chunk_shape(shape, dim, axis.size, 0).numel() for shape, dim in splits]
    local = torch.zeros(sum(widths), dtype=shards[0].dtype, device=device)
    for target, shard in zip(local.split(widths), shards, strict=True):
        target[: shard.numel()].view(shard.shape).copy_(shard)
    pending = axis.start_all_gather(local, 0, axis.size * len(local))

    def wait() -> list[Tensor]:
        full: list[Tensor] = []
        gathered = pending.wait().view(axis.size, -1).split(widths, 1)
        for rows, (shape, dim) in zip(gathered, splits, strict=True):
            chunks = []
            for index, row in enumerate(rows):
                shape_there = chunk_shape(shape, dim, axis.size, index)
                chunks.append(row[: shape_there.numel()].view(shape_there))
            full.append(torch.cat(chunks, dim))
        return full

    return wait


def unsharded_store() -> ParameterStore:
    """Return the store of a module without sharded parameters. No communication."""
    return ParameterStore(nn.Module(), (), (), (), build_mesh((world_size(),)))
