"""Run: a prepared training. The plan, the sharded parameters, and one program per shape of batch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.comm.collectives import RankZero, agree_on_seed
from alpa_strategy.comm.mesh import Pending
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.async_loss import allows_async_loss, as_in_training_step
from alpa_strategy.lightning.captured_steps import CapturedStep, CapturedSteps
from alpa_strategy.lightning.checks import clears_gradients_unseen
from alpa_strategy.lightning.evaluation_loop import step_counters
from alpa_strategy.lightning.full_parameters import FullParameters, UnshardForHooks, shapes_only
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.memory_headroom import MemoryHeadroom
from alpa_strategy.lightning.metric_state import MetricStates
from alpa_strategy.lightning.planning import (
    Prepared,
    Running,
    capture,
    check_optimizer,
    find_or_make_plan,
    prepare,
    running_pins,
)
from alpa_strategy.lightning.same_steps import ParametersAsTheyWere, SameSteps, shape_key
from alpa_strategy.lightning.step_effects import (
    append_to_lists,
    output_of,
    update_metrics_and_log,
    verify,
    write_buffers,
)
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.pipeline.step_programs import PlacedPlan, StepProgram
from alpa_strategy.planner.early_step import TrainerSettings
from alpa_strategy.planner.optimizer_info import optimizer_info_in
from alpa_strategy.planner.replan import Pins
from alpa_strategy.planner.task import is_for
from alpa_strategy.runtime.clip import use_whole_norms
from alpa_strategy.runtime.evaluation_parameters import evaluation_pins
from alpa_strategy.runtime.host_memory import tuned_for
from alpa_strategy.runtime.optimizer_state import unshard_state, whole_state_dict
from alpa_strategy.runtime.parameters import ParameterStore

MEASURED_STEPS = range(5, 25)
MAX_SHAPES = 64  # of which programs are kept
MAX_PROGRAMS = 16  # of one batch shape
Sharding = Callable[[Any], AbstractContextManager[Callable[[Tensor], Tensor]]]
NO_OPTIMIZER = OptimizerInfo(state_bytes=0.0, name="none")


def start_training(
    module: Any,
    optimizers: Sequence[Optimizer],
    batch: Any,
    batch_idx: int,
    job: Job,
    sharding: Sharding,
    resumed: Mapping[str, Any] | None,
) -> Run:
    """The module in shards, under a plan for its step on the first batch. Collective.

    Args:
        sharding: context around what shards the module; gives what makes all of a parameter or of optimizer state.
        resumed: as for `prepare`.
    """
    seed, rank_zero = agree_on_seed(), RankZero(job.limits.plan_timeout_seconds)
    info = optimizer_info_in(module, optimizers, TrainerSettings.of(module.trainer))
    prepared = prepare(module, batch, batch_idx, job, info, rank_zero, resumed)
    limit = job.options.usable_bytes(prepared.cluster.device.memory_bytes)
    with tuned_for(prepared.plan, limit, job.device), sharding(module) as whole:
        return Run(module, optimizers[0], info, prepared, batch, job, rank_zero, seed, whole)


@dataclass(frozen=True)
class _Unfinished:
    """A step whose values are on their way (`pending`), and what it has logged not yet said."""

    step: StepGraph
    values: Mapping[int, Tensor]
    batch: Any
    counters: Mapping[str, int]
    pending: list[Pending]


class Run:
    """Shards `module` in place under its plan (collective), then runs its steps, whatever the number of stages.

    Args:
        module: the LightningModule; its parameters are swapped to local shards, the objects stay.
        optimizer: made on the whole parameters; its state, if any, is sharded too.
        prepared: the captured first step and its plan.
        batch: the first batch, on this rank's device.
        seed: the run's seed, the same on all ranks.
        whole: gives all of a parameter, or of a tensor of the optimizer's state, that is to be sharded.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer,
        optimizer_info: OptimizerInfo,
        prepared: Prepared,
        batch: Any,
        job: Job,
        rank_zero: RankZero,
        seed: int,
        whole: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self.module, self._optimizer, self._optimizer_info = module, optimizer, optimizer_info
        self._job, self._rank_zero, self.say = job, rank_zero, job.say
        self.plan, self._cluster = prepared.plan, prepared.cluster
        step, stages = prepared.step, prepared.plan.stages
        check_optimizer(optimizer_info, stages)
        with job.progress("lower"):
            self._placed = PlacedPlan(
                module,
                step.parameters,
                self.plan,
                optimizer,
                job.device,
                self._cluster,
                seed,
                self._loss_scale,
                job.backend,
                job.limits.bucket_bytes,
            )
            self.store: ParameterStore = self._placed.store
            self._placed.shard(optimizer, whole)
            program = self._program(step)
        self.whole = FullParameters(self.store)
        self._hooks: UnshardForHooks | None = None
        self.headroom = MemoryHeadroom(
            self.store, optimizer_info, job.options.usable_bytes(self._cluster.device.memory_bytes)
        )
        self._same = SameSteps(rank_zero, MAX_SHAPES)
        self._captured = CapturedSteps(MAX_SHAPES, MAX_PROGRAMS, self.drop)
        self._captured.add(shape_key(batch), CapturedStep(step, program, AttributeCheck(module, step.attributes)))
        self.metrics = MetricStates()
        self._step_starts: list[float] = []
        self._unfinished: _Unfinished | None = None
        self._parameters = ParametersAsTheyWere(module)

    # A training step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """What `module.training_step(batch, batch_idx)` returns, computed by all ranks on all their rows.

        Where nobody reads the loss before the backward is done, sums over the devices may still run when this returns,
        and nothing is logged yet: `finish_backward` waits and logs.
        """
        self._measure()
        is_async = allows_async_loss(self.module.trainer, self.module)
        captured = self._captured_step(batch, batch_idx)
        if captured.program.makes_gradients:
            self._clear_gradients(batch_idx)
        pending: list[Pending] | None = [] if is_async else None
        counters = step_counters(self.module.trainer, batch_idx)
        values = captured.program(batch, counters, pending)
        self._placed.random.num_steps += 1
        unfinished = _Unfinished(captured.step, values, batch, counters, pending or [])
        if is_async:
            self._unfinished = unfinished
        else:
            self._finish_step(unfinished)
        return output_of(captured.step, values, batch, counters)

    def finish_backward(self) -> None:
        """After the Trainer's backward: complete gradients, and what the step logs if that had to wait. Collective."""
        if not self.plan.is_pipelined:  # gradients of a pipeline were complete before it
            self.store.finish_backward()
        done, self._unfinished = self._unfinished, None
        if done is not None:
            with as_in_training_step(self.module):
                self._finish_step(done)

    def _finish_step(self, done: _Unfinished) -> None:
        """What the step does besides computing: checks, buffers, metrics and logs."""
        for pending in done.pending:
            pending.wait()
        verify(done.step, done.values)
        write_buffers(self.module, done.step, done.values)
        with self._job.context():  # the default dtype and autocast under which the user's step would have logged
            update_metrics_and_log(self.module, done.step, done.values, done.counters, self.metrics)
        append_to_lists(self.module, done.step, done.values, done.batch, done.counters)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A backward whose gradients stay local: another batch of the same optimizer step follows."""
        if self.plan.is_pipelined:  # it reduces the gradients of each of its steps
            yield
            return
        self.store.sync(False)
        try:
            yield
        finally:
            self.store.sync(True)

    def _clear_gradients(self, batch_idx: int) -> None:
        """The step makes its gradients before the Trainer clears the last ones: where nobody looks at them in between,
        these go now, and are not there twice."""
        trainer = self.module.trainer
        if batch_idx % trainer.accumulate_grad_batches == 0 and clears_gradients_unseen(trainer, self.module):
            for parameter in self.module.parameters():
                parameter.grad = None

    def _loss_scale(self) -> float:
        """What the precision plugin will scale the loss by: half-precision gradients inside the step need it now."""
        scaler = getattr(self.module.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    # What runs a step: captured once per shape and content

    def _captured_step(self, batch: Any, batch_idx: int) -> CapturedStep:
        """What runs this batch; captured, planned and lowered now where nothing fits. Collective."""
        key = shape_key(batch)
        if len(self._captured) > 1:  # each shape is known to all ranks, but it must be the same one now
            self._same.check_shapes(batch)
        known = self._captured.of(key)
        index, changed = self._captured.fitting(key, step_counters(self.module.trainer, batch_idx), batch)
        if index is not None:
            self._captured.use(key)
            return known[index]
        if not known:
            self._same.meet_for_shape(batch)
        elif changed is not None:
            self._same.meet_for_change(changed)
        with shapes_only(self.store):
            step = capture(self.module, batch, batch_idx, self._job)
        program = next((each.program for each in known if each.step.graph_digest == step.graph_digest), None)
        if program is None:
            program = self._program(step)
        captured = CapturedStep(step, program, AttributeCheck(self.module, step.attributes))
        self._captured.add(key, captured)
        return captured

    def _program(self, step: StepGraph) -> StepProgram:
        """What runs a step as planned; one of another shape or content, under the running plan's parameters."""
        if is_for(self.plan, step):
            return self._placed.training_program(step, self.plan)
        try:
            plan = self._following_plan(step, running_pins, self._optimizer_info)
        except PlanError as error:
            if not self.plan.is_pipelined:
                raise
            rank_zero_warn(
                "alpa: the running pipeline cannot run this batch: every rank computes all of it, with whole "
                f"parameters; batches of one shape (drop_last=True) avoid that. {error.problem}"
            )
            return self._placed.whole_program(step)
        return self._placed.training_program(step, plan)

    def _following_plan(self, step: StepGraph, pins: Pins, optimizer: OptimizerInfo) -> Plan:
        running = Running(self.plan, pins)
        return find_or_make_plan(step, self._job, self._cluster, optimizer, self._rank_zero, running)

    def drop(self, program: StepProgram) -> None:
        """A program is not used any more. No communication."""
        self._placed.drop(program)

    def changed_parameters(self) -> str | None:
        """What happened to the module's parameters since the plan was made, None when nothing did that matters.

        Raises:
            RuntimeMismatchError: when it happened on some ranks only.
        """
        changed = self._parameters.changed()
        if changed is not None:
            self._same.meet_for_change(changed)
        return changed

    # Evaluation steps on the training's parameters

    def lower_evaluation(self, step: StepGraph) -> StepProgram:
        """What runs an evaluation step on the parameters as they lie. Collective."""
        return self._placed.evaluation_program(step, self._following_plan(step, evaluation_pins, NO_OPTIMIZER))

    # Whole values, checkpoints, the end

    def adapt_trainer(self, trainer: Any) -> None:
        """Let hooks of users and callbacks that look at parameters or gradients see whole ones, and its precision
        plugin clip by the norm of all shards."""
        use_whole_norms(trainer.precision_plugin, self.store, lambda: self.whole.is_active)
        if self.store.sharded_parameters:
            self._hooks = UnshardForHooks(trainer, self.module, self.whole, self.headroom.for_whole)

    def whole_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict as a plain Trainer would write it. Collective."""
        with self.whole.suspended():
            return whole_state_dict(optimizer, self.store)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this rank's beyond parameters and optimizer, for a checkpoint: plain data."""
        return {**self._placed.state_dict(), "plan": self.plan.to_dict() if self._rank_zero.is_rank_zero else None}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state_dict` was taken; False (and nothing is done) when that was on other meshes."""
        return self._placed.load_state_dict(state)

    def release(self) -> None:
        """Give the module and the optimizer their whole tensors back, for good. Collective."""
        self.metrics.make_local()
        unshard_state(self._optimizer, self.store)
        self.store.unshard()

    def close(self) -> None:
        """End what runs beside the main thread, give the hooks back. No communication."""
        if self._hooks is not None:
            self._hooks.remove()
        self._placed.close()

    def _measure(self) -> None:
        """Remember when steps begin; after some, say how long a step takes against the prediction."""
        count = len(self._step_starts)
        if count > MEASURED_STEPS.stop:
            return
        if self._job.device.type == "cuda" and count in (MEASURED_STEPS.start, MEASURED_STEPS.stop):
            torch.cuda.synchronize(self._job.device)  # the host may be steps ahead
        self._step_starts.append(time.perf_counter())
        if count == MEASURED_STEPS.stop:
            from alpa_strategy.display import measured_line

            starts = self._step_starts[MEASURED_STEPS.start :]
            seconds = statistics.median(b - a for a, b in itertools.pairwise(starts))
            if self._job.device.type == "cuda":  # single starts are the host's; both ends were waited for
                seconds = (starts[-1] - starts[0]) / (len(starts) - 1)
            self._job.say(measured_line(self.plan, seconds))
