"""TrainingRun: a prepared training. The plan, the sharded parameters, and one lowered program per shape of batch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from alpa_strategy.comm.collectives import RankZero
from alpa_strategy.comm.mesh import Pending, build_mesh
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck
from alpa_strategy.ir.parameter_plan import ParameterPlan
from alpa_strategy.lightning.evaluation import evaluation_inputs, evaluation_pins
from alpa_strategy.lightning.evaluation_loop import step_counters
from alpa_strategy.lightning.full_parameters import WholeHooks, WholeParameters, shapes_only
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.metric_state import MetricStates
from alpa_strategy.lightning.parameter_changes import ParametersAsTheyWere
from alpa_strategy.lightning.planning import Prepared, capture, check_optimizer, find_or_make_plan
from alpa_strategy.lightning.programs import Program, Programs
from alpa_strategy.lightning.replay import (
    append_to_lists,
    output_of,
    replay_records,
    step_buffers,
    verify,
    write_buffers,
)
from alpa_strategy.lightning.room import Room
from alpa_strategy.lightning.same_steps import SameSteps
from alpa_strategy.lightning.shape_key import shape_key
from alpa_strategy.lower.codegen import LoweredStep, lower
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.planner.task import is_for
from alpa_strategy.runtime.optimizer_state import shard_state, unshard_state, whole_state_dict
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.step_in_backward import StepInBackward

MEASURED_STEPS = range(5, 25)
MAX_SHAPES = 64  # of which programs are kept
MAX_PROGRAMS = 16  # of one batch shape
NO_OPTIMIZER = OptimizerInfo(state_bytes=0.0, name="none")


@dataclass(frozen=True)
class LoweredEvaluation:
    """What runs an evaluation step, and how its parameters arrive."""

    step: LoweredStep
    pins: Mapping[str, ParameterPlan]


@dataclass(frozen=True)
class _Unfinished:
    """A step whose values are on their way (`pending`), and what it has logged not yet said."""

    step: StepGraph
    values: Mapping[int, Tensor]
    batch: Any
    counters: Mapping[str, int]
    pending: list[Pending]


class TrainingRun:
    """Plans and shards `module` in place (collective), then runs its steps.

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
        self.module, self._whole, self._job, self._rank_zero = module, whole, job, rank_zero
        self._optimizer_info, self._seed, self.say = optimizer_info, seed, job.say
        self.step, self.plan, self._cluster = prepared.step, prepared.plan, prepared.cluster
        check_optimizer(optimizer_info, self.plan.stages)
        self._optimizer = optimizer
        with job.progress("lower"):
            lowered = self._set_up()
        self.whole, self._hooks = WholeParameters(self.store), None
        self.room = Room(self.store, optimizer_info, job.options.usable_bytes(self._cluster.device.memory_bytes))
        self._same = SameSteps(rank_zero, job.device, MAX_SHAPES)
        self._programs: Programs[Program] = Programs(MAX_SHAPES, MAX_PROGRAMS, self.drop)
        self._programs.add(shape_key(batch), Program(self.step, lowered, AttributeCheck(module, self.step.attributes)))
        self.metrics = MetricStates()
        self._step_starts: list[float] = []
        self._unfinished: _Unfinished | None = None
        self._parameters = ParametersAsTheyWere(module)

    def changed_parameters(self) -> str | None:
        """What happened to the module's parameters since the plan was made, None when nothing did that matters.

        Raises:
            RuntimeMismatchError: when it happened on some ranks only.
        """
        changed = self._parameters.changed()
        if changed is not None:
            self._same.meet_for_change(changed)
        return changed

    def see_whole_parameters(self, trainer: Any) -> None:
        """Let the hooks of users and callbacks that look at parameters or gradients see whole ones."""
        if self.store.sharded_parameters:
            self._hooks = WholeHooks(trainer, self.module, self.whole, self.room.for_whole)

    def _set_up(self) -> Any:
        """Build meshes, shard parameters and optimizer; what runs the first step. Collective."""
        bucket_bytes = self._job.limits.bucket_bytes
        self.stage = self.plan.stages[0]
        self._gathers_at_use = any(p.uses_shards for p in self.stage.parameter_plans.values())
        self.mesh = build_mesh(self.stage.logical_mesh, backend=self._job.backend)
        self._random = ShardedRandom(self.mesh, self._seed)
        stepping = StepInBackward(self._optimizer, bucket_bytes) if self.stage.steps_in_backward else None
        self.store = ParameterStore(self.module, self.step.parameters, (self.stage,), (self.mesh,), self.mesh, stepping)
        self.store.shard(self._whole, bucket_bytes)
        shard_state(self._optimizer, self.store, self._whole)
        return self._lowered(self.step)

    def _lowered(self, step: StepGraph) -> Any:
        """What runs a step as planned; one of another shape or content, under the running plan's parameters."""
        plan = self.plan
        if not is_for(plan, step):
            plan = find_or_make_plan(
                step, self._job, self._cluster, self._optimizer_info, self._rank_zero, running=self.stage
            )
        return lower(step, plan.stages[0], self.mesh, self._job.device, self._random)

    def training_step(self, batch: Any, batch_idx: int, values_come_late: bool = False) -> Any:
        """What `module.training_step(batch, batch_idx)` returns, computed by all ranks on all their rows.

        Args:
            values_come_late: sums over the devices may still run when this returns, and nothing is logged yet:
                `finish_step` waits and logs, when the backward is done.
        """
        self._measure()
        program = self._program(batch, batch_idx)
        pending: list[Pending] | None = [] if values_come_late else None
        counters = step_counters(self.module.trainer, batch_idx)
        values = self._values(program, batch, counters, pending)
        self._unfinished = _Unfinished(program.step, values, batch, counters, pending or [])
        if not values_come_late:
            self.finish_step()
        return output_of(program.step, values, batch, counters)

    def finish_step(self) -> None:
        """What the step does besides computing: checks, buffers, metrics and logs. Nothing where it is done."""
        if self._unfinished is None:
            return
        done, self._unfinished = self._unfinished, None
        for pending in done.pending:
            pending.wait()
        verify(done.step, done.values)
        write_buffers(self.module, done.step, done.values)
        with self._job.context():  # the default dtype and autocast under which the user's step would have logged
            replay_records(self.module, done.step, done.values, done.counters, self.metrics)
        append_to_lists(self.module, done.step, done.values, done.batch, done.counters)

    def _values(
        self, program: Program, batch: Any, counters: Mapping[str, int], pending: list[Pending] | None
    ) -> dict[int, Tensor]:
        """The step's escaping values, as far as they are there (`pending`); the loss can be differentiated."""
        step = program.step
        buffers = step_buffers(self.module, step, counters)
        parameters = self.store.of_stage[0]
        with parameters.regather_hooks() if self._gathers_at_use else nullcontext():
            return program.lowered(parameters.step_inputs(), buffers, batch_rows(step, batch), pending)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A backward whose gradients stay local: another batch of the same optimizer step follows."""
        self.store.sync(False)
        try:
            yield
        finally:
            self.store.sync(True)

    def finish_backward(self) -> None:
        """After the Trainer's backward: complete gradients. Collective."""
        self.store.finish_backward()

    def whole_parameters(self) -> WholeParameters:
        """Context: the module with its whole parameters, for checkpoints and user code. Collective on entry."""
        return self.whole

    # Evaluation steps on the training's parameters

    def lower_evaluation(self, step: StepGraph) -> LoweredEvaluation:
        """What runs an evaluation step on the parameters as they lie. Collective."""
        pins = evaluation_pins(step, self.stage.parameter_plans, len(self.stage.logical_mesh))
        stage = replace(self.stage, parameter_plans=pins)
        plan = find_or_make_plan(step, self._job, self._cluster, NO_OPTIMIZER, self._rank_zero, running=stage)
        return LoweredEvaluation(lower(step, plan.stages[0], self.mesh, self._job.device, self._random), pins)

    def evaluate(
        self, step: StepGraph, lowered: LoweredEvaluation, batch: Any, counters: Mapping[str, int]
    ) -> dict[int, Tensor]:
        """The step's escaping values, whole on every rank. Collective."""
        parameters = evaluation_inputs(self.module, step, self.store.of_stage[0], lowered.pins)
        buffers = step_buffers(self.module, step, counters)
        return lowered.step(parameters, buffers, batch_rows(step, batch))

    def whole_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict as a plain Trainer would write it. Collective."""
        with self.whole.suspended():
            return whole_state_dict(optimizer, self.store)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this rank's beyond parameters and optimizer, for a checkpoint: plain data."""
        randoms = {str(stage): random.state_dict() for stage, random in self._random_streams().items()}
        plan = self.plan.to_dict() if self._rank_zero.is_rank_zero else None
        return {"devices": self._devices(), "seed": self._seed, "randoms": randoms, "plan": plan}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state_dict` was taken; False (and nothing is done) when that was on other meshes."""
        if state["devices"] != self._devices():
            return False
        self._seed = state["seed"]
        for stage, random in self._random_streams().items():
            random.load_state_dict(state["randoms"][str(stage)])
        return True

    def _random_streams(self) -> dict[int, ShardedRandom]:
        """Stage -> this rank's random streams."""
        return {0: self._random}

    def _devices(self) -> list[list[int]]:
        """Where every stage runs: the streams of one place mean nothing in another."""
        return [[s.first_device, *s.submesh, 0, *s.logical_mesh] for s in self.plan.stages]

    def release(self) -> None:
        """Give the module and the optimizer their whole tensors back, for good. Collective."""
        self.metrics.make_local()
        unshard_state(self._optimizer, self.store)
        self.store.unshard()

    def drop(self, lowered: Any) -> None:
        """A program is not used any more. No communication."""

    def close(self) -> None:
        """End what runs beside the main thread, give the hooks back. No communication."""
        if self._hooks is not None:
            self._hooks.remove()

    def _program(self, batch: Any, batch_idx: int) -> Program:
        """What runs this batch; captured, planned and lowered now where nothing fits. Collective."""
        key = shape_key(batch)
        if len(self._programs) > 1:  # each shape is known to all ranks, but it must be the same one now
            self._same.check_shapes(batch)
        programs = self._programs.of(key)
        index, changed = self._programs.fitting(key, step_counters(self.module.trainer, batch_idx), batch)
        if index is not None:
            self._programs.use(key)
            return programs[index]
        if not programs:
            self._same.meet_for_shape(batch)
        elif changed is not None:
            self._same.meet_for_change(changed)
        with shapes_only(self.store):
            step = capture(self.module, batch, batch_idx, self._job)
        lowered = next((p.lowered for p in programs if p.step.graph_digest == step.graph_digest), None)
        if lowered is None:
            lowered = self._lowered(step)
        program = Program(step, lowered, AttributeCheck(self.module, step.attributes))
        self._programs.add(key, program)
        return program

    def _measure(self) -> None:
        """Remember when steps begin; after some, say how long a step takes against the prediction."""
        count = len(self._step_starts)
        if count > MEASURED_STEPS.stop:
            return
        self._step_starts.append(time.perf_counter())
        if count == MEASURED_STEPS.stop:
            from alpa_strategy.display import measured_line

            starts = self._step_starts[MEASURED_STEPS.start :]
            seconds = statistics.median(b - a for a, b in itertools.pairwise(starts))
            self._job.say(measured_line(self.plan, seconds))


def batch_rows(step: StepGraph, batch: Any) -> list[Tensor]:
    """The batch's tensor leaves in `step.batch` order: this rank's rows, or all of them (`batch_scope="global"`)."""
    leaves = pytree.tree_leaves(batch)
    return [leaves[given.leaf] for given in step.batch]
