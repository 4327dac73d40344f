"""Session: the forms that a module takes under one strategy, and what brings each about.

It is whole, or built without memory, until the first training batch brings the plan; then its
parameters lie in shards until the training ends, and beyond that where it does not fit whole. A
model that does not fit into one device is sharded for an evaluation without a training as well.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.comm.collectives import any_rank, world_size
from alpa_strategy.errors import AlpaError, CaptureError, FailedCheckError
from alpa_strategy.lightning.checkpointing import Checkpoints
from alpa_strategy.lightning.deferred_init import DeferredInit, stays_sharded
from alpa_strategy.lightning.evaluation_loop import EvaluationLoop
from alpa_strategy.lightning.job import Job, device_limit

if TYPE_CHECKING:
    from alpa_strategy.capture.submodules import Call
    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.lightning.sharded_run import ShardedRun


_SHAPES = re.compile("shape|size|dimension", re.IGNORECASE)


class Session:
    """One per strategy. Everything that changes the module's form is collective.

    Args:
        make_job: the job as it is now.
        checkpoints: what they hold is put in place when the module is sharded.
    """

    def __init__(self, make_job: Callable[[], Job], checkpoints: Checkpoints) -> None:
        self._make_job, self._checkpoints = make_job, checkpoints
        # Of a training or of an evaluation; None while the module is whole.
        self.run: ShardedRun | None = None
        # That of the last run.
        self.plan: Plan | None = None
        # Of the host's memory, what this process took beside its tensors when that run began.
        self.process_bytes = 0
        self.deferred_init = DeferredInit()
        self._why_written: CaptureError | None = None
        # Of these, what the user knows.
        self._told: CaptureError | None = None
        self._is_accumulating = self._stays_local = False
        self._shards_for_evaluation = False
        # Of submodules, that a run has recorded.
        self._calls: Sequence[Call] | None = None
        self._loop: EvaluationLoop | None = None

    # Training

    def before_training_batch(
        self, module: Any, optimizers: list[Optimizer], batch: Any, batch_idx: int
    ) -> None:
        """The module in shards, under a plan for its parameters as they are now."""
        if self.run is None:
            self._shard(module, optimizers, batch, batch_idx)
        elif (change := self.run.changed_parameters()) is not None:
            # Parameters were frozen, unfrozen or replaced: another plan, from the whole module.
            if self._is_accumulating:
                raise AlpaError(
                    f"{change} between the batches of one optimizer step",
                    "do it when a step begins (batch_idx % accumulate_grad_batches == 0)",
                )
            self.run.say(f"alpa: {change}: planning once more")
            random_streams, self._calls = self.run.state_dict(), self.run.calls
            self._make_whole()
            self._shard(module, optimizers, batch, batch_idx).load_state_dict(random_streams)

    def _shard(
        self, module: Any, optimizers: Sequence[Optimizer], batch: Any, batch_idx: int
    ) -> "ShardedRun":
        # Planning and the runtime are loaded with the first batch, not with the import of the
        # package.
        from alpa_strategy.capture.python_state import requiring_grad
        from alpa_strategy.lightning.eager_run import (
            EagerRun,
            check_may_run_as_written,
            why_written,
        )
        from alpa_strategy.lightning.rank_consistency import toggled
        from alpa_strategy.lightning.run import Run
        from alpa_strategy.lightning.sharded_run import RunInputs
        from alpa_strategy.lightning.submodule_run import SubmoduleRun
        from alpa_strategy.runtime.host_memory import process_bytes
        from alpa_strategy.runtime.sharded_parameter import are_held

        job, resumed, named = (
            self._make_job(),
            self._checkpoints.resumed,
            list(module.named_parameters()),
        )
        held = dict(compress(named, any_rank(are_held([parameter for _, parameter in named]))))
        submodules = job.submodules and (
            job.submodules[0],
            replace(job.submodules[1], kept_whole=tuple(held)),
        )
        job = replace(
            job, options=replace(job.options, kept_whole=tuple(held)), submodules=submodules
        )
        given = RunInputs(module, tuple(optimizers), job, self.deferred_init.sharding)
        resumes_written = any_rank([bool(resumed.get("as_written"))])[0]
        self._why_written = self._why_written or why_written(
            module, optimizers, job, resumes_written
        )
        # Measuring draws.
        with isolate_rng(include_cuda=job.device.type == "cuda"):
            run: ShardedRun | None = None
            if self._why_written is None:
                try:
                    run = Run(given, batch, batch_idx, resumed.get("plan"))
                except CaptureError as error:
                    self._why_written = error
            if run is None:
                assert self._why_written is not None
                is_news, self._told = self._why_written is not self._told, self._why_written
                with requiring_grad(toggled(module, optimizers), True):
                    if job.submodules is not None:
                        run = SubmoduleRun(given, self._why_written, self._calls)
                    else:
                        check_may_run_as_written(self._why_written, job)
                        run = EagerRun(given, self._why_written, is_news)
        self.run, self.plan = run, run.plan
        if left := [
            name
            for name, parameter in held.items()
            if parameter in set(run.store.sharded_parameters)
        ]:
            rank_zero_warn(
                f"alpa: something else holds the memory of {', '.join(left)} as well (a view made"
                " before, a NumPy "
                "array, a state dict): it does not follow the parameter, of which a rank has a"
                " part, or nothing"
            )
        self._checkpoints.restore(run, optimizers)
        run.adapt_trainer(module.trainer)
        self.process_bytes = process_bytes(module, optimizers, job.device)
        _show_plan(run, job, self.process_bytes)
        return run

    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """What the module's own step returns, its loss differentiable; `eager_step` calls it."""
        assert self.run is not None
        self.run.begin_check(batch)
        try:
            with _caused_by(self._why_written):
                return self.run.training_step(batch, batch_idx, eager_step)
        except CaptureError as error:
            is_final = self.run.plan.is_eager or not self._make_job().may_run_eagerly
            if is_final or (self.deferred_init.was_needed and stays_sharded(self.run)):
                if isinstance(error, FailedCheckError) and error.own is not None:
                    raise error.own from error
                raise
            self._why_written = error
        run = self._go_on_as_written(self.run, batch, batch_idx)
        with _caused_by(self._why_written):
            return run.training_step(batch, batch_idx, eager_step)

    def _go_on_as_written(self, run: "ShardedRun", batch: Any, batch_idx: int) -> "ShardedRun":
        """What runs this step and all that follow after `run`, perhaps between batches of one
        optimizer step.
        """
        run.leave_steps()
        gradients = run.take_gradients() if self._is_accumulating else []
        self._make_whole()
        run = self._shard(run.module, run.optimizers, batch, batch_idx)
        if world_size() > 1:
            rank_zero_warn(
                f"alpa: step {run.module.trainer.global_step + 1} and all that follow run as they"
                " are written, after "
                "steps that were one device's on all ranks' rows. Where a loss is no mean over"
                " rows, BatchNorm's "
                "statistics are taken or random numbers drawn, the training goes on as under DDP,"
                " not as on one "
                'device. capture="never" has it so from the first step on, capture="require" never'
            )
        for parameter, gradient in gradients:
            run.store.give_gradient(parameter, gradient)
        run.sync(not self._stays_local)
        return run

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A backward whose gradients stay local: another batch of the same optimizer step
        follows.
        """
        assert self.run is not None
        self._is_accumulating = self._stays_local = True
        self.run.sync(False)
        try:
            yield
        finally:
            self._stays_local = False
            # Perhaps another one than before.
            self.run.sync(True)

    @contextmanager
    def stepping(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Around an optimizer's step: parameters get new values. Gives the closure for it."""
        assert self.run is not None

        with self.run.stepping():
            # Of a step that runs its own backward the closure computes; the Trainer's calls our
            # `training_step`.
            yield closure if self.run.module.automatic_optimization else self.run.in_step()(closure)
            # perhaps another run: a step that goes on as written is computed in here
            self.run.stepped()
        self._is_accumulating = False

    @contextmanager
    def in_backward(self, loss: Tensor) -> Iterator[None]:
        """Around the backward of a step's loss; gradients are complete after it, unless more are
        added to them.
        """
        assert self.run is not None
        self.run.begin_check(loss=loss)
        with self.run.in_step():
            yield
            self.run.end_of_backward()
        self.run.whole.end_of_backward()
        self.run.finish_backward()
        self.run.check_gradients()

    def end_training(self) -> None:
        """The module and its optimizer are whole again, unless that would not fit."""
        self._is_accumulating = False
        if self.run is None or (self.deferred_init.was_needed and stays_sharded(self.run)):
            return
        self._checkpoints.run_ends()
        self._make_whole()

    def _make_whole(self) -> None:
        assert self.run is not None
        self.run.release()
        self.run.close()
        self.run = None

    # Evaluation

    def start_evaluation(self, module: Any) -> None:
        """A loop over evaluation batches begins."""
        if self.run is not None:
            self.run.take_buffers()
        if self.run is None and world_size() > 1 and module.trainer.state.fn != TrainerFn.FITTING:
            self._shards_for_evaluation = not self.fits_one_device(module)
        if self._shards_for_evaluation and self.run is None:
            self._shard_for_evaluation(module)
        if self.run is not None:
            self.run.start_evaluation()
        self._loop = EvaluationLoop(module.trainer) if world_size() > 1 else None

    def fits_one_device(self, module: Any) -> bool:
        """Whether the whole parameters fit into what a plan may use of a device."""
        return sum(p.numel() * p.element_size() for p in module.parameters()) <= device_limit(
            self._make_job()
        )

    def evaluate(self, args: tuple[Any, ...], eager_step: Callable[[], Any]) -> Any:
        """What `eager_step`, an evaluation step, returns; see `ShardedRun.evaluation_step`."""
        output = eager_step() if self.run is None else self.run.evaluation_step(args, eager_step)
        if self._loop is not None:
            self._loop.after_step(*args[1:])
        return output

    def _shard_for_evaluation(self, module: Any) -> None:
        from alpa_strategy.lightning.eager_run import EagerRun
        from alpa_strategy.lightning.sharded_run import RunInputs

        job = self._make_job()
        job = replace(job, options=replace(job.options, parallel="zero3"))
        given = RunInputs(module, (), job, self.deferred_init.sharding)
        with torch.inference_mode(False), isolate_rng(include_cuda=job.device.type == "cuda"):
            run = EagerRun(given, CaptureError("an evaluation"))
            self._checkpoints.restore_parameters(run.store)
        self.run, self.plan = run, run.plan
        _show_plan(run, job)

    def end_evaluation(self) -> None:
        """The loop has ended; what was sharded for it alone is whole again."""
        # First: ranks that have batches left may need this one's parts.
        if self.run is not None:
            self.run.end_evaluation()
        if self._loop is not None:
            self._loop.end()
            self._loop = None
        if self._shards_for_evaluation and self.run is not None:
            self._shards_for_evaluation = False
            with torch.inference_mode(False):
                if not (self.deferred_init.was_needed and stays_sharded(self.run)):
                    self._make_whole()

    def meet(self) -> None:
        """Code of a step begins a collective of all ranks."""
        if self.run is not None:
            self.run.meet()

    # The forms, seen from outside

    def as_training_holds_it(self) -> AbstractContextManager[Any]:
        """Context: parameters in parts, also within a hook that sees them whole and saves."""
        return nullcontext() if self.run is None else self.run.whole.suspended()

    def explain(self, error: BaseException) -> None:
        """A note to an error about shapes, where parameters lie in parts."""
        is_of_shapes = isinstance(error, RuntimeError | ValueError | IndexError) and _SHAPES.search(
            str(error)
        )
        if (
            is_of_shapes
            and self.run is not None
            and not self.run.whole.is_active
            and self.run.store.sharded_parameters
        ):
            error.add_note(
                "alpa: parameters lie in parts on the ranks. Code that reads or changes them"
                " outside of the module's "
                "steps and hooks (a loader that asks the model, an average of weights) wants `with "
                "trainer.strategy.whole_parameters():` around it, on all ranks together, or"
                ' parallel="data"'
            )

    def close(self, interrupted: bool) -> None:
        """The Trainer is done, or an exception has ended it. No communication."""
        self._shards_for_evaluation, self._why_written, self._calls = False, None, None
        if self.run is not None and self.deferred_init.was_needed and not interrupted:
            # It stays in shards.
            return
        if self.run is not None:
            self.run.close()
        self.run = None


@contextmanager
def _caused_by(why: CaptureError | None) -> Iterator[None]:
    """An error of the user's step that `why` foretold has it as its cause; any other stays as it
    is.
    """
    try:
        yield
    except AlpaError:
        raise
    except Exception as error:
        if error.__cause__ is None and error is not why and _foretells(why, error):
            error.__cause__ = why
        raise


def _foretells(why: BaseException | None, error: Exception) -> bool:
    """Whether the step was not captured, or a captured one ended, because it raises this error."""
    if isinstance(why, FailedCheckError):
        return True
    text = f"{type(error).__name__}: "
    return isinstance(why, CaptureError) and text in why.problem


def _show_plan(run: "ShardedRun", job: Job, process_bytes: int = 0) -> None:
    if job.progress.enabled:
        from alpa_strategy.display.table import plan_table

        if (replica := job.replica) is not None:
            job.progress.say(
                f"alpa: {replica.count} replicas, each with this plan for its own batches, as under"
                " DDP"
            )
        elif world_size() > 1 and not run.plan.is_eager:
            job.progress.say(
                "alpa: losses, gradients and logs of a step are one device's on the batches of all"
                " ranks"
            )
        # Else it shows which can be planned.
        if job.submodules is None or run.plan.stages[0].strategies:
            job.progress.say(plan_table(run.plan, process_bytes=process_bytes))
