"""The user's parameters as this device holds them: shards in place, gathered for the step,
gradients brought home.

The module keeps its Parameter objects under their names, so optimizers, callbacks and state-dict
keys work unchanged; only `data` is replaced. Values and gradients move by `Reshard`s from the
storage layout to the one that the step uses:

    mode    stored       in the step   gradient after the step
    R       Invariant    R             complete on every device already
    R*      Invariant    R*            Partial, all-reduced once per step
    S<d>    Shard(d)     S<d>          complete on its shard already
    G<d>    Shard(d)     R*            Partial, reduce-scattered once per step; gathered once per step

`ParameterStore` is all of them, of any number of stages: what the Trainer, checkpoints and the
optimizer's state ask.
`MeshParameters` is the part of it on one mesh: what the stages there ask while a step runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.comm.collectives import all_gather_object, world_size
from alpa_strategy.comm.mesh import MeshComm, build_mesh
from alpa_strategy.comm.reshard import Entrance, Sums
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.plan import ParameterPlan, StagePlan, stage_ranks
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.runtime.gradients import (
    Completed,
    GradientReducer,
    ReplicaReducer,
    Replicas,
    chunk_shape,
)
from alpa_strategy.runtime.host_parameters import HostParameters, StoredTensors
from alpa_strategy.runtime.sharded_parameter import Chunk, ShardedParameter, replace_data

T = TypeVar("T")
GradientReader = Callable[
    [str, Tensor], None
]  # is shown a parameter's name, and the tensor whose `.grad` the backward has made


class MeshParameters:
    """Parameters of the stages on one mesh, while steps run; `replicas` as for `ParameterStore`."""

    def __init__(self, mesh: MeshComm, replicas: Replicas | None = None) -> None:
        self.mesh = mesh
        self._replicas = replicas
        self._host: HostParameters | None = None
        self._results = StoredTensors()
        self._by_name: dict[str, ShardedParameter] = {}  # by every name of a tied parameter
        self._by_parameter: dict[nn.Parameter, ShardedParameter] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.listens = True  # to gradients as the backward makes them

    def add(
        self, given: ParameterInput, plan: ParameterPlan, parameter: nn.Parameter
    ) -> ShardedParameter:
        """A stage of this mesh has this parameter; stages on the same devices store it alike."""
        if (known := self._by_parameter.get(parameter)) is not None:
            return known
        of_gradients = None if self._replicas is None else self._replicas.mesh
        sharded = ShardedParameter.of(given, plan, parameter, self.mesh, of_gradients)
        self._by_parameter[parameter] = sharded
        self._by_name.update(dict.fromkeys(given.names, sharded))
        return sharded

    def shard(
        self,
        values: Callable[[nn.Parameter], Tensor],
        bucket_bytes: int,
        look: GradientReader | None,
    ) -> None:
        """See `ParameterStore.shard`."""
        self._look = look
        for sharded in self._by_parameter.values():
            parameter = sharded.parameter
            if not sharded.is_whole or sharded.plan.on_host:
                whole = values(parameter)
                if sharded.plan.on_host:
                    self._host = self._host or HostParameters(whole.device, look)
                    sharded.link = self._host.link
                replace_data(parameter, sharded.shard_like(whole))
                del whole
                parameter.grad = None
            elif values is not Tensor.detach:
                parameter.data = values(parameter)
        trained = [
            sharded for sharded in self._by_parameter.values() if sharded.parameter.requires_grad
        ]
        if self._replicas is not None:
            self.reducer: GradientReducer = ReplicaReducer(self._replicas, trained, bucket_bytes)
        else:
            self.reducer = GradientReducer(self.mesh, trained, bucket_bytes)
        for sharded in trained:
            if sharded.to_use.backward_steps and not sharded.is_gathered_once:
                self._watch(sharded)
            elif look is not None and not sharded.is_gathered_once and not sharded.plan.is_fetched:
                self._hooks.append(
                    sharded.parameter.register_post_accumulate_grad_hook(
                        partial(look, sharded.name)
                    )
                )

    def unwatch(self) -> None:
        """Watch no backward any more: by what does, parameters hold this for ever. No
        communication.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for sharded in self._by_parameter.values():
            sharded.accumulator = None  # it remembers the shard's shape, too

    def step_inputs(self, ahead_bytes: int = 0) -> Mapping[str, Tensor]:
        """Name -> what the lowered step takes: the parameter itself, or (`G` modes) its copy
        gathered for this step.

        All gatherings start now and run beside the step; asking for a parameter waits for its own.

        Args:
            ahead_bytes: of gradients whose sums (ZeRO-3) go on beside the backward.
        """
        for sharded in self._by_parameter.values():
            if sharded.is_gathered_once and sharded.leaf is None and sharded.link is None:
                sharded.begin_gathering()
        if not ahead_bytes or self.mesh.whole.size == 1 or not torch.is_grad_enabled():
            return LazyTensors(self.step_input)
        sums = Sums(ahead_bytes)
        # A gradient that is summed once more, in buckets, wants to come early.
        entered = {
            sharded.name: sharded.in_step(Entrance.apply(sharded.parameter, sums))
            for sharded in self._by_parameter.values()
            if sharded.parameter.requires_grad
            and sharded.plan.uses_shards
            and not sharded.plan.is_fetched
            if sharded.is_used_in_place
        }
        return LazyTensors(self.step_input, entered)

    def step_input(self, name: str) -> Tensor:
        """What the lowered step takes for one parameter; see `step_inputs`."""
        sharded = self._by_name[name]
        if sharded.plan.is_fetched:
            assert self._host is not None
            return sharded.in_step(self._host.fetch(sharded))
        if not sharded.is_gathered_once:
            return sharded.in_step(sharded.parameter)
        if sharded.leaf is None:
            with torch.no_grad():
                part = (
                    None
                    if self._host is None or sharded.link is None
                    else self._host.bring(sharded)
                )
                leaf = sharded.begin_gathering(part).wait()
            sharded.gathering = None
            leaf = leaf.requires_grad_(sharded.parameter.requires_grad)
            if leaf.requires_grad:
                leaf.grad_dtype = sharded.parameter.dtype  # in which micro-batches add up
                leaf.grad, sharded.partial = sharded.partial, None
                leaf.register_post_accumulate_grad_hook(partial(self._made, sharded.name))
            sharded.leaf = leaf
        return sharded.leaf

    def will_read(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """A new training program takes parameters in these dtypes, by name; see
        `StepGraph.dtypes_read`.
        """
        for name, dtype in dtypes.items():
            self._by_name[name].will_be_read_in(dtype)

    def regather_hooks(self, ahead_bytes: int) -> SavedTensorHooks:
        """Context of a forward: what it gathers at use is not kept but gathered again (ZeRO-3), so
        many bytes ahead.
        """
        return SavedTensorHooks(self._by_parameter, self._results.store, ahead_bytes)

    def hold(self, names: Collection[str]) -> None:
        """Gradients of these parameters (names of the step's) are not complete when they are made
        next.
        """
        self.reducer.held = frozenset(names)

    def finish_backward(self, completed: Completed | None = None) -> None:
        """After every backward: complete `parameter.grad` (where `reducer.enabled`). Collective
        over the mesh.
        """
        if self._host is not None:
            self._host.finish()
            completed = None  # gradients have yet to arrive
        self.reducer.finish(completed)
        if self._host is not None:
            self._host.link.settle()

    def after_optimizer_step(self) -> None:
        """Parameters have new values: copies that were gathered for the last step go."""
        for sharded in self._by_parameter.values():
            sharded.drop_copy()

    def _watch(self, sharded: ShardedParameter) -> None:
        """Announce the gradient of a parameter that the step uses as it is stored."""
        # A hook of the node that adds to `grad`, not of the tensor: those also run for
        # `torch.autograd.grad`.
        parameter, part = sharded.parameter, sharded.parameter.data
        if self._replicas is not None:  # the node knows the shape of gradients: that of the whole
            parameter.data = part.new_zeros(()).expand(sharded.module_shape)
        sharded.accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        parameter.data = part
        aside = sharded.set_complete_aside
        self._hooks.append(
            sharded.accumulator.register_prehook(
                lambda grads: aside(grads) if self.listens else None
            )
        )
        self._hooks.append(
            sharded.parameter.register_post_accumulate_grad_hook(partial(self._made, sharded.name))
        )

    def _made(self, name: str, used: Tensor) -> None:
        """The backward has made the gradient of a parameter, or of its copy: of this rank, not
        reduced yet.
        """
        if not self.listens:
            return
        if self._look is not None:
            self._look(name, used)
        self.reducer.mark_ready(name)


class LazyTensors(dict[str, Tensor]):
    """Tensors by name; what it does not hold is made whenever it is asked for."""

    def __init__(
        self, make: Callable[[str], Tensor], held: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(held or {})
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        return self._make(name)


@dataclass
class _Known:
    """A parameter of any stage, as this rank sees it. The first stage that uses it owns it."""

    name: str
    shape: torch.Size  # of the whole, in the module
    source: int  # the rank that speaks for the owning stage
    owned: ShardedParameter | None  # as the owning stage has it, where this rank is one of its
    held: ShardedParameter | None  # as any stage of this rank has it


class ParameterStore:
    """Parameters that any stage uses, in the stages' order: the same on every rank. All others are
    whole everywhere.

    Where stages lie on different devices, a rank holds the parameters of its own stages only, the
    others are empty, and
    whatever gathers is collective over the whole job: the owning stage gathers, and sends to the
    others.

    Args:
        module: the user's module; holds whole parameters, equal on all ranks, until `shard`.
        inputs: the step's parameters, each of which some stage holds.
        stages: their `parameter_plans` say, by any of a parameter's names, how it is stored.
        meshes: per stage this rank's mesh, None for stages of others.
        mesh: of the whole job.
        replicas: each rank runs a step of its own on whole parameters, and gradients are averaged.
        copies: which of how many stores of the job, on as many ranks each, that hold the same.

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
        self.mesh, self.copies = mesh, copies
        self.ahead_bytes = max(
            (stage.ahead_bytes for stage in stages), default=0
        )  # gathered before they are used
        self.of_stage: dict[int, MeshParameters] = {}  # of stages; those on one mesh share them
        self._meshes: dict[int, MeshParameters] = {}  # by id of the mesh
        self._known: dict[nn.Parameter, _Known] = {}
        self._is_split = (
            len({stage_ranks(stage) for stage in stages}) > 1
        )  # ranks lack parameters of other stages
        for index, (stage, own_mesh) in enumerate(zip(stages, meshes, strict=True)):
            if own_mesh is not None:
                here = self._meshes.setdefault(id(own_mesh), MeshParameters(own_mesh, replicas))
                self.of_stage[index] = here
            for given in inputs:
                plans = [
                    stage.parameter_plans[name]
                    for name in given.names
                    if name in stage.parameter_plans
                ]
                if not plans:
                    continue
                parameter = module.get_parameter(given.name)
                sharded = None if own_mesh is None else here.add(given, plans[0], parameter)
                if parameter not in self._known:
                    source = stage_ranks(stage)[0]
                    self._known[parameter] = _Known(
                        given.name, parameter.shape, source, sharded, sharded
                    )
                elif self._known[parameter].held is None:
                    self._known[parameter].held = sharded
        for given in inputs:
            if module.get_parameter(given.name) not in self:
                raise PlanError(
                    f"the plan says nothing of parameter {given.name}", "plan again for this model"
                )
        whole = {
            p for p, known in self._known.items() if known.held is not None and known.held.is_whole
        }
        # Not whole on every rank, in order; all where other ranks may lack what this one holds.
        self.sharded_parameters = {p: None for p in self._known if self._is_split or p not in whole}

    # Which parameters there are, and what this rank has of them

    @property
    def device(self) -> torch.device:
        """Where parameters are used, wherever they lie."""
        held = (known.held.device for known in self._known.values() if known.held is not None)
        return next(held, torch.device("cpu"))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All stages' parameters, in the same order on every rank."""
        return tuple(self._known)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether some stage uses the parameter."""
        return parameter in self._known

    def name_of(self, parameter: nn.Parameter) -> str:
        """The step's name of one of `parameters`."""
        return self._known[parameter].name

    def whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the whole parameter, as the module had it."""
        known = self._known.get(parameter)
        return parameter.shape if known is None else known.shape

    def whole_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes of all of them, whole."""
        return sum(self.whole_shape(p).numel() * p.element_size() for p in parameters)

    def is_on_host(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's part of it lies in host memory."""
        known = self._known.get(parameter)
        return known is not None and known.held is not None and known.held.link is not None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has any of the parameter: it is empty here otherwise."""
        known = self._known.get(parameter)
        return known is None or known.held is not None

    def chunks(self, parameter: nn.Parameter, tensor: Tensor) -> list[Chunk]:
        """The boxes of the whole parameter that this rank holds, if any: see
        `ShardedParameter.chunks`.
        """
        known = self._known.get(parameter)
        if known is None:
            return [Chunk((0,) * tensor.dim(), tensor)]
        return [] if known.held is None else known.held.chunks(tensor)

    def replica(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Of the ranks that hold the same part: which one this is, and how many; None outside of
        the owning stage.
        """
        known = self._known.get(parameter)
        if known is None:
            return self.mesh.whole.index, self.mesh.whole.size
        return None if known.owned is None else known.owned.replica()

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's elements count in a sum over all ranks: of those that hold the same,
        the first's do.
        """
        replica = self.replica(parameter)
        return replica is not None and replica[0] == 0

    # Into shards, and out of them

    def shard(
        self,
        values: Callable[[nn.Parameter], Tensor] = Tensor.detach,
        bucket_bytes: int = BUCKET_BYTES,
        look: GradientReader | None = None,
    ) -> None:
        """Replace every parameter's data by this rank's part, and watch the backward. Once, before
        training.

        Args:
            values: gives the whole of a parameter (all of it is freed before the next is asked
                for).
            look: sees every gradient as this rank has made it, before any sum over ranks.
        """
        for mesh in self._meshes.values():
            mesh.shard(values, bucket_bytes, look)
        for parameter, known in self._known.items():
            if known.held is None:
                replace_data(parameter, parameter.new_empty(0))
                parameter.grad = None

    def unshard(self) -> None:
        """Give every parameter its whole data back, on every rank. Collective; ends training with
        this store.
        """
        for mesh in self._meshes.values():
            mesh.unwatch()
            mesh.after_optimizer_step()
        for parameter in self.sharded_parameters:
            known = self._known[parameter]
            if known.owned is None or not known.owned.is_whole:
                parameter.grad = None  # that of a part
            replace_data(parameter, self.gather(parameter))

    # A training step, where the backward is the Trainer's (stages of a pipeline are told by the
    # pipeline)

    def sync(self, enabled: bool) -> None:
        """Whether the next backward ends with the reduction."""
        for mesh in self._meshes.values():
            mesh.reducer.enabled = enabled

    @contextmanager
    def listening(self, flag: bool) -> Iterator[None]:
        """Context in which gradients are taken as they are made, or stay this rank's own."""
        before = [(mesh, mesh.listens) for mesh in self._meshes.values()]
        for mesh, _ in before:
            mesh.listens = flag
        try:
            yield
        finally:
            for mesh, listened in before:
                mesh.listens = listened

    @property
    def is_syncing(self) -> bool:
        """What `sync` was last given."""
        return all(mesh.reducer.enabled for mesh in self._meshes.values())

    @property
    def awaits_finish(self) -> bool:
        """Whether a backward of this rank's own has made gradients that `finish_backward` has not
        seen yet.
        """
        reducers = [mesh.reducer for mesh in self._meshes.values()]
        return any(isinstance(each, ReplicaReducer) and each.has_begun for each in reducers)

    def finish_backward(self, completed: Completed | None = None) -> None:
        """See `MeshParameters.finish_backward`."""
        for mesh in self._meshes.values():
            mesh.finish_backward(completed)

    def give_gradient(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Keep this rank's part of a gradient that is complete already."""
        known = self._known.get(parameter)
        if known is None:
            parameter.grad = whole
        elif known.held is not None:
            known.held.put_gradient(known.held.shard_like(whole))

    def after_optimizer_step(self) -> None:
        """See `MeshParameters.after_optimizer_step`."""
        for mesh in self._meshes.values():
            mesh.after_optimizer_step()

    # Whole values: checkpoints, user code, optimizer state

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """The whole parameter, on every rank. Collective."""
        return self.gather_like(parameter, parameter.detach())

    def gather_like(
        self, parameter: nn.Parameter, tensor: Tensor, shape: torch.Size | None = None
    ) -> Tensor:
        """The whole of a tensor laid out as the parameter (its gradient), on every rank.
        Collective.

        Tensors of another shape than the owning stage's parts are taken as they are there.

        Args:
            tensor: on ranks outside of the owning stage only its dtype is looked at.
            shape: of the whole, that of the parameter by default.
        """
        known = self._known.get(parameter)
        if known is None:
            return tensor
        if known.owned is not None:
            whole = known.owned.gather_like(tensor)
        else:
            whole = torch.empty(shape or known.shape, dtype=tensor.dtype, device=self.device)
        if self._is_split:
            whole = whole.contiguous()
            dist.broadcast(whole, group=self.mesh.whole.group, group_src=known.source)
        return whole

    def whole_in_step(self, parameter: nn.Parameter) -> Tensor:
        """The whole parameter for code that all ranks run alike, whose gradients are complete.
        Collective.
        """
        held = self._known[parameter].held
        assert held is not None
        return held.to_whole(held.in_step(parameter)).view(held.module_shape)

    def summed_later(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole copy of a parameter whose gradient, of this rank alone, more batches of one
        update add to.
        """
        known = self._known[parameter]
        copy = None if known.held is None else known.held.leaf
        return (
            copy
            if copy is not None and copy.grad is not None and copy.numel() == known.shape.numel()
            else None
        )

    def start_gather(self, parts: Mapping[nn.Parameter, Tensor]) -> Callable[[], list[Tensor]]:
        """The whole of parameters of one dtype, from their parts: begun now, in one collective
        where all are cut
        along one axis. Collective; what it gives waits, without communication of its own."""
        owned = [each for parameter in parts if (each := self._known[parameter].owned) is not None]
        cuts = [
            (each.shape, placement.dim)
            for each in owned
            for placement in each.plan.layout
            if isinstance(placement, Shard)
            and len(each.plan.layout) == 1
            and each.shape == each.module_shape
        ]
        if self._is_split or len(cuts) < len(parts):
            values = [self.gather_like(parameter, part) for parameter, part in parts.items()]
            return lambda: values
        axis = owned[0].mesh.axes[0]
        columns = [chunk_shape(shape, dim, axis.size, 0).numel() for shape, dim in cuts]
        own = torch.zeros(
            sum(columns), dtype=next(iter(parts.values())).dtype, device=owned[0].device
        )
        for column, part in zip(own.split(columns), parts.values(), strict=True):
            column[: part.numel()].view(part.shape).copy_(part)
        pending = axis.start_all_gather(own, 0, axis.size * len(own))

        def wait() -> list[Tensor]:
            found = []
            for rows, (shape, dim) in zip(
                pending.wait().view(axis.size, -1).split(columns, 1), cuts, strict=True
            ):
                shapes = [chunk_shape(shape, dim, axis.size, i) for i in range(axis.size)]
                found.append(
                    torch.cat(
                        [row[: s.numel()].view(s) for row, s in zip(rows, shapes, strict=True)], dim
                    )
                )
            return found

        return wait

    def said_by_owners(self, own: Mapping[nn.Parameter, T]) -> dict[nn.Parameter, T]:
        """Of each parameter what the stage that owns it says, on every rank. Collective.

        Args:
            own: what this rank would say of its parameters, small and picklable.
        """
        if not self._is_split:
            return dict(own)
        known = self._known.items()
        here = {each.name: own[p] for p, each in known if each.owned is not None and p in own}
        everyone = all_gather_object(here, self.mesh.whole.group)
        said = {
            p: everyone[each.source][each.name]
            for p, each in known
            if each.name in everyone[each.source]
        }
        return {p: text for p, text in own.items() if p not in self} | said

    def shard_like(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part (a copy, perhaps empty) of a tensor of the whole shape; other shapes as
        they are.
        """
        if (known := self._known.get(parameter)) is None:
            return whole
        return whole.new_empty(0) if known.held is None else known.held.shard_like(whole)

    def take_whole(self, parameter: nn.Parameter, whole: Tensor, part: Tensor) -> None:
        """Write this rank's part of a parameter, if it holds any, into `part`, and into a gathered
        copy.
        """
        held = self._known[parameter].held
        if held is not None:
            held.take_whole(whole, part)


def all_whole() -> ParameterStore:
    """Of a module that nobody has sharded. No communication."""
    return ParameterStore(nn.Module(), (), (), (), build_mesh((world_size(),)))
