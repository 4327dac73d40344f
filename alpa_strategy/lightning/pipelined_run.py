"""PipelinedRun: a TrainingRun whose plan has stages or micro-batches. A whole step, backward included, is one call of a
`Pipeline`; the Trainer's own backward then finds its gradients ready and only takes them over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.comm.mesh import Pending, build_mesh
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.errors import PlanError, RuntimeMismatchError
from alpa_strategy.inter_op.subgraph import slice_stage
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.interpret import run_step
from alpa_strategy.ir.parameter_plan import ParameterPlan
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_plan import StagePlan
from alpa_strategy.lightning.checks import clears_gradients_unseen
from alpa_strategy.lightning.evaluation import EvaluationParameters, evaluation_pins
from alpa_strategy.lightning.planning import find_or_make_following_plan
from alpa_strategy.lightning.programs import Program
from alpa_strategy.lightning.replay import step_buffers
from alpa_strategy.lightning.run import NO_OPTIMIZER, TrainingRun, batch_rows
from alpa_strategy.microbatch.microstep import MicroStep
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.pipeline.build import (
    StageParameters,
    StagePlaces,
    build_pipeline,
    stage_meshes,
    stage_randoms,
)
from alpa_strategy.pipeline.executor import Pipeline
from alpa_strategy.planner.task import is_for
from alpa_strategy.runtime.optimizer_state import shard_state
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.sharding.localize import is_random

Gradients = tuple[tuple[nn.Parameter, Tensor], ...]
ONE_STAGE_SCHEDULE = "1F1B"  # micro-batches without a pipeline: each one's backward follows its forward


@dataclass(frozen=True)
class PipelinedStep:
    """A step cut into micro-batches, and what runs them."""

    micro: MicroStep
    pipeline: Pipeline


@dataclass(frozen=True)
class WholeStep:
    """A step that the stages cannot run: every rank computes all of it."""


class PipelinedRun(TrainingRun):
    """See the module's docstring; made like a TrainingRun."""

    def _set_up(self) -> PipelinedStep | WholeStep:
        bucket_bytes, backend = self._job.limits.bucket_bytes, self._job.backend
        self._num_steps = 0
        self._pipelines: list[Pipeline] = []
        self._anchor = torch.zeros((), device=self._job.device, requires_grad=True)
        stages, parameters = self.plan.stages, self.step.parameters
        meshes = stage_meshes(stages, backend=backend)
        randoms = stage_randoms(stages, meshes, self._seed)
        self._places = StagePlaces(meshes, randoms, self._job.device, self._cluster)
        staged = [p for p in parameters if any(name in stage.parameter_plans for stage in stages for name in p.names)]
        world = build_mesh((world_size(),), backend=backend)
        self.store = ParameterStore(self.module, staged, stages, meshes, world)
        self.store.shard(self._whole, bucket_bytes)
        self._stores = self.store.of_stage
        shard_state(self._optimizer, self.store, self._whole)
        return self._lowered(self.step)

    def _pipelined(
        self,
        micro: MicroStep,
        stages: tuple[StagePlan, ...],
        schedule: str | None,
        parameters: Mapping[int, StageParameters],
    ) -> PipelinedStep:
        held = [stage.parameter_plans for stage in self.plan.stages]
        pipeline = build_pipeline(self.module, micro, stages, schedule, self._places, parameters, held)
        self._pipelines.append(pipeline)
        return PipelinedStep(micro, pipeline)

    def _training_pipeline(self, step: StepGraph, plan: Plan) -> PipelinedStep:
        schedule = plan.schedule if len(plan.stages) > 1 else ONE_STAGE_SCHEDULE
        micro = microbatch(step, plan.num_microbatches, world_size())
        return self._pipelined(micro, plan.stages, schedule, self._stores)

    def _lowered(self, step: StepGraph) -> PipelinedStep | WholeStep:
        """The running stages, also for a batch of another shape; where they cannot run it, the step in one piece."""
        if is_for(self.plan, step):
            return self._training_pipeline(step, self.plan)
        try:
            plan = find_or_make_following_plan(
                step, self.plan, _training_pins, self._job, self._cluster, self._optimizer_info, self._rank_zero
            )
        except PlanError as error:
            rank_zero_warn(
                "alpa: the running pipeline cannot run this batch: every rank computes all of it, with whole "
                f"parameters; batches of one shape (drop_last=True) avoid that. {error.problem}"
            )
            return WholeStep()
        return self._training_pipeline(step, plan)

    def training_step(self, batch: Any, batch_idx: int, values_come_late: bool = False) -> Any:
        """As of a TrainingRun. The step's gradients are made in it, before the Trainer clears the last ones: these go
        now, where nobody looks at them in between."""
        trainer = self.module.trainer
        if batch_idx % trainer.accumulate_grad_batches == 0 and clears_gradients_unseen(trainer, self.module):
            for parameter in self.module.parameters():
                parameter.grad = None
        return super().training_step(batch, batch_idx, values_come_late)

    def _values(
        self, program: Program, batch: Any, counters: Mapping[str, int], pending: list[Pending] | None
    ) -> dict[int, Tensor]:
        """The step's values, all of them there; the loss hands the pipeline's gradients to the Trainer's backward."""
        step = program.step
        buffers = step_buffers(self.module, step, counters)
        scale = self._loss_scale()
        if isinstance(program.lowered, WholeStep):
            values, gradients = self._run_whole(step, buffers, batch, scale)
        else:
            values, gradients = self._run_pipeline(program.lowered, buffers, batch, scale)
        self._num_steps += 1
        values[step.loss] = _HandOver.apply(self._anchor, values[step.loss], gradients, scale)
        return values

    def _loss_scale(self) -> float:
        """What the precision plugin will scale the loss by: half-precision gradients inside the step need it now."""
        scaler = getattr(self.module.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _run_pipeline(
        self, lowered: PipelinedStep, buffers: Mapping[str, Any], batch: Any, scale: float
    ) -> tuple[dict[int, Tensor], Gradients]:
        micro, pipeline = lowered.micro, lowered.pipeline
        # A pipeline updates its buffers by itself, micro-batch by micro-batch: it must not write into the module's.
        pipeline.set_buffers({name: b.clone() if isinstance(b, Tensor) else b for name, b in buffers.items()})
        values = self._part(micro.prologue, buffers, batch, {})
        given = {value: values[source] for value, source in micro.given.items()}
        result = pipeline.step(batch_rows(micro.graph, batch), given, scale)
        values |= result.values
        values |= self._part(micro.epilogue, buffers, batch, values)
        return values, result.gradients

    def _run_whole(
        self, step: StepGraph, buffers: Mapping[str, Any], batch: Any, scale: float
    ) -> tuple[dict[int, Tensor], Gradients]:
        """The step on the global batch, the same work on every rank; each keeps its parts of the gradients."""
        whole = {p.name: self._whole_leaf(p.name, p.meta.requires_grad) for p in step.parameters}
        rows = _whole_rows(step, batch)
        with self._same_numbers(), torch.enable_grad():
            found = run_step(step, whole, buffers, rows)
            trained = {name: leaf for name, leaf in whole.items() if leaf.requires_grad}
            grads = torch.autograd.grad(found[step.loss] * scale, list(trained.values()), allow_unused=True)
        gradients = []
        for name, gradient in zip(trained, grads, strict=True):
            parameter = self.module.get_parameter(name)
            if gradient is None:
                continue
            if self.store.name_of(parameter) is None:  # no stage uses it: it lies whole on every rank
                gradients.append((parameter, gradient))
            elif self.store.holds(parameter):
                gradients.append((parameter, self.store.shard_like(name, gradient)))
        return {value: found[value].detach() for value in step.escaping}, tuple(gradients)

    def _whole_leaf(self, name: str, requires_grad: bool) -> Tensor:
        parameter = self.module.get_parameter(name)
        whole = parameter.detach() if self.store.name_of(parameter) is None else self.store.gather(name)
        return whole.detach().requires_grad_(requires_grad)

    @torch.no_grad()
    def _part(
        self, part: StepGraph | None, buffers: Mapping[str, Any], batch: Any, values: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """What a prologue or an epilogue makes of the global batch: small work, repeated by every rank."""
        if part is None:
            return {}
        parameters = {p.name: self._whole_leaf(p.name, False) for p in part.parameters}
        rows = _whole_rows(part, batch)
        with self._same_numbers() if any(is_random(op.call) for op in part.ops) else nullcontext():
            found = run_step(part, parameters, buffers, rows, values)
        return {value: found[value] for value in part.escaping}

    def _same_numbers(self) -> AbstractContextManager[Any]:
        """Random numbers that are the same on every rank and others at every step; the rank's own go on after it."""
        return _seeded(self._seed * 1_000_003 + self._num_steps)

    # Evaluation steps on the running stages

    def lower_evaluation(self, step: StepGraph) -> PipelinedStep:
        """What runs an evaluation step through the stages. Collective."""
        plan = find_or_make_following_plan(
            step, self.plan, _evaluation_pins, self._job, self._cluster, NO_OPTIMIZER, self._rank_zero
        )
        micro = microbatch(step, plan.num_microbatches, world_size())
        graphs = [slice_stage(micro.graph, *stage.ops) for stage in plan.stages]
        pins = [_evaluation_pins(graph, stage) for graph, stage in zip(graphs, self.plan.stages, strict=True)]
        parameters = {
            index: EvaluationParameters(self.module, graphs[index], store, pins[index])
            for index, store in self._stores.items()
        }
        return self._pipelined(micro, plan.stages, None, parameters)

    def evaluate(
        self, step: StepGraph, lowered: PipelinedStep, batch: Any, counters: Mapping[str, int]
    ) -> dict[int, Tensor]:
        """The step's escaping values on every rank. Collective."""
        micro, pipeline = lowered.micro, lowered.pipeline
        buffers = step_buffers(self.module, step, counters)
        pipeline.set_buffers(buffers)
        values = self._part(micro.prologue, buffers, batch, {})
        given = {value: values[source] for value, source in micro.given.items()}
        values |= pipeline.evaluate(batch_rows(micro.graph, batch), given)
        return values | self._part(micro.epilogue, buffers, batch, values)

    def state_dict(self) -> dict[str, Any]:
        """As of a TrainingRun."""
        return {**super().state_dict(), "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """As of a TrainingRun."""
        taken_up = super().load_state_dict(state)
        if taken_up:
            self._num_steps = state["num_steps"]
        return taken_up

    def _random_streams(self) -> dict[int, ShardedRandom]:
        return dict(self._places.randoms)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """As of a TrainingRun: a pipeline reduces the gradients of each of its steps."""
        yield

    def finish_backward(self) -> None:
        """As of a TrainingRun: a pipeline's gradients are complete before the Trainer's backward."""

    def drop(self, lowered: PipelinedStep | WholeStep) -> None:
        """A program is not used any more. No communication."""
        if isinstance(lowered, PipelinedStep) and lowered.pipeline in self._pipelines:
            lowered.pipeline.close()
            self._pipelines.remove(lowered.pipeline)

    def close(self) -> None:
        """End what runs beside the main thread, give the hooks back. No communication."""
        super().close()
        for pipeline in self._pipelines:
            pipeline.close()


class _HandOver(torch.autograd.Function):
    """The loss as it is; its backward adds gradients that are there already, scaled, to their parameters' `.grad`.

    `known_scale` is in the gradients already.

    The anchor makes it differentiable on a rank without parameters too. Gradients do not pass through the parameters'
    own graph nodes: hooks of theirs would take them for parts that are still to be reduced.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Gradients, known_scale: float) -> Tensor:
        ctx.gradients, ctx.known_scale = gradients, known_scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeMismatchError(
                "backward ran twice through one pipelined step, whose gradients were handed over by the first",
                "call backward once per training step, or plan with num_stages=1 and num_microbatches=1",
            )
        gradients, ctx.gradients = list(ctx.gradients), None
        while gradients:  # one by one, so that not all are there twice
            parameter, gradient = gradients.pop()
            scaled = gradient * (scale / ctx.known_scale).to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None, None


class _seeded:
    """Context: the default generators start from `seed`, and go on afterwards as if nothing had been drawn."""

    def __init__(self, seed: int) -> None:
        self._fork = torch.random.fork_rng()
        self._number = seed

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._number)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def _evaluation_pins(graph: StepGraph, stage: StagePlan) -> dict[str, ParameterPlan]:
    return evaluation_pins(graph, stage.parameter_plans, len(stage.logical_mesh))


def _training_pins(graph: StepGraph, stage: StagePlan) -> dict[str, ParameterPlan]:
    return stage.parameter_plans


def _whole_rows(part: StepGraph, batch: Any) -> list[Tensor]:
    """The tensors of the global batch that `part` reads. Collective where the ranks bring rows of their own."""
    whole: list[Tensor] = []
    for leaf, rows in zip(part.batch, batch_rows(part, batch), strict=True):
        if part.batch_scope == "global" or leaf.batch_dim is None or world_size() == 1:
            whole.append(rows)
            continue
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        whole.append(torch.cat(parts))
    return whole
