"""PipelinedRun: a TrainingRun whose plan has stages or micro-batches. A whole step, backward included, is one call of a
`Pipeline`; the Trainer's own backward then finds its gradients ready and only takes them over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.capture.interpret import run_step
from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.errors import PlanError, RuntimeMismatchError
from alpa_strategy.inter_op.microbatch import microbatch
from alpa_strategy.inter_op.stage import MicroStep
from alpa_strategy.lightning.agree import world_size
from alpa_strategy.lightning.replay import resolve
from alpa_strategy.lightning.run import Program, TrainingRun, batch_rows
from alpa_strategy.lightning.staged_optimizer_state import (
    gather_staged_state,
    shard_staged_state,
    staged_state_dict,
)
from alpa_strategy.plan.plan import Plan
from alpa_strategy.runtime.pipeline import Pipeline
from alpa_strategy.runtime.staged_parameters import StagedParameters
from alpa_strategy.runtime.staged_step import build_pipeline, stage_meshes, stage_stores
from alpa_strategy.runtime.torch_comm import build_mesh
from alpa_strategy.sharding.localize import is_random

ONE_STAGE_SCHEDULE = "1F1B"  # micro-batches without a pipeline: each one's backward follows its forward


def needs_pipeline(plan: Plan) -> bool:
    """Whether a plan is more than one stage that runs the whole batch at once."""
    return len(plan.stages) > 1 or plan.num_microbatches > 1 or any(stage.remat for stage in plan.stages)


@dataclass(frozen=True)
class PipelinedStep:
    """A step cut into micro-batches, and what runs them."""

    micro: MicroStep
    pipeline: Pipeline


class PipelinedRun(TrainingRun):
    """See the module's docstring; made like a TrainingRun."""

    def _set_up(self, bucket_bytes: int, backend: str) -> PipelinedStep:
        self._num_steps = 0
        self._anchor = torch.zeros((), device=self._job.device, requires_grad=True)
        micro = self._micro(self.step)
        stages = self.plan.stages
        self._meshes = stage_meshes(stages, backend=backend)
        self._stores = stage_stores(self.module, micro.graph, stages, self._meshes, bucket_bytes)
        world = build_mesh((world_size(),), backend=backend)
        self.store = StagedParameters(self.module, micro.graph, stages, self._stores, world)
        self.store.shard()
        shard_staged_state(self._optimizer, self.store)
        self._num_ops = len(micro.graph.ops)
        return self._pipelined(micro)

    def _micro(self, step: StepGraph) -> MicroStep:
        num_ranks = world_size() if step.batch_scope == "rank" else 1
        return microbatch(step, self.plan.num_microbatches, num_ranks)

    def _pipelined(self, micro: MicroStep) -> PipelinedStep:
        pipeline = build_pipeline(
            self.module,
            micro,
            self.plan.stages,
            self.plan.schedule if len(self.plan.stages) > 1 else ONE_STAGE_SCHEDULE,
            self._meshes,
            self._stores,
            self._job.device,
            self._seed,
            self._cluster,
        )
        return PipelinedStep(micro, pipeline)

    def _lowered_again(self, step: StepGraph) -> PipelinedStep:
        """The running stages for a batch of another shape, where the step has the same ops."""
        try:
            micro = self._micro(step)
            if len(micro.graph.ops) == self._num_ops:
                return self._pipelined(micro)
            reason = "training_step computes something else than when it was planned"
        except PlanError as error:
            reason = error.problem
        raise RuntimeMismatchError(
            f"the running pipeline cannot run this batch: {reason}",
            "use batches of one shape (drop_last=True drops a shorter last batch), or num_stages=1",
        )

    def _values(self, program: Program, batch: Any) -> dict[int, Tensor]:
        """The step's values; the loss hands the pipeline's gradients to the Trainer's backward."""
        step, micro, pipeline = program.step, program.lowered.micro, program.lowered.pipeline
        buffers = {b.name: resolve(self.module, b.name) for b in step.buffers}
        # A pipeline updates its buffers by itself, micro-batch by micro-batch: it must not write into the module's.
        pipeline.set_buffers({name: buffer.clone() for name, buffer in buffers.items()})
        values = self._part(micro.prologue, buffers, batch, {})
        given = {value: values[source] for value, source in micro.given.items()}
        result = pipeline.step(batch_rows(micro.graph, batch), given)
        values |= result.values
        values |= self._part(micro.epilogue, buffers, batch, values)
        self._num_steps += 1
        values[step.loss] = _HandOver.apply(self._anchor, values[step.loss], result.gradients)
        return values

    @torch.no_grad()
    def _part(
        self, part: StepGraph | None, buffers: Mapping[str, Tensor], batch: Any, values: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """What a prologue or an epilogue makes of the global batch: small work, repeated by every rank."""
        if part is None:
            return {}
        parameters = {p.name: self.store.gather(p.name) for p in part.parameters}
        rows = _whole_rows(part, batch)
        with self._same_numbers() if any(is_random(op.call) for op in part.ops) else nullcontext():
            found = run_step(part, parameters, buffers, rows, values)
        return {value: found[value] for value in part.escaping}

    def _same_numbers(self) -> AbstractContextManager[Any]:
        """Random numbers that are the same on every rank and others at every step; the rank's own go on after it."""
        return _seeded(self._seed * 1_000_003 + self._num_steps)

    def whole_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state dict as a plain Trainer would write it. Collective."""
        return staged_state_dict(optimizer, self.store)

    def release(self) -> None:
        """Give the module and the optimizer their whole tensors back, for good. Collective."""
        gather_staged_state(self._optimizer, self.store)
        self.store.unshard()

    def close(self) -> None:
        """End what runs beside the main thread. No communication."""
        for pipeline in {
            id(p.lowered): p.lowered.pipeline for found in self._programs.values() for p in found
        }.values():
            pipeline.close()


class _HandOver(torch.autograd.Function):
    """The loss as it is; its backward adds gradients that are there already, scaled, to their parameters' `.grad`.

    The anchor makes it differentiable on a rank without parameters too. Gradients do not pass through the parameters'
    own graph nodes: hooks of theirs would take them for parts that are still to be reduced.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        for parameter, gradient in ctx.gradients:
            scaled = gradient * scale.to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None


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
