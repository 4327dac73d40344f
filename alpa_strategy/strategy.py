"""AlpaStrategy: the life of a run, as the list of hooks that the Trainer calls, in its order.

The Trainer sets up, runs its sanity check and restores checkpoints on the whole module; the first training batch then
brings the plan and the shards (`_prepare`). Everything heavy is a function in `alpa_strategy.lightning`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from alpa_strategy.errors import AlpaError, OptionError
from alpa_strategy.lightning.agree import RankZero, agree_on_seed, broadcast_states
from alpa_strategy.lightning.checkpoints import Checkpoints
from alpa_strategy.lightning.checks import check_callbacks, check_module, check_optimizers
from alpa_strategy.lightning.meta import (
    is_on_meta,
    move_real_tensors,
    raise_still_sharded,
    skip_sanity_check,
    stays_sharded,
)
from alpa_strategy.lightning.parallel_job import ParallelJob
from alpa_strategy.options import BUCKET_BYTES, Limits, PlanOptions, check_names

if TYPE_CHECKING:
    from alpa_strategy.cluster.spec import ClusterSpec
    from alpa_strategy.lightning.evaluation import Evaluation
    from alpa_strategy.lightning.large import LargeModel
    from alpa_strategy.lightning.run import TrainingRun
    from alpa_strategy.plan.plan import Plan


class AlpaStrategy(ParallelJob):
    """Plans how an ordinary LightningModule is sharded, shards it, and trains it: same results as on one device.

    Args:
        plan: a plan file to run; None: a stored plan that fits, or a new one.
        plan_dir: folder of stored plans; None: `<default_root_dir>/.alpa/plans`.
        cluster: costs to plan with: a YAML file, the name of one in configs/clusters, or a ClusterSpec;
            None: measured on the job's devices, once.
        parallel, logical_mesh, placements, memory_limit, memory_fraction, batch_scope, solver_seconds, baselines,
            num_microbatches, schedule, num_stages, remat: see `PlanOptions`.
        backend: library of the collectives: `auto`, `torch` or `deepspeed`.
        bucket_bytes: gradients are reduced in buckets of this many bytes.
        checkpoint: `sharded`: directories that all ranks write; `single`: ordinary files that rank 0 writes (whole
            tensors in every rank's memory); `auto`: sharded on several devices.
        async_checkpoint: training goes on while a sharded checkpoint is written (as with AsyncCheckpointIO).
        plan_timeout_seconds: how long the other ranks wait for rank 0's plan.
        collective_timeout_seconds: timeout of the process group.
        verbose: show phases, the plan, and predicted against measured step time (on rank 0).
        unknown: anything else is an OptionError that names the nearest option.
    """

    def __init__(
        self,
        plan: str | Path | None = None,
        plan_dir: str | Path | None = None,
        cluster: ClusterSpec | str | Path | None = None,
        parallel: str | Sequence[str] = "auto",
        logical_mesh: Sequence[int] | None = None,
        placements: Mapping[str, str] | None = None,
        memory_limit: float | str | None = None,
        memory_fraction: float = 0.9,
        batch_scope: str = "rank",
        solver_seconds: float = 20.0,
        baselines: bool = False,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        num_stages: int | None = None,
        remat: bool | None = None,
        backend: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        checkpoint: str = "auto",
        async_checkpoint: bool = False,
        plan_timeout_seconds: float = 3600.0,
        collective_timeout_seconds: float = 1800.0,
        verbose: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **unknown: Any,
    ) -> None:
        check_names(unknown, _OPTION_NAMES, "option of AlpaStrategy")
        super().__init__(
            collective_timeout_seconds,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = PlanOptions.from_user(
            parallel=parallel,
            logical_mesh=logical_mesh,
            placements=placements,
            memory_limit=memory_limit,
            memory_fraction=memory_fraction,
            batch_scope=batch_scope,
            solver_seconds=solver_seconds,
            baselines=baselines,
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_stages=num_stages,
            remat=remat,
        )
        for name, value in (("plan_timeout_seconds", plan_timeout_seconds), ("bucket_bytes", bucket_bytes)):
            if not value > 0:
                raise OptionError(f"{name}={value!r} cannot be", "give a number above 0")
        self.limits = Limits(plan_timeout_seconds, collective_timeout_seconds, bucket_bytes)
        self.plan: Plan | None = None
        self._plan_file = None if plan is None else Path(plan)
        self._plan_dir = None if plan_dir is None else Path(plan_dir)
        self._cluster = cluster
        self._backend = backend
        self._verbose = verbose
        self._checkpoints = Checkpoints(checkpoint, async_checkpoint)
        self._run: TrainingRun | None = None
        self._is_accumulating = False
        self._evaluation: Evaluation | None = None
        self._large: LargeModel | None = None  # what was built without memory and is not made yet
        self._was_large = False
        self._shards_for_evaluation = False

    @property
    def store(self) -> Any:
        """The running training's ParameterStore, or None outside of one."""
        return None if self._run is None else self._run.store

    # Before the module is set up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._checkpoints.begin(self.lightning_module.trainer, self._run)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around `configure_model` and in `trainer.init_module()`: what is built here is made in shards, later."""
        with super().tensor_init_context(empty_init), self._recording(start=True):
            yield

    @contextmanager
    def _recording(self, start: bool = False) -> Generator[None, None, None]:
        """What happens to deferred tensors is recorded; nothing special where there are none."""
        if start and self.num_nodes * self.num_processes > 1:
            self._large_model()
        with nullcontext() if self._large is None else self._large.recording():
            yield

    def _large_model(self) -> LargeModel:
        if self._large is None:
            from alpa_strategy.lightning.large import LargeModel

            self._large = LargeModel(self.root_device)
        return self._large

    # The module is set up, whole or not made yet

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_callbacks(trainer)
            check_module(trainer, self.lightning_module)
            if self.options.batch_scope == "global":
                trainer._accelerator_connector.use_distributed_sampler = False
        if is_on_meta(self.lightning_module):
            self._large_model()
        with self._recording():
            self.model = self.precision_plugin.convert_module(self.lightning_module)
        self._settle_large(trainer)
        self.model_to_device()
        if self._run is None:
            broadcast_states(self.lightning_module)
        elif fitting:
            raise_still_sharded(self.lightning_module)
        with self._recording():
            if fitting:
                self.setup_optimizers(trainer)
                check_optimizers(self.optimizers)
            self.setup_precision_plugin()
            if fitting:
                _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        move_real_tensors(self.model, self.root_device)

    def _settle_large(self, trainer: pl.Trainer) -> None:
        """Values for what was built without memory; it is made now where no training will bring a plan. Collective."""
        assert self.lightning_module is not None
        if self._large is None:
            return
        self._large.settle(self.lightning_module, self._checkpoints.parameters_to_load)
        if not is_on_meta(self.lightning_module):
            self._large = None
        elif trainer.state.fn != TrainerFn.FITTING or self.world_size == 1:
            self._large.make_whole(self.lightning_module)
            self._large = None
        else:
            skip_sanity_check(trainer)

    # Training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The first batch brings the plan: it is the loader's own, so none is lost and no random state is touched."""
        if self._run is None:
            self._prepare(batch, batch_idx)
        elif (change := self._run.changed_parameters()) is not None:
            self._prepare_again(change, batch, batch_idx)

    def _prepare_again(self, change: str, batch: Any, batch_idx: int) -> None:
        """Another plan, from the whole module: parameters were frozen, unfrozen or replaced. Collective."""
        assert self._run is not None
        if self._is_accumulating:
            raise AlpaError(
                f"{change} between the batches of one optimizer step",
                "do it when a step begins (batch_idx % accumulate_grad_batches == 0)",
            )
        self._run.say(f"alpa: {change}: planning once more")
        random_streams = self._run.state_dict()
        self._end_run()
        self._prepare(batch, batch_idx)
        assert self._run is not None
        self._run.load_state_dict(random_streams)

    def _prepare(self, batch: Any, batch_idx: int) -> None:
        from alpa_strategy.lightning.early_step import Surroundings, with_early_step
        from alpa_strategy.lightning.evaluation import Evaluation
        from alpa_strategy.lightning.planning import freed_memory, prepare
        from alpa_strategy.lightning.precision import use_whole_norms
        from alpa_strategy.optimizer_info import inspect_optimizer
        from alpa_strategy.runtime.host_memory import set_freed, trim

        assert self.lightning_module is not None
        seed = agree_on_seed()
        job, rank_zero = self._job(), RankZero(self.limits.plan_timeout_seconds)
        optimizer = with_early_step(
            inspect_optimizer(self.optimizers),
            self.lightning_module,
            self.optimizers[0],
            Surroundings.of(self.lightning_module.trainer),
        )
        with isolate_rng(include_cuda=self.root_device.type == "cuda"):  # measuring draws random numbers
            prepared = prepare(self.lightning_module, batch, batch_idx, job, optimizer, rank_zero)
            if self.root_device.type == "cpu":
                set_freed(freed_memory(prepared, job))
            if prepared.plan.is_pipelined:
                from alpa_strategy.lightning.pipelined_run import PipelinedRun as Run
            else:
                from alpa_strategy.lightning.run import TrainingRun as Run
            if self._large is not None:
                self._large.put_placeholders(self.lightning_module)
            self._run = Run(
                self.lightning_module,
                self.optimizers[0],
                optimizer,
                prepared,
                batch,
                job,
                rank_zero,
                seed,
                self.limits.bucket_bytes,
                self._backend,
                Tensor.detach if self._large is None else self._large.whole,
            )
        if self._large is not None:
            self._large.finish()
            self._large, self._was_large = None, True
        if self.root_device.type == "cpu":
            trim()  # what the whole module and planning took
        self._evaluation = Evaluation(self._run, job)
        self.plan = self._run.plan
        self._checkpoints.restore(self._run, self.optimizers[0])
        self._run.see_whole_parameters(self.lightning_module.trainer)
        use_whole_norms(self.precision_plugin, self._run)
        self._show_plan()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        batch, batch_idx = args[0], args[1] if len(args) > 1 else 0
        return self._run.training_step(batch, batch_idx)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Micro-batches of an accumulated step: gradients stay local until the last one."""
        assert self._run is not None
        self._is_accumulating = True
        self._run.store.sync(False)
        try:
            yield
        finally:
            self._run.store.sync(True)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As in the base class, with the gradients reduced before `on_after_backward` sees them."""
        assert self.lightning_module is not None
        assert self._run is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        self._run.store.finish_backward()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._run is not None
        self._run.store.after_optimizer_step()
        self._is_accumulating = False
        return result

    # Evaluation: captured steps on the parameters as they lie (alpa_strategy.lightning.evaluation)

    @override
    def on_validation_start(self) -> None:
        self._start_evaluation("validation")

    @override
    def on_test_start(self) -> None:
        self._start_evaluation("test")

    @override
    def on_predict_start(self) -> None:
        self._start_evaluation("predict")

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    def _start_evaluation(self, kind: str) -> None:
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if self._evaluation is None and self.world_size > 1 and not fitting:
            from alpa_strategy.lightning.standalone import fits_one_device

            self._shards_for_evaluation = not fits_one_device(self.lightning_module, self._job())
        if self._evaluation is not None:
            self._evaluation.start(kind)

    def _evaluate(self, name: str, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a training's first batch, or after it, steps run as they are written: the module is whole then, if it
        fits."""
        if self._evaluation is None and self._shards_for_evaluation:
            self._shard_for_evaluation(name, args)
        return eager(*args, **kwargs) if self._evaluation is None else self._evaluation.step(name, args, eager)

    def _shard_for_evaluation(self, name: str, args: tuple[Any, ...]) -> None:
        from alpa_strategy.lightning.evaluation import Evaluation
        from alpa_strategy.lightning.standalone import evaluation_run

        seed, job, rank_zero = agree_on_seed(), self._job(), RankZero(self.limits.plan_timeout_seconds)
        with torch.inference_mode(False), isolate_rng(include_cuda=self.root_device.type == "cuda"):
            self._run = evaluation_run(
                self.lightning_module, name, args, job, rank_zero, seed, self.limits.bucket_bytes, self._backend
            )
        self._evaluation = Evaluation(self._run, job)
        self.plan = self._run.plan
        self._show_plan()
        self._evaluation.start(name.removesuffix("_step"))

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
        if self._shards_for_evaluation and self._run is not None:
            self._shards_for_evaluation = False
            with torch.inference_mode(False):
                self._end_run()

    @override
    def on_train_end(self) -> None:
        """The module leaves the training whole, and so does the optimizer, unless that would not fit."""
        self._is_accumulating = False
        if self._run is not None and self._was_large and stays_sharded(self._run):
            return
        if self._run is not None:
            self._checkpoints.run_ends()
            self._end_run()

    def _end_run(self) -> None:
        """The module has its whole parameters again. Collective."""
        assert self._run is not None
        self._run.release()
        self._run.close()
        self._run = self._evaluation = None

    # Checkpoints

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._checkpoints.process_dataloader(dataloader)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._large is not None:
            return self._large.whole_values(super().lightning_module_state_dict())
        with self._as_training_holds_it():
            return self._checkpoints.module_state(self)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._as_training_holds_it():
            return self._checkpoints.optimizer_state(self, optimizer)

    def _as_training_holds_it(self) -> Any:
        """Context: parameters in parts, also within a hook that sees them whole and saves."""
        return nullcontext() if self._run is None else self._run.whole.suspended()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._checkpoints.save(checkpoint, filepath, storage_options, self.checkpoint_io):
            self.interrupted = True

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, self.checkpoint_io)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, weights_only, self.checkpoint_io)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if is_on_meta(self.lightning_module):
            self._large_model().before_loading(self.lightning_module, checkpoint["state_dict"])
        self._checkpoints.load_model(self.lightning_module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._checkpoints.load_optimizer(optimizer, stored)

    def whole_parameters(self) -> Any:
        """Context in which the module's parameters are whole, for user code; changes are kept. Collective on entry."""
        return nullcontext() if self._run is None else self._run.whole_parameters()

    @property
    def is_whole(self) -> bool:
        """Whether the module has its whole parameters now."""
        return self._run is None or self._run.whole.is_active

    # Values between ranks

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the ranks' distinct data: with `batch_scope="global"` every rank holds the same value already."""
        if not isinstance(tensor, Tensor) or (self.options.batch_scope == "global" and group is None):
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.interrupted = True
        self._checkpoints.close(interrupted=True)
        self.tell_others(exception)

    @override
    def teardown(self) -> None:
        """Called after exceptions too: no collectives here."""
        self._shards_for_evaluation = False
        self.stop_watching()
        stays = self._run is not None and self._was_large and not self.interrupted
        if self._run is not None and not stays:
            self._run.close()
            self._run = None
        if not stays:
            self._evaluation = None
        if not self.interrupted:
            self._checkpoints.close(interrupted=False)
        with self._recording():
            super().teardown()

    # Details

    def _job(self) -> Any:
        from alpa_strategy.lightning.planning import Job

        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        folder = Path(trainer.default_root_dir) / ".alpa"
        shows = self._verbose and self.global_rank == 0
        if shows:
            from alpa_strategy.display import Progress

            progress = Progress(enabled=True)
            progress_phase: Any = progress
            say: Any = progress.console.print
        else:
            progress_phase, say = _silent, lambda text: None
        return Job(
            num_nodes=self.num_nodes,
            devices_per_node=self.num_processes,
            device=self.root_device,
            options=replace(self.options, accumulate_grad_batches=trainer.accumulate_grad_batches),
            folder=folder,
            plan_folder=self._plan_dir or folder / "plans",
            plan_file=self._plan_file,
            cluster=self._cluster,
            context=self.precision_plugin.train_step_context,
            progress=progress_phase,
            say=say,
        )

    def _show_plan(self) -> None:
        assert self._run is not None
        if self._verbose and self.global_rank == 0:
            from alpa_strategy.display import plan_table

            self._run.say(plan_table(self._run.plan))


@contextmanager
def _silent(name: str, detail: str = "") -> Generator[None, None, None]:
    """A progress phase that shows nothing."""
    yield


_OPTION_NAMES = [
    name for name in inspect.signature(AlpaStrategy.__init__).parameters if name not in ("self", "unknown")
]
