"""ShardedRun: a module with sharded parameters, as its Trainer, checkpoints and hooks use it.

Its subclasses run the steps: `Run` runs captured, planned steps, `EagerRun` eager ones, and the
`SubmoduleRun` of an extra eager ones with planned submodules.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import outermost_metrics
from alpa_strategy.checkpoint.sharded_state_dict import shard_state, unshard_state
from alpa_strategy.comm.collectives import (
    any_rank,
    broadcast_tensors,
    cpu_group,
    rank_in,
    world_size,
)
from alpa_strategy.hook_points import EAGER_SHARDING, GatherOnUse
from alpa_strategy.ir.graph import BufferInput
from alpa_strategy.ir.measured_steps import MeasuredSteps, ProfiledSteps
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_companion import plan_digest
from alpa_strategy.lightning.checks import UPDATE_HOOKS, has_own_hooks
from alpa_strategy.lightning.digests import GRADIENT, GradientCheck, ReplicaChecksum
from alpa_strategy.lightning.evaluation_loop import is_last_of_loader
from alpa_strategy.lightning.full_parameters import (
    FullParameters,
    unshard_for_hooks,
    use_whole_norms,
)
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.rank_consistency import ParameterChangeDetector, toggled
from alpa_strategy.lightning.step_effects import MetricStates
from alpa_strategy.lightning.step_writes import StepWrites
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.planner.optimizer_reads import reads_of_all
from alpa_strategy.planner.plan_store import PlanStore
from alpa_strategy.runtime.owner_step import OwnerStep
from alpa_strategy.runtime.parameters import ParameterStore, unsharded_store
from alpa_strategy.runtime.step_by_bucket import StepByBucket, can_step_in_parts
from alpa_strategy.units import format_bytes
from alpa_strategy.urls import is_url


@dataclass(frozen=True)
class RunInputs:
    """A module with full or deferred parameters, its optimizers and its job."""

    # The LightningModule; its Parameter objects stay.
    module: Any

    # Optimizers of the full parameters; none for an evaluation.
    optimizers: tuple[Optimizer, ...]

    job: Job

    # Context in which the module is sharded. Its value is a function that returns the full tensor
    # of a parameter or of optimizer state (see `DeferredInit.sharding`).
    sharding: Callable[[Any], AbstractContextManager[Callable[[Tensor], Tensor]]]

    # Names of parameters whose copies differ between the ranks, as the steps of an earlier run of
    # this training have written different values to them.
    differing: frozenset[str] = frozenset()


class ShardedRun(ABC):
    """A module with sharded parameters. Methods that gather or reduce are collective.

    Args:
        inputs: the module, its optimizers and its job.
        optimizer_info: properties of all optimizers together.
        plan: the plan.
        store: store of the parameters, which are sharded here.
        limit: bytes of a device that may be used.
        values: returns the full tensor of a parameter or of optimizer state.
        buffers: buffers that must be equal on all ranks.
    """

    # The runtime of programs, if there are any.
    _placed: PlanRuntime | None = None

    # Median seconds of a step; None: not measured yet.
    measured_step_seconds: float | None = None

    # Predicted seconds of a step with the loop as measured; None: not measured yet.
    predicted_step_seconds: float | None = None

    def __init__(
        self,
        inputs: RunInputs,
        optimizer_info: OptimizerInfo,
        plan: Plan,
        store: ParameterStore,
        limit: float,
        values: Callable[[Tensor], Tensor],
        buffers: Sequence[BufferInput] = (),
    ) -> None:
        module, optimizers, job = inputs.module, inputs.optimizers, inputs.job
        self.module = module
        self.optimizers = optimizers
        self.plan = plan
        self._is_pipelined = plan.is_pipelined
        self.store = store
        self._job = job
        self.say = job.progress.say
        check = None
        if job.limits.check_gradients and optimizers:
            check = GradientCheck(divided=not plan.is_eager)
        self._gradient_check = check
        # Parameters have their full shapes until then.
        reads = {} if optimizer_info.element_wise else reads_of_all(optimizers)
        store.shard(values, job.limits.bucket_bytes, None if check is None else check.look)
        if reads:
            store.assign_owners(reads)
        self._owner_steps = [OwnerStep(optimizer, store) for optimizer in optimizers]
        for optimizer in optimizers:
            shard_state(optimizer, store, values)
        self.full_parameters = FullParameters(store)
        # Gathers parameters on use, in eager steps.
        self.on_use: GatherOnUse | None = None
        self._evaluates: GatherOnUse | None = None
        self._evaluation = ExitStack()
        self._optimizer_info = optimizer_info
        # Bytes of a device that may be used.
        self.memory_limit = limit
        # The last argument of `sync`.
        self.syncs = True
        self.metrics = MetricStates(job.replica)
        self._parameters = ParameterChangeDetector(
            module, toggled(module, optimizers) if plan.is_eager else ()
        )
        # Whether buffers may differ between ranks.
        self.buffers_differ = plan.is_eager
        self._num_updates = 0
        # What the code of eager steps writes to parameters; None: it is not looked at.
        self._writes = _step_writes(plan, inputs, store)
        self._compare_copies(inputs, buffers)
        # See `adapt_trainer`.
        self._adapted = ExitStack()
        # As under DDP, gradients outside of steps are not reduced.
        self._adapted.enter_context(store.listening(False))
        self._by_bucket = [StepByBucket(optimizer) for optimizer in optimizers]
        # What this run has recorded for the next one.
        self.recorded: Any = None
        # The group with which `reduce` exchanges values of the current step.
        self.peers: Any = None

    def _compare_copies(self, inputs: RunInputs, buffers: Sequence[BufferInput]) -> None:
        """Make the checks that compare the ranks' copies of parameters, buffers and gradients.
        Collective.
        """
        job = inputs.job
        every = job.limits.check_replicas_every
        compared = (self.store, self.module, buffers, every, job.device)
        self.copies = ReplicaChecksum(*compared, writes=self._writes, differing=inputs.differing)
        if self._gradient_check is not None:
            compared = (self.store, self.module, (), 1, job.device)
            self._gradient_check.copies = ReplicaChecksum(*compared, GRADIENT)

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """Return the result of `module.training_step(batch, batch_idx)`, its loss differentiable.

        Args:
            batch: this rank's batch.
            batch_idx: its index in the epoch.
            eager_step: calls the module's own step.
        """

    @abstractmethod
    def finish_backward(self) -> None:
        """Reduce the gradients after the Trainer's backward, unless more are accumulated."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state but for parameters and optimizer, for a checkpoint. Only rank
        0's has the plan.
        """
        streams = {} if self._placed is None else self._placed.state_dict()
        plan = self.plan.to_dict() if rank_in(None) == 0 else None
        plans = self._job.plans.used if rank_in(self._job.group) == 0 else []
        return {
            **streams,
            "plan": plan,
            "plans": [other for other in plans if other != plan],
            "planned_batch": self._job.plans.planned_batch,
        }

    @property
    def group(self) -> Any:
        """The ranks that run a step together; None: all."""
        return self._job.group

    @property
    def plan_path(self) -> Path:
        """Path of the plan's file, or where it would be stored on this machine."""
        plan_file = self._job.plan_file
        if plan_file is not None and not is_url(plan_file):
            return Path(plan_file)
        return PlanStore(self._job.plan_folder).path(self.plan.fingerprint)

    def changed_parameters(self) -> str | None:
        """Return the change of the module's parameters that requires another plan, None if none."""
        return self._parameters.changed()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, if that was on the same meshes."""
        if self._placed is not None:
            self._placed.load_state_dict(state)

    def measured_steps(self, profiled: ProfiledSteps | None) -> MeasuredSteps:
        """Return the measured seconds of the plan's steps, with the profile of some, if any."""
        return MeasuredSteps(
            plan_digest(self.plan),
            self.measured_step_seconds,
            profiled,
            self.predicted_step_seconds,
        )

    @cached_property
    def _trainer(self) -> Any:
        """The module's Trainer, cached: the module's own property takes microseconds each time."""
        return self.module.trainer

    def step_completed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the optimizer step parameters with complete gradients before others are complete.

        Does nothing if hooks or plugins may read or change gradients before the step.
        """
        stepper = self._stepper()
        if stepper is not None:
            stepper(parameters)

    def _stepper(self) -> StepByBucket | None:
        """Return the `StepByBucket` that steps the optimizer bucket by bucket in the backward.

        None unless there is one optimizer that steps elements by themselves, under automatic
        optimization; None as well if anything looks at all gradients first: clipping, a scaler, a
        check, hooks or a precision plugin of the user; or if gradients stay local.
        """
        trainer, plugin = self._trainer, self._trainer.precision_plugin
        is_one = self.module.automatic_optimization and len(self.optimizers) == 1 and self.syncs
        readers = self._gradient_check, trainer.gradient_clip_val, getattr(plugin, "scaler", None)
        is_known = type(plugin).__module__.startswith(("lightning.", "alpa_strategy."))
        if not (is_one and is_known and self._optimizer_info.element_wise) or any(
            reader is not None for reader in readers
        ):
            return None
        if has_own_hooks(self.module, self._trainer, UPDATE_HOOKS):
            return None
        return self._by_bucket[0] if can_step_in_parts(self.optimizers[0]) else None

    def sync(self, enabled: bool) -> None:
        """Set whether the next backward reduces gradients; else they stay local and accumulate.

        They are reduced in any case by a pipeline, where parameters are gathered on use, and in
        captured steps if an `on_after_backward` hook may read them.
        """
        self.syncs = enabled
        # A pipeline reduces the gradients of each of its steps. Parameters that are gathered on use
        # accumulate reduced shards.
        if not self._is_pipelined and self.on_use is None:
            # Hooks after the backward (clipping, for example) see the same gradients as on one
            # device.
            hooks = ("on_after_backward",)
            is_read = not self.plan.is_eager and has_own_hooks(self.module, self._trainer, hooks)
            self.store.sync(enabled or is_read)

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters with a gradient on any rank, and their full gradients.

        Another run continues with them. Collective.
        """
        if not self._is_pipelined:
            self.store.sync(True)
            self.store.finish_backward()
        parameters = list(self.module.parameters())
        has_gradient = any_rank([p.grad is not None for p in parameters])
        gradients = []
        for parameter in compress(parameters, has_gradient):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append((parameter, self.store.gather_like(parameter, grad)))
        return gradients

    def in_step(self) -> Any:
        """Return a context, or decorator, of a step, its backward or an optimizer's closure.

        Parameters are full in it when they are used.
        """
        if self.on_use is None:
            return self.store.listening(True)
        return self._in_use(self.on_use)

    @contextmanager
    def _in_use(self, on_use: GatherOnUse) -> Iterator[None]:
        """Context in which parameters are gathered when used, and gradients reduced."""
        with self.store.listening(True), on_use.in_use(for_backward=True):
            yield

    def noting_writes(self) -> AbstractContextManager[None]:
        """Return the context of an eager step: what its code writes to parameters is recorded."""
        return nullcontext() if self._writes is None else self._writes.in_step()

    def meet(self) -> None:
        """Synchronize before a collective of the step's own code.

        With parameters that are gathered on use, other ranks may still need some first.
        """
        for fully_shard in self.full_parameters.on_use:
            fully_shard.meet()

    def end_of_backward(self) -> None:
        """Serve parameters to ranks whose backward still runs, within `in_step`."""
        if self.on_use is not None:
            self.on_use.end_step()

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context of an optimizer's step, to be entered at once; `stepped` ends it. A
        backward of manual optimization is finished first. Raises: as `check_gradients`.
        """
        # With manual optimization, after `loss.backward()`.
        if self.store.awaits_finish:
            self.end_of_backward()
            self.finish_backward()
            self.check_gradients()
        return self.full_parameters.suspended(True)

    def finish_measuring(self) -> float | None:
        """Return the seconds of a step when the training ends; None: they are not known."""
        return self.measured_step_seconds

    def stepped(self) -> None:
        """Finish an optimizer's step. Collective at the steps at which replicas are compared.

        Raises RuntimeMismatchError if copies differ.
        """
        for by_bucket in self._by_bucket:
            by_bucket.end()
        self.store.after_optimizer_step()
        if self.on_use is not None:
            self.on_use.drop()
        self._num_updates += 1
        if self.copies.due(self._num_updates):
            self.copies.compare(f"after step {self._num_updates}")

    def begin_check(self, batch: Any = None, loss: Tensor | None = None) -> None:
        """Record the batch or the loss of the current step, if gradients are checked."""
        check = self._gradient_check
        if check is None:
            return

        if batch is not None:
            check.batch = batch
        if loss is not None:
            # Checked later, as its all-reduce may be in flight.
            check.losses.append(loss.detach())

    def check_gradients(self) -> None:
        """Check the gradients, if the user wants it, they are complete, and no loss scaler does.
        Collective. Raises as `GradientCheck.finish`.
        """
        if self._gradient_check is None or not (self._is_pipelined or self.store.is_syncing):
            return
        if self._job.replica is not None and not self.syncs:
            return
        # A loss scaler checks for overflow itself.
        if getattr(self.module.trainer.precision_plugin, "scaler", None) is None:
            gradients = {self.store.name_of(p): p.grad for p in self.store.parameters}
            self._gradient_check.finish(gradients, self._num_updates + 1)

    def take_buffers(self) -> None:
        """Broadcast rank 0's buffers if the ranks have run local steps since the last broadcast."""
        if self.buffers_differ:
            broadcast_tensors(self.module.buffers())
        self.buffers_differ = False

    # Evaluation steps are eager, each rank on its own batches: DDP's semantics by construction. If
    # full parameters fit in addition to a training step they are gathered once per loop, else each
    # while it is used.

    def start_evaluation(self) -> None:
        """Prepare a loop over evaluation batches: full parameters, or gathered on use if memory is
        short; nothing if none are sharded. Collective.

        Raises SetupError if memory is short and the extra is switched off.
        """
        # Every rank loads all samples.
        if self._job.options.batch_scope == "global" and self._job.replica is None:
            for _, metric in outermost_metrics(self.module):
                self.metrics.make_global(metric)
        else:
            self.metrics.make_local()
        if not self.store.sharded_parameters:
            return
        if any_rank([self.no_headroom_for_evaluation() is not None])[0]:
            extra = EAGER_SHARDING.required("an evaluation that full parameters do not fit into")
            group = cpu_group("evaluation")
            self._evaluates = extra.gather_on_use(self.module, self.store, group, False, False)
            self.full_parameters.on_use.append(self._evaluates)
            self._evaluation.callback(self._evaluates.remove)
            self._evaluation.enter_context(self._evaluates.in_use())
        else:
            self._evaluation.enter_context(self.full_parameters.entered())

    def evaluation_step(self, args: tuple[Any, ...], eager_step: Callable[[], Any]) -> Any:
        """Return the result of `eager_step`, an evaluation step on this rank's batch.

        Args:
            args: (batch, batch_idx, dataloader_idx) as the Trainer gives them, or the first of
                these.
            eager_step: calls the module's own step.
        """
        on_use = self._evaluates
        if on_use is not None:
            on_use.begin_step()
        output = eager_step()
        # The Trainer reduces logged values when a loader ends. All ranks must have reached its end.
        if on_use is not None and is_last_of_loader(self.module.trainer, *args[1:]):
            on_use.end_step()
        return output

    def end_evaluation(self) -> None:
        """End a loop over evaluation batches: parameters are shards again. Collective."""
        self.metrics.make_local()
        on_use, self._evaluates = self._evaluates, None
        if on_use is not None:
            self.full_parameters.on_use.remove(on_use)
            on_use.end_step(for_good=True)
        self._evaluation.close()

    # Memory headroom of a device in addition to a training. These return None if the tensors fit,
    # else the reason, for a message

    def no_headroom_for_full_parameters(self, with_gradients: bool = False) -> str | None:
        """Return why full parameters (and gradients, if `with_gradients`) do not fit in addition to
        the training.

        None if they fit.
        """
        full_bytes = self.store.full_bytes(self.store.parameters)
        here = [p for p in self.store.parameters if not self.store.is_on_host(p)]
        parts = sum(p.nbytes for p in here)
        state = sum(p.numel() for p in here) * self._optimizer_info.state_bytes
        return self._against(
            "they and what training keeps",
            2 * parts + state + full_bytes * (2 if with_gradients else 1),
        )

    def no_headroom_for_evaluation(self) -> str | None:
        """Return why full parameters do not fit in addition to a training step, or None."""
        copies = self.store.full_bytes(self.store.sharded_parameters)
        return self._against("they and a training step", self.plan.predicted.peak_bytes + copies)

    def no_headroom_for_full_module(self) -> str | None:
        """Return why the full module and optimizer state do not fit; None if they fit."""
        full_bytes = self.store.full_bytes(self.store.parameters)
        trained = sum(
            self.store.full_shape(p).numel() for p in self.store.parameters if p.requires_grad
        )
        state = trained * self._optimizer_info.state_bytes
        return self._against("whole parameters and optimizer state", full_bytes + state)

    def _against(self, subject: str, needed: float) -> str | None:
        """Return a sentence if `needed` bytes exceed a device's memory, else None."""
        if needed <= self.memory_limit:
            return None
        return (
            f"{subject} need {format_bytes(needed)} per device of {format_bytes(self.memory_limit)}"
        )

    # Hooks of the Trainer, and the end of the run

    def adapt_trainer(self, trainer: Any) -> None:
        """Let hooks see full parameters and gradients, and the plugin clip by full norms.

        Raises AlpaError if a callback needs full parameters that do not fit.
        """
        if self.store.sharded_parameters or not self.plan.is_eager:
            self._adapted.enter_context(
                use_whole_norms(trainer.precision_plugin, self.full_parameters)
            )
        if self.store.sharded_parameters:
            self._adapted.enter_context(
                unshard_for_hooks(
                    self.module, self.full_parameters, self.no_headroom_for_full_parameters
                )
            )

    def release(self) -> None:
        """Unshard the module and the optimizers at the end of the run. Collective."""
        self.metrics.make_local()
        for optimizer in self.optimizers:
            unshard_state(optimizer, self.store)
        self.store.unshard()
        # Hooks of a step that is running see parameters through this store.
        self.full_parameters.store = unsharded_store()

    def close(self) -> None:
        """Restore the hooks. No communication."""
        self._adapted.close()
        if self._writes is not None:
            self._writes.remove()
        for mesh_parameters in self.store.of_stage.values():
            mesh_parameters.unwatch()
        for owner_step in self._owner_steps:
            owner_step.remove()
        if self.on_use is not None:
            self.on_use.remove()


def _step_writes(plan: Plan, inputs: RunInputs, store: ParameterStore) -> StepWrites | None:
    """Return the recorder of the parameters that a run's eager steps write to; None if copies are
    not compared.
    """
    job = inputs.job
    is_compared = bool(job.limits.check_replicas_every) and world_size() > 1
    if not plan.is_eager or not inputs.optimizers or not is_compared:
        return None
    # The planned submodules of shards need the attribute of tensors as it is.
    reads_shards = job.submodules is not None and bool(store.sharded_parameters)
    return StepWrites(store, job.compile is None and not reads_shards)
