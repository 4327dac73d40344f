"""AlpaStrategy: a run's hooks, in the order in which the Trainer calls them.

The Trainer sets up, runs its sanity check and restores checkpoints on the full module. The first
training batch is then planned, and the module sharded, all by `alpa_strategy.lightning`.
"""

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import broadcast_tensors, world_size
from alpa_strategy.comm.mesh import AxisComm, Replica, divide, select_backend
from alpa_strategy.comm.reshard import stacked
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import AlpaError, check_names
from alpa_strategy.lightning import checks
from alpa_strategy.lightning.checkpoint_paths import local_folder, path_or_url, plan_folder
from alpa_strategy.lightning.checkpointing import Checkpoints
from alpa_strategy.lightning.full_parameters import check_backward
from alpa_strategy.lightning.job import Job, compiled_by_user, options_of_run, submodule_options
from alpa_strategy.lightning.loader_order import LoaderOrder
from alpa_strategy.lightning.log_means import reduce_logged
from alpa_strategy.lightning.master_weights import with_masters
from alpa_strategy.lightning.module_init import is_on_meta, move_real_tensors
from alpa_strategy.lightning.parallel_job import LIGHTNING_OPTIONS, ParallelJob
from alpa_strategy.lightning.pretrained import SavesPretrained
from alpa_strategy.lightning.session import Session
from alpa_strategy.lightning.step_effects import GLOBAL, REPLICAS
from alpa_strategy.lightning.step_reports import StepReports
from alpa_strategy.option_values import compile_options
from alpa_strategy.options import (
    BUCKET_BYTES,
    CHECK_REPLICAS_EVERY,
    Limits,
    PlanOptions,
)
from alpa_strategy.planner.eager_plan import eager_option
from alpa_strategy.schedules import Orders, Schedule

if TYPE_CHECKING:
    from alpa_strategy.cost.model import OpCosts
    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.lightning.sharded_run import ShardedRun
    from alpa_strategy.runtime.parameters import ParameterStore


class AlpaStrategy(SavesPretrained, ParallelJob):
    """Plans, shards and trains an ordinary LightningModule with the results of one device.

    Args:
        plan: a plan file to run; None: a stored plan that fits, or a new one.
        plan_dir: folder of stored plans, or its URL; None: `<default_root_dir>/.alpa/plans`.
        cluster: costs to plan with: a YAML file, the name of one in configs/clusters, or a
            ClusterSpec; None: measured on the job's devices, once.
        parallel, logical_mesh, placements, device_map, solver, memory_limit, memory_fraction,
            batch_scope, solver_seconds, baselines, num_microbatches, schedule, num_stages, stages,
            remat, offload, costs, fp32_reduction: see `PlanOptions`.
        capture: `auto`: a step that cannot be captured runs eagerly, each rank on its own batch,
            gradients averaged (DDP's contract); `require`: it is an error; `never`: every step
            runs eagerly; `submodules`: every step runs eagerly, and forwards of submodules that
            can be captured are planned (`auto` does so if an option requires a plan).
        compile: whether stages run through `torch.compile`. A dict: with these arguments of it
            (`backend`, `mode`, `options`). None: if the module, or a submodule, was given to
            `torch.compile`.
        master_weights: with `precision="bf16-true"`: parameters, gradients and optimizer state
            stay fp32, and steps compute with bf16 copies of the parameters.
        backend: library of the collectives: `auto`, `torch` or `deepspeed`.
        bucket_bytes: bytes of gradients that one collective reduces.
        checkpoint: `sharded`: directories that all ranks write; `single`: ordinary files that rank
            0 writes (full tensors in every rank's memory); `auto`: directories while the plan has
            sharded parameters, ordinary files otherwise.
        async_checkpoint: train on while a checkpoint is written (as with AsyncCheckpointIO).
        check_replicas_every: steps between checks that replicated parameters and buffers are equal
            on all ranks, in addition to checks at the first steps and at checkpoints; 0: never.
        replicas: with `batch_scope="replica"`: number of replicas that the devices are divided
            into, neighbours together. Each runs captured steps, planned for its devices, on its own
            batch, which all of its ranks load. Gradients are averaged over the replicas. None:
            every device is a replica, and steps are eager.
        check_gradients: check every step's gradients before and after they are summed over the
            ranks. A warning reports the first that is not finite: one rank's, a sum, or all ranks'
            as on one device. Replicated gradients must be equal. Costs a pass over the gradients
            and a device synchronization per step.
        plan_timeout_seconds: seconds that the other ranks wait for rank 0's plan.
        collective_timeout_seconds: timeout of the process group.
        verbose: print phases, the plan, and predicted against measured step time (on rank 0).
        start_method: `popen` runs the script again per device, `fork` copies the process.
        log_plan: give the Trainer's loggers the plan as hyperparameters, and step seconds, samples
            and tokens per second, MFU and memory as metrics, all named `alpa/...`.
        profile_steps: (first, last + 1) training steps to trace, into the Trainer's `log_dir`.

    Raises:
        OptionError: an option is unknown or has a value that it cannot have.
    """

    def __init__(
        self,
        plan: str | Path | None = None,
        plan_dir: str | Path | None = None,
        cluster: ClusterSpec | str | Path | None = None,
        parallel: str | Sequence[str] = "auto",
        logical_mesh: Sequence[int] | None = None,
        placements: Mapping[str, str] | None = None,
        device_map: Mapping[str, str | int | Sequence[int]] | None = None,
        solver: str = "ilp",
        memory_limit: float | str | None = None,
        memory_fraction: float = 0.9,
        batch_scope: str = "auto",
        capture: str = "auto",
        solver_seconds: float = 20.0,
        baselines: bool = False,
        num_microbatches: int | None = None,
        schedule: str | Schedule | Callable[[int, int, int], Orders] | None = None,
        num_stages: int | None = None,
        stages: Sequence[str] | None = None,
        remat: bool | str | Sequence[str] | None = None,
        offload: bool | str | Sequence[str] | None = None,
        costs: "OpCosts | None" = None,
        compile: bool | Mapping[str, Any] | None = None,
        master_weights: bool = False,
        fp32_reduction: bool = False,
        backend: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        checkpoint: str = "auto",
        async_checkpoint: bool = False,
        check_replicas_every: int = CHECK_REPLICAS_EVERY,
        check_gradients: bool = False,
        replicas: int | None = None,
        plan_timeout_seconds: float = 3600.0,
        collective_timeout_seconds: float = 1800.0,
        verbose: bool = True,
        log_plan: bool = True,
        profile_steps: tuple[int, int] | None = None,
        start_method: str = "popen",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **unknown: Any,
    ) -> None:
        # Every option by its name. `options.py` alone validates values.
        values = dict(locals())
        check_names(unknown, OPTION_NAMES, "unknown option of AlpaStrategy")
        self._read_options(values)
        of_lightning = {name: values[name] for name in LIGHTNING_OPTIONS}
        super().__init__(collective_timeout_seconds, start_method, **of_lightning)
        self._checkpoints = Checkpoints(checkpoint, async_checkpoint)
        self._session = Session(self._job, self._checkpoints)

    def _read_options(self, values: Mapping[str, Any]) -> None:
        """Validate and store the options, `values` by name; see `__init__` for what is raised."""
        plan_names = [option.name for option in fields(PlanOptions) if option.name in values]
        limit_names = [option.name for option in fields(Limits)]
        self.options = PlanOptions.from_user(**{name: values[name] for name in plan_names})
        self.limits = Limits.from_user(**{name: values[name] for name in limit_names})

        # Both raise for options that contradict each other, before any device is known.
        mesh_devices = math.prod(values["logical_mesh"] or (1,))
        num_devices = mesh_devices * (values["replicas"] or 1)
        eager_option(self.options, self.limits)
        submodule_options(self.options, self.limits, num_devices)

        # This rank's device, once its process has its place.
        self._device: torch.device | None = None

        # Result of `submodule_options`, once the job's devices are known.
        self._submodules: tuple[int, PlanOptions] | None = None
        self._reports = StepReports(self)
        self._loader_order = LoaderOrder()
        # Dynamo's context, if the Trainer is given a module that `torch.compile` made.
        self._compiled_in: Any = None

        plan, plan_dir, cluster = (values[name] for name in ("plan", "plan_dir", "cluster"))
        self._plan_file = None if plan is None else path_or_url(plan)
        self._plan_dir = None if plan_dir is None else path_or_url(plan_dir)
        self._cluster = ClusterSpec.load(cluster) if isinstance(cluster, str | Path) else cluster

        self._compile = values["compile"]
        self._verbose = values["verbose"]
        self._backend = values["backend"]
        # Raises for an unknown name.
        select_backend(self._backend)

    @property
    def plan(self) -> "Plan | None":
        """The plan of the last training, or of an evaluation without one."""
        return self._session.plan

    @property
    def process_bytes(self) -> int:
        """Host bytes that this process uses besides `plan.predicted.peak_bytes`; 0 on GPUs."""
        return self._session.process_bytes

    @property
    def run(self) -> "ShardedRun | None":
        """The run of the sharded module's steps; None while its parameters are full."""
        return self._session.run

    @property
    def store(self) -> "ParameterStore | None":
        """The parameters of `run`; None while there is none."""
        return None if self.run is None else self.run.store

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the Trainer's module without `torch.compile` around it.

        The Trainer refuses compiled modules: the step is compiled. (A property would be slower.)
        """
        is_module = name == "_lightning_module" and value is not None
        if is_module and value._compiler_ctx is not None:
            self._compiled_in = value._compiler_ctx["dynamo_ctx"]
            to_uncompiled(value)
        super().__setattr__(name, value)

    @ParallelJob.precision_plugin.setter  # type: ignore[attr-defined]
    def precision_plugin(self, plugin: Precision | None) -> None:
        """The Trainer's precision, or `MasterWeights` in its stead if `master_weights=True`."""
        if plugin is not None and self.limits.master_weights:
            plugin = with_masters(plugin)
        self._precision_plugin = plugin

    @property
    @override
    def root_device(self) -> torch.device:
        """This rank's device."""
        # The base class reads an environment variable each time, and every batch asks.
        return self._device or super().root_device

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _share(self) -> Replica | None:
        """The replica whose samples this rank loads now; None: it loads samples of its own."""
        module = self.lightning_module
        replicas = self.limits.replicas
        if replicas is None or module is None or not module.trainer.training:
            return None
        return divide(replicas)

    @property
    def _across(self) -> AxisComm:
        """This rank and the ranks with the same index in the other replicas."""
        num_submodule_replicas = 1 if self._submodules is None else self._submodules[0]
        return divide(self.limits.replicas or num_submodule_replicas).across

    def _job(self) -> Job:
        """Return the description of the job for the Trainer's current run."""
        trainer = self._module.trainer
        folder = local_folder(trainer) / ".alpa"

        compiled = compile_options(self._compile)
        if self._compile is None:
            compiled = compiled_by_user(self._module, self._compiled_in)

        replica = None
        if self.limits.replicas is not None and trainer.state.fn == TrainerFn.FITTING:
            replica = divide(self.limits.replicas)

        train_step_context = self.precision_plugin.train_step_context
        return Job(
            num_nodes=self.num_nodes,
            devices_per_node=self.num_processes,
            replica=replica,
            submodules=self._submodules,
            device=self.root_device,
            options=options_of_run(self.options, trainer, replica, compiled is not None),
            compile=compiled,
            limits=self.limits,
            backend=self._backend,
            folder=folder,
            plan_folder=plan_folder(self._plan_dir, folder),
            plan_url=self._plan_dir if isinstance(self._plan_dir, str) else None,
            plan_file=self._plan_file,
            cluster=self._cluster,
            context=train_step_context,
            log_context=getattr(self.precision_plugin, "dtype_context", train_step_context),
            plans=self._checkpoints.plans,
            progress=Progress(enabled=self._verbose and self.global_rank == 0),
            pages=self._reports.pages,
        )

    # Before the module is set up

    @override
    def setup_environment(self) -> None:
        """Start the job and begin checkpoints; OptionError if an option does not fit devices."""
        self._device = None
        super().setup_environment()
        self._device = self.root_device
        self._loader_order.use(self._module.trainer, self.world_size)
        num_devices = self.num_nodes * self.num_processes
        replicas = self.limits.replicas
        batch_scope = self.options.batch_scope
        checks.check_replicas(replicas, batch_scope, self.num_nodes, self.num_processes)
        self._submodules = submodule_options(self.options, self.limits, num_devices)
        self._checkpoints.begin(self._module.trainer, self.run, replicas)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context of configure_model and `init_module()`: modules built in it get shards later."""
        if self.num_nodes * self.num_processes > 1:
            self._session.deferred_init.begin(self.root_device)
        with super().tensor_init_context(empty_init), self._session.deferred_init.recording():
            yield

    # The module is set up, full or deferred

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Check, set up precision, module, optimizers. Collective. AlpaError if a check fails."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.take_signals(trainer)

        deferred_init = self._session.deferred_init
        fitting = trainer.state.fn == TrainerFn.FITTING
        checks.check_precision(self.precision_plugin)
        self._checkpoints.check_paths()
        if fitting or self.world_size > 1:
            checks.check_shapes(self._module)
        if fitting:
            checks.check_module(self._module)
            if self.world_size > 1:
                check_backward(self._module)
            if self.options.batch_scope == "global":
                trainer._accelerator_connector.use_distributed_sampler = False

        self._reports = StepReports(self, trainer if fitting else None)

        if is_on_meta(self._module):
            deferred_init.begin(self.root_device)
        with deferred_init.recording():
            self.model = self.precision_plugin.convert_module(self._module)
        to_load = self._checkpoints.parameters_to_load
        deferred_init.settle(trainer, self._module, to_load, self._session.fits_one_device)
        move_real_tensors(self.model, self.root_device)

        if self.run is None:
            broadcast_tensors((*self._module.parameters(), *self._module.buffers()))
        elif fitting:
            raise AlpaError(
                f"{type(self._module).__name__} is still sharded by the last training: the full"
                " module does not fit",
                "save a checkpoint, and train on with a new Trainer and `ckpt_path`",
            )

        with deferred_init.recording():
            if fitting:
                self.setup_optimizers(trainer)
                checks.check_optimizers(self.optimizers)
            self.setup_precision_plugin()
            if fitting:
                _optimizers_to_device(self.optimizers, self.root_device)

    # Training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Plan on the loader's first batch: none is lost, and no random state is changed."""
        self._session.before_training_batch(self._module, self.optimizers, batch, batch_idx)
        self._reports.begin_batch(self.run)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch_idx = args[1] if len(args) > 1 else 0
        eager_step = partial(super().training_step, *args, **kwargs)
        return self._session.training_step(args[0], batch_idx, eager_step)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Context of all batches but the last of an accumulated step: gradients stay local."""
        return self._session.accumulating()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward, return the loss; gradients are reduced before `on_after_backward`."""
        plugin, module = self.precision_plugin, self._module
        loss = plugin.pre_backward(closure_loss, module)
        self._session.backward(
            loss, partial(plugin.backward, loss, module, optimizer, *args, **kwargs)
        )
        return plugin.post_backward(loss, module)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self._session.optimizer_step(closure, step)

    # Evaluation: eager steps on gathered parameters

    @override
    def on_validation_start(self) -> None:
        if self._watch is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            self._watch.before_evaluation()
        self._session.start_evaluation(self._module)

    on_test_start = on_predict_start = on_validation_start

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.evaluate(args, partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.evaluate(args, partial(super().test_step, *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.evaluate(args, partial(super().predict_step, *args, **kwargs))

    @override
    def on_validation_end(self) -> None:
        self._session.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    @override
    def on_train_end(self) -> None:
        """Unshard module and optimizer if they fit; RuntimeMismatchError if others still train."""
        if self._watch is not None:
            self._watch.after_last_batch()
        self._reports.end(self.run)
        self._session.end_training()

    # Checkpoints

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The Trainer would seed the workers by rank; ranks of one replica need equal samples.
        if self._share is not None:
            _auto_add_worker_init_fn(dataloader, self._share.index)
        return self._checkpoints.process_dataloader(dataloader)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict that a checkpoint gets: of shards, or full. Collective."""
        if self._session.deferred_init.is_pending:
            return self._session.deferred_init.whole_values(super().lightning_module_state_dict())
        with self._session.as_training_holds_it():
            return self._checkpoints.module_state(self)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._session.as_training_holds_it():
            return self._checkpoints.optimizer_state(self, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if not self._checkpoints.save(checkpoint, filepath, storage_options, self.checkpoint_io):
            self.interrupted = True

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, self.checkpoint_io)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at a path or URL; tensors are read when they are used."""
        checkpoint = self._checkpoints.load(checkpoint_path, weights_only, self.checkpoint_io)
        if self._checkpoints.resumes_an_epoch_of_other_ranks:
            self._loader_order.restore(self._module.trainer)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read a checkpoint's `state_dict` into the module or its shards. Collective."""
        if is_on_meta(self._module):
            self._session.deferred_init.begin(self.root_device)
            self._session.deferred_init.before_loading(self._module, checkpoint["state_dict"])
        self._checkpoints.load_model(self._module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(self.optimizers, checkpoint["optimizer_states"])

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Context with full parameters for user code; changes persist. Collective on entry."""
        return nullcontext() if self.run is None else self.run.full_parameters.entered()

    @property
    def is_whole(self) -> bool:
        """Whether the module has its full parameters now."""
        return self.run is None or self.run.full_parameters.is_active

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler: samples of this rank's replica, or of the rank itself."""
        replica = self._share
        if replica is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": replica.count, "rank": replica.index}

    # Values between ranks

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over `group` (None: all ranks with different samples; none under
        `batch_scope="global"`). Any other value is returned unchanged."""
        if group is None and self.run is not None:
            group = self.run.peers

        has_global_batch = self.options.batch_scope == "global" and group is None
        is_alone = group == REPLICAS and self._across.size == 1
        if group == GLOBAL or has_global_batch or is_alone or not isinstance(tensor, Tensor):
            return tensor

        if group is None:
            self._meet()
        if group == REPLICAS:
            group = self._across.group

        def reduce_over(values: Tensor, how: Any) -> Any:
            return super(AlpaStrategy, self).reduce(values, group, how)

        trainer = self._module.trainer
        return reduce_logged(trainer, tensor, world_size(group), reduce_op, reduce_over)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return [ranks, *shape] of the ranks of `group`, or of the replicas. Collective."""
        if group is None:
            self._meet()
        # The same result as of the module's own `all_gather`.
        if self.run is not None and self.run.peers and group in (None, dist.group.WORLD):
            return stacked(tensor if sync_grads else tensor.detach(), self._across)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._meet()
        if not self.interrupted:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._meet()
        return super().broadcast(obj, src)

    @override
    def _meet(self) -> None:
        super()._meet()
        self._checkpoints.serve_hooks()
        self._session.meet()

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add a note to an error of memory or shapes, end checkpoints, tell the other ranks."""
        self.interrupted = True
        self._session.explain(exception)
        self._checkpoints.close(interrupted=True)
        self.tell_others(exception)

    @override
    def teardown(self) -> None:
        """End the run, after exceptions as well: without collectives."""
        self.stop_watching()
        self._reports.close(self.run)
        self._session.close(self.interrupted)
        # In reverse order: the session's wrappers are around the same hooks.
        if not self.interrupted:
            self._checkpoints.close(interrupted=False)
        with self._session.deferred_init.recording():
            super().teardown()


_PARAMETERS = inspect.signature(AlpaStrategy.__init__).parameters
OPTION_NAMES = [name for name in _PARAMETERS if name not in ("self", "unknown")]
