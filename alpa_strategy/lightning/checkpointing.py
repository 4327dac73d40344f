"""Checkpoints: what goes into one, in which form it is written, and when what was read is put where
it belongs.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.checkpoint import sharded_state_dict
from alpa_strategy.checkpoint.downloading import release_downloads
from alpa_strategy.checkpoint.on_demand import LazyEntryGather
from alpa_strategy.checkpoint.opening import (
    is_checkpoint,
    open_checkpoint,
    reading,
)
from alpa_strategy.checkpoint.owner_state import owner_state_to_write
from alpa_strategy.checkpoint.saving import CheckpointWriter
from alpa_strategy.checkpoint.tensors import LocalShards, map_tensors
from alpa_strategy.comm.collectives import (
    RankZero,
    all_gather_object,
    cpu_group,
    on_all_ranks,
    rank_in,
    world_size,
)
from alpa_strategy.errors import CheckpointError, OptionError
from alpa_strategy.ir.held_optimizers import states_in
from alpa_strategy.lightning.checkpoint_paths import (
    check_checkpoint_paths,
    local_folder,
    warn_of_uploads,
)
from alpa_strategy.lightning.checks import names_in, own_hooks
from alpa_strategy.lightning.dataloader_state import (
    Pass,
    ResumableLoader,
    Resume,
    put_states,
    rank_state,
    take_up,
    warn_of_stop,
)
from alpa_strategy.lightning.run_plans import RunPlans, resumed_plans
from alpa_strategy.runtime.parameters import ParameterStore, unsharded_store
from alpa_strategy.urls import is_of_process, is_url

FORMS = ("auto", "sharded", "single")
MEET_SECONDS = 10.0
CLOSING_SECONDS = 10.0
_EARLY = ("on_train_start", "on_train_epoch_start", "on_train_batch_start")


class Checkpoints:
    """One per strategy; `begin` starts a run.

    Args:
        form: `sharded`: all ranks write directories; `single`: rank 0 writes ordinary files through
            the CheckpointIO; `auto`: directories while parameters are sharded, ordinary files while
            every rank has all of them (and on one device, and for the user's own CheckpointIO:
            those through the CheckpointIO). At URLs, only the user's own CheckpointIO is used.
        in_background: training goes on while a checkpoint is written.
    """

    def __init__(self, form: str, in_background: bool) -> None:
        if form not in FORMS:
            raise OptionError(f"checkpoint={form!r} is not known", f"use one of {', '.join(FORMS)}")
        self._form, self._in_background = form, in_background
        self._trainer: Any = None
        self._writer: CheckpointWriter | None = None
        self._group: Any = None
        self._on_demand = LazyEntryGather(None)
        self._forget()

    def _forget(self) -> None:
        """Reset everything that belongs to one run of the Trainer."""
        self._run: Any = None
        # Of a run that has ended.
        self._run_state: dict[str, Any] | None = None
        self._resume: Resume | None = None
        self.plans = RunPlans()
        self._num_loaders = 0
        # Of each optimizer, read when the plan is there: the state, or all of a state dict that
        # only the optimizer knows to read.
        self._optimizer_states: dict[int, Any] = {}
        # Of the checkpoint, by name: of parameters that were on the meta device when it was loaded.
        self.parameters_to_load: dict[str, Tensor] = {}
        self._left_alone = False

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the connections to other processes: a Trainer may be pickled when its job
        is over.
        """
        lost = ("_meeting", "_writer", "_group", "_on_demand")
        return {**vars(self), **dict.fromkeys(lost)}

    def begin(self, trainer: Any, run: Any, replicas: int | None) -> None:
        """Prepare for a run of the Trainer, which begins. Collective.

        Args:
            run: of a training that has left its module sharded, if any.
            replicas: number of replicas; None: each rank loads samples of its own.
        """
        self._num_shares = replicas or world_size()
        self._trainer = trainer
        self._forget()
        self._run = run
        self._meeting, self._num_meetings = RankZero(MEET_SECONDS), 0
        self._on_demand = LazyEntryGather(cpu_group("checkpoint hooks"))

    @property
    def _store(self) -> ParameterStore:
        """The run's parameters; those of no sharding before the plan is made."""
        return unsharded_store() if self._run is None else self._run.store

    # Loading

    def load(
        self, path: str | Path, weights_only: bool | None, checkpoint_io: Any
    ) -> dict[str, Any]:
        """Return the Lightning checkpoint at `path`, with tensors that are read when they are used.

        While fitting it also takes up the checkpoint's state of ranks and its plans.

        Args:
            path: local path or URL, of which the call is collective.
            weights_only: as of `torch.load`.
            checkpoint_io: the Trainer's, which reads what this package does not.

        Raises:
            CheckpointError, FileNotFoundError: it cannot be read, or is not there.
        """
        if self._writer is not None:
            # It may be this checkpoint that is being written.
            self._writer.wait()
        if self._is_opened_here(path, checkpoint_io):
            checkpoint = self._open_together(path, weights_only)
        else:
            checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if self._trainer.state.fn == TrainerFn.FITTING:
            with reading(Path(path)):
                self._resume = take_up(checkpoint, rank_in(None), world_size(), self._num_shares)
                self.plans = resumed_plans(self.resumed)
        return checkpoint

    def _open_together(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Open a checkpoint on all ranks; FileNotFoundError on all if one of them does not find it.

        Collective, if it is at a URL.
        """
        if not is_url(path):
            return open_checkpoint(path, weights_only)

        def open_existing() -> dict[str, Any] | None:
            try:
                return open_checkpoint(path, weights_only)
            except FileNotFoundError:
                return None

        checkpoint, are_open = on_all_ranks(open_existing, lambda result: result is not None)
        if checkpoint is None or not all(are_open):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return checkpoint

    def _is_opened_here(self, path: str | Path, checkpoint_io: Any) -> bool:
        """Whether this package reads the checkpoint, and not the Trainer's `checkpoint_io`."""
        if not is_url(path):
            return _is_torchs(checkpoint_io) or is_checkpoint(path)
        if not _is_torchs(checkpoint_io) and self._form != "sharded":
            return False
        # Lightning trusts the ordinary files of web servers (`lightning.fabric`'s `_load`).
        return not str(path).startswith("http") or is_checkpoint(path)

    def load_model(self, module: Any, state_dict: Mapping[str, Tensor], strict: bool) -> None:
        """Read parameters and buffers into the module. Collective.

        Parameters on the meta device are read later, when the module is sharded. If it is sharded
        already, the shards are read.

        Args:
            strict: whether names that are missing or unknown are an error, as of `load_state_dict`.
        """
        store = self._store
        parameters = dict(module.named_parameters(remove_duplicate=False))
        held = {name for name, p in parameters.items() if p in store}
        # Nothing is copied to the meta device: that is what comes later.
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*copying from a non-meta parameter in the checkpoint"
            )
            sharded_state_dict.load_others(module, state_dict, store, strict)
        missing = {name for name, p in parameters.items() if p.is_meta}
        self.parameters_to_load = {
            name: state_dict[name] for name in missing | held if name in state_dict
        }
        if held:
            self.restore_parameters(store)

    def load_optimizers(self, optimizers: Sequence[Optimizer], stored: Sequence[Any]) -> None:
        """Read the groups of the optimizers now, and their state when it is known which shard of it
        this rank has.

        Args:
            stored: state dict of each optimizer.

        Raises:
            CheckpointError: there are more or fewer states than optimizers, or one is not that of a
                torch optimizer.
        """
        if len(stored) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has states of {len(stored)} optimizers, configure_optimizers gave"
                f" {len(optimizers)}",
                "give as many, or load only the model (load_from_checkpoint)",
            )
        # A hook before the first batch may look at optimizers' state, which then is whole until the
        # plan.
        is_edited_early = "state" in names_in(own_hooks(self._trainer.lightning_module, _EARLY))
        for optimizer, state_dict in zip(optimizers, stored, strict=True):
            if sharded_state_dict.holds_others(optimizer):
                self._optimizer_states[id(optimizer)] = state_dict
                continue
            parts = (
                (state_dict.get("state"), state_dict.get("param_groups"))
                if isinstance(state_dict, dict)
                else ()
            )
            if not parts or not isinstance(parts[0], dict) or not isinstance(parts[1], list):
                raise CheckpointError(
                    "the checkpoint's optimizer state is not that of a torch optimizer", ""
                )
            if any(
                isinstance(key, int) and not isinstance(value, dict)
                for key, value in parts[0].items()
            ):
                raise CheckpointError(
                    "the checkpoint's optimizer state of a parameter has no entries", ""
                )
            optimizer.load_state_dict({**state_dict, "state": {}})
            self._optimizer_states[id(optimizer)] = parts[0]
            is_made = not any(
                p.is_meta for group in optimizer.param_groups for p in group["params"]
            )
            if self._run is None and is_made and is_edited_early:
                self._restore_optimizer(optimizer)

    @property
    def resumed(self) -> Mapping[str, Any]:
        """The `ShardedRun.state_dict` of the resumed training; empty if there is none."""
        if self._resume is None:
            return {}

        return self._resume.run or {}

    @property
    def resumes_an_epoch_of_other_ranks(self) -> bool:
        """Whether the run continues an epoch whose samples another number of ranks shared."""
        return self._resume is not None and self._resume.is_of_other_ranks

    def restore(self, run: Any, optimizers: Sequence[Optimizer]) -> None:
        """Read this rank's shards from the checkpoint, and continue its random streams.

        `run` is the run from now on; hooks may read full parameters. Collective.
        """
        if self._run is None and self._resume is not None:
            warn_of_stop(self._resume, self._trainer)
        self._run = run
        run.full_parameters.before_gather = self.serve_hooks
        if optimizers and self._is_sharded(self._trainer.strategy.checkpoint_io):
            warn_of_uploads(self._trainer)
        self.restore_parameters(run.store)
        for optimizer in optimizers:
            self._restore_optimizer(optimizer)
        release_downloads()
        run.load_state_dict(self.resumed)

    def restore_parameters(self, store: ParameterStore) -> None:
        """Read this rank's shards of the parameters that the checkpoint has. Collective."""
        if self.parameters_to_load:
            on_all_ranks(
                lambda: sharded_state_dict.load_parameters(self.parameters_to_load, store),
                lambda _: None,
            )
            # Copies that were gathered before hold other values.
            store.after_optimizer_step()
            self.parameters_to_load = {}

    def _restore_optimizer(self, optimizer: Optimizer) -> None:
        """Load the checkpoint's state into an optimizer, each value where its parameter is.
        Collective.

        Nothing happens if no state was loaded for it.
        """
        store = self._store
        stored = self._optimizer_states.pop(id(optimizer), None)
        if stored is not None:
            restore = sharded_state_dict.restore_state
            if sharded_state_dict.holds_others(optimizer):
                restore = sharded_state_dict.restore_held
            load = partial(restore, optimizer, stored, store)
            on_all_ranks(load, lambda _: None)
            # Each state is placed as its parameter, on the device or in host memory.
            for states in states_in(optimizer):
                for parameter, state in states.items():
                    for key, value in state.items():
                        if key != "step":
                            state[key] = move_data_to_device(value, parameter.device)

    def process_dataloader(self, loader: Any) -> Any:
        """Return a training dataloader that continues from the checkpoint; others unchanged."""
        # Users may require a dataloader before any fit.
        if self._trainer is None or not self._trainer.training:
            return loader
        resume = self._resume
        index, self._num_loaders = self._num_loaders, self._num_loaders + 1
        taken_up = (
            resume.passes[index] if resume is not None and index < len(resume.passes) else None
        )
        if taken_up is not None and isinstance(loader, _Stateful):
            # It finds its position by itself.
            taken_up = Pass(epoch=taken_up.epoch, now=taken_up.now)
        elif taken_up is not None:
            # Lightning warns that the loader cannot resume: it does.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch"
            )
        progress = self._trainer.fit_loop.epoch_progress
        return ResumableLoader(loader, lambda: progress.current.processed, taken_up)

    # Saving

    def serve_hooks(self) -> None:
        """Gather the entries that checkpoint hooks of other ranks compute with. To be called before
        a collective of all ranks that code of a hook may come to.
        """
        if self._is_in_hook:
            self._on_demand.finish()

    @property
    def _is_in_hook(self) -> bool:
        """Whether the user's `on_save_checkpoint` runs now."""
        module = None if self._trainer is None else self._trainer.lightning_module
        return getattr(module, "_current_fx_name", None) == "on_save_checkpoint"

    def module_state(self, strategy: Any) -> dict[str, Any]:
        """Return the module's state dict, with shards or full tensors as it will be written; {} if
        only some ranks are here for the checkpoint. Collective.
        """
        if self._is_left_alone():
            return {}
        module = strategy.lightning_module
        # Else the entries of the checkpoint that is made are in use.
        if not self._is_in_hook:
            self._on_demand.begin()
        if self._is_sharded(strategy.checkpoint_io):
            store = unsharded_store() if strategy.is_whole else self._store
            return sharded_state_dict.module_state(module, store, self._on_demand)
        with strategy.whole_parameters():
            return module.state_dict()

    def optimizer_state(self, strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict for a checkpoint, with shards or full tensors as it
        will be written; {} if only some ranks are here. Collective.
        """
        if self._left_alone:
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._run is None:
            # Nothing was trained since it was loaded.
            self._restore_optimizer(optimizer)
        # Callbacks have run their hooks.
        self._on_demand.finish()
        if self._is_sharded(strategy.checkpoint_io):
            shards = sharded_state_dict.shards_to_write(self._store, self._on_demand)
            owned = owner_state_to_write(self._store, self._on_demand)
            return sharded_state_dict.state_dict_with(optimizer, self._store, shards, owned)
        if self._run is None:
            return optimizer.state_dict()
        return sharded_state_dict.state_dict_with(optimizer, self._store, self._store.gather_like)

    def save(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any, checkpoint_io: Any
    ) -> bool:
        """Write a checkpoint that has `module_state`. Collective; raises as `_write`.

        Args:
            checkpoint: the Trainer's; states of this rank are added to it.
            path: local path or URL.
            storage_options: as of Lightning's CheckpointIO.
            checkpoint_io: the Trainer's.

        Returns:
            False, with nothing written, if only some ranks are here for it.
        """
        if self._left_alone:
            return False
        # The module has run its hooks.
        self._on_demand.finish()
        if self._run is not None:
            self._run.copies.compare("at a checkpoint")
        if self._on_demand.take_changes():
            # Copies that were gathered before hold other values.
            self._store.after_optimizer_step()
        self._add_rank_states(checkpoint)
        if "transformers" in sys.modules:
            from alpa_strategy.hf.description import add_descriptions

            add_descriptions(self._trainer.lightning_module, checkpoint)
        self._write(checkpoint, path, storage_options, checkpoint_io)
        self._on_demand.begin()
        return True

    def _write(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any, checkpoint_io: Any
    ) -> None:
        """Write a checkpoint to `path`: sharded, as one file, or by a plugin of the user's.
        Collective.

        Raises:
            CheckpointError: it cannot be written, or `storage_options` mean nothing for it.
        """
        if self._writes_through(checkpoint_io, path):
            checkpoint = self._in_full(checkpoint)
            if self._trainer.is_global_zero:
                checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            # Pickling an object of the user's may have gathered entries.
            self._on_demand.finish()
            return
        if storage_options is not None:
            raise CheckpointError(
                "storage_options mean nothing for checkpoints of this strategy",
                "leave them out; fsspec reads those of URLs from environment variables and from its"
                " own configuration files",
            )
        in_background = self._in_background or isinstance(checkpoint_io, AsyncCheckpointIO)
        if is_url(path):
            in_background = self._is_training and not _is_of_ending_job(path)
        if self._is_sharded(checkpoint_io):
            self._writer_now().save(checkpoint, path, in_background, self._on_demand)
        else:
            self._writer_now().save_file(checkpoint, path, in_background)

    def _in_full(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with full tensors in host memory on rank 0, and empty ones on other
        ranks. Collective if it has shards.
        """

        def full(shards: LocalShards) -> Tensor:
            tensor = shards.full_tensor()
            return tensor.cpu() if self._trainer.is_global_zero else torch.empty(0)

        return map_tensors(checkpoint, LocalShards, full)

    @property
    def _is_training(self) -> bool:
        """Whether a fit is running, whose end waits for what is written in the background."""
        state = self._trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def check_paths(self) -> None:
        """Check the folders of checkpoints, as of `check_checkpoint_paths`."""
        check_checkpoint_paths(self._trainer, self._form == "sharded" and world_size() > 1)

    def remove(self, path: str | Path, checkpoint_io: Any) -> None:
        """Remove a checkpoint of either form, on rank 0 (`CheckpointWriter.remove`). Collective."""
        if not self._writes_through(checkpoint_io, path):
            self._writer_now().remove(path)
        elif self._trainer.is_global_zero:
            checkpoint_io.remove_checkpoint(path)

    def _add_rank_states(self, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks, loaders and random generators among them, to a checkpoint of
        a training, not to others. Collective.
        """
        if self._trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        local_state = rank_state(
            self._trainer, self._run_state if self._run is None else self._run.state_dict()
        )
        states = all_gather_object(local_state, cpu_group("checkpoint states"))
        put_states(checkpoint, states, self._num_shares)

    def _is_sharded(self, checkpoint_io: Any) -> bool:
        """Whether a checkpoint that is made now holds shards."""
        if self._form != "auto":
            return self._form == "sharded"
        is_in_shards = self._run is not None and bool(self._run.store.sharded_parameters)
        return is_in_shards and world_size() > 1 and _is_torchs(checkpoint_io)

    def _writes_through(self, checkpoint_io: Any, path: str | Path) -> bool:
        """Whether the Trainer's `checkpoint_io` writes and removes the checkpoint at `path`, not
        this package's writer.
        """
        if is_of_process(path) and world_size() > 1:
            # Other ranks' shards would be in the memory of these.
            return True
        if is_url(path) and _is_torchs(checkpoint_io):
            return False
        if self._form == "auto":
            return world_size() == 1 or not _is_torchs(checkpoint_io)
        return self._form == "single"

    def _writer_now(self) -> CheckpointWriter:
        """Return the writer of this run's process groups, made when these are new. Collective."""
        group = cpu_group("checkpoints")
        if self._writer is None or self._group is not group:
            self._group = group
            staging_root = local_folder(self._trainer) / ".alpa" / "staging"
            self._writer = CheckpointWriter(
                self._group,
                cpu_group("checkpoint states"),
                self._trainer.is_global_zero,
                staging_root.absolute(),
            )
        return self._writer

    def _is_left_alone(self) -> bool:
        """Whether only some ranks are here after an exception: waiting would hang. Rank 0 warns."""
        if (
            self._left_alone
            or self._trainer.state.status != TrainerStatus.INTERRUPTED
            or world_size() == 1
        ):
            return self._left_alone
        self._num_meetings += 1
        came = self._meeting.meet(
            f"exception{self._num_meetings}", str(self._trainer.global_step), MEET_SECONDS
        )
        self._left_alone = len(came) < world_size() or len(set(came.values())) > 1
        if self._left_alone:
            rank_zero_warn(
                f"alpa: no checkpoint was saved after the exception: only ranks {sorted(came)} of"
                f" {world_size()} are "
                "here for it, and every rank holds a part; go on from the last one that was saved"
                " before"
            )
        return self._left_alone

    # The end

    def run_ends(self) -> None:
        """Note that training has ended and parameters are full again: later checkpoints have the
        run's last random streams.
        """
        if self._run is not None:
            self._run_state, self._run = self._run.state_dict(), None

    def close(self, interrupted: bool) -> None:
        """Wait for checkpoints that are written in the background; after an exception only for a
        while.

        Args:
            interrupted: whether the run ended by an exception. Failures are then warnings.

        Raises:
            CheckpointError: writing one has failed.
        """
        release_downloads()
        if self._writer is None:
            return
        if not interrupted:
            self._writer.wait()
            return
        try:
            self._writer.wait(CLOSING_SECONDS)
        except CheckpointError as error:
            rank_zero_warn(f"alpa: {error}")
        if self._writer.is_busy:
            rank_zero_warn(
                "alpa: a checkpoint is still being written or uploaded, and is lost if the process"
                " ends now; the one before it stays. Staged files are in .alpa/staging"
            )
        self._run = None


def _is_torchs(checkpoint_io: Any) -> bool:
    """Whether the user left it to Lightning how checkpoints are stored."""
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io is None or type(checkpoint_io) is TorchCheckpointIO


def _is_of_ending_job(path: str | Path) -> bool:
    """Whether SLURM is about to end the job, and the checkpoint is for the next one."""
    return str(path).rpartition("/")[2].startswith("hpc_ckpt_")
