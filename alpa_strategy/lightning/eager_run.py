"""EagerRun: a training with eager (uncaptured) steps, each rank on its own batch: DDP's contract.

Random numbers, logs and metrics are local to each rank, as under DDP with the same seeds. Gradients
are averaged while the backward runs, and rank 0's buffers are broadcast before a step. Parameters
are placed as the plan specifies.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from alpa_strategy.capture.python_state import patched
from alpa_strategy.capture.trace import names_by_tensor
from alpa_strategy.comm.collectives import all_reduce_max, cpu_group, world_size
from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.errors import CaptureError, SetupError
from alpa_strategy.hook_points import (
    ACTIVATION_CHECKPOINT,
    EAGER_SHARDING,
    Recomputation,
    ShardedGradients,
)
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.job import Job, compiled_as_written, device_limit
from alpa_strategy.lightning.planning import check_optimizer
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.options import SELECTIVE
from alpa_strategy.planner.eager_plan import captured_only_option, eager_option, plan_eager
from alpa_strategy.planner.optimizer_info import (
    inspect_optimizer,
    joint_info,
    wants_sparse_gradients,
)
from alpa_strategy.runtime.gradients import Replicas
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.process_memory import enforce_memory_plan, tuned
from alpa_strategy.runtime.synced_norms import synced


def reason_for_eager_steps(
    module: Any, optimizers: Sequence[Optimizer], job: Job, resumes_written: bool
) -> CaptureError | None:
    """Return the reason for which no capture is tried, or None if it is.

    Args:
        module: the module of the training.
        optimizers: its optimizers.
        job: the job.
        resumes_written: whether the resumed training had eager steps.

    Raises:
        OptionError: the options contradict each other.
    """
    option = eager_option(job.options, job.limits)
    if option is not None:
        return CaptureError(option)
    if job.limits.capture == "submodules":
        return CaptureError('capture="submodules"')
    if not module.automatic_optimization:
        return CaptureError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization = False)"
        )

    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return CaptureError(
                f"{name} has a hook (register_hook) for the gradient of each rank's own backward"
            )
    if _is_pruned(module):
        return CaptureError("ModelPruning puts masks into the module while it trains")
    # The training would fail at its end.
    if not job.may_run_eagerly and _recomputes_batch_norms(module):
        return CaptureError(
            "StochasticWeightAveraging ends with an epoch for BatchNorm's statistics, not captured"
        )

    if len(optimizers) != 1:
        return CaptureError(f"configure_optimizers gave {len(optimizers)} optimizers")
    if wants_sparse_gradients(optimizers[0]):
        return CaptureError(
            f"{type(optimizers[0]).__name__} requires sparse gradients, captured steps make dense"
            " ones"
        )
    if resumes_written and job.may_run_eagerly:
        return CaptureError(
            "the checkpoint is of a training with eager steps"
            ' (capture="require" tries to capture once more)'
        )
    return None


def check_may_run_eagerly(why: CaptureError, job: Job) -> None:
    """Check that no option requires a captured step.

    Args:
        why: the reason for which the step is not captured.
        job: the job.

    Raises:
        CaptureError: `why`, with the option that requires a captured step.
    """
    is_eager_option = job.limits.capture == "never" or job.options.batch_scope == "replica"
    against = captured_only_option(job.options)
    if against is None and job.plan_file is not None:
        against = "a plan file is given"
    if job.replica is not None:
        against = f"replicas={job.replica.count}"

    if against is None and (is_eager_option or job.may_run_eagerly):
        return

    if against is None and job.limits.capture == "require":
        against = 'capture="require"'
    if against is None:
        against = f"batch_scope={job.options.batch_scope!r}"
    alternative = (
        "to run the step eagerly instead (each rank on its own batch, as under DDP), use"
        f' capture="auto" and drop the option that requires a captured step: {against}'
    )
    fix = f"{why.fix}; {alternative}" if why.fix else alternative
    raise type(why)(why.problem, fix) from why


def _is_pruned(module: Any) -> bool:
    return any(isinstance(callback, ModelPruning) for callback in module.trainer.callbacks)


def _recomputes_batch_norms(module: Any) -> bool:
    """Whether StochasticWeightAveraging adds an epoch that recomputes BatchNorm's statistics."""
    callbacks = module.trainer.callbacks
    if not any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return False

    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def parameter_inputs(module: nn.Module, trains: bool) -> list[ParameterInput]:
    """Return every parameter once, with all its names; without gradients if not `trains`."""
    inputs: list[ParameterInput] = []
    for tensor, names in names_by_tensor(module):
        if isinstance(tensor, nn.Parameter):
            requires_grad = tensor.requires_grad and trains
            meta = TensorMeta(tuple(tensor.shape), tensor.dtype, requires_grad)
            inputs.append(ParameterInput(len(inputs), names, meta))
    return inputs


def _store(
    module: nn.Module, parameters: Sequence[ParameterInput], plan: Plan, job: Job
) -> ParameterStore:
    """Return the store of the parameters, with process groups of its own. Collective."""
    group = cpu_group("agree")
    # Reductions of gradients, gathers of parameters and the step's own collectives overlap in an
    # order that differs between ranks. So each has a process group of its own.
    size = (world_size(),)
    mesh = build_mesh(size, backend=job.backend, own_group="parameters")
    gradient_mesh = build_mesh(size, backend=job.backend, own_group="gradients")
    for new_mesh in (mesh, gradient_mesh):
        # NCCL may connect at the first call and block the host. A rank in an on-demand gather would
        # wait for it.
        new_mesh.all_devices.all_reduce(torch.zeros((), device=job.device))
    replicas = Replicas(gradient_mesh, lambda numbers: all_reduce_max(numbers, group))
    return ParameterStore(module, parameters, plan.stages, [mesh], mesh, replicas=replicas)


class EagerRun(ShardedRun):
    """A run with eager steps; see the file's docstring. Making one is collective.

    Args:
        inputs: the module, its optimizers and the job.
        why: the reason for which the steps are not captured.
        say: whether `why` is logged.

    Raises:
        AlpaError: parameters are sharded, and an optimizer or a callback cannot work on shards.
    """

    def __init__(self, inputs: RunInputs, why: CaptureError, say: bool = True) -> None:
        module = inputs.module
        optimizers = inputs.optimizers
        job = inputs.job
        infos = [inspect_optimizer([optimizer]) for optimizer in optimizers]
        parameters = parameter_inputs(module, trains=bool(optimizers))
        limit = device_limit(job)
        devices = (job.num_nodes, job.devices_per_node)
        precision = str(module.trainer.precision_plugin.precision)
        plan = plan_eager(parameters, job.options, infos, devices, limit, why, precision)
        for info in infos:
            check_optimizer(info, plan.stages)
        if optimizers:
            _check_pruning(module, plan)
            if say:
                _log_reason(why)
        if _shards_parameters(plan):
            EAGER_SHARDING.required("an eager step with sharded parameters")

        info = joint_info(infos)
        with tuned(job.device), inputs.sharding(module) as values:
            store = _store(module, parameters, plan, job)
            super().__init__(inputs, info, plan, store, limit, values)

        self._adapted.callback(
            enforce_memory_plan(self, plan, limit, module, optimizers, job.device)
        )
        if optimizers and world_size() > 1:
            self._sync_batch_norms()

        # As under DDP, buffers that a step creates are not shared.
        self._shares_buffers = next(module.buffers(), None) is not None
        # They may differ before the first step.
        self.buffers_differ = self._shares_buffers

        # Of steps with manual optimization.
        self._gradients: ShardedGradients | None = None
        if store.sharded_parameters and optimizers:
            self._shard_on_use()
            if job.compile is not None and say:
                rank_zero_info(
                    "alpa: nothing is compiled: sharded parameters are gathered and freed while a"
                    " module runs"
                )
        elif job.compile is not None:
            compiled = compiled_as_written(module, job.compile, job.limits.bucket_bytes)
            self._adapted.enter_context(compiled)
        self._checkpoint_activations(limit)

    def _sync_batch_norms(self) -> None:
        """Synchronize statistics of the user's SyncBatchNorm modules over the ranks until the run
        ends; of all batch norms with `sync_batchnorm=True`.
        """
        backend = self._job.backend
        # Trainer(sync_batchnorm=True).
        every = self.module.trainer.strategy._layer_sync is not None
        norms = synced(
            self.module,
            every,
            lambda: build_mesh((world_size(),), backend, own_group="norms").axes[0],
        )
        self._adapted.enter_context(patched(norms))

    def _shard_on_use(self) -> None:
        """Gather each module's sharded parameters while it runs.

        Raises SetupError if the extra that does it is switched off.
        """
        store = self.store
        extra = EAGER_SHARDING.required("an eager step")
        self._gradients = extra.sharded_gradients(self.module, store, self._owner_steps, self.meet)
        parameter_plans = self.plan.stages[0].parameter_plans.values()
        keeps = not any(parameter_plan.uses_shards for parameter_plan in parameter_plans)
        has_room = self.no_headroom_for_evaluation() is None
        group = cpu_group("rounds")
        self.on_use = extra.gather_on_use(self.module, store, group, keeps, has_room)
        if self._writes is not None:
            self.on_use.watch_changes(self._writes.look)
        self.full_parameters.on_use.append(self.on_use)

    def _checkpoint_activations(self, limit: float) -> None:
        """Checkpoint the activations of the modules that the user named, or of those that have to.

        Does nothing without optimizers, nor if `remat` is not set (or "selective") and steps are
        compiled or the extra is switched off.

        Args:
            limit: bytes of a device that may be used.

        Raises:
            SetupError: the user asked for it (`remat`), and the extra that does it is switched off.
        """
        module, job = self.module, self._job
        # "selective" is for captured steps.
        remat = None if job.options.remat == (SELECTIVE,) else job.options.remat
        is_chosen_here = remat is None and job.compile is None

        self._recomputation: Recomputation | None = None
        extra = ACTIVATION_CHECKPOINT.extra
        if extra is None and remat:
            raise ACTIVATION_CHECKPOINT.missing(f"remat={remat!r} of a step that runs eagerly")
        if extra is None or not self.optimizers or not (remat or is_chosen_here):
            return

        headroom = limit - self.plan.predicted.peak_bytes if is_chosen_here else None
        self._recomputation = extra(module, remat, headroom)
        self._adapted.enter_context(self._recomputation.installed())

    @override
    def begin_check(self, batch: Any = None, loss: Tensor | None = None) -> None:
        """Do as `ShardedRun.begin_check`, log the bytes that the forward saved for the backward,
        and warn of a first loss that is nan if parameters are gathered on use. Both are done only
        with a `loss`.
        """
        super().begin_check(batch, loss)
        if loss is None:
            return

        if self._recomputation is not None:
            line = self._recomputation.after_forward(loss)
            if line is not None:
                rank_zero_info(f"alpa: {line}")

        is_first = self.on_use is not None and self._num_updates == 0
        if is_first and loss.isnan().any():
            rank_zero_warn(
                "alpa: the first loss is nan. A sharded parameter has no values if code accesses it"
                " without its module (through a list, say). If DDP's loss is a number, make the"
                " parameter an attribute of the module that uses it, or keep parameters full"
                ' (parallel="data")'
            )

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        """Run the module's own step, parameters gathered while they are used, and return its
        output.

        Args:
            eager_step: calls the module's `training_step`; the batch is bound to it already.
        """
        self.take_buffers()
        if self.on_use is not None:
            self.on_use.begin_step()
        # As under DDP, gradients of a backward within the step count with manual optimization only:
        # with automatic optimization they may be cleared before the Trainer's own backward.
        listens = not self.module.automatic_optimization or self.on_use is not None
        with (
            self.noting_writes(),
            self.in_step(),
            self.store.listening(listens),
            self._sharded_gradients(),
        ):
            output = eager_step()
            if self.on_use is not None and not self.module.automatic_optimization:
                self.on_use.end_step()
        self._parameters.leave_frozen()
        # As under DDP, buffers are not broadcast after a step whose gradients stay local, nor with
        # manual optimization.
        self.buffers_differ = (
            self._shares_buffers and self.syncs and self.module.automatic_optimization
        )
        return output

    def _sharded_gradients(self) -> AbstractContextManager[None]:
        """Return the context of a step: with manual optimization it works on sharded gradients."""
        if self._gradients is None or self.module.automatic_optimization:
            return nullcontext()
        return self._gradients.in_step()

    @override
    def finish_backward(self) -> None:
        """Wait for the gradients' reductions, and free gathered parameters. Collective."""
        with nullcontext() if self.on_use is None else self.on_use.suspended():
            self.store.finish_backward(self.step_completed)
        if self.on_use is not None and not self.on_use.is_active:
            self.on_use.drop()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the run's state for checkpoints, marked as that of an eager run."""
        return {"as_written": True, **super().state_dict()}


def _shards_parameters(plan: Plan) -> bool:
    """Whether an eager plan shards any parameter."""
    parameter_plans = plan.stages[0].parameter_plans.values()
    return not all(parameter_plan.is_unsharded for parameter_plan in parameter_plans)


def _check_pruning(module: Any, plan: Plan) -> None:
    """Check that ModelPruning works with the plan.

    Raises:
        SetupError: it is used and parameters are sharded.
    """
    if not _is_pruned(module) or not _shards_parameters(plan):
        return

    raise SetupError(
        "ModelPruning puts masks and new parameters into the module while it trains, which is"
        " impossible with sharded parameters",
        'use parallel="data" and memory for it, or prune the trained module (torch.nn.utils.prune)',
    )


def _log_reason(why: CaptureError) -> None:
    """Log on rank 0 the reason `why` steps run eagerly, and the advantages of captured ones."""
    problem = " ".join(why.problem.split())
    rank_zero_info(
        "alpa: steps run eagerly, each rank on its own batch, gradients averaged (DDP's contract):"
        f" {problem}. The ops of a captured step could be sharded (tensor, sequence and pipeline"
        " parallelism), and its activations recomputed one by one"
    )
