"""EagerRun: a training whose steps run as they are written, each rank on its own batch: DDP's
contract.

Random numbers, logs and metrics are each rank's own, as under DDP with the same seeds; gradients
are averaged while the backward runs, buffers are rank 0's when a step begins. Parameters lie as the
plan says.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from alpa_strategy.capture.python_state import patched
from alpa_strategy.capture.trace import names_by_tensor
from alpa_strategy.comm.collectives import all_reduce_max, cpu_group, world_size
from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.errors import CaptureError, SetupError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.user_code import is_user_file
from alpa_strategy.lightning.full_parameters import gradient_norm
from alpa_strategy.lightning.job import Job, compiled_as_written, device_limit
from alpa_strategy.lightning.planning import check_optimizer
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.options import SELECTIVE, OptimizerInfo
from alpa_strategy.planner.eager_plan import against_written, asks_for_written, plan_eager
from alpa_strategy.planner.optimizer_info import inspect_optimizer, wants_sparse_gradients
from alpa_strategy.runtime.activation_checkpoint import (
    ActivationBudget,
    ModuleCheckpoint,
    modules_to_checkpoint,
)
from alpa_strategy.runtime.eager_fully_shard import EagerFullyShard, set_data
from alpa_strategy.runtime.gradients import Replicas
from alpa_strategy.runtime.host_memory import enforce_memory_plan, tuned
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.synced_norms import synced


def why_written(
    module: Any, optimizers: Sequence[Optimizer], job: Job, resumes_written: bool
) -> CaptureError | None:
    """Why capture is not even tried, None where it is.

    Args:
        resumes_written: the training that is resumed ran as it was written.
    """
    if (asks := asks_for_written(job.options, job.limits)) is not None:
        return CaptureError(asks)
    if job.limits.capture == "submodules":
        return CaptureError('capture="submodules"')
    if not module.automatic_optimization:
        return CaptureError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization = False)"
        )
    if hooked := [
        n
        for n, p in module.named_parameters()
        if p._backward_hooks or p._post_accumulate_grad_hooks
    ]:
        return CaptureError(
            f"{hooked[0]} has a hook (register_hook) for the gradient that a rank's own backward"
            " makes"
        )
    if _is_pruned(module):
        return CaptureError("ModelPruning puts masks into the module while it trains")
    averages = any(
        isinstance(callback, StochasticWeightAveraging) for callback in module.trainer.callbacks
    )
    has_norms = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
    # At its end: better to know it now.
    if not job.may_run_eagerly and averages and has_norms:
        return CaptureError(
            "StochasticWeightAveraging ends with an epoch for BatchNorm's statistics, not captured"
        )
    if len(optimizers) != 1:
        return CaptureError(f"configure_optimizers gave {len(optimizers)} optimizers")
    if wants_sparse_gradients(optimizers[0]):
        return CaptureError(
            f"{type(optimizers[0]).__name__} wants sparse gradients, captured steps make dense ones"
        )
    if resumes_written and job.may_run_eagerly:
        return CaptureError(
            'the checkpoint is of such a training (capture="require" tries to capture once more)'
        )
    return None


def check_may_run_as_written(why: CaptureError, job: Job) -> None:
    """Raises `why` where a captured step is demanded, with what demands it."""
    asked = job.limits.capture == "never" or job.options.batch_scope == "replica"
    against = against_written(job.options) or (
        "a plan file is given" if job.plan_file is not None else None
    )
    if job.replica is not None:
        against = f"replicas={job.replica.count}"
    if against is None and (asked or job.may_run_eagerly):
        return
    if against is None:
        against = (
            'capture="require"'
            if job.limits.capture == "require"
            else f"batch_scope={job.options.batch_scope!r}"
        )
    way_out = (
        "to run the step as it is written instead (each rank on its own batch, as under DDP), use"
        ' capture="auto" and '
        f"drop what only a captured step can meet: {against}"
    )
    raise type(why)(why.problem, f"{why.fix}; {way_out}" if why.fix else way_out) from why


def _is_pruned(module: Any) -> bool:
    return any(isinstance(callback, ModelPruning) for callback in module.trainer.callbacks)


def parameter_inputs(module: nn.Module, trains: bool) -> list[ParameterInput]:
    """Every parameter once, with all its names."""
    named = [(p, names) for p, names in names_by_tensor(module) if isinstance(p, nn.Parameter)]
    return [
        ParameterInput(i, names, TensorMeta(tuple(p.shape), p.dtype, p.requires_grad and trains))
        for i, (p, names) in enumerate(named)
    ]


def _store(
    module: nn.Module, parameters: Sequence[ParameterInput], plan: Plan, job: Job
) -> ParameterStore:
    group = cpu_group("agree")
    # Gradients are on their way while parameters are gathered, beside the step's collectives: in
    # any order on a rank.
    uses = "parameters", "gradients"
    mesh, of_gradients = (
        build_mesh((world_size(),), backend=job.backend, own_group=use) for use in uses
    )
    for each in (mesh, of_gradients):
        # NCCL may connect at the first call, and hold up the host: a rank in a round of gatherings
        # would wait for it.
        each.whole.all_reduce(torch.zeros((), device=job.device))
    replicas = Replicas(of_gradients, lambda numbers: all_reduce_max(numbers, group))
    return ParameterStore(module, parameters, plan.stages, [mesh], mesh, replicas=replicas)


class EagerRun(ShardedRun):
    """See the file's docstring. Collective.

    Args:
        why: why the steps are not captured.
        say: whether the user has yet to be told `why`.

    Raises:
        AlpaError: shards are asked for, or needed, and an optimizer or a callback cannot work on
            them.
    """

    def __init__(self, given: RunInputs, why: CaptureError, say: bool = True) -> None:
        module, optimizers, job = given.module, given.optimizers, given.job
        infos = [inspect_optimizer([optimizer]) for optimizer in optimizers]
        parameters, limit = parameter_inputs(module, trains=bool(optimizers)), device_limit(job)
        plan = plan_eager(
            parameters, job.options, infos, (job.num_nodes, job.devices_per_node), limit, why
        )
        for info in infos:
            check_optimizer(info, plan.stages)
        parameter_plans = plan.stages[0].parameter_plans.values()
        if optimizers and _is_pruned(module) and not all(each.is_whole for each in parameter_plans):
            raise SetupError(
                "ModelPruning puts masks and new parameters into the module while it trains, which"
                " shards cannot "
                "follow",
                'use parallel="data" and memory for it, or prune the trained module'
                " (torch.nn.utils.prune)",
            )
        if optimizers and say:
            rank_zero_info(
                "alpa: steps run as they are written, each rank on its own batch, gradients"
                " averaged (DDP's contract): "
                f"{' '.join(why.problem.split())}. Captured, the step would be one device's on all"
                " ranks' rows, and "
                "its ops could be divided (tensor, sequence and pipeline parallelism) and made"
                " again one by one"
            )
        largest = max(
            infos, key=lambda each: each.state_bytes, default=OptimizerInfo(state_bytes=0.0)
        )
        with tuned(job.device), given.sharding(module) as values:
            store = _store(module, parameters, plan, job)
            super().__init__(given, largest, plan, store, limit, values)
        if job.device.type == "cpu":
            self._adapted.callback(enforce_memory_plan(self, plan, limit, module, optimizers))
        if optimizers and world_size() > 1:
            # Trainer(sync_batchnorm=True).
            every = module.trainer.strategy._layer_sync is not None
            norms = synced(
                module,
                every,
                lambda: build_mesh((world_size(),), job.backend, own_group="norms").axes[0],
            )
            self._adapted.enter_context(patched(norms))
        # As DDP: not where only a step makes some.
        self._shares_buffers = next(module.buffers(), None) is not None
        # Perhaps.
        self.buffers_differ = self._shares_buffers
        if store.sharded_parameters and optimizers:
            self._reads = _ShardedGradientReads(store)
            keeps = not any(each.uses_shards for each in parameter_plans)
            has_room = self.no_room_for_evaluation() is None
            self.on_use = EagerFullyShard(module, store, cpu_group("rounds"), keeps, has_room)
            self.whole.on_use.append(self.on_use)
            if job.compile is not None and say:
                rank_zero_info(
                    "alpa: nothing is compiled: parameters in parts come and go while a module runs"
                )
        elif job.compile is not None:
            self._adapted.enter_context(
                compiled_as_written(module, job.compile, job.limits.bucket_bytes)
            )
        # Which is for captured steps.
        remat = None if job.options.remat == (SELECTIVE,) else job.options.remat
        chooses = remat is None and job.compile is None
        modules = modules_to_checkpoint(module, remat) if optimizers and (remat or chooses) else {}
        self._room = (
            ActivationBudget(module, modules, limit - plan.predicted.peak_bytes)
            if chooses
            else None
        )
        self._adapted.enter_context(ModuleCheckpoint(module, self._room).installed(modules))

    @override
    def begin_check(self, batch: Any = None, loss: Tensor | None = None) -> None:
        super().begin_check(batch, loss)
        if (
            loss is not None
            and self._room is not None
            and (line := self._room.ends_in(loss)) is not None
        ):
            rank_zero_info(f"alpa: {line}")
        if (
            loss is not None
            and self.on_use is not None
            and self._num_updates == 0
            and loss.isnan().any()
        ):
            rank_zero_warn(
                "alpa: the first loss is nan. A parameter in shards has no values where code"
                " reaches it past the "
                "module that owns it (through a list, say): if DDP's is a number, make it an"
                " attribute of the module "
                'that uses it, or keep parameters whole (parallel="data")'
            )

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Callable[[], Any]) -> Any:
        self.take_buffers()
        if self.on_use is not None:
            self.on_use.on_demand.begin()
        # As DDP has it: what a backward within the step makes may be cleared before the Trainer's
        # own.
        listens = not self.module.automatic_optimization or self.on_use is not None
        with self.in_step(), self.store.listening(listens), self._parts_of_gradients():
            output = eager_step()
            if self.on_use is not None and not self.module.automatic_optimization:
                self.on_use.on_demand.finish()
        self._parameters.leave_frozen()
        # As DDP has it: not after a step whose gradients stay local, nor where the step runs its
        # own backward passes.
        self.buffers_differ = (
            self._shares_buffers and self.syncs and self.module.automatic_optimization
        )
        return output

    @contextmanager
    def _parts_of_gradients(self) -> Iterator[None]:
        """Around a step that works on gradients itself, of which ranks have parts: torch's norms
        are of the whole.
        """
        if self.on_use is None or self.module.automatic_optimization:
            yield
            return
        clipping = torch.nn.utils.clip_grad
        of_torch = clipping._get_total_norm

        def total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **named: Any) -> Tensor:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = set(map(id, tensors))
            own = [p for p in self.module.parameters() if id(p.grad) in given]
            if self.store.sharded_parameters.keys().isdisjoint(own):
                return of_torch(tensors, norm_type, *rest, **named)
            self.meet()
            return gradient_norm(self.store, own, float(norm_type))

        names = [(clipping, "_get_total_norm"), (torch.nn.utils, "get_total_norm")]
        with patched((owner, name, total_norm) for owner, name in names), self._reads:
            yield

    @override
    def finish_backward(self) -> None:
        with nullcontext() if self.on_use is None else self.on_use.suspended():
            self.store.finish_backward(self.step_completed)
        if self.on_use is not None and not self.on_use.is_active:
            self.on_use.drop()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"as_written": True, **super().state_dict()}


class _ShardedGradientReads(TorchFunctionMode):
    """Gradients in parts: says once that the user's code, no optimizer, reads them, and sets parts
    or whole ones.
    """

    def __init__(self, store: ParameterStore) -> None:
        super().__init__()
        self._store, self._has_said = store, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_news = (
            func == _READS_GRAD and not self._has_said and args[0] in self._store.sharded_parameters
        )
        if is_news and _is_of_step(sys._getframe(1)):
            self._has_said = True
            rank_zero_warn(
                f"alpa: the step reads the gradient of {self._store.name_of(args[0])}, of which"
                " each rank has a part: "
                "changes element by element are right, and norms by torch.nn.utils; for sums and"
                " products of your own "
                'keep gradients whole (parallel="data")'
            )
        if func == _SETS_GRAD and args[1] is not None and args[0] in self._store.sharded_parameters:
            kept, part = args[0].data, self._store.shard_like(*args)
            # Whose shape its gradient has.
            set_data([(args[0], part)])
            func(args[0], part)
            set_data([(args[0], kept)])
            return None
        return func(*args, **(kwargs or {}))


def _is_of_step(frame: FrameType) -> bool:
    # The first is quick, and false nearly always: torch's optimizers ask for every parameter.
    return is_user_file(frame.f_code.co_filename) and not any(
        isinstance(caller.f_locals.get("self"), Optimizer) for caller, _ in walk_stack(frame)
    )


_READS_GRAD, _SETS_GRAD = cast("Any", Tensor).grad.__get__, cast("Any", Tensor).grad.__set__
