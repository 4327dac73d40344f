"""Session: the states of a module under one strategy (`ModuleState`), and their transitions.

The module is full or deferred until the first training batch, which is planned. Then it is sharded
until the training ends, and longer if the full one does not fit. A module that does not fit on one
device is sharded for an evaluation without a training as well.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.comm.collectives import any_rank, rank_in, world_size
from alpa_strategy.errors import AlpaError, CaptureError, FailedCheckError
from alpa_strategy.hook_points import PLANNED_SUBMODULES
from alpa_strategy.lightning.checkpointing import Checkpoints
from alpa_strategy.lightning.evaluation_loop import EvaluationLoop
from alpa_strategy.lightning.job import Job, device_limit
from alpa_strategy.lightning.module_init import new_module_init, stays_sharded
from alpa_strategy.lightning.out_of_memory import is_out_of_memory, memory_note, memory_of
from alpa_strategy.loading import rare_collections, without_collections

if TYPE_CHECKING:
    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun


_SHAPES = re.compile("shape|size|dimension", re.IGNORECASE)


class ModuleState(Enum):
    """The state of a strategy's module. In the last three, `Session.run` exists."""

    # Full parameters on every rank.
    FULL = "full"

    # Built without memory; no plan yet.
    DEFERRED = "deferred"

    # Placed as a plan specifies, for captured steps.
    SHARDED = "sharded"

    # Placed as a plan specifies, for eager steps.
    EAGER = "eager"

    # Sharded for one evaluation without a training, as the full module does not fit on a device.
    EVALUATION = "evaluation"


class Session:
    """The module's state under one strategy. All transitions are collective, but `close`.

    Args:
        make_job: returns the job of the Trainer's current run.
        checkpoints: restore a checkpoint's values when the module is sharded.
    """

    def __init__(self, make_job: Callable[[], Job], checkpoints: Checkpoints) -> None:
        self._make_job = make_job
        self._checkpoints = checkpoints

        # State but for DEFERRED, which `deferred_init` decides.
        self._state = ModuleState.FULL

        # The run of a training or of an evaluation; None while the module is full or deferred.
        self.run: ShardedRun | None = None

        # Plan of the last run.
        self.plan: Plan | None = None

        # Bytes of host memory that this process used in addition to its tensors, when the run
        # started.
        self.process_bytes = 0

        self.deferred_init = new_module_init()

        # Reason for eager steps; None: steps are captured.
        self._reason: CaptureError | None = None

        # The reason that was logged last.
        self._logged_reason: CaptureError | None = None

        # Whether the current optimizer step has had a batch that is not its last.
        self._is_accumulating = False

        # Whether gradients of the current batch stay local.
        self._stays_local = False

        # What a run has recorded for the next one.
        self._recorded: Any = None

        # Parameters whose copies differ by what steps write to them (`ReplicaChecksum`).
        self._differing: frozenset[str] = frozenset()
        self._loop: EvaluationLoop | None = None

    @property
    def state(self) -> ModuleState:
        """The module's state."""
        if self._state is ModuleState.FULL and self.deferred_init.is_pending:
            return ModuleState.DEFERRED
        return self._state

    # Training

    def before_training_batch(
        self, module: Any, optimizers: list[Optimizer], batch: Any, batch_idx: int
    ) -> None:
        """Shard the module at the first batch, and once more after changes of its parameters.

        Raises:
            AlpaError: parameters changed between the batches of one optimizer step; or as of
                `_shard`.
        """
        if self.run is None:
            self._shard(module, optimizers, batch, batch_idx)
            return

        change = self.run.changed_parameters()
        if change is None:
            return

        # Parameters were frozen, unfrozen or replaced: the full module is planned again.
        if self._is_accumulating:
            raise AlpaError(
                f"{change} between the batches of one optimizer step",
                "do it when a step begins (batch_idx % accumulate_grad_batches == 0)",
            )
        self.run.say(f"alpa: {change}: planning once more")
        self.run.copies.compare("before planning once more")
        self._differing = frozenset(self.run.copies.differing)
        random_streams = self.run.state_dict()
        self._recorded = self.run.recorded
        self._unshard()
        self._shard(module, optimizers, batch, batch_idx).load_state_dict(random_streams)

    def _shard(
        self, module: Any, optimizers: Sequence[Optimizer], batch: Any, batch_idx: int
    ) -> "ShardedRun":
        """Plan on `batch`, shard the full module, restore its state and print the plan. Collective.

        Returns:
            The run, which is the session's from now on.

        Raises:
            AlpaError: the step cannot be captured or planned, or the checkpoint cannot be read.
        """
        # Planning and the runtime are imported with the first batch, not with the package.
        with without_collections():
            from alpa_strategy.lightning.eager_run import reason_for_eager_steps
            from alpa_strategy.lightning.sharded_run import RunInputs
            from alpa_strategy.runtime.process_memory import process_bytes
            from alpa_strategy.runtime.sharded_parameter import have_other_users

        named = list(module.named_parameters())
        is_shared = any_rank(have_other_users([parameter for _, parameter in named]))
        shared = dict(compress(named, is_shared))
        job = _keeping_full(self._make_job(), tuple(shared))
        inputs = RunInputs(
            module, tuple(optimizers), job, self.deferred_init.sharding, self._differing
        )

        resumes_eager = any_rank([bool(self._checkpoints.resumed.get("as_written"))])[0]
        if self._reason is None:
            self._reason = reason_for_eager_steps(module, optimizers, job, resumes_eager)

        # Measurements draw random numbers.
        with rare_collections(), isolate_rng(include_cuda=job.device.type == "cuda"):
            run = self._captured_run(inputs, batch, batch_idx)
            if run is None:
                run = self._eager_run(inputs)
        self._enter(run, ModuleState.EAGER if run.plan.is_eager else ModuleState.SHARDED)

        self.deferred_init.read_shards(run.store)
        _warn_of_shared_memory(shared, run)
        self._checkpoints.restore(run, optimizers)
        run.adapt_trainer(module.trainer)
        self.process_bytes = process_bytes(module, optimizers, job.device)
        _show_plan(run, job, self.process_bytes)
        return run

    def _captured_run(self, inputs: "RunInputs", batch: Any, batch_idx: int) -> "ShardedRun | None":
        """Return a run with captured steps; None if they cannot be captured, with the reason in
        `self._reason`. Collective.
        """
        with without_collections():
            from alpa_strategy.lightning.run import Run

        if self._reason is not None:
            return None

        try:
            return Run(inputs, batch, batch_idx, self._checkpoints.resumed.get("plan"))
        except CaptureError as error:
            self._reason = error
            return None

    def _eager_run(self, inputs: "RunInputs") -> "ShardedRun":
        """Return a run with eager steps; an extra may plan their submodules.

        Raises:
            CaptureError: an option requires a captured step.
        """
        with without_collections():
            from alpa_strategy.capture.python_state import requiring_grad
            from alpa_strategy.lightning.eager_run import EagerRun, check_may_run_eagerly
            from alpa_strategy.lightning.rank_consistency import toggled

        reason = self._reason
        assert reason is not None
        is_new = reason is not self._logged_reason
        self._logged_reason = reason
        with requiring_grad(toggled(inputs.module, inputs.optimizers), True):
            if inputs.job.submodules is not None:
                extra = PLANNED_SUBMODULES.required("the run")
                return extra.new_run(inputs, reason, self._recorded)

            check_may_run_eagerly(reason, inputs.job)
            return EagerRun(inputs, reason, is_new)

    def _enter(self, run: "ShardedRun", state: ModuleState) -> None:
        """Set the run that shards the module now, and its plan."""
        self._state = state
        self.run = run
        self.plan = run.plan

    def _stays_sharded(self) -> bool:
        """Whether the module cannot be unsharded, as the full one does not fit; logs why."""
        return self.deferred_init.was_needed and stays_sharded(self.run)

    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """Return the result of the module's own step, its loss differentiable.

        Args:
            batch: this rank's batch.
            batch_idx: its index in the epoch.
            eager_step: calls the module's own step.

        Raises:
            CaptureError: the step cannot be captured and may not run eagerly.
            Exception: the one of the user's check that failed in the captured step.
        """
        assert self.run is not None
        self.run.begin_check(batch)
        try:
            return self._run_step(self.run, batch, batch_idx, eager_step)
        except CaptureError as error:
            is_final = self.run.plan.is_eager or not self._make_job().may_run_eagerly
            if is_final or self._stays_sharded():
                if isinstance(error, FailedCheckError) and error.local_error is not None:
                    raise error.local_error from error
                raise
            self._reason = error

        run = self._continue_eagerly(self.run, batch, batch_idx)
        return self._run_step(run, batch, batch_idx, eager_step)

    def _run_step(
        self, run: "ShardedRun", batch: Any, batch_idx: int, eager_step: Callable[[], Any]
    ) -> Any:
        """Return the run's result of a step. An error of the user's step that was the reason for
        eager steps gets that reason as its cause.
        """
        try:
            return run.training_step(batch, batch_idx, eager_step)
        except AlpaError:
            raise
        except Exception as error:
            why = self._reason
            if error.__cause__ is None and error is not why and _is_reason(why, error):
                error.__cause__ = why
            raise

    def _continue_eagerly(self, run: "ShardedRun", batch: Any, batch_idx: int) -> "ShardedRun":
        """Replace `run` by one with eager steps, and return that. Gradients that an optimizer step
        has accumulated so far go over to it. Raises: as `_shard`.
        """
        gradients = run.take_gradients() if self._is_accumulating else []
        self._unshard()
        run = self._shard(run.module, run.optimizers, batch, batch_idx)
        for parameter, gradient in gradients:
            run.store.store_gradient(parameter, gradient)
        run.sync(not self._stays_local)
        return run

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of a batch that is not the last of its optimizer step: gradients stay local."""
        assert self.run is not None
        self._is_accumulating = True
        self._stays_local = True
        self.run.sync(False)
        try:
            yield
        finally:
            self._stays_local = False
            # The run may have been replaced in the context.
            self.run.sync(True)

    def optimizer_step(self, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Return the result of an optimizer's step.

        Args:
            closure: of the step, as the Trainer or the user gives it.
            step: makes the step, with the keyword argument `closure`.
        """
        assert self.run is not None

        with self.run.stepping():
            # With manual optimization the user's closure computes. The Trainer's calls
            # `training_step`, which prepares the module itself.
            if not self.run.module.automatic_optimization:
                closure = self.run.in_step()(closure)
            result = step(closure=closure)
            # The closure may have replaced the run by one with eager steps.
            self.run.stepped()
        self._is_accumulating = False
        return result

    def backward(self, loss: Tensor, run_backward: Callable[[], Any]) -> None:
        """Run the backward of a step's loss; then gradients are reduced, unless more are
        accumulated. RuntimeMismatchError if ranks' copies of them differ.
        """
        assert self.run is not None
        self.run.begin_check(loss=loss)
        with self.run.in_step():
            run_backward()
            self.run.end_of_backward()
        self.run.full_parameters.end_of_backward()
        self.run.finish_backward()
        self.run.check_gradients()

    def end_training(self) -> None:
        """Unshard the module and its optimizer, if they fit."""
        self._is_accumulating = False
        if self.run is None or self._stays_sharded():
            return
        self._checkpoints.run_ends()
        self._unshard()

    def _unshard(self) -> None:
        """End the run and leave the module with full parameters. Collective."""
        assert self.run is not None
        self.run.release()
        self.run.close()
        self.run = None
        self._state = ModuleState.FULL

    # Evaluation

    def start_evaluation(self, module: Any) -> None:
        """Prepare a loop over evaluation batches. Collective.

        A training's buffers become those of rank 0. Without a training, a module that does not fit
        one device is sharded.

        Raises:
            AlpaError: parameters cannot be sharded or read, or as of `EvaluationLoop`.
        """
        is_training = module.trainer.state.fn == TrainerFn.FITTING
        if self.run is not None:
            self.run.take_buffers()
        elif world_size() > 1 and not is_training and not self.fits_one_device(module):
            self._shard_for_evaluation(module)
        if self.run is not None:
            self.run.start_evaluation()
        self._loop = EvaluationLoop(module.trainer) if world_size() > 1 else None

    def fits_one_device(self, module: Any) -> bool:
        """Whether the full parameters fit into the memory that a plan may use. Collective."""
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        return num_bytes <= device_limit(self._make_job())

    def evaluate(self, args: tuple[Any, ...], eager_step: Callable[[], Any]) -> Any:
        """Return the result of `eager_step`, an evaluation step on `args`.

        Args:
            args: as of `ShardedRun.evaluation_step`.
            eager_step: calls the module's own step.

        Raises:
            RuntimeMismatchError: as of `EvaluationLoop`.
        """
        output = eager_step() if self.run is None else self.run.evaluation_step(args, eager_step)
        if self._loop is not None:
            self._loop.after_step(*args[1:])
        return output

    def _shard_for_evaluation(self, module: Any) -> None:
        """Shard the parameters of a module that is only evaluated (ZeRO-3), so that none is stored
        full, and print the plan. AlpaError: parameters cannot be sharded or read.
        """
        from alpa_strategy.lightning.eager_run import EagerRun
        from alpa_strategy.lightning.sharded_run import RunInputs

        job = self._make_job()
        job = replace(job, options=replace(job.options, parallel="zero3"))
        inputs = RunInputs(module, (), job, self.deferred_init.sharding)
        with torch.inference_mode(False), isolate_rng(include_cuda=job.device.type == "cuda"):
            run = EagerRun(inputs, CaptureError("an evaluation"))
            self.deferred_init.read_shards(run.store)
            self._checkpoints.restore_parameters(run.store)
        self._enter(run, ModuleState.EVALUATION)
        _show_plan(run, job)

    def end_evaluation(self) -> None:
        """End a loop over evaluation batches; a module that was sharded for it is unsharded, if it
        fits.
        """
        # Before anything else, as ranks with remaining batches may need this rank's shards.
        if self.run is not None:
            self.run.end_evaluation()
        if self._loop is not None:
            self._loop.end()
            self._loop = None
        if self.run is not None and self._state is ModuleState.EVALUATION:
            # A module that cannot be unsharded stays as it is for further evaluations.
            self._state = ModuleState.EAGER
            with torch.inference_mode(False):
                if not self._stays_sharded():
                    self._unshard()

    def meet(self) -> None:
        """Synchronize with ranks that still need parameters, before a collective of all ranks."""
        if self.run is not None:
            self.run.meet()

    # The module's state, used by the strategy

    def as_training_holds_it(self) -> AbstractContextManager[Any]:
        """Return a context with sharded parameters, within hooks that see full ones as well."""
        return nullcontext() if self.run is None else self.run.full_parameters.suspended()

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of memory, and to one about shapes if parameters are sharded."""
        if is_out_of_memory(error):
            memory = memory_of(self._make_job().device)
            error.add_note(memory_note(self.plan, rank_in(None), memory))
            return
        if not isinstance(error, RuntimeError | ValueError | IndexError):
            return
        if (
            self.run is None
            or self.run.full_parameters.is_active
            or not self.run.store.sharded_parameters
        ):
            return

        if _SHAPES.search(str(error)):
            error.add_note(
                "alpa: parameters are sharded over the ranks. Code that reads or changes them"
                " outside of the module's steps and hooks (a loader that uses the model, an average"
                " of weights) needs `with trainer.strategy.whole_parameters():` around it, on all"
                ' ranks together, or parallel="data"'
            )

    def close(self, interrupted: bool) -> None:
        """End the session's run with the Trainer's, or after an exception. No communication.

        A module that does not fit one device stays sharded, unless there was an exception.
        """
        self._reason = None
        self._recorded = None
        self._differing = frozenset()
        if self.run is None:
            return

        # A module that was not unsharded does not fit: it stays sharded.
        if self.deferred_init.was_needed and not interrupted:
            if self._state is ModuleState.EVALUATION:
                self._state = ModuleState.EAGER
            return

        self.run.close()
        self.run = None
        self._state = ModuleState.FULL


def _keeping_full(job: Job, names: tuple[str, ...]) -> Job:
    """Return the job with the parameters `names` full, in their current memory."""
    submodules = job.submodules
    if submodules is not None:
        num_replicas, options = submodules
        submodules = (num_replicas, replace(options, kept_whole=names))
    options = replace(job.options, kept_whole=names)
    return replace(job, options=options, submodules=submodules)


def _warn_of_shared_memory(shared: Mapping[str, Tensor], run: "ShardedRun") -> None:
    """Warn, on rank 0, of sharded parameters whose full memory is used by other objects.

    Args:
        shared: parameters, by name, whose memory was shared before they were sharded.
    """
    sharded = set(run.store.sharded_parameters)
    names = [name for name, parameter in shared.items() if parameter in sharded]
    if names:
        rank_zero_warn(
            f"alpa: something else holds the memory of {', '.join(names)} as well (a view made"
            " before, a NumPy array, a state dict): it does not follow the parameter, of which a"
            " rank has a shard, or nothing"
        )


def _is_reason(why: BaseException | None, error: Exception) -> bool:
    """Whether a capture, or a captured step, failed because the step raises this error."""
    if isinstance(why, FailedCheckError):
        return True
    text = f"{type(error).__name__}: "
    return isinstance(why, CaptureError) and text in why.problem


def _show_plan(run: "ShardedRun", job: Job, process_bytes: int = 0) -> None:
    """Print the plan of a run, if this rank prints; not of a run that only records calls of
    submodules.

    Args:
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
    """
    if not job.progress.enabled:
        return

    from alpa_strategy.display.summary import plan_summary

    if job.replica is not None:
        job.progress.say(
            f"alpa: {job.replica.count} replicas, each with this plan for its own batches, as under"
            " DDP"
        )
    elif world_size() > 1 and job.options.batch_scope == "global":
        job.progress.say(
            "alpa: losses, gradients and logs of a step are one device's on the batch that all"
            " ranks load"
        )
    # A run that only records the calls of submodules has nothing to show.
    if job.submodules is None or run.plan.stages[0].strategies:
        location = _location_of(run.plan, job)
        job.progress.say(plan_summary(run.plan, run.memory_limit, process_bytes, location))


def _location_of(plan: "Plan", job: Job) -> str:
    """Return the path or URL of a plan's file; a placeholder if it is not in the job's folder."""
    from alpa_strategy.planner.plan_store import PlanStore

    store = PlanStore(job.plan_folder, job.plan_url)
    is_stored = store.path(plan.fingerprint).exists()
    return store.location(plan.fingerprint) if is_stored else "PLAN.json"
