"""Run: a prepared training. The plan, the sharded parameters, and one program per shape of
batch.
"""

import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.capture.python_reads import changed_numbers, numbers_now
from alpa_strategy.capture.state_tensors import state_leaves
from alpa_strategy.comm.collectives import (
    RankZero,
    all_gather_object,
    broadcast_object,
    broadcast_tensors,
    world_size,
)
from alpa_strategy.cost.host import with_host
from alpa_strategy.display.plan_words import rates_text
from alpa_strategy.display.table import measured_line
from alpa_strategy.errors import CaptureError, PlanError, RuntimeMismatchError
from alpa_strategy.ir.graph import BufferInput, StepGraph
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.places import Place
from alpa_strategy.ir.plan import Predicted
from alpa_strategy.lightning import step_effects
from alpa_strategy.lightning.checks import has_own_hooks
from alpa_strategy.lightning.digests import SameBatchCheck
from alpa_strategy.lightning.evaluation_loop import StepCounters
from alpa_strategy.lightning.full_parameters import shapes_only
from alpa_strategy.lightning.loop_clock import LoopClock
from alpa_strategy.lightning.machine_load import busy_machine
from alpa_strategy.lightning.planning import (
    capture,
    check_optimizer,
    find_or_make_plan,
    job_cluster,
)
from alpa_strategy.lightning.rank_consistency import MAX_SHAPES, StepConsensus
from alpa_strategy.lightning.shape_key import keyed_leaves, shape_key
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.pipeline.step_programs import PlanRuntime, StepProgram
from alpa_strategy.planner.optimizer_info import inspect_optimizer
from alpa_strategy.planner.smaller_batch import batch_shapes, plan_on_smaller_batch
from alpa_strategy.runtime.gradients import average
from alpa_strategy.runtime.process_memory import enforce_memory_plan, tuned
from alpa_strategy.runtime.step_by_bucket import fused

MEASURED_STEPS = range(5, 25)
# The fewest steps that are measured where a training ends earlier.
LEAST_MEASURED = 5
# Bytes of gradients below which memory is not worth the time to clear them before the forward.
LEAST_TO_CLEAR = 2**20
# Before the Trainer clears them.
_SEE_GRADIENTS = ("on_before_zero_grad", "optimizer_zero_grad")
# Number of shapes that are captured if steps may run eagerly: two (a last batch may be shorter),
# one more per STEPS_PER_SHAPE steps, at most MANY_SHAPES. If new shapes come faster, captures take
# longer than the steps that they serve.
MANY_SHAPES = 10
STEPS_PER_SHAPE = 200

# The same for changes of attributes, buffers and paths of Python that a step depends on.
CHANGES = 8

# Largest number of programs for one batch shape.
MAX_PROGRAMS = 16


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, and the program that runs it on this rank."""

    step: StepGraph
    program: StepProgram

    @cached_property
    def has_effects(self) -> bool:
        """Whether the step logs values, or leaves some in Python's objects or its batch."""
        step = self.step
        return any((step.logs, step.metrics, step.stored, step.appended, step.assigned))


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return which tensors the module's buffers are, and how often each was changed."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


class Run(ShardedRun):
    """Plans a module's step on its first batch, shards it in place, then runs it, whatever the
    stages. Collective.

    Args:
        inputs: with one optimizer, whose state, if any, is sharded too.
        batch: the first batch, on this rank's device.
        batch_idx: its number, as `training_step` gets it.
        resumed: as for `find_or_make_plan`.
    """

    _placed: PlanRuntime

    def __init__(
        self, inputs: RunInputs, batch: Any, batch_idx: int, resumed: Mapping[str, Any] | None
    ) -> None:
        module, job = inputs.module, inputs.job
        seed = broadcast_object(torch.initial_seed())
        timeout = job.limits.plan_timeout_seconds
        rank_zero = RankZero(timeout)
        self._rank_zero = rank_zero
        replica = job.replica
        # Other replicas draw other random numbers.
        if replica is not None:
            seed += replica.index
            self._rank_zero = RankZero(timeout, replica.group)
        self._to_fuse = inputs.optimizers if job.compile is not None else ()
        with fused(self._to_fuse):
            info = inspect_optimizer(inputs.optimizers, module)
        step = capture(module, batch, batch_idx, job)
        # Parameters that the step itself changes: every later one has them as buffers too.
        self._state = frozenset(buffer.name for buffer in step.buffers if buffer.is_parameter)
        if replica is not None and len(set(all_gather_object(step.parameter_digest))) > 1:
            raise RuntimeMismatchError(
                "the replicas' first batches use other parameters of the module",
                "let their steps use the same ones",
            )
        self._cluster = job_cluster(job)
        # That of the first replica's batch is for all, which are to hold the same.
        plan = find_or_make_plan(step, job, self._cluster, info, rank_zero, resumed=resumed)
        check_optimizer(info, plan.stages)
        limit = job.options.usable_bytes(self._cluster.device.memory_bytes)
        buffers = _equal_buffers(step) if replica is None else ()
        with tuned(job.device), inputs.sharding(module) as values, job.progress("lower"):
            devices = (job.device, self._cluster, seed, self._loss_scale)
            self._placed = PlanRuntime(
                module, step.parameters, plan, *devices, job.backend, job.compile, replica
            )
            super().__init__(inputs, info, plan, self._placed.store, limit, values, buffers)
            # Else the resumed run's first batch.
            if plan.fingerprint.batch == step.batch_digest:
                job.plans.planned_batch = batch_shapes(step)
            program = self._program(step)
        self._adapted.callback(
            enforce_memory_plan(self, plan, limit, module, inputs.optimizers, job.device)
        )
        self._same = StepConsensus(rank_zero, job.group)
        self._same_batch = SameBatchCheck(job.group)
        # By what kind of batch they are for, those used last at the end; of a kind, those captured
        # last.
        self._captured: OrderedDict[Hashable, list[CapturedStep]] = OrderedDict()
        self._keep(shape_key(batch), step, program, batch)
        self._num_changes = 0
        # That change.
        self._numbers: list[Place] = []
        # Whether ranks have batches, and so buffers, of their own.
        self._follows_buffers = job.options.rows == "rank" and world_size(job.group) > 1
        # Whether buffers are to be rank 0's when the next step starts.
        self._syncs_buffers = True
        # Of the module's buffers after the last step.
        self._buffer_versions: list[tuple[int, int]] = []
        self._step_starts: list[float] = []
        self._loop_clock = LoopClock()

    # A training step

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """Run the captured step on the samples of all ranks, or of a replica's, with its logs,
        metrics and writes. Collective.

        Returns:
            The value of `module.training_step(batch, batch_idx)`.

        Raises:
            CaptureError, PlanError: as of `_captured_step`.
            FailedCheckError: a check of the step fails.
            RuntimeMismatchError: batches or modules that should be the same differ.
        """
        buffers_changed = self._buffers_changed()
        self.take_buffers()
        self._measure()
        key, leaves = keyed_leaves(batch)
        captured, counters = self._captured_step(key, batch, batch_idx, buffers_changed)
        step = captured.step
        program = captured.program
        if step.states:
            leaves = [*leaves, *state_leaves(self.module, step.states)]
        # With `batch_scope="global"` all ranks must load the same batch.
        is_global = step.batch_scope == "global"
        if is_global:
            self._same_batch.begin(batch)
        self._clear_gradients(batch_idx)
        # A pipeline's backward is in it.
        with self.in_step():
            inputs = step_effects.without_writes(step, leaves)
            values = program.run(inputs, counters)
        self._loop_clock.leave()
        self._placed.num_steps += 1
        # The forward has taken its time: the checksums are there.
        if is_global:
            self._same_batch.finish()
        if step.checks:
            step_effects.verify(step, values)
        step_effects.write_buffers(self.module, program.buffers, values)
        if self._follows_buffers:
            self._buffer_versions = _versions(self.module)
        if captured.has_effects:
            self._repeat_effects(step, values, leaves, counters)
        # As under DDP, buffers are rank 0's from step to step, and each rank's own between the
        # batches of an accumulated step.
        differ = self._job.replica is not None or program.buffers_differ
        self._syncs_buffers = self.syncs or program.needs_equal_buffers
        self.buffers_differ = differ and self._syncs_buffers
        return step_effects.materialize_output(step.output, values, leaves, counters)

    def _repeat_effects(
        self,
        step: StepGraph,
        values: Mapping[int, Tensor],
        leaves: Sequence[Any],
        counters: Mapping[str, Any],
    ) -> None:
        """Log, and leave values where the user's step would leave them."""
        # A validation may have set another (`self.phase = "train"`).
        for stored in step.stored:
            stored.namespace[stored.name] = stored.value
        if step.logs or step.metrics:
            # The default dtype and autocast under which the user's step would have logged.
            with self._job.log_context():
                step_effects.update_metrics_and_log(
                    self.module, step, values, leaves, counters, self.metrics
                )
        step_effects.append_to_lists(self.module, step, values, leaves, counters)
        step_effects.set_attributes(self.module, step, values, leaves, counters)
        step_effects.write_batch(step, values, leaves)

    @override
    def in_step(self) -> Any:
        """Context of a training step; its time starts."""
        self._loop_clock.enter()
        return super().in_step()

    @override
    def stepped(self) -> None:
        """Finish an optimizer step; its time ends."""
        super().stepped()
        self._loop_clock.leave()

    @override
    def finish_backward(self) -> None:
        """Wait for the gradients' reductions, and average them over replicas. Collective."""
        # Gradients of a pipeline were complete before it.
        if not self._is_pipelined:
            self.store.finish_backward(
                None if self._job.replica is not None else self.step_completed
            )
        if self._job.replica is not None and self.syncs:
            average(
                self.store.parameters,
                self._job.replica.across,
                self.store.device,
                self._job.limits.bucket_bytes,
            )

    @override
    def stepping(self) -> AbstractContextManager[None]:
        """Context of an optimizer step, fused for the optimizers that can be."""
        stepping = super().stepping()
        return self._fused_in(stepping) if self._to_fuse else stepping

    @contextmanager
    def _fused_in(self, stepping: AbstractContextManager[None]) -> Iterator[None]:
        with stepping, fused(self._to_fuse):
            yield

    @cached_property
    def _clears_early(self) -> bool:
        """Whether a step clears the last one's gradients before its forward."""
        return sum(parameter.nbytes for parameter in self.store.parameters) >= LEAST_TO_CLEAR

    def _clear_gradients(self, batch_idx: int) -> None:
        """Clear the last step's gradients before the forward of an optimizer step's first batch, if
        this run clears early and no hook reads them until then.

        The Trainer clears them after it, when they would add to the memory of activations.
        """
        if not self._clears_early:
            return
        begins = batch_idx % self._trainer.accumulate_grad_batches == 0
        if begins and not has_own_hooks(self.module, self._trainer, _SEE_GRADIENTS):
            # The module's own take half a millisecond to find.
            for parameter in self.store.parameters:
                parameter.grad = None

    def _loss_scale(self) -> float:
        """Return the factor by which the precision plugin will scale the loss; 1 without a scaler.

        Half-precision gradients inside the step need it now.
        """
        scaler = getattr(self.module.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    # What runs a step: captured once per shape and content

    def _counters(self, step: StepGraph, batch: Any, batch_idx: int) -> StepCounters:
        """Return the values of the counters, and of the numbers of `step` that change, by name."""
        counters = StepCounters(self._trainer, batch_idx)
        if step.numbers:
            counters.update(numbers_now(step.numbers, self.module, batch))
        return counters

    def _captured_step(
        self, key: Hashable, batch: Any, batch_idx: int, buffers_changed: bool
    ) -> tuple[CapturedStep, Mapping[str, Any]]:
        """Return the step that runs this batch, and its counters; it is captured, planned and
        lowered now if there is none. Collective.

        Args:
            key: of the batch, `shape_key`.
            buffers_changed: whether a hook has changed this rank's buffers.

        Raises:
            CaptureError: (on all ranks) there is no one step of all ranks, or too many come.
            PlanError: a new step has no plan.
        """
        known = self._captured.get(key, [])
        index, counters, changed = self._fitting(known, batch, batch_idx)
        numbers: dict[str, Any] = {}
        if index is not None:
            numbers = {str(place): counters[str(place)] for place in known[index].step.numbers}
        all_have = self._same.all_have(key, index, batch, numbers, buffers_changed)
        if self._same.buffers_changed:
            # As DDP does before every forward.
            broadcast_tensors(self.module.buffers())
        if all_have:
            assert index is not None
            self._captured.move_to_end(key)
            return known[index], counters
        self._check_may_capture(known, batch, changed)
        with shapes_only(self.store):
            changing = self._changing_numbers(known, batch)
            step = capture(self.module, batch, batch_idx, self._job, changing, self._state)
        program = next(
            (
                earlier.program
                for earlier in known
                if earlier.step.graph_digest == step.graph_digest
            ),
            None,
        )
        if program is None:
            program = self._program(step)
        return self._keep(key, step, program, batch), self._counters(step, batch, batch_idx)

    def _check_may_capture(
        self, known: Sequence[CapturedStep], batch: Any, changed: str | None
    ) -> None:
        """Count the captures of a training, and report new shapes.

        Args:
            known: captured steps of the batch's shape.
            batch: that is to be captured.
            changed: what has changed since one of `known`.

        Raises:
            CaptureError: too many come, and the steps may run eagerly.
        """
        may_differ = self._job.may_run_eagerly
        steps = self._placed.num_steps
        if not known:
            shapes = len(self._captured)
            if may_differ and shapes >= min(MANY_SHAPES, 2 + steps // STEPS_PER_SHAPE):
                raise CaptureError(
                    f"batches have come in {shapes + 1} shapes in {steps + 1} steps, and each would"
                    " be captured and "
                    "planned anew (pad to a few lengths, pad_to_multiple_of, to have them captured:"
                    ' capture="require")'
                )
            self._same.say_shape(batch, shapes + 1)
        elif may_differ:
            self._num_changes += 1
            if (
                self._num_changes > CHANGES + steps // STEPS_PER_SHAPE
                and self.no_headroom_for_full_module() is None
            ):
                raise CaptureError(
                    f"{changed or 'what the step depends on'} has changed, {self._num_changes}"
                    f" times in {steps + 1} "
                    "steps, each another capture (a number that changes often is better a buffer,"
                    " changed by `fill_`)"
                )

    def _buffers_changed(self) -> bool:
        """Whether a hook has changed this rank's buffers since the last step, where rank 0's are
        those of all ranks.
        """
        follows = self._follows_buffers and self._syncs_buffers
        return follows and self._buffer_versions != _versions(self.module)

    def _fitting(
        self, steps: Sequence[CapturedStep], batch: Any, batch_idx: int
    ) -> tuple[int | None, Mapping[str, Any], str | None]:
        """Choose the captured step whose values and guards hold for this batch.

        Args:
            steps: captured for batches of this kind.

        Returns:
            (index of the last one that holds, its counters, None), or (None, {}, a text of the
            value that has changed since one of them, None if it has no name).
        """
        changed: str | None = None
        for index in reversed(range(len(steps))):
            step = steps[index].step
            other = changed_value(step.attributes)
            if other is None and not leaves_hold(step.leaves, batch):
                other = "a value in the batch that is no tensor"
            if other is None:
                counters = self._counters(step, batch, batch_idx)
                failed = _failed_guards(step, counters)
                if not failed:
                    return index, counters, None
                # Else the step's Python would take another path.
                other = next(
                    (str(place) for place in step.numbers if str(place) in failed[0]), changed
                )
            changed = other
        return None, {}, changed

    def _changing_numbers(self, known: Sequence[CapturedStep], batch: Any) -> tuple[Place, ...]:
        """Return the locations of numbers that have changed so far, and are the same on all ranks.
        Collective.

        Args:
            known: captured steps; the last one is compared with the module and the batch.
        """
        changing = {place for place in self._numbers if place.leaf is None}
        for last in known[-1:]:
            changing |= {*last.step.numbers, *changed_numbers(last.step, self.module, batch)}
        places = sorted(changing, key=str)
        values = numbers_now(places, self.module, batch)
        values_of_ranks = all_gather_object(values, self._job.group)
        numbers = []
        for place in places:
            name = str(place)
            texts = {repr(of_rank.get(name)) for of_rank in values_of_ranks}
            if len(texts) == 1 and type(values[name]) in (int, float):
                numbers.append(place)
        self._numbers = numbers
        return tuple(numbers)

    def _keep(
        self, key: Hashable, step: StepGraph, program: StepProgram, batch: Any
    ) -> CapturedStep:
        """Store a captured step for batches of kind `key`, and return it. The oldest steps of the
        kind, and the oldest kinds, are dropped if there are too many.
        """
        steps = self._captured.setdefault(key, [])
        steps.append(CapturedStep(step, program))
        del steps[:-MAX_PROGRAMS]
        self._captured.move_to_end(key)
        while len(self._captured) > MAX_SHAPES:
            self._captured.popitem(last=False)
        return steps[-1]

    def _program(self, step: StepGraph) -> StepProgram:
        """Return the program of a step, planned if it differs from the first one.

        A smaller batch runs under the same plan if it can (`plan_on_smaller_batch`). Another step
        of another shape or content gets a plan with the running plan's parameters. If a pipeline
        cannot run it, every rank computes all of it, and rank 0 warns.

        Raises:
            PlanError: the step has no plan, and no pipeline runs.
        """
        made_for = self.plan.fingerprint
        # Else it means other ops.
        if (made_for.graph, made_for.batch) == (
            step.graph_digest,
            step.batch_digest,
        ):
            return self._placed.training_program(step, self.plan)
        smaller = plan_on_smaller_batch(step, self._job.plans.planned_batch, self.plan)
        if smaller is not None:
            return self._placed.training_program(step, smaller)
        try:
            plan = find_or_make_plan(
                step, self._job, self._cluster, self._optimizer_info, self._rank_zero, self.plan
            )
        except PlanError as error:
            if not self._is_pipelined:
                raise
            rank_zero_warn(
                "alpa: the running pipeline cannot run this batch: every rank computes all of it,"
                " with whole "
                f"parameters; batches of one shape (drop_last=True) avoid that. {error.problem}"
            )
            return self._placed.global_program(step)
        return self._placed.training_program(step, plan)

    @override
    def changed_parameters(self) -> str | None:
        """Do as `ShardedRun.changed_parameters`.

        Raises:
            RuntimeMismatchError: parameters changed on some ranks only.
        """
        changed = self._parameters.changed()
        if changed is not None:
            self._same.meet_for_change(changed)
        return changed

    def _measure(self) -> None:
        """Record when a step begins; after some, report their seconds and the predicted ones.

        Does nothing afterwards.
        """
        count = len(self._step_starts)
        if count > MEASURED_STEPS.stop:
            return
        if self._job.device.type == "cuda" and count in (MEASURED_STEPS.start, MEASURED_STEPS.stop):
            # The host may be steps ahead.
            torch.cuda.synchronize(self._job.device)
        self._step_starts.append(time.perf_counter())
        self._loop_clock.end_step()
        if count == MEASURED_STEPS.stop:
            self._report_measured(self._step_starts[MEASURED_STEPS.start :])

    @override
    def finish_measuring(self) -> float | None:
        """Report how long a step takes if the training ends before it was reported.

        Returns:
            Seconds of a step: the median, on GPUs the mean; None if too few were measured.
        """
        starts = self._step_starts[MEASURED_STEPS.start :]
        if self.measured_step_seconds is None and len(starts) >= LEAST_MEASURED:
            if self._job.device.type == "cuda":
                torch.cuda.synchronize(self._job.device)
            self._report_measured([*starts, time.perf_counter()])
        return self.measured_step_seconds

    def _report_measured(self, starts: Sequence[float]) -> None:
        """Say how long a step takes against the prediction, and store both as attributes.

        Args:
            starts: when steps began, and when the last one ended; on GPUs both ends were waited
                for.
        """
        seconds = statistics.median(b - a for a, b in itertools.pairwise(starts))
        # Single starts are the host's.
        if self._job.device.type == "cuda":
            seconds = (starts[-1] - starts[0]) / (len(starts) - 1)
        self.measured_step_seconds = seconds
        rates = rates_text(self.plan.figures, seconds)
        predicted = self._predicted()
        self.predicted_step_seconds = predicted.step_seconds
        planned = self.plan.predicted.step_seconds
        cause = busy_machine(self._job.device.type)
        self._job.progress.say(measured_line(predicted, seconds, rates, planned, cause))

    def _predicted(self) -> Predicted:
        """Return the plan's prediction, with the Trainer's loop as measured in the first steps."""
        planned = self.plan.predicted
        loop_seconds = self._loop_clock.seconds
        if loop_seconds is None:
            return planned
        return with_host(planned, planned.host_seconds, loop_seconds, self._cluster.device)


def _failed_guards(step: StepGraph, counters: StepCounters) -> list[frozenset[str]]:
    """Return the names of counters of each guard that does not hold for these values; [] if all
    hold.
    """
    if not step.guards:
        return []
    values = counters.all()
    return [guard.asked.counters for guard in step.guards if not guard.holds(**values)]


def _equal_buffers(step: StepGraph) -> tuple[BufferInput, ...]:
    """Return the buffers that are equal on all ranks after the step: a rank's own batch changes the
    others.
    """
    of_ranks = dict(step.of_ranks)
    return tuple(buffer for buffer in step.buffers if buffer.update not in of_ranks)
