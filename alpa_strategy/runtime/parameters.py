"""The user's parameters as this device holds them: shards in place, gathered for the step, gradients brought home.

The module keeps its Parameter objects under their names, so optimizers, callbacks and state-dict keys work unchanged;
only `data` is replaced. Values and gradients move by `Reshard`s from the storage layout to the one that the step uses:

    mode    stored       in the step   gradient after the step
    R       Replicate    R             complete on every device already
    R*      Replicate    R*            Partial, all-reduced once per step
    S<d>    Shard(d)     S<d>          complete on its shard already
    G<d>    Shard(d)     R*            Partial, reduce-scattered once per step; gathered once per step
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm, Pending
from alpa_strategy.comm.regather import Regather
from alpa_strategy.errors import PlanError, RuntimeMismatchError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.placement import Layout
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.runtime.gradients import GradientEntry, GradientReducer
from alpa_strategy.runtime.parameter_data import replace_data
from alpa_strategy.runtime.step_in_backward import StepInBackward
from alpa_strategy.runtime.stored import StoredParameter, replica


class ParameterStore:
    """Parameters of one stage on one mesh.

    Args:
        module: the user's module; holds whole parameters, equal on all ranks, until `shard`.
        inputs: the step's parameters.
        plans: name -> plan; by any of a tied parameter's names.
        mesh: the stage's mesh.
        bucket_bytes: size of the gradient buckets.
        stepping: updates parameters within the backward where their gradient is complete then.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[ParameterInput, ...],
        plans: Mapping[str, ParameterPlan],
        mesh: MeshComm,
        bucket_bytes: int = BUCKET_BYTES,
        stepping: StepInBackward | None = None,
    ) -> None:
        self.mesh = mesh
        self._stepping = stepping
        self._stored: dict[str, StoredParameter] = {}
        self._by_name: dict[str, StoredParameter] = {}
        self._by_parameter: dict[nn.Parameter, StoredParameter] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_sharded = False
        for given in inputs:
            plan = next((plans[name] for name in given.names if name in plans), None)
            if plan is None:
                raise PlanError(f"the plan says nothing of parameter {given.name}", "plan again for this model")
            stored = StoredParameter.of(given, plan, module.get_parameter(given.name), mesh)
            self._stored[given.name] = stored
            self._by_parameter[stored.parameter] = stored
            self._by_name.update(dict.fromkeys(given.names, stored))
        self._reducer = GradientReducer(mesh, [self._entry(s) for s in self._trainable()], bucket_bytes)

    def _trainable(self) -> list[StoredParameter]:
        return [stored for stored in self._stored.values() if stored.parameter.requires_grad]

    def shard(self, values: Callable[[nn.Parameter], Tensor] = Tensor.detach) -> None:
        """Replace every parameter's data by this device's shard, and watch the backward. Once, before training.

        Args:
            values: gives the whole of a parameter (all of it is freed before the next is asked for).
        """
        for stored in self._stored.values():
            if stored.to_whole.forward_steps:
                replace_data(stored.parameter, self.shard_like(stored.name, values(stored.parameter)))
                stored.parameter.grad = None
            elif values is not Tensor.detach:
                stored.parameter.data = values(stored.parameter)
        for stored in self._trainable():
            if stored.to_use.backward_steps and not stored.is_gathered_once:
                self._watch(stored)
        if self._stepping is not None:
            complete = [s for s in self._trainable() if not s.to_use.backward_steps and not s.is_gathered_once]
            self._hooks += self._stepping.watch(stored.parameter for stored in complete)
        self._is_sharded = True

    def unshard(self) -> None:
        """Give every parameter its whole data back, on every device. Collective; ends training with this store."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.after_optimizer_step()
        for stored in self._stored.values():
            stored.accumulator = None  # it remembers the shard's shape
            if stored.to_whole.forward_steps:
                stored.parameter.grad = None
                replace_data(stored.parameter, stored.whole_of(stored.parameter.detach()))
        self._is_sharded = False

    # One training step

    def step_inputs(self) -> Mapping[str, Tensor]:
        """Name -> what the lowered step takes: the parameter itself, or (`G` modes) its copy gathered for this step.

        All gatherings start now and run beside the step; asking for a parameter waits for its own.
        """
        for stored in self._stored.values():
            if stored.is_gathered_once and stored.leaf is None:
                self._gathering(stored)
        return _StepInputs(self, tuple(self._stored))

    def step_input(self, name: str) -> Tensor:
        """What the lowered step takes for one parameter; see `step_inputs`."""
        return self._step_input(self._by_name[name])

    def _step_input(self, stored: StoredParameter) -> Tensor:
        if not stored.is_gathered_once:
            return stored.in_step(stored.parameter)
        if stored.leaf is None:
            with torch.no_grad():
                leaf = self._gathering(stored).wait()
            stored.gathering = None
            leaf = leaf.requires_grad_(stored.parameter.requires_grad)
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _: self._reducer.mark_ready(stored.name))
            stored.leaf = leaf
        return stored.leaf

    def _gathering(self, stored: StoredParameter) -> Pending:
        """The gathering of the step's copy, begun now where it is not under way."""
        if stored.gathering is None:
            with torch.no_grad():
                stored.gathering = stored.to_use.start(stored.in_step(stored.parameter.detach()))
        return stored.gathering

    def sync(self, enabled: bool) -> None:
        """Whether the next backward ends with the reduction: False for all micro-batches but the last of a step."""
        self._reducer.enabled = enabled

    def hold(self, names: Collection[str]) -> None:
        """Gradients of these parameters (names of the step's) are not complete when they are made next."""
        self._reducer.held = frozenset(names)

    def finish_backward(self) -> None:
        """After every backward: complete `parameter.grad` (when `sync` is on). Collective."""
        if self._stepping is not None:
            self._stepping.finish()
        self._reducer.finish()
        if self._stepping is not None:
            self._stepping.reset()

    def after_optimizer_step(self) -> None:
        """Drop gathered copies: the next step gathers the new values."""
        for stored in self._stored.values():
            self._drop_copy(stored)

    def _drop_copy(self, stored: StoredParameter) -> None:
        if stored.gathering is not None:  # the step did not use it
            stored.gathering.wait()
        stored.leaf = stored.gathering = None

    def discard_gradients(self) -> None:
        """Forget what an interrupted or skipped backward left behind."""
        self._reducer.reset()
        if self._stepping is not None:
            self._stepping.reset()
        for stored in self._stored.values():
            stored.complete, stored.is_complete, stored.parameter.grad = None, False, None
            if stored.leaf is not None:
                stored.leaf.grad = None

    def regather_hooks(self) -> Regather:
        """Context for the forward: parameters that the step gathers at use are not kept but gathered again (ZeRO-3)."""
        return Regather(stored.parameter for stored in self._stored.values())

    # Whole values: checkpoints, logging, optimizer state

    def gather(self, name: str) -> Tensor:
        """The whole parameter, on every device. Collective."""
        stored = self._by_name[name]
        return self.gather_like(name, stored.parameter.detach())

    def gather_like(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a tensor laid out as parameter `name` (a moment of its optimizer). Collective.

        Tensors of another shape than the local parameter's (step counters) are returned as they are.
        """
        stored = self._by_name[name]
        return stored.whole_of(tensor) if tensor.shape == stored.local_shape else tensor

    def shard_like(self, name: str, whole: Tensor) -> Tensor:
        """This device's part (a copy) of a tensor of parameter `name`'s whole shape; other shapes as they are."""
        stored = self._by_name[name]
        return stored.part_of(whole) if whole.shape == stored.module_shape else whole

    def load_full(self, name: str, tensor: Tensor) -> None:
        """Overwrite this device's part of parameter `name` by that of the whole `tensor`."""
        stored = self._by_name[name]
        if tensor.shape != stored.module_shape:
            raise RuntimeMismatchError(
                f"a value of shape {list(tensor.shape)} was given for {name}, which is {list(stored.module_shape)}",
                "load a checkpoint of the same model",
            )
        with torch.no_grad():
            stored.parameter.copy_(self.shard_like(name, tensor) if self._is_sharded else tensor)
        self._drop_copy(stored)

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter, as the module had it."""
        return self._by_name[name].module_shape

    def take_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Write this device's part of parameter `name` into `part`, and into a copy that is gathered for the step."""
        stored = self._by_name[name]
        part.copy_(self.shard_like(name, whole))
        if stored.leaf is not None:
            stored.leaf.data.copy_(stored.used_part_of(whole))
        else:
            self._drop_copy(stored)

    def local_shape(self, name: str) -> torch.Size:
        """Shape of this device's part of parameter `name`, as the module holds it."""
        return self._by_name[name].local_shape

    def chunks(self, name: str, tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of the whole parameter that this device holds: (where it begins, a view of `tensor`) each.

        More than one where the step sees the parameter in segments.

        Args:
            tensor: laid out as parameter `name`.
        """
        return self._by_name[name].chunks(tensor)

    def replica(self, name: str) -> tuple[int, int]:
        """Of the devices that hold the same part of a parameter: which one this is, and how many they are."""
        return replica(self._by_name[name].layout, self.mesh)

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The step's name of a parameter, None when the step does not use it."""
        stored = self._by_parameter.get(parameter)
        return stored.name if stored is not None else None

    def layout_of(self, parameter: nn.Parameter) -> Layout:
        """Where a parameter's (and its gradient's) elements lie; what the step does not use is replicated."""
        stored = self._by_parameter.get(parameter)
        return stored.layout if stored is not None else Layout.replicated(len(self.mesh.shape))

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this device has a part of the parameter: it has one of all that the step uses."""
        return parameter in self._by_parameter

    @property
    def sharded_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters of which this device holds a part only."""
        return tuple(s.parameter for s in self._stored.values() if s.to_whole.forward_steps)

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this device's elements count in a sum over the mesh: of those that hold the same, the first does."""
        return replica(self.layout_of(parameter), self.mesh)[0] == 0

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The step's parameters."""
        return tuple(self._by_parameter)

    # Gradients

    def _watch(self, stored: StoredParameter) -> None:
        """Announce the gradient of a parameter that the step uses as it is stored.

        `parameter.grad` may hold a gradient that an earlier backward reduced already (the user does not clear it at
        every step): it is set aside, so that it is not summed over the devices again.
        """
        parameter = stored.parameter

        def before(grads: tuple[Tensor, ...]) -> None:
            if parameter.grad is None:
                stored.complete = None
            elif stored.is_complete:
                stored.complete, parameter.grad = parameter.grad, None
            stored.is_complete = False

        # A hook of the node that adds to `grad`, not of the tensor: those also run for `torch.autograd.grad`.
        stored.accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        self._hooks.append(stored.accumulator.register_prehook(before))
        self._hooks.append(
            parameter.register_post_accumulate_grad_hook(lambda _: self._reducer.mark_ready(stored.name))
        )

    def _entry(self, stored: StoredParameter) -> GradientEntry:
        parameter = stored.parameter

        def put(grad: Tensor) -> None:
            grad = grad.view_as(parameter)
            if stored.complete is not None:
                grad = grad + stored.complete
                stored.complete = None
            elif stored.is_gathered_once and parameter.grad is not None:
                grad = grad + parameter.grad
            parameter.grad = grad
            stored.is_complete = True

        return GradientEntry(
            name=stored.name,
            reshard=stored.to_use,
            shape=stored.used_shape,
            dtype=parameter.dtype,
            device=parameter.device,
            holder=lambda: stored.leaf if stored.is_gathered_once else parameter,
            put=put,
            is_used_up=lambda: self._stepping is not None and self._stepping.has_stepped(parameter),
        )


class _StepInputs(Mapping[str, Tensor]):
    """What the step takes, by name; each waits for its gathering when it is asked for."""

    def __init__(self, store: ParameterStore, names: tuple[str, ...]) -> None:
        self._store, self._names = store, names

    def __getitem__(self, name: str) -> Tensor:
        return self._store.step_input(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
