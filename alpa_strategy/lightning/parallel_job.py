"""The job below the strategy: its processes and its process group.

As Lightning's DDP strategy, without DDP's wrapper of the module. Errors of a single rank and
signals end all ranks with the extra `extras/failure_watch`.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from alpa_strategy.comm.collectives import Background, all_gather_object, any_rank, check_groups
from alpa_strategy.comm.job_store import fresh_store, job_store
from alpa_strategy.errors import AlpaError, OptionError
from alpa_strategy.hook_points import FAILURE_WATCH, JobWatch
from alpa_strategy.lightning.notebook import NotebookLauncher, interactive_error

# `popen`: the script runs once more for each device. `fork`: the process is copied, for notebooks.
START_METHODS = ("popen", "fork")

# What Lightning gives to every strategy.
LIGHTNING_OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
)

# The module that imports everything for captured steps.
STEP_MODULE = "alpa_strategy.lightning.run"


def _load_step_module() -> None:
    importlib.import_module(STEP_MODULE)


def _report_once(error: AlpaError, rank: int) -> None:
    """Let `error`, if it ends this process, be shown as its message without stack traces.

    Rank 0 shows the full message when it ends, as all ranks raise the same error if they reached
    consensus on it. The others print a line now. ALPA_TRACEBACK=1 shows stack traces.
    """
    before = sys.excepthook
    if rank > 0:
        print(
            f"rank {rank} ends: {type(error).__name__}: {error.problem.splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )

    def show(kind: type[BaseException], raised: BaseException, traceback: Any) -> None:
        if raised is not error or os.environ.get("ALPA_TRACEBACK"):
            before(kind, raised, traceback)
        elif rank == 0:
            print(f"\n{kind.__name__}: {raised}", file=sys.stderr, flush=True)

    sys.excepthook = show


class ParallelJob(DDPStrategy):
    """Lightning's DDP strategy without DDP's wrapper of the module, for a derived strategy.

    Args:
        timeout_seconds: timeout of the process group's collectives.
        start_method: one of START_METHODS.
        arguments: the arguments that the Trainer gives to every strategy.

    Raises:
        OptionError: there is no such start method.
    """

    def __init__(self, timeout_seconds: float, start_method: str, **arguments: Any) -> None:
        if start_method not in START_METHODS:
            raise OptionError(
                f"start_method is {start_method!r}", f"use {' or '.join(map(repr, START_METHODS))}"
            )
        arguments["start_method"] = start_method
        super().__init__(timeout=timedelta(seconds=timeout_seconds), **arguments)
        self.interrupted = False
        self._watch: JobWatch | None = None

    # Before the module is set up

    @override
    def _configure_launcher(self) -> None:
        """Set the launcher; none for a single process, and none if a job manager starts the ranks.

        Raises:
            SetupError: there are several processes in an interactive session, and the start method
                is not fork.
        """
        assert self.cluster_environment is not None
        # Without a launcher, a single process works in a notebook, too.
        if self.num_processes * self.num_nodes == 1:
            return
        if self.cluster_environment.creates_processes_externally:
            return
        if self._start_method == "fork":
            self._launcher = NotebookLauncher(self)
        elif imports._IS_INTERACTIVE:
            raise interactive_error()
        else:
            extra = FAILURE_WATCH.extra
            launcher = _SubprocessScriptLauncher if extra is None else extra.launcher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        """Set CUDA's number of queues, then make the process groups. Collective."""
        # A pipeline has a stream for each channel and direction. CUDA's default of 8 queues would
        # let some share a queue, where a receive that waits for another rank can block the send
        # that this rank waits for. CUDA reads the variable when the device is first used.
        if self.root_device.type == "cuda":
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        """Join the job's process group, and watch the other ranks.

        On several ranks, random generators are seeded again, and ranks on CPUs take the least
        number of threads of all. On one rank there is nothing to join.
        """
        self.set_world_ranks()
        self.interrupted = False
        # On one rank random numbers continue as under a plain Trainer.
        if self.world_size == 1:
            return

        reset_seed()
        assert self.cluster_environment is not None
        assert self._timeout is not None
        store: dict[str, Any] = {}
        # torchrun's agent has the store. It outlives a job that is restarted.
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_torchruns and not dist.is_initialized():
            rank = self.cluster_environment.global_rank()
            world_size = self.cluster_environment.world_size()
            store = {"store": fresh_store(rank, world_size, self._timeout.total_seconds())}

        backend = self._get_process_group_backend()
        device = None if self.root_device.type == "cpu" else self.root_device
        with self._loading_what_steps_need():
            _init_dist_connection(
                self.cluster_environment, backend, timeout=self._timeout, device_id=device, **store
            )

        extra = FAILURE_WATCH.extra
        if extra is not None:
            self._watch = extra.start(
                job_store(), self.global_rank, self.world_size, self._launcher
            )
        check_groups()
        if self.root_device.type == "cpu":
            # Lightning reduces the threads of its launcher's process alone. Another number of
            # threads rounds differently, so weights that several ranks compute would drift apart.
            torch.set_num_threads(min(all_gather_object(torch.get_num_threads())))

    @contextmanager
    def _loading_what_steps_need(self) -> Iterator[None]:
        """Context of the wait for other ranks, in which the launching process imports modules.

        Its first training step needs them. The other ranks import them in the same seconds.
        """
        if not isinstance(self._launcher, _SubprocessScriptLauncher) or self.global_rank > 0:
            yield
            return
        loading = Background("alpa-loading")
        loading.run(_load_step_module)
        try:
            yield
        finally:
            # Forked loader workers must not inherit the locks of a running import.
            loading.wait()

    # Values between ranks

    def _meet(self) -> None:
        """Prepare an exchange of values by user code, callbacks or Lightning."""
        if self._watch is not None:
            self._watch.before_exchange()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decided so. Collective."""
        self._meet()
        return not any_rank([not decision])[0] if all else any_rank([bool(decision)])[0]

    # The end

    def tell_others(self, exception: BaseException) -> None:
        """Publish the `exception` with which this rank fails, so that the others end as well.
        Nothing is published in a notebook, nor of a KeyboardInterrupt. An AlpaError is shown
        without stack traces if it ends the process.
        """
        # The notebook ends the other workers, and shows the exception.
        if self._start_method == "fork":
            return
        if isinstance(exception, AlpaError):
            _report_once(exception, self.global_rank)
        if self._watch is not None and not isinstance(exception, KeyboardInterrupt):
            self._watch.failed(exception)

    def take_signals(self, trainer: Any) -> None:
        """Handle signals for all ranks; called before the Trainer registers its handlers."""
        # On one rank Lightning's own handlers suffice.
        if self._watch is not None:
            self._watch.handle_signals(trainer)

    def stop_watching(self) -> None:
        """Stop watching other ranks and handling signals. No communication."""
        if self._watch is not None:
            self._watch.stop(ends_well=not self.interrupted)
            self._watch = None
