"""A plan on this rank, and what runs captured steps under it.

`PlanRuntime` holds the meshes, random streams and parameters of this rank's stages, for as long as
the module lies in shards. For each captured step it makes a `StepProgram`, whatever the number of
stages:

- direct: one stage, the whole batch at once. The values carry their autograd graph, and the
  backward of the loss runs
  it as on one device: hooks on it are called.
- pipelined: stages or micro-batches. Backward included, a step is one call of a `Pipeline`; the
  backward of the loss finds the gradients there and only hands them over.
- whole: what the stages cannot run, a last smaller batch perhaps. Every rank computes all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import world_size
from alpa_strategy.comm.mesh import MeshComm, Replica, build_mesh, build_stage_meshes
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.inter_op.subgraph import slice_stage
from alpa_strategy.ir.graph import ParameterInput, StepGraph, run_step
from alpa_strategy.ir.guards import COUNTERS
from alpa_strategy.ir.plan import Plan, stage_ranks
from alpa_strategy.lower.codegen import lower
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.microbatch.transform import MicroStep, microbatch
from alpa_strategy.pipeline.build import StagePlaces, build_pipeline, stage_randoms
from alpa_strategy.pipeline.executor import Gradients, Pipeline
from alpa_strategy.pipeline.stage_program import Values
from alpa_strategy.runtime.parameters import ParameterStore

ONE_STAGE_SCHEDULE = (
    "1F1B"  # micro-batches without a pipeline: each one's backward follows its forward
)


# Leaves of this rank's batch, in the order of `pytree.tree_leaves`.
Leaves = Sequence[Any]
# What runs a captured step here: (the batch, the counters' values) -> the step's escaping
# values by number, whole on every rank; the loss can be differentiated.
StepProgram = Callable[[Leaves, Mapping[str, int]], Values]


class PlanRuntime:
    """See the file's docstring. Collective.

    Args:
        module: holds whole parameters until `store` is sharded; the Parameter objects stay.
        parameters: of the step that was planned.
        compile: arguments of `torch.compile`; None: programs of training steps are not compiled.
        seed: the job's, the same on all ranks.
        loss_scale: what the loss will be scaled by (half precision): gradients that a step makes
            need it early.
        replica: runs the plan, beside others that hold the same; None: all of the job runs it.
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
    ) -> None:
        self._group = group = None if replica is None else replica.group
        self.module, self._plan, self.loss_scale = module, plan, loss_scale
        self._seed, self.num_steps = seed, 0  # both go into checkpoints
        stages = plan.stages
        meshes = build_stage_meshes(
            [(s.logical_mesh, stage_ranks(s)) for s in stages], backend, group=group
        )
        compiler = None if compile is None else Compiler(compile)
        self._places = StagePlaces(
            meshes, stage_randoms(stages, meshes, seed), device, cluster, compiler, group
        )
        job_mesh = (
            meshes[0]
            if len(stages) == 1
            else build_mesh((world_size(group),), backend, group=group)
        )
        assert job_mesh is not None
        if plan.is_pipelined:  # what only a prologue or epilogue reads lies whole on every rank
            held = {name for stage in stages for name in stage.parameter_plans}
            parameters = [given for given in parameters if not held.isdisjoint(given.names)]
        copies = (0, 1) if replica is None else (replica.index, replica.count)
        self.store = ParameterStore(module, parameters, stages, meshes, job_mesh, copies=copies)

    def training_program(self, step: StepGraph, plan: Plan) -> StepProgram:
        """What runs a training step under its plan, which has the parameters where they lie."""
        places, of_stage = self._places, self.store.of_stage
        if not self._plan.is_pipelined:
            stage, mesh = plan.stages[0], places.meshes[0]
            assert mesh is not None
            of_stage[0].will_read(step.dtypes_read)
            overlaps = not self._plan.is_eager  # else the user's own code may differentiate twice
            lowered = lower(
                step,
                stage,
                mesh,
                places.device,
                places.randoms[0],
                places.compiler,
                overlaps=overlaps,
            )
            plans = stage.parameter_plans.values()
            regathers = any(plan.uses_shards or plan.is_fetched for plan in plans) or bool(
                stage.recomputed_ops
            )

            def direct(leaves: Leaves, counters: Mapping[str, int]) -> Values:
                buffers = step_buffers(self.module, step, counters)
                with of_stage[0].regather_hooks(stage.ahead_bytes) if regathers else nullcontext():
                    inputs = of_stage[0].step_inputs(stage.ahead_bytes)
                    return lowered(inputs, buffers, _rows_at_place(step, leaves, mesh))[0]

            return direct
        schedule = plan.schedule if len(plan.stages) > 1 else ONE_STAGE_SCHEDULE
        micro = microbatch(step, plan.num_microbatches, world_size(self._group))
        for index, held in of_stage.items():
            held.will_read(slice_stage(micro.graph, *plan.stages[index].ops).dtypes_read)
        held_plans = [stage.parameter_plans for stage in self._plan.stages]
        pipeline = build_pipeline(
            self.module, micro, plan.stages, schedule, places, of_stage, held_plans
        )
        return partial(self._pipelined, step, micro, pipeline)

    def _pipelined(
        self,
        step: StepGraph,
        micro: MicroStep,
        pipeline: Pipeline,
        leaves: Leaves,
        counters: Mapping[str, int],
    ) -> Values:
        buffers = step_buffers(self.module, step, counters)
        # A pipeline updates its buffers itself, micro-batch by micro-batch: it must not write into
        # the module's.
        pipeline.set_buffers(
            {name: b.clone() if isinstance(b, Tensor) else b for name, b in buffers.items()}
        )
        values: Values = {}
        if micro.prologue is not None:
            values |= self._compute_whole(micro.prologue, buffers, leaves, values)[0]
        given = {value: values[source] for value, source in micro.given.items()}
        scale = self.loss_scale()
        found, gradients = pipeline.step(batch_rows(micro.graph, leaves), given, scale)
        values |= found
        if micro.epilogue is not None:
            values |= self._compute_whole(micro.epilogue, buffers, leaves, values)[0]
        return values | {step.loss: hand_over(values[step.loss], gradients, scale)}

    def compute_whole(self, step: StepGraph, leaves: Leaves, counters: Mapping[str, int]) -> Values:
        """All of a step on every rank, which keeps its parts of the gradients."""
        scale, buffers = self.loss_scale(), step_buffers(self.module, step, counters)
        values, parameters = self._compute_whole(step, buffers, leaves, {}, trains=True)
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
        return values | {step.loss: hand_over(values[step.loss], tuple(gradients), scale)}

    def _compute_whole(
        self,
        part: StepGraph,
        buffers: Mapping[str, Any],
        leaves: Leaves,
        values: Values,
        trains: bool = False,
    ) -> tuple[Values, dict[str, Tensor]]:
        """What `part` makes of the global batch and of whole parameters, and these, to
        differentiate by. Collective.

        Every rank does all of it, with random numbers that are the same on all of them and others
        at every step; the rank's own go on after it. values: what `part` receives.
        """
        parameters = {}
        for given in part.parameters:
            leaf = self.store.gather(self.module.get_parameter(given.name)).detach()
            parameters[given.name] = leaf.requires_grad_(trains and given.meta.requires_grad)
        rows = _global_rows(part, leaves, self.store.mesh)
        # By default fork_rng touches every GPU of the node, with a warning; the others belong to
        # other ranks.
        here = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=here), torch.set_grad_enabled(trains):
            torch.manual_seed(
                (self._seed * 1_000_003 + self.num_steps) % 2**63
            )  # a seed of its own may be large
            found = run_step(part, parameters, buffers, rows, values)
        return {value: found[value] for value in part.escaping}, parameters

    def state_dict(self) -> dict[str, Any]:
        """This rank's random streams, for a checkpoint: plain data."""
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
        """Continue where `state_dict` was taken; nothing is done where that was on other meshes, or
        of another kind.
        """
        if state.get("devices") != self._devices():
            return
        self._seed, self.num_steps = state["seed"], state.get("num_steps", 0)
        for stage, random in self._places.randoms.items():
            random.load_state_dict(state["randoms"][str(stage)])

    def _devices(self) -> list[list[int]]:
        """Where every stage runs: the streams of one place mean nothing in another."""
        return [
            [s.first_device, *s.submesh, 0, *s.logical_mesh, *s.devices] for s in self._plan.stages
        ]


def hand_over(loss: Tensor, gradients: Gradients, scale: float) -> Tensor:
    """The loss, with a backward that adds `gradients`, which are those of the loss times `scale`,
    to `.grad`s.
    """
    # An input that wants a gradient makes it differentiable on a rank without parameters too.
    return _PassGradient.apply(
        torch.zeros((), device=loss.device, requires_grad=True), loss, gradients, scale
    )


class _PassGradient(torch.autograd.Function):
    """Gradients pass by the parameters' own graph nodes, whose hooks would take them for parts yet
    to be reduced.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, gradients: Gradients, known_scale: float
    ) -> Tensor:
        ctx.gradients, ctx.known_scale = gradients, known_scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeMismatchError(
                "backward ran twice through one pipelined step, whose gradients were handed over by"
                " the first",
                "call backward once per training step, or plan with num_stages=1 and"
                " num_microbatches=1",
            )
        gradients, ctx.gradients = list(ctx.gradients), None
        while gradients:  # one by one, so that not all are there twice
            parameter, gradient = gradients.pop()
            scaled = gradient * (scale / ctx.known_scale).to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None, None


def step_buffers(module: nn.Module, step: StepGraph, counters: Mapping[str, int]) -> dict[str, Any]:
    """What a program of `step` takes as buffers: the module's by name, and the counters."""
    held = {b.name: attrgetter(b.name)(module) for b in step.buffers}
    return {**held, **{name: held[name].clone() for name in step.kept_buffers}, COUNTERS: counters}


def batch_rows(step: StepGraph, leaves: Leaves) -> list[Tensor]:
    """The batch's tensor leaves in `step.batch` order: this rank's rows, or all of them
    (`batch_scope="global"`).
    """
    return [leaves[given.leaf] for given in step.batch]


def _rows_at_place(step: StepGraph, leaves: Leaves, mesh: MeshComm) -> list[Tensor]:
    """The rows of this rank's place in the mesh: of another rank where devices lie in an order of
    their own.
    """
    rows = batch_rows(step, leaves)
    if step.batch_scope == "global" or mesh.is_in_order:
        return rows
    exchanged = []
    for leaf, tensor in zip(step.batch, rows, strict=True):
        is_batched = leaf.batch_dim is not None
        exchanged.append(mesh.exchange_rows(tensor) if is_batched else tensor)
    return exchanged


def _global_rows(part: StepGraph, leaves: Leaves, mesh: MeshComm) -> list[Tensor]:
    """The tensors of the global batch that `part` reads. Collective where the ranks bring rows of
    their own.

    mesh: of all ranks.
    """
    rows, axis = _rows_at_place(part, leaves, mesh), mesh.whole
    if part.batch_scope == "global":
        return rows
    pairs = zip(part.batch, rows, strict=True)
    return [
        own if leaf.batch_dim is None else axis.all_gather(own, 0, len(own) * axis.size)
        for leaf, own in pairs
    ]
