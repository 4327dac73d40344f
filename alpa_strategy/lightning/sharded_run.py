"""ShardedRun: a module whose parameters lie as a plan says, and what its Trainer, checkpoints and
hooks ask of it.

How steps run is said by its two kinds: `Run` has them captured and planned, `EagerRun` runs them
as they are written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import outermost_metrics
from alpa_strategy.capture.submodules import Call
from alpa_strategy.checkpoint.sharded_state_dict import shard_state, unshard_state
from alpa_strategy.comm.collectives import any_rank, broadcast_tensors, cpu_group, rank_in
from alpa_strategy.ir.graph import BufferInput
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.batch_rows import UPDATE_HOOKS
from alpa_strategy.lightning.checks import has_own_hooks
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
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.runtime.eager_fully_shard import EagerFullyShard
from alpa_strategy.runtime.parameters import ParameterStore, all_whole
from alpa_strategy.runtime.step_by_bucket import StepByBucket, can_step_in_parts
from alpa_strategy.units import format_bytes


@dataclass(frozen=True)
class RunInputs:
    """A module whose parameters are whole, or not made yet, and what it is to be trained with."""

    # The LightningModule; its Parameter objects stay.
    module: Any
    # Made on the whole parameters; none: for an evaluation.
    optimizers: tuple[Optimizer, ...]
    job: Job
    # context around what shards the module; gives what makes all of a parameter or of optimizer
    # state
    sharding: Callable[[Any], AbstractContextManager[Callable[[Tensor], Tensor]]]


class ShardedRun(ABC):
    """See the file's docstring. What gathers or reduces is collective.

    Args:
        optimizer_info: of all optimizers together.
        store: to be sharded.
        limit: bytes of a device that may be used.
        values: gives the whole of a parameter, or of a tensor of optimizer state.
        buffers: of which all ranks are to hold the same, as they do of parameters.
    """

    # What runs programs, where there are any.
    _placed: PlanRuntime | None = None

    def __init__(
        self,
        given: RunInputs,
        optimizer_info: OptimizerInfo,
        plan: Plan,
        store: ParameterStore,
        limit: float,
        values: Callable[[Tensor], Tensor],
        buffers: Sequence[BufferInput] = (),
    ) -> None:
        module, optimizers, job = given.module, given.optimizers, given.job
        self.module, self.optimizers, self.plan, self.store = module, optimizers, plan, store
        self._job, self.say = job, job.progress.say
        # The module's own property takes microseconds.
        self._trainer = module.trainer
        check = (
            GradientCheck(divided=not plan.is_eager)
            if job.limits.check_gradients and optimizers
            else None
        )
        self._gradient_check = check
        store.shard(values, job.limits.bucket_bytes, None if check is None else check.look)
        for optimizer in optimizers:
            shard_state(optimizer, store, values)
        self.whole = FullParameters(store)
        # For a step that runs as it is written.
        self.on_use: EagerFullyShard | None = None
        self._evaluates: EagerFullyShard | None = None
        self._evaluation = ExitStack()
        self._optimizer_info, self._limit = optimizer_info, limit
        # What `sync` was last given.
        self.syncs = True
        self.metrics = MetricStates(job.replica)
        self._parameters = ParameterChangeDetector(
            module, toggled(module, optimizers) if plan.is_eager else ()
        )
        # Perhaps.
        self.buffers_differ = plan.is_eager
        self._num_updates = 0
        self.copies = ReplicaChecksum(
            store, module, buffers, job.limits.check_replicas_every, job.device
        )
        if check is not None:
            check.copies = ReplicaChecksum(store, module, (), 1, job.device, GRADIENT)
        # See `adapt_trainer`.
        self._adapted = ExitStack()
        # As DDP, to nothing outside of a step, as in an evaluation.
        self._adapted.enter_context(store.listening(False))
        self._by_bucket = [StepByBucket(each) for each in optimizers]
        # Of submodules, recorded for the run that follows.
        self.calls: Sequence[Call] | None = None
        # Values of the step under way are exchanged with theirs: a group for `reduce`.
        self.peers: Any = None

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """What `module.training_step(batch, batch_idx)` returns, its loss differentiable;
        `eager_step` calls it.
        """

    @abstractmethod
    def finish_backward(self) -> None:
        """After the Trainer's backward: gradients are complete, where no more are added to them."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this rank's beyond parameters and optimizer, for a
        checkpoint: plain data.
        """
        streams = {} if self._placed is None else self._placed.state_dict()
        plan = self.plan.to_dict() if rank_in(None) == 0 else None
        plans = self._job.plans.used if rank_in(self._job.group) == 0 else []
        return {
            **streams,
            "plan": plan,
            "plans": [each for each in plans if each != plan],
            "planned_batch": self._job.plans.planned_batch,
        }

    def changed_parameters(self) -> str | None:
        """What happened to the module's parameters that wants another plan, None when nothing
        did.
        """
        return self._parameters.changed()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, if that was on the same meshes."""
        if self._placed is not None:
            self._placed.load_state_dict(state)

    def step_completed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the optimizer step parameters whose gradients are complete, while others are not.

        Nothing is done where somebody may look at the gradients, or change them, before the step.
        """
        stepper = self._stepper()
        if stepper is not None:
            stepper(parameters)

    def _stepper(self) -> StepByBucket | None:
        trainer, plugin = self._trainer, self._trainer.precision_plugin
        is_one = self.module.automatic_optimization and len(self.optimizers) == 1 and self.syncs
        looks = self._gradient_check, trainer.gradient_clip_val, getattr(plugin, "scaler", None)
        is_known = type(plugin).__module__.startswith(("lightning.", "alpa_strategy."))
        if not (is_one and is_known and self._optimizer_info.element_wise) or any(
            each is not None for each in looks
        ):
            return None
        if has_own_hooks(self.module, self._trainer, UPDATE_HOOKS):
            return None
        return self._by_bucket[0] if can_step_in_parts(self.optimizers[0]) else None

    def sync(self, enabled: bool) -> None:
        """Whether the next backward completes gradients; else they stay local, as more are added to
        them.
        """
        self.syncs = enabled
        # A pipeline reduces the gradients of each of its steps; what parameters in parts keep of
        # one is its part.
        if not self.plan.is_pipelined and self.on_use is None:
            # One device's step: who looks after every batch (to clip, say) finds what it would
            # there.
            hooks = ("on_after_backward",)
            is_read = not self.plan.is_eager and has_own_hooks(self.module, self._trainer, hooks)
            self.store.sync(enabled or is_read)

    def leave_steps(self) -> None:
        """The next step is another run's, in the midst of an epoch."""
        return

    def take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """All of the gradients that are there, on every rank, for another run. Collective."""
        if not self.plan.is_pipelined:
            self.store.sync(True)
            self.store.finish_backward()
        parameters = list(self.module.parameters())
        there = any_rank([p.grad is not None for p in parameters])
        grads = [
            (p, torch.zeros_like(p) if p.grad is None else p.grad)
            for p in compress(parameters, there)
        ]
        return [(p, self.store.gather_like(p, grad)) for p, grad in grads]

    def in_step(self) -> Any:
        """Around code of a step, of its backward or of an optimizer's closure: it sees whole
        parameters. A context manager, and a decorator.
        """
        listening = self.store.listening(True)
        return listening if self.on_use is None else self._in_use(self.on_use)

    @contextmanager
    def _in_use(self, on_use: EagerFullyShard) -> Iterator[None]:
        with self.store.listening(True), on_use.in_use(for_backward=True):
            yield

    def meet(self) -> None:
        """The step's own code begins a collective of all ranks: in parts, others may still need
        parameters first.
        """
        for each in self.whole.on_use:
            each.meet()

    def end_of_backward(self) -> None:
        """This rank's backward is done: in parts, others may still need parameters. Within
        `in_step`.
        """
        if self.on_use is not None:
            self.on_use.on_demand.finish()

    def stepping(self) -> AbstractContextManager[None]:
        """Around an optimizer's step, to be entered at once; `stepped` follows within it."""
        # After `loss.backward()` in a step that runs its own backward passes.
        if self.store.awaits_finish:
            self.end_of_backward()
            self.finish_backward()
            self.check_gradients()
        return self.whole.suspended(True)

    def stepped(self) -> None:
        """An optimizer has stepped. Collective at the steps at which copies are compared."""
        for each in self._by_bucket:
            each.end()
        self.store.after_optimizer_step()
        if self.on_use is not None:
            self.on_use.drop()
        self._num_updates += 1
        if self.copies.due(self._num_updates):
            self.copies.compare(f"after step {self._num_updates}")

    def begin_check(self, batch: Any = None, loss: Tensor | None = None) -> None:
        """Where gradients are checked: what the step under way computes them from."""
        if (check := self._gradient_check) is not None:
            check.batch = check.batch if batch is None else batch
            if loss is not None:
                # Looked at later: sums over devices may be under way.
                check.losses.append(loss.detach())

    def check_gradients(self) -> None:
        """Where that is asked for, and they are complete. Collective."""
        if self._gradient_check is None or not (self.plan.is_pipelined or self.store.is_syncing):
            return
        if self._job.replica is not None and not self.syncs:
            return
        # Which looks for itself.
        if getattr(self.module.trainer.precision_plugin, "scaler", None) is None:
            gradients = {self.store.name_of(p): p.grad for p in self.store.parameters}
            self._gradient_check.finish(gradients, self._num_updates + 1)

    def take_buffers(self) -> None:
        """Buffers are rank 0's, where the ranks have run a step of their own on them since they
        were.
        """
        if self.buffers_differ:
            broadcast_tensors(self.module.buffers())
        self.buffers_differ = False

    # Evaluation steps run as they are written, each rank on its own batches: DDP's semantics by
    # construction. Where whole parameters have room beside a training step they are gathered once a
    # loop, else each while it is used.

    def start_evaluation(self) -> None:
        """Begin a loop over evaluation batches. Collective."""
        # Every rank brings all rows.
        if self._job.options.batch_scope == "global" and self._job.replica is None:
            for _, metric in outermost_metrics(self.module):
                self.metrics.make_global(metric)
        else:
            self.metrics.make_local()
        if not self.store.sharded_parameters:
            return
        if any_rank([self.no_room_for_evaluation() is not None])[0]:
            self._evaluates = EagerFullyShard(self.module, self.store, cpu_group("evaluation"))
            self.whole.on_use.append(self._evaluates)
            self._evaluation.callback(self._evaluates.remove)
            self._evaluation.enter_context(self._evaluates.in_use())
        else:
            self._evaluation.enter_context(self.whole.entered())

    def evaluation_step(self, args: tuple[Any, ...], eager_step: Callable[[], Any]) -> Any:
        """What `eager_step` returns, a step on this rank's batch.

        Args:
            args: (batch, batch_idx, dataloader_idx) as the Trainer gives them, or the first of
                these.
        """
        on_use = self._evaluates
        if on_use is not None:
            on_use.on_demand.begin()
        output = eager_step()
        # The Trainer reduces what was logged when a loader ends: all ranks must have come to its
        # end.
        if on_use is not None and is_last_of_loader(self.module.trainer, *args[1:]):
            on_use.on_demand.finish()
        return output

    def end_evaluation(self) -> None:
        """The loop has ended. Collective."""
        self.metrics.make_local()
        on_use, self._evaluates = self._evaluates, None
        if on_use is not None:
            self.whole.on_use.remove(on_use)
            on_use.on_demand.finish(for_good=True)
        self._evaluation.close()

    # What has room on a device beside a training; None where it has, else why it has not, for a
    # message

    def no_room_for_whole(self, with_gradients: bool = False) -> str | None:
        """Whole parameters (and gradients) for a while, beside the parts with their gradients and
        optimizer state.
        """
        whole = self.store.whole_bytes(self.store.parameters)
        here = [p for p in self.store.parameters if not self.store.is_on_host(p)]
        parts = sum(p.nbytes for p in here)
        state = sum(p.numel() for p in here) * self._optimizer_info.state_bytes
        return self._against(
            "they and what training keeps", 2 * parts + state + whole * (2 if with_gradients else 1)
        )

    def no_room_for_evaluation(self) -> str | None:
        """Copies of all that lies in shards, for a while, beside the largest that a step needs."""
        copies = self.store.whole_bytes(self.store.sharded_parameters)
        return self._against("they and a training step", self.plan.predicted.peak_bytes + copies)

    def no_room_for_release(self) -> str | None:
        """Whole parameters and optimizer state, for good."""
        whole = self.store.whole_bytes(self.store.parameters)
        trained = sum(
            self.store.whole_shape(p).numel() for p in self.store.parameters if p.requires_grad
        )
        state = trained * self._optimizer_info.state_bytes
        return self._against("whole parameters and optimizer state", whole + state)

    def _against(self, what: str, needed: float) -> str | None:
        if needed <= self._limit:
            return None
        return f"{what} need {format_bytes(needed)} per device of {format_bytes(self._limit)}"

    # The Trainer's own, the end

    def adapt_trainer(self, trainer: Any) -> None:
        """Let hooks and callbacks see whole parameters and gradients, and the precision plugin clip
        by all shards.
        """
        if self.store.sharded_parameters or not self.plan.is_eager:
            self._adapted.enter_context(use_whole_norms(trainer.precision_plugin, self.whole))
        if self.store.sharded_parameters:
            self._adapted.enter_context(
                unshard_for_hooks(self.module, self.whole, self.no_room_for_whole)
            )

    def release(self) -> None:
        """Give the module and the optimizers their whole tensors back, for good. Collective."""
        self.metrics.make_local()
        for optimizer in self.optimizers:
            unshard_state(optimizer, self.store)
        self.store.unshard()
        # A step may be under way, whose hooks see parameters by it.
        self.whole.store = all_whole()

    def close(self) -> None:
        """Give the hooks back. No communication."""
        self._adapted.close()
        for each in self.store.of_stage.values():
            each.unwatch()
        if self.on_use is not None:
            self.on_use.remove()
