"""The parameters of the stages on one mesh, while steps run: what the step takes of them, and how
their gradients are noticed.

`runtime/parameters.py` has the parameters of all stages.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ContextDecorator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.reshard import Entrance, Sums
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.optimizer_info import Reads
from alpa_strategy.ir.owners import assign_owners, matrix_work, needs_owner
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.runtime.gradient_buckets import Completed
from alpa_strategy.runtime.gradients import GradientReducer, ReplicaReducer, Replicas
from alpa_strategy.runtime.host_link import StoredTensors
from alpa_strategy.runtime.host_parameters import HostParameters
from alpa_strategy.runtime.sharded_parameter import ShardedParameter, replace_data

# Is called with a parameter's name, and with the tensor whose `grad` the backward has made.
GradientReader = Callable[[str, Tensor], None]


class MeshParameters:
    """The parameters of the stages on one mesh.

    Args:
        mesh: the devices.
        replicas: set if each rank runs a step of its own on full parameters.
    """

    def __init__(self, mesh: MeshComm, replicas: Replicas | None = None) -> None:
        self.mesh = mesh
        self._replicas = replicas

        # Parameters in host memory, and results of ops that are stored there.
        self._host: HostParameters | None = None
        self._results = StoredTensors()

        # By every name of a tied parameter, and by the parameter.
        self._by_name: dict[str, ShardedParameter] = {}
        self._by_parameter: dict[nn.Parameter, ShardedParameter] = {}

        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

        # Whether gradients are reduced as the backward makes them.
        self.listens = True

    def add(
        self, parameter_input: ParameterInput, plan: ParameterPlan, parameter: nn.Parameter
    ) -> ShardedParameter:
        """Add a parameter of a stage and return it; a known one as it was added. Stages on the same
        devices store it alike.

        Args:
            parameter_input: the parameter as an input of the step.
            plan: how it is stored.
            parameter: of the module, still with its full data.
        """
        known = self._by_parameter.get(parameter)
        if known is not None:
            return known

        replicas = None if self._replicas is None else self._replicas.mesh
        sharded = ShardedParameter.of(parameter_input, plan, parameter, self.mesh, replicas)
        self._by_parameter[parameter] = sharded
        self._by_name.update(dict.fromkeys(parameter_input.names, sharded))
        return sharded

    @property
    def sharded(self) -> tuple[ShardedParameter, ...]:
        """All parameters of the mesh, in the same order on its devices."""
        return tuple(self._by_parameter.values())

    def assign_owners(self, reads: Mapping[nn.Parameter, Reads]) -> None:
        """Set the owners of parameters that an optimizer steps in full, such that all devices of
        the mesh have about the same work.

        Args:
            reads: what optimizers look at, by parameter.
        """
        stepped_in_full = []
        for sharded in self._by_parameter.values():
            of_parameter = reads.get(sharded.parameter)
            if of_parameter is not None and needs_owner(sharded.plan, of_parameter):
                stepped_in_full.append(sharded)

        work = []
        for sharded in stepped_in_full:
            num_batch_dims = int(0 in reads[sharded.parameter].free_dims)
            work.append(matrix_work(sharded.module_shape, num_batch_dims))
        num_elements = [sharded.module_shape.numel() for sharded in stepped_in_full]
        owners = assign_owners(work, num_elements, self.mesh.all_devices.size)
        for sharded, owner in zip(stepped_in_full, owners, strict=True):
            sharded.owner = owner

    def shard(
        self,
        values: Callable[[nn.Parameter], Tensor],
        bucket_bytes: int,
        look: GradientReader | None,
    ) -> None:
        """Replace the data of all parameters by this rank's shards, and register the hooks that
        reduce gradients in the backward. Gradients of parameters that get shards are dropped.

        For the arguments see `ParameterStore.shard`.
        """
        self._look = look
        for sharded in self._by_parameter.values():
            parameter = sharded.parameter
            if not sharded.is_unsharded or sharded.plan.on_host:
                full = values(parameter)
                if sharded.plan.on_host:
                    self._host = self._host or HostParameters(full.device, look)
                    sharded.link = self._host.link
                replace_data(parameter, sharded.shard_like(full))
                # Freed before the next parameter's values are made.
                del full
                parameter.grad = None
            elif values is not Tensor.detach:
                parameter.data = values(parameter)

        trained = [s for s in self._by_parameter.values() if s.parameter.requires_grad]
        if self._replicas is not None:
            self.reducer: GradientReducer = ReplicaReducer(self._replicas, trained, bucket_bytes)
        else:
            self.reducer = GradientReducer(self.mesh, trained, bucket_bytes)

        for sharded in trained:
            if sharded.is_gathered_once:
                # Its gathered copy gets a hook in every step.
                continue
            if sharded.to_use.backward_steps:
                self._watch(sharded)
            elif look is not None and not sharded.plan.is_fetched:
                hook = partial(look, sharded.name)
                handle = sharded.parameter.register_post_accumulate_grad_hook(hook)
                self._hooks.append(handle)

    def unwatch(self) -> None:
        """Remove all hooks of gradients: parameters refer to this object by them. No
        communication.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for sharded in self._by_parameter.values():
            # The node remembers the shape of the shard, too.
            sharded.accumulator = None

    def step_inputs(self, prefetched_bytes: int = 0) -> Mapping[str, Tensor]:
        """Return name -> the tensor that the lowered step takes: the parameter itself, or its copy
        that is gathered once per step (`G` modes).

        All gatherings start now and overlap with the step; access to a parameter waits for its own.

        Args:
            prefetched_bytes: of gradients whose sums (ZeRO-3) may overlap with the backward.
        """
        for sharded in self._gathered_once:
            if sharded.leaf is None and sharded.link is None:
                sharded.begin_gathering()

        if not prefetched_bytes or self.mesh.all_devices.size == 1 or not torch.is_grad_enabled():
            return self._inputs

        sums = Sums(prefetched_bytes)
        entered: dict[str, Tensor] = dict(self._used_as_stored)
        for sharded in self._by_parameter.values():
            if not sharded.parameter.requires_grad or not sharded.plan.uses_shards:
                continue
            # A gradient that is summed once more, in a bucket, has to be complete early.
            if sharded.is_used_in_place and not sharded.plan.is_fetched:
                entrance = Entrance.apply(sharded.parameter, sums)
                entered[sharded.name] = sharded.in_step(entrance)
        return LazyTensors(self.step_input, entered)

    @cached_property
    def _gathered_once(self) -> tuple[ShardedParameter, ...]:
        """The parameters of which steps use a gathered copy."""
        return tuple(sharded for sharded in self.sharded if sharded.is_gathered_once)

    @cached_property
    def _inputs(self) -> Mapping[str, Tensor]:
        """Name -> what a step takes, where no gradient is summed within the backward."""
        return LazyTensors(self.step_input, self._used_as_stored)

    @cached_property
    def _used_as_stored(self) -> dict[str, Tensor]:
        """Name -> parameter, for those that every step takes as the module has them."""
        parameters: dict[str, Tensor] = {}
        for name, sharded in self._by_name.items():
            has_copy = sharded.plan.is_fetched or sharded.is_gathered_once
            if not has_copy and sharded.module_shape == sharded.shape:
                parameters[name] = sharded.parameter
        return parameters

    def step_input(self, name: str) -> Tensor:
        """Return the tensor that the lowered step takes for the parameter `name`: its shard, or the
        copy that is gathered once per step. Waits for that.
        """
        sharded = self._by_name[name]
        if sharded.plan.is_fetched:
            assert self._host is not None
            return sharded.in_step(self._host.fetch(sharded))
        if not sharded.is_gathered_once:
            return sharded.in_step(sharded.parameter)
        if sharded.leaf is None:
            sharded.leaf = self._gathered_leaf(sharded)
        return sharded.leaf

    def _gathered_leaf(self, sharded: ShardedParameter) -> Tensor:
        """Return the gathered copy of a parameter, a leaf of autograd that announces its gradient.
        Its `grad` is the sum over earlier micro-batches, moved from `sharded.partial`.
        """
        with torch.no_grad():
            local = None
            if self._host is not None and sharded.link is not None:
                local = self._host.to_device(sharded)
            leaf = sharded.begin_gathering(local).wait()
        sharded.gathering = None

        leaf = leaf.requires_grad_(sharded.parameter.requires_grad)
        if leaf.requires_grad:
            # The dtype in which micro-batches add up.
            leaf.grad_dtype = sharded.parameter.dtype
            leaf.grad = sharded.partial
            sharded.partial = None
            leaf.register_post_accumulate_grad_hook(partial(self._made, sharded.name))
        return leaf

    def will_read(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Record the dtypes, by name, in which a new training program reads parameters.

        They are those of `StepGraph.dtypes_read`.
        """
        for name, dtype in dtypes.items():
            self._by_name[name].will_be_read_in(dtype)

    def regather_hooks(self, prefetched_bytes: int) -> SavedTensorHooks:
        """Context of a forward: what it gathers at use is not saved for the backward, but
        re-gathered there (ZeRO-3).

        Args:
            prefetched_bytes: that the backward may prefetch.
        """
        return SavedTensorHooks(self._by_parameter, self._results.store, prefetched_bytes)

    def hold(self, names: Collection[str]) -> None:
        """Set the parameters, by the step's names, whose gradients are not complete when the next
        backward makes them.
        """
        self.reducer.held = frozenset(names)

    def finish_backward(self, completed: Completed | None = None) -> None:
        """Complete `parameter.grad` after a backward, if `reducer.enabled`. Collective over the
        mesh.

        Args:
            completed: as of `finish_buckets`; not called if parameters are in host memory.
        """
        if self._host is not None:
            self._host.finish()
            # Gradients have not arrived in host memory when their bucket is done.
            completed = None
        self.reducer.finish(completed)
        if self._host is not None:
            self._host.link.settle()

    def after_optimizer_step(self) -> None:
        """Drop the copies that were gathered for the last step: parameters have new values."""
        for sharded in self._gathered_once:
            sharded.drop_copy()

    def _watch(self, sharded: ShardedParameter) -> None:
        """Register the hooks that reduce the gradient of a parameter that the step uses as it is
        stored.

        By a hook of the node that adds to `grad`, not of the tensor: a tensor's hooks also run for
        `torch.autograd.grad`.
        """
        parameter = sharded.parameter
        shard = parameter.data
        if self._replicas is not None:
            # The node remembers the shape of gradients, here that of the full parameter.
            parameter.data = shard.new_zeros(()).expand(sharded.module_shape)
        sharded.accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        parameter.data = shard

        def before_accumulation(grads: tuple[Tensor, ...]) -> None:
            if self.listens:
                sharded.set_complete_aside(grads)

        self._hooks.append(sharded.accumulator.register_prehook(before_accumulation))
        after_accumulation = partial(self._made, sharded.name)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(after_accumulation))

    def _made(self, name: str, used: Tensor) -> None:
        """Take the local gradient of a parameter, or of its copy, that the backward has made.

        Does nothing unless `listens`.
        """
        if not self.listens:
            return
        if self._look is not None:
            self._look(name, used)
        self.reducer.mark_ready(name)


class Listening(ContextDecorator):
    """Context in which gradients are reduced as they are made, or stay local.

    A class, as every step enters it several times: a generator takes three times as long.

    Args:
        meshes: of the parameters.
        flag: whether gradients are reduced.
    """

    def __init__(self, meshes: Collection[MeshParameters], flag: bool) -> None:
        self._meshes = meshes
        self._flag = flag
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before = [mesh.listens for mesh in self._meshes]
        for mesh in self._meshes:
            mesh.listens = self._flag

    def __exit__(self, *_: object) -> None:
        for mesh, listened in zip(self._meshes, self._before, strict=True):
            mesh.listens = listened


class LazyTensors(dict[str, Tensor]):
    """Tensors by name; those that it does not store are made at every access.

    Args:
        make: returns the tensor of a name.
        held: the tensors that are stored.
    """

    def __init__(
        self, make: Callable[[str], Tensor], held: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(held or {})
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        return self._make(name)


def scaled_gradients(inputs: Mapping[str, Tensor], scale: float) -> Mapping[str, Tensor]:
    """Return the inputs of a step (`MeshParameters.step_inputs`), with gradients times `scale`."""
    return LazyTensors(lambda name: _ScaledGradient.apply(inputs[name], scale))


class _ScaledGradient(torch.autograd.Function):
    """(parameter, scale) -> the parameter, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, scale: float) -> Tensor:
        """Return a view of the parameter."""
        # Read by `SavedTensorHooks`.
        ctx.is_made_of_parameters = True
        ctx.scale = scale
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
