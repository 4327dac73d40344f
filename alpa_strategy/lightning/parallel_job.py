"""The job below the strategy: processes, process group, failures and signals.

As Lightning's DDP strategy, with two differences. If a rank that Lightning's launcher started
fails, the launcher reports which one and ends the others; Lightning's own launcher kills them
silently within 5 s. And every rank watches the others, so that none waits for a lost rank.

Signals end all ranks at the same step if possible, and within `END_SECONDS` in any case.
Lightning's SIGTERM handler broadcasts from rank 0 within the handler: ranks that are in another
collective then wait for each other until it times out. Here (`JobSignals`) a handler only stores
the signal. A thread, which receives the signal even while the main thread waits in a collective,
notifies the other ranks through the job's store. At the start of the next training batch all ranks
reach consensus that one received a signal, and end together (or save and requeue, under SLURM), as
Lightning would. A rank that does not get there in time (it plans, or a collective hangs) is ended.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from alpa_strategy.capture.python_state import patched
from alpa_strategy.checkpoint.names import discard_unfinished
from alpa_strategy.comm.collectives import Background, all_gather_object, any_rank, check_groups
from alpa_strategy.comm.failure import FailureWatch, exit_text, fresh_store, job_store
from alpa_strategy.errors import AlpaError, OptionError, RuntimeMismatchError
from alpa_strategy.lightning.notebook import NotebookLauncher, interactive_error

# `popen`: the script runs once more for each device. `fork`: the process is copied, for notebooks.
START_METHODS = ("popen", "fork")

CHILD_POLL_SECONDS = 0.5

# The module that imports everything for captured steps.
STEP_MODULE = "alpa_strategy.lightning.run"

# Seconds for the other ranks to report their errors and to end by themselves.
REPORT_SECONDS = 6.0


class Launcher(_SubprocessScriptLauncher):
    """Starts the script for every other rank of this node, and ends all ranks if one is lost."""

    def __init__(self, cluster_environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._ending = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the launcher without its processes, as part of a Trainer."""
        return {**vars(self), "procs": [], "_ending": None}

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the other ranks of this node, unless a job manager does, and call `function` on
        this one.
        """
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            # If rank 0 ends first, its store is gone. C++ would print warnings of that with stack
            # traces.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self._call_children_scripts()
            first_rank = self.cluster_environment.node_rank() * self.num_processes + 1
            arguments = (self.procs, first_rank, self._ending)
            thread = threading.Thread(
                target=watch_children, args=arguments, daemon=True, name="alpa-child-watch"
            )
            thread.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Send a signal to the other ranks of this node, whose end is then no failure."""
        self._ending.set()
        super().kill(signum)

    def children_to_end(self) -> Sequence[subprocess.Popen]:
        """Return the child processes for a caller that ends them; they are not watched any more."""
        self._ending.set()
        return self.procs


def watch_children(
    children: Sequence[subprocess.Popen], first_rank: int, ending: threading.Event
) -> None:
    """Wait until all children have ended; if one fails, report it and kill the rest and this one.

    The others have `REPORT_SECONDS` to end by themselves.

    Args:
        children: the processes.
        first_rank: global rank of the first child.
        ending: set by a caller that ends the children; then this returns.
    """
    codes = _poll(children)
    while not any(codes):
        all_ended = all(code == 0 for code in codes)
        if all_ended or ending.wait(CHILD_POLL_SECONDS):
            return
        codes = _poll(children)

    # A rank that raises an error reports it itself, and the others report that they end because of
    # it. A rank that a signal killed cannot.
    exit_codes = [code for code in codes if code is not None]
    was_killed = any(code < 0 for code in exit_codes)
    if not was_killed and ending.wait(REPORT_SECONDS):
        return

    for rank, (child, code) in enumerate(zip(children, codes, strict=True), start=first_rank):
        if code is not None and code != 0:
            text = f"\nalpa: rank {rank} (process {child.pid}) {exit_text(code)}"
            print(text, file=sys.stderr, flush=True)
    if was_killed and ending.wait(REPORT_SECONDS):
        return

    _report_ended(first_rank - 1)
    for rank, child in enumerate(children, first_rank):
        if child.poll() is None:
            _report_ended(rank)
            child.kill()
            child.wait()
    discard_unfinished()
    # The main thread may hang in a collective, where no exception reaches it.
    os.kill(os.getpid(), signal.SIGKILL)


def _poll(children: Sequence[subprocess.Popen]) -> list[int | None]:
    """Return the exit codes of processes; None for those that run."""
    return [child.poll() for child in children]


def _load_step_module() -> None:
    importlib.import_module(STEP_MODULE)


def _report_ended(rank: int) -> None:
    """Report a rank that has not noticed the lost one, because it plans or waits for the plan."""
    text = (
        f"\nalpa: rank {rank} is ended: it was still at work {REPORT_SECONDS:.0f} s after another"
        " was lost"
    )
    print(text, file=sys.stderr, flush=True)


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
        self._watch: FailureWatch | None = None
        self._signals: JobSignals | None = None

    # Before the module is set up

    @override
    def _configure_launcher(self) -> None:
        """Set the launcher; none for a single process, and none if a job manager starts the
        ranks.
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
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

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
        """Join the job's process group, and watch the other ranks."""
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

        children = self._launcher.children_to_end if isinstance(self._launcher, Launcher) else tuple
        self._watch = FailureWatch(
            job_store(), self.global_rank, self.world_size, children, last=discard_unfinished
        )
        self._watch.start()
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
        if not isinstance(self._launcher, Launcher) or self.global_rank > 0:
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
        if self._signals is not None:
            self._signals.check_together()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decided so. Collective."""
        self._meet()
        return not any_rank([not decision])[0] if all else any_rank([bool(decision)])[0]

    # The end

    def tell_others(self, exception: BaseException) -> None:
        """Publish the `exception` with which this rank fails, so that the others end as well."""
        # The notebook ends the other workers, and shows the exception.
        if self._start_method == "fork":
            return
        if isinstance(exception, AlpaError):
            _report_once(exception, self.global_rank)
        if self._watch is not None and not isinstance(exception, KeyboardInterrupt):
            self._watch.publish(exception)

    def take_signals(self, trainer: Any) -> None:
        """Handle signals for all ranks; called before the Trainer registers its handlers."""
        # On one rank Lightning's own handlers suffice.
        if self._watch is not None:
            self._signals = JobSignals(trainer, self._watch)
            self._signals.install()

    def stop_watching(self) -> None:
        """Stop watching other ranks and handling signals. No communication."""
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        if self._watch is not None:
            self._watch.stop(ends_well=not self.interrupted)
            self._watch = None


# Signals


# Seconds from a signal to the end of a rank that does not end by itself. Schedulers kill after 10
# to 30 s, and it takes time until every rank is notified.
END_SECONDS = 5.0

# Seconds from Ctrl+C to a KeyboardInterrupt in the middle of the rank's work.
INTERRUPT_SECONDS = 2.0

# Seconds that child processes have to end.
CHILD_SECONDS = 1.0

ENDING = (signal.SIGTERM, signal.SIGINT)

# Points at which ranks synchronize: before a training batch; before an evaluation or an epoch's
# end; after the last batch.
TRAINS = "trains"
PAUSES = "pauses"
ENDS = "ends"
POINTS = (TRAINS, PAUSES, ENDS)

# What Lightning gives to every strategy.
LIGHTNING_OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
)

EQUALLY_MANY = (
    "give all ranks equally many (limit_train_batches, max_steps, or drop the surplus in the"
    " dataset)"
)


def _stopped_alone(ranks: Sequence[int]) -> RuntimeMismatchError:
    """Return the error for `trainer.should_stop` that is set on these ranks only."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    shown = f"{noun} {', '.join(map(str, ranks))}"
    return RuntimeMismatchError(
        f"trainer.should_stop is set on {shown} alone: the other ranks still train",
        "let all ranks decide alike, as EarlyStopping does: "
        "trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False), "
        "called on all ranks at the same step",
    )


class JobSignals:
    """Handles signals of this rank, from `install` to `remove`, for all ranks of the job.

    In the main thread only, and with several ranks only.

    Args:
        trainer: the Trainer, whose signal handling is replaced.
        watch: notifies the other ranks.
    """

    def __init__(self, trainer: pl.Trainer, watch: FailureWatch) -> None:
        self._trainer = trainer
        self._watch = watch
        self._connector = trainer._signal_connector
        self._requeue = self._connector._slurm_sigusr_handler_fn

        # The signal that ends the job.
        self._ending_signal: int | None = None

        # Set by SLURM's signal to save and requeue.
        self._requeued = threading.Event()

        # Whether Ctrl+C was handled once.
        self._interrupted = False

        # Whether this rank is at a pause that other ranks do not reach.
        self._is_alone = False

        self._timers: list[threading.Timer] = []

        # Restores the handling of signals by Lightning and the process.
        self._installed = ExitStack()
        self._old_interrupt: Any = None

    def install(self) -> None:
        """Replace Lightning's handling of signals, before it registers its handlers."""
        # In other threads Lightning does not handle signals, either.
        if threading.current_thread() is not threading.main_thread():
            return

        fit_loop = self._trainer.fit_loop
        end_epoch = partial(self._end_epoch, fit_loop.on_advance_end)
        patches = [
            (self._connector, "_sigterm_notifier_fn", self._receive),
            (self._connector, "_slurm_sigusr_handler_fn", lambda *_: self._requeued.set()),
            (fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.meet),
            (fit_loop, "on_advance_end", end_epoch),
        ]
        self._installed.enter_context(patched(patches))
        # Another rank's signal is handled as if this rank had received Ctrl+C.
        self._watch.on_told = lambda word: self._start_to_end(int(word), interrupts=True)

        # Python writes the number of each signal to this socket, also during a collective.
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        listener = threading.Thread(
            target=self._listen, args=(receiving,), daemon=True, name="alpa-signals"
        )
        listener.start()
        self._installed.callback(listener.join, 1.0)
        # A closed socket ends the listener.
        self._installed.callback(sending.close)
        before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        self._installed.callback(signal.set_wakeup_fd, before)

        # A handler of the user's, or SIG_IGN, stays.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._old_interrupt = signal.signal(signal.SIGINT, self._on_interrupt)
            self._installed.callback(self._restore_interrupt)

    def remove(self) -> None:
        """Restore the process's own handling of signals, at the end of the Trainer's run."""
        for timer in self._timers:
            timer.cancel()
        self._installed.close()

    def _restore_interrupt(self) -> None:
        """Restore the handler of Ctrl-C."""
        # Lightning's teardown restores the handlers of this dict.
        self._connector._original_handlers[signal.SIGINT] = self._old_interrupt
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._old_interrupt)

    def _end_epoch(self, on_advance_end: Callable[[], None]) -> None:
        self.meet(PAUSES)
        on_advance_end()

    def meet(self, point: str = TRAINS) -> None:
        """Handle the signals of all ranks together, at one of the POINTS. Collective.

        Ranks may have different numbers of batches: one that pauses while others train continues
        alone, and synchronizes with them later.

        Raises:
            SIGTERMException, KeyboardInterrupt: the job ends, on all ranks at this batch.
            RuntimeMismatchError: some ranks are done, others are not.
        """
        pauses = True
        while pauses:
            is_ending = [self._ending_signal == number for number in ENDING]
            is_at = [point == other for other in POINTS]
            flags = any_rank([*is_ending, self._requeued.is_set(), *is_at])
            ends, interrupts, requeues = flags[:3]
            trains, pauses, over = flags[3:]

            if point == PAUSES:
                self._is_alone = trains or over
                return
            self._is_alone = False

        if trains and over:
            # All ranks are here: those that pause have synchronized once more.
            stopped = all_gather_object(bool(self._trainer.should_stop))
            if any(stopped) and not all(stopped):
                raise _stopped_alone([rank for rank, stops in enumerate(stopped) if stops])
            raise RuntimeMismatchError(
                "some ranks have no more training batches, others have", EQUALLY_MANY
            )
        if requeues:
            self._requeued.clear()
            # Lightning's handler does not read the frame.
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]
        if ends:
            self._connector.received_sigterm = True
            raise SIGTERMException
        if interrupts:
            # A notification that arrives later is no second Ctrl+C.
            self._ending_signal = self._ending_signal or signal.SIGINT
            # Lightning ignores it as well while it shuts down.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

    def check_together(self) -> None:
        """Check, before a collective, that all ranks come to it.

        Raises:
            RuntimeMismatchError: this rank pauses while others train.
        """
        if not self._is_alone:
            return

        if self._trainer.should_stop:
            raise _stopped_alone([self._trainer.global_rank])

        point = "an evaluation" if self._trainer.validating else "the end of an epoch"
        raise RuntimeMismatchError(
            f"rank {self._trainer.global_rank} is at {point}, where it needs all ranks: others"
            " still train",
            EQUALLY_MANY,
        )

    # Receiving signals: in the main thread by handlers, in others by the listener and the watch

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Store the first Ctrl+C; raise a KeyboardInterrupt for the second.

        The second is the user's, or comes from the timer of `INTERRUPT_SECONDS`.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._receive(signum)

    def _listen(self, receiving: socket.socket) -> None:
        """Read signals from the socket, one byte each.

        Handlers do not run while the main thread waits in a collective.
        """
        while numbers := receiving.recv(16):
            for number in numbers:
                if number in ENDING:
                    self._receive(number)
        receiving.close()

    def _receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Notify the other ranks of this rank's first signal, and start to end."""
        if self._ending_signal is None:
            self._watch.tell(str(signum))
        self._start_to_end(signum, interrupts=self._old_interrupt is not None)

    def _start_to_end(self, signum: int, interrupts: bool) -> None:
        """Start the timers that end this process after a signal, if it does not end by itself."""
        if self._ending_signal is not None:
            return
        self._ending_signal = signum
        self._timers = [threading.Timer(END_SECONDS, self._end)]
        if signum == signal.SIGINT and interrupts:
            self._timers.append(threading.Timer(INTERRUPT_SECONDS, self._interrupt))
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def _interrupt(self) -> None:
        """Interrupt the main thread, as Ctrl-C does."""
        self._interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _end(self) -> None:
        """End this process, which has not ended by itself in time."""
        assert self._ending_signal is not None
        name = signal.Signals(self._ending_signal).name
        rank = self._trainer.global_rank
        text = (
            f"\nalpa: rank {rank} ends {END_SECONDS:.0f} s after {name}, in the middle of its work"
        )
        print(text, file=sys.stderr, flush=True)
        self._watch.end_process(128 + self._ending_signal, CHILD_SECONDS)
