"""A plan on this rank, and the programs that run captured steps under it.

`PlanRuntime` has the meshes, random streams and parameters of this rank's stages, for as long as
the module is sharded. For each captured step it makes a `StepProgram`:

- direct: one stage, the full batch at once. The values have an autograd graph, and the backward of
  the loss runs it as on one device: hooks on it are called.
- pipelined: several stages or micro-batches. Backward included, a step is one call of a `Pipeline`;
  the backward of the loss only passes the gradients to the parameters.
- global: a batch that the stages cannot run, such as a smaller last one. Every rank computes all of
  it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import rank_in, world_size
from alpa_strategy.comm.mesh import MeshComm, Replica, build_mesh, build_stage_meshes
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.graph import BufferInput, ParameterInput, StepGraph
from alpa_strategy.ir.guards import COUNTERS
from alpa_strategy.ir.plan import Plan, StagePlan, stage_ranks
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.lower.codegen import lower
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.microbatch.first_rank_buffers import with_first_rank_buffers
from alpa_strategy.microbatch.transform import MicroStep, microbatch
from alpa_strategy.pipeline.build import (
    StageDevices,
    buffers_of,
    build_pipeline,
    is_gathered_at_use,
    stage_randoms,
)
from alpa_strategy.pipeline.executor import Gradients, Pipeline
from alpa_strategy.pipeline.of_this_rank import of_this_rank
from alpa_strategy.pipeline.stage_program import Values
from alpa_strategy.runtime.mesh_parameters import scaled_gradients
from alpa_strategy.runtime.parameters import ParameterStore

# Of micro-batches without a pipeline: the backward of each one follows its forward.
ONE_STAGE_SCHEDULE = "1F1B"

# Leaves of this rank's batch, in the order of `pytree.tree_leaves`.
Leaves = Sequence[Any]


@dataclass(frozen=True)
class StepProgram:
    """A function that runs a captured step, and its buffers."""

    # (leaves of the batch, values of the counters) -> values that leave the step, by number: those
    # of this rank's step. The loss can be differentiated.
    run: Callable[[Leaves, Mapping[str, int]], Values]

    # The step's buffers. Their updates are numbers of values that `run` returns.
    buffers: tuple[BufferInput, ...]

    # Whether ranks have different buffers after the step.
    buffers_differ: bool = False

    # Whether a rank's step reads buffers of other ranks: they must be equal when it starts.
    needs_equal_buffers: bool = True


class PlanRuntime:
    """Runs captured steps under a plan. All methods but those for checkpoints are collective.

    Args:
        module: its parameters are full until `store` is sharded; the Parameter objects stay.
        parameters: of the step that was planned.
        plan: of the parameters.
        device: of this rank.
        cluster: by whose links transfers between stages are chosen; None: without their costs.
        seed: of the job, the same on all ranks.
        loss_scale: returns the factor of the loss (half precision). Gradients that a pipeline
            computes need it before the backward.
        backend: of the process groups.
        compile: arguments of `torch.compile`; None: programs of training steps are not compiled.
        replica: the ranks that run the plan, next to others with the same parameters; None: all
            ranks of the job run it.
        gradient_scale: factor of the gradients that programs of one stage give to parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[ParameterInput],
        plan: Plan,
        device: torch.device,
        cluster: ClusterSpec | None,
        seed: int,
        loss_scale: Callable[[], float],
        backend: str,
        compile: Mapping[str, Any] | None = None,
        replica: Replica | None = None,
        gradient_scale: float = 1.0,
    ) -> None:
        group = None if replica is None else replica.group
        self._group = group
        self._rank = rank_in(group)
        self._num_ranks = world_size(group)
        self.module = module
        self._plan = plan
        self.loss_scale = loss_scale
        self._gradient_scale = gradient_scale

        # Both are part of checkpoints.
        self._seed = seed
        self.num_steps = 0

        stages = plan.stages
        shapes_and_ranks = [(stage.logical_mesh, stage_ranks(stage)) for stage in stages]
        meshes = build_stage_meshes(shapes_and_ranks, backend, group=group)
        compiler = None if compile is None else Compiler(compile)
        self._places = StageDevices(
            meshes, stage_randoms(stages, meshes, seed), device, cluster, compiler, group
        )
        if len(stages) == 1:
            job_mesh = meshes[0]
        else:
            job_mesh = build_mesh((world_size(group),), backend, group=group)
        assert job_mesh is not None

        if plan.is_pipelined:
            # Parameters that only a prologue or epilogue reads are unsharded on every rank.
            planned = {name for stage in stages for name in stage.parameter_plans}
            parameters = [
                parameter for parameter in parameters if not planned.isdisjoint(parameter.names)
            ]
        copies = (0, 1) if replica is None else (replica.index, replica.count)
        self.store = ParameterStore(module, parameters, stages, meshes, job_mesh, copies=copies)

    def training_program(self, step: StepGraph, plan: Plan) -> StepProgram:
        """Return the program of a training step.

        Args:
            step: that was captured.
            plan: of the step, with the parameters in the layouts of this runtime's plan.

        Raises:
            PlanError: the step cannot be split into the plan's micro-batches, or run by its
                schedule.
        """
        if not self._plan.is_pipelined:
            return self._direct_program(step, plan.stages[0])

        places = self._places
        of_stage = self.store.of_stage
        schedule = plan.schedule if len(plan.stages) > 1 else ONE_STAGE_SCHEDULE
        micro = microbatch(step, plan.num_microbatches, world_size(self._group))
        for index, mesh_parameters in of_stage.items():
            stage_graph = slice_stage(micro.graph, *plan.stages[index].ops)
            mesh_parameters.will_read(stage_graph.dtypes_read)
        held_plans = [stage.parameter_plans for stage in self._plan.stages]
        pipeline = build_pipeline(
            self.module, micro, plan.stages, schedule, places, of_stage, held_plans
        )
        return StepProgram(
            partial(self._pipelined, step, micro, pipeline), with_first_rank_buffers(step).buffers
        )

    def _direct_program(self, step: StepGraph, stage: StagePlan) -> StepProgram:
        """Return the program of a step with one stage and one micro-batch."""
        places = self._places
        mesh = places.meshes[0]
        assert mesh is not None
        parameters = self.store.of_stage[0]
        parameters.will_read(step.dtypes_read)

        lowered = lower(step, stage, mesh, places.device, places.randoms[0], places.compiler)
        plans = stage.parameter_plans.values()
        gathers_at_use = any(map(is_gathered_at_use, plans))
        regathers = gathers_at_use or bool(stage.recomputed_ops)

        # Values of ranks are local if the devices are in the order of ranks (`leaving_layouts`).
        ranks = (0, 1) if mesh.is_in_order else (self._rank, self._num_ranks)

        def direct(leaves: Leaves, counters: Mapping[str, int]) -> Values:
            buffers = step_buffers(self.module, step, counters)
            with parameters.regather_hooks(stage.prefetched_bytes) if regathers else nullcontext():
                inputs = parameters.step_inputs(stage.prefetched_bytes)
                if self._gradient_scale != 1.0:
                    inputs = scaled_gradients(inputs, self._gradient_scale)
                values = lowered(inputs, buffers, _samples_of_mesh(step, leaves, mesh))[0]
            return of_this_rank(step, values, *ranks)

        buffers_differ = _has_updates_of_ranks(step)
        return StepProgram(direct, step.buffers, buffers_differ, lowered.reads_others_buffers)

    def _pipelined(
        self,
        step: StepGraph,
        micro: MicroStep,
        pipeline: Pipeline,
        leaves: Leaves,
        counters: Mapping[str, int],
    ) -> Values:
        """Run a step by a `Pipeline`, with prologue and epilogue, and return this rank's values.

        Args:
            step: the step of the full batch.
            micro: the same, split into micro-batches.
            leaves: of the batch that this rank has loaded.
            counters: by name.

        Raises:
            LostRankError: as of `Pipeline.step`.
        """
        buffers = step_buffers(self.module, step, counters)

        # A pipeline updates its buffers itself, micro-batch by micro-batch: it gets copies.
        copies = dict(buffers)
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor):
                copies[name] = buffer.clone()
        pipeline.set_buffers(copies)

        values: Values = {}
        if micro.prologue is not None:
            values |= self._compute_globally(micro.prologue, buffers, leaves, values)[0]
        external_values = {value: values[source] for value, source in micro.from_prologue.items()}
        scale = self.loss_scale()
        escaping, gradients = pipeline.step(batch_rows(micro.graph, leaves), external_values, scale)
        values |= escaping
        if micro.epilogue is not None:
            values |= self._compute_globally(micro.epilogue, buffers, leaves, values)[0]
        values |= {step.loss: hand_over(values[step.loss], gradients, scale)}
        return of_this_rank(step, values, self._rank, self._num_ranks)

    def global_program(self, step: StepGraph) -> StepProgram:
        """Return a program that computes all of a step on every rank; each keeps its shards of the
        gradients.
        """
        run = partial(self._run_globally, step)
        return StepProgram(run, step.buffers, _has_updates_of_ranks(step))

    def _run_globally(self, step: StepGraph, leaves: Leaves, counters: Mapping[str, int]) -> Values:
        """Run a step unsharded on every rank with the full batch, and return this rank's values;
        each rank stores its shards of the gradients.
        """
        scale = self.loss_scale()
        buffers = step_buffers(self.module, step, counters)
        values, parameters = self._compute_globally(step, buffers, leaves, {}, trains=True)
        loss = values[step.loss]
        trained = {name: leaf for name, leaf in parameters.items() if leaf.requires_grad}
        grads = torch.autograd.grad(
            loss, list(trained.values()), torch.full_like(loss, scale), allow_unused=True
        )
        gradients = []
        for name, gradient in zip(trained, grads, strict=True):
            parameter = self.module.get_parameter(name)
            if gradient is not None and self.store.holds(parameter):
                gradients.append((parameter, self.store.shard_like(parameter, gradient)))
        values = {value: tensor.detach() for value, tensor in values.items()}
        values |= {step.loss: hand_over(values[step.loss], tuple(gradients), scale)}
        return of_this_rank(step, values, self._rank, self._num_ranks)

    def _compute_globally(
        self,
        part: StepGraph,
        buffers: Mapping[str, Any],
        leaves: Leaves,
        values: Values,
        trains: bool = False,
    ) -> tuple[Values, dict[str, Tensor]]:
        """Compute `part` of a step on every rank, from the global batch and full parameters.

        Collective. The random numbers are the same on all ranks, and others at every step; the
        rank's own generators are unchanged.

        Args:
            part: a graph of the step.
            buffers: by name.
            leaves: of this rank's batch.
            values: that `part` receives.
            trains: whether to record a graph for the gradients of the parameters.

        Returns:
            The escaping values of `part`, and the full parameters by name.
        """
        parameters = {}
        for parameter in part.parameters:
            leaf = self.store.gather(self.module.get_parameter(parameter.name)).detach()
            parameters[parameter.name] = leaf.requires_grad_(
                trains and parameter.meta.requires_grad
            )
        samples = _global_samples(part, leaves, self.store.mesh)

        # By default fork_rng uses every GPU of the node, with a warning; the others belong to other
        # ranks.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(trains):
            # The user's seed may be large.
            torch.manual_seed((self._seed * 1_000_003 + self.num_steps) % 2**63)
            all_values = run_step(part, parameters, buffers, samples, values)
        return {value: all_values[value] for value in part.escaping}, parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's random streams for a checkpoint, as plain data."""
        randoms = {
            str(stage): random.state_dict() for stage, random in self._places.randoms.items()
        }
        return {
            "devices": self._devices(),
            "seed": self._seed,
            "num_steps": self.num_steps,
            "randoms": randoms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random streams from `state_dict`. Does nothing if that was of other
        meshes.
        """
        if state.get("devices") != self._devices():
            return
        self._seed = state["seed"]
        self.num_steps = state.get("num_steps", 0)
        for stage, random in self._places.randoms.items():
            random.load_state_dict(state["randoms"][str(stage)])

    def _devices(self) -> list[list[int]]:
        """Return the devices of every stage: random streams are valid on the same meshes only."""
        devices = []
        for stage in self._plan.stages:
            mesh = (*stage.submesh, 0, *stage.logical_mesh)
            devices.append([stage.first_device, *mesh, *stage.devices])
        return devices


def hand_over(loss: Tensor, gradients: Gradients, scale: float) -> Tensor:
    """Return the loss with a backward that adds `gradients` to the parameters' `.grad`s.

    Args:
        loss: without a graph.
        gradients: of the loss times `scale`; complete.
        scale: of the gradients.
    """
    # An input that requires grad makes the loss differentiable on a rank without parameters too.
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _PassGradient.apply(anchor, loss, gradients, scale)


class _PassGradient(torch.autograd.Function):
    """(anchor, loss, gradients, their scale) -> the loss.

    The gradients bypass the parameters' `AccumulateGrad` nodes, whose hooks would reduce them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, gradients: Gradients, known_scale: float
    ) -> Tensor:
        """Return a copy of the loss; `anchor` requires a gradient, so that the backward runs."""
        ctx.gradients = gradients
        ctx.known_scale = known_scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None, None]:
        """Add the pipeline's gradients to `parameter.grad`.

        Args:
            scale: gradient of the loss; that with which the pipeline ran is divided out.

        Raises:
            RuntimeMismatchError: it runs for the second time.
        """
        if ctx.gradients is None:
            raise RuntimeMismatchError(
                "backward ran twice through one pipelined step, whose gradients were passed to the"
                " parameters by the first",
                "call backward once per training step, or plan with num_stages=1 and"
                " num_microbatches=1",
            )
        gradients = list(ctx.gradients)
        ctx.gradients = None

        # One by one, so that not all are in memory twice.
        while gradients:
            parameter, gradient = gradients.pop()
            scaled = gradient * (scale / ctx.known_scale).to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None, None


def _has_updates_of_ranks(step: StepGraph) -> bool:
    """Whether each rank updates a buffer from its own batch."""
    of_ranks = dict(step.of_ranks)
    return any(buffer.update in of_ranks for buffer in step.buffers)


def step_buffers(module: nn.Module, step: StepGraph, counters: Mapping[str, int]) -> dict[str, Any]:
    """Return the buffers of a program of `step`: the module's by name, copies of those in
    `kept_buffers`, and the counters.
    """
    buffers: dict[str, Any] = buffers_of(module, step)
    for name in step.kept_buffers:
        buffers[name] = buffers[name].clone()
    buffers[COUNTERS] = counters
    return buffers


def batch_rows(step: StepGraph, leaves: Leaves) -> list[Tensor]:
    """Return the batch's tensors in the order of `step.batch`: this rank's, or those of all ranks
    (`batch_scope="global"`).

    This rank's item of a batch of numbers becomes a tensor of shape [1].
    """
    tensors = []
    for entry in step.batch:
        tensor = leaves[entry.leaf]
        # The numbers of all ranks are a vector, of which this rank has one item.
        is_number_of_rank = tensor.ndim == 0 and bool(entry.meta.shape)
        tensors.append(tensor.reshape(1) if is_number_of_rank else tensor)
    return tensors


def _samples_of_mesh(step: StepGraph, leaves: Leaves, mesh: MeshComm) -> list[Tensor]:
    """Return the samples that belong to this rank's coordinate in the mesh.

    They are another rank's if the devices of the mesh are not in the order of the ranks.
    Collective.
    """
    samples = batch_rows(step, leaves)
    if step.batch_scope == "global" or mesh.is_in_order:
        return samples
    exchanged = []
    for leaf, tensor in zip(step.batch, samples, strict=True):
        is_batched = leaf.batch_dim is not None
        exchanged.append(mesh.exchange_rows(tensor) if is_batched else tensor)
    return exchanged


def _global_samples(part: StepGraph, leaves: Leaves, mesh: MeshComm) -> list[Tensor]:
    """Return the tensors of the global batch that `part` reads. Collective.

    Args:
        part: a graph of the step.
        leaves: of this rank's batch.
        mesh: of all ranks.
    """
    samples = _samples_of_mesh(part, leaves, mesh)
    if part.batch_scope == "global":
        return samples
    gathered = []
    for leaf, local in zip(part.batch, samples, strict=True):
        if leaf.batch_dim is None:
            gathered.append(local)
        else:
            gathered.append(
                mesh.all_devices.all_gather(local, 0, len(local) * mesh.all_devices.size)
            )
    return gathered
