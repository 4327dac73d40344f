"""The job below the strategy: its devices and ranks, how they meet, what passes between them, how
they end as one.

As in Lightning's DDP strategy, with two differences: ranks that Lightning's launcher started are
ended when one of them fails (it says which was lost, where Lightning's own kills all silently
within 5 s of a child's death), and every rank watches the others, so that none waits for a rank
that is gone.

Signals end all ranks at the same step where it can be, and within `END_SECONDS` in any case.
Lightning's SIGTERM
handler broadcasts from within the handler, and only from rank 0: ranks that are in the middle of
another collective then wait for each other until it times out. Here (`JobSignals`) a handler only
takes note. A thread, which the signal reaches even while the main thread waits in a collective,
tells the other ranks through the job's store; at the start of the next training batch all ranks
agree that one was asked to end (or to save and requeue, under SLURM), and do so together, as
Lightning would. What has not come to that point in time (planning, a hanging collective) is ended.
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
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from alpa_strategy.capture.python_state import patched
from alpa_strategy.checkpoint.saving import discard_unfinished
from alpa_strategy.comm.collectives import Background, all_gather_object, any_rank, check_groups
from alpa_strategy.comm.failure import FailureWatch, fresh_store, job_store
from alpa_strategy.errors import AlpaError, RuntimeMismatchError

CHILD_POLL_SECONDS = 0.5
# Loads all that runs captured steps.
STEP_MODULE = "alpa_strategy.lightning.run"
# That the other ranks have to say what they know and to end by themselves.
REPORT_SECONDS = 6.0


class Launcher(_SubprocessScriptLauncher):
    """Starts the script again for every other rank of this node, and ends them all when one is
    lost.
    """

    def __init__(self, cluster_environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._ending = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """A Trainer may be pickled: without its processes."""
        return {**vars(self), "procs": [], "_ending": None}

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            # Where rank 0 ends first, its store is gone: what C++ says of that, with its frames, is
            # no news.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self._call_children_scripts()
            first_rank = self.cluster_environment.node_rank() * self.num_processes + 1
            watched = self.procs, first_rank, self._ending
            threading.Thread(
                target=watch_children, args=watched, daemon=True, name="alpa-child-watch"
            ).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        self._ending.set()
        super().kill(signum)

    def children_to_end(self) -> Sequence[subprocess.Popen]:
        """The children, for a caller that ends them: what becomes of them from here on is no
        news.
        """
        self._ending.set()
        return self.procs


def watch_children(
    children: Sequence[subprocess.Popen], first_rank: int, ending: threading.Event
) -> None:
    """Until all have ended well, or one has not: name it, and after `REPORT_SECONDS` kill the rest
    and this process.

    Args:
        first_rank: global rank of the first child.
        ending: set by who ends the children: nothing is left to watch.
    """
    while not any(codes := [child.poll() for child in children]):
        if all(code == 0 for code in codes) or ending.wait(CHILD_POLL_SECONDS):
            return
    # A rank that raised an error has named it, and all others say that they end because of it.
    was_killed = any(code is not None and code < 0 for code in codes)
    if not was_killed and ending.wait(REPORT_SECONDS):
        return
    for rank, (child, code) in enumerate(zip(children, codes, strict=True), start=first_rank):
        if code is not None and code != 0:
            how = f"ended with exit code {code}"
            # Some signals have no name.
            if code < 0:
                name = next(
                    (each.name for each in signal.Signals if each == -code), f"signal {-code}"
                )
                how = f"was ended by {name}" + "; out of memory is a common reason" * (
                    -code == signal.SIGKILL
                )
            print(f"\nalpa: rank {rank} (process {child.pid}) {how}", file=sys.stderr, flush=True)
    if was_killed and ending.wait(REPORT_SECONDS):
        return
    _say_ended(first_rank - 1)
    for rank, child in enumerate(children, first_rank):
        if child.poll() is None:
            _say_ended(rank)
            child.kill()
            child.wait()
    discard_unfinished()
    # The main thread may hang in a collective, where no exception reaches it.
    os.kill(os.getpid(), signal.SIGKILL)


def _load_step_module() -> None:
    importlib.import_module(STEP_MODULE)


def _say_ended(rank: int) -> None:
    """Of a rank that knows nothing of the lost one: it plans, say, or waits for whoever does."""
    text = f"\nalpa: rank {rank} is ended: it was still at work {REPORT_SECONDS:.0f} s after another was lost"
    print(text, file=sys.stderr, flush=True)


def _say_once(error: AlpaError, rank: int) -> None:
    """Where `error` ends this process, it is its message that is shown, without the frames of this
    package and torch
    (ALPA_TRACEBACK=1 shows them): in full by rank 0, whose error is that of all ranks where they
    agreed on it."""
    before = sys.excepthook
    # Now: rank 0 says all of it, last.
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
    """Lightning's DDP strategy without DDP's module around the user's: what a rank holds of it
    others decide upon.

    Args:
        timeout_seconds: of the process group's collectives.
        given: what the Trainer hands to every strategy.
    """

    def __init__(self, timeout_seconds: float, **given: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_seconds), **given)
        self.interrupted = False
        self._watch: FailureWatch | None = None
        self._signals: JobSignals | None = None

    # Before the module is set up

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Nothing to launch: works in a notebook too.
        if self.num_processes * self.num_nodes == 1:
            return
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        # A pipeline has a stream for each channel and direction. With CUDA's 8 queues some would
        # share one, where a receive that waits for another rank holds up what that rank waits for.
        # Read when the device is first used.
        if self.root_device.type == "cuda":
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        """Join the job's process group, and watch the other ranks."""
        self.set_world_ranks()
        self.interrupted = False
        # Random numbers go on as under a plain Trainer.
        if self.world_size == 1:
            return
        reset_seed()
        assert self.cluster_environment is not None
        assert self._timeout is not None
        store: dict[str, Any] = {}
        # The store of its agent.
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_torchruns and not dist.is_initialized():
            place = self.cluster_environment.global_rank(), self.cluster_environment.world_size()
            store = {"store": fresh_store(*place, self._timeout.total_seconds())}
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
            # Lightning sets its launcher's process alone to fewer threads, and another number of
            # threads rounds otherwise: work that several ranks do alike would give them weights
            # that drift apart.
            torch.set_num_threads(min(all_gather_object(torch.get_num_threads())))

    @contextmanager
    def _loading_what_steps_need(self) -> Iterator[None]:
        """Around the wait for other ranks: a process that has started them has seconds to spare.

        Its first training step would load these modules; the other ranks load them meanwhile.
        """
        if not isinstance(self._launcher, Launcher) or self.global_rank > 0:
            yield
            return
        loading = Background("alpa-loading")
        loading.run(_load_step_module)
        try:
            yield
        finally:
            # Loader workers are forked later, and would inherit the locks of a running import.
            loading.wait()

    # Values between ranks

    def _meet(self) -> None:
        """Before values are exchanged that user code, callbacks or Lightning want to have
        exchanged.
        """
        if self._signals is not None:
            self._signals.check_together()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._meet()
        return not any_rank([not decision])[0] if all else any_rank([bool(decision)])[0]

    # The end

    def tell_others(self, exception: BaseException) -> None:
        """This rank fails with `exception`: the others end as well."""
        if isinstance(exception, AlpaError):
            _say_once(exception, self.global_rank)
        if self._watch is not None and not isinstance(exception, KeyboardInterrupt):
            self._watch.publish(exception)

    def take_signals(self, trainer: Any) -> None:
        """Before the Trainer registers its handlers: what signals do concerns all ranks."""
        # On one rank Lightning's own handlers do.
        if self._watch is not None:
            self._signals = JobSignals(trainer, self._watch)
            self._signals.install()

    def stop_watching(self) -> None:
        """Nobody else's end, and no signal, concerns this rank any more. No communication."""
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        if self._watch is not None:
            self._watch.stop(ends_well=not self.interrupted)
            self._watch = None


# Signals


# Schedulers kill after 10 to 30; some of that passes until every rank knows.
END_SECONDS = 5.0
INTERRUPT_SECONDS = 2.0
CHILD_SECONDS = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)
# Where ranks meet: before a training batch, before an evaluation or an epoch's end, after the last
# batch.
POINTS = TRAINS, PAUSES, ENDS = "trains", "pauses", "ends"
EQUALLY_MANY = "give all ranks equally many (limit_train_batches, max_steps, or drop the surplus in the dataset)"


def _stopped_alone(ranks: Sequence[int]) -> RuntimeMismatchError:
    """The error for `trainer.should_stop` that is set on these ranks and not on all."""
    shown = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return RuntimeMismatchError(
        f"trainer.should_stop is set on {shown} alone: the other ranks still train",
        "let all ranks decide alike, as EarlyStopping does: "
        "trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False), "
        "called on all ranks at the same step",
    )


class JobSignals:
    """What this rank does about signals, from `install` to `remove`. In the main thread alone, with
    several ranks.
    """

    def __init__(self, trainer: pl.Trainer, watch: FailureWatch) -> None:
        self._trainer, self._watch = trainer, watch
        self._connector = trainer._signal_connector
        self._requeue = self._connector._slurm_sigusr_handler_fn
        # The signal by which the job ends.
        self._asked: int | None = None
        self._requeued, self._interrupted = threading.Event(), False
        # At a pause to which others do not come.
        self._is_alone = False
        self._timers: list[threading.Timer] = []
        # What stands in the place of Lightning's and the process's own.
        self._taken = ExitStack()
        self._old_interrupt: Any = None

    def install(self) -> None:
        """Take the place of what Lightning would do. Before it registers its handlers."""
        if threading.current_thread() is not threading.main_thread():
            # Nor does Lightning get signals there.
            return
        taken = [
            (self._connector, "_sigterm_notifier_fn", self._ask),
            (self._connector, "_slurm_sigusr_handler_fn", lambda *_: self._requeued.set()),
            (self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.meet),
            (
                self._trainer.fit_loop,
                "on_advance_end",
                partial(self._end_epoch, self._trainer.fit_loop.on_advance_end),
            ),
        ]
        self._taken.enter_context(patched(taken))
        # As if Ctrl+C came here, too.
        self._watch.on_told = lambda word: self._begin_to_end(int(word), interrupts=True)
        heard, rung = socket.socketpair()
        rung.setblocking(False)
        listener = threading.Thread(
            target=self._listen, args=(heard,), daemon=True, name="alpa-signals"
        )
        listener.start()
        self._taken.callback(listener.join, 1.0)
        # Ends the listener.
        self._taken.callback(rung.close)
        before = signal.set_wakeup_fd(rung.fileno(), warn_on_full_buffer=False)
        self._taken.callback(signal.set_wakeup_fd, before)
        # Else the user's own, or ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._old_interrupt = signal.signal(signal.SIGINT, self._on_interrupt)
            self._taken.callback(self._give_interrupt_back)

    def remove(self) -> None:
        """The Trainer is done: signals are the process's own again."""
        for timer in self._timers:
            timer.cancel()
        self._taken.close()

    def _give_interrupt_back(self) -> None:
        # What its teardown restores.
        self._connector._original_handlers[signal.SIGINT] = self._old_interrupt
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._old_interrupt)

    def _end_epoch(self, as_ever: Callable[[], None]) -> None:
        self.meet(PAUSES)
        as_ever()

    def meet(self, point: str = TRAINS) -> None:
        """What any rank was asked to do, all do before a training batch, or after the last.
        Collective.

        Streams may be of unequal lengths: a rank that pauses while others train goes on alone, and
        meets them later.

        Raises:
            SIGTERMException, KeyboardInterrupt: the job ends, on all ranks at this batch.
            RuntimeMismatchError: some ranks are done, others are not.
        """
        pauses = True
        while pauses:
            asked = [*(self._asked == number for number in ENDING), self._requeued.is_set()]
            ends, interrupts, requeues, trains, pauses, over = any_rank(
                [*asked, *(point == each for each in POINTS)]
            )
            self._is_alone = point == PAUSES and (trains or over)
            if point == PAUSES:
                return
        if trains and over:
            # All ranks are here: those that pause have met once more.
            stopped = all_gather_object(bool(self._trainer.should_stop))
            if any(stopped) and not all(stopped):
                raise _stopped_alone([rank for rank, stops in enumerate(stopped) if stops])
            raise RuntimeMismatchError(
                "some ranks have no more training batches, others have", EQUALLY_MANY
            )
        if requeues:
            self._requeued.clear()
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]  # the frame is not looked at
        if ends:
            self._connector.received_sigterm = True
            raise SIGTERMException
        if interrupts:
            # What comes late is no second Ctrl+C.
            self._asked = self._asked or signal.SIGINT
            # As Lightning does once it shuts down.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

    def check_together(self) -> None:
        """RuntimeMismatchError where others do not come to what this rank is about to do with
        them.
        """
        if self._is_alone and self._trainer.should_stop:
            raise _stopped_alone([self._trainer.global_rank])
        if self._is_alone:
            here = "an evaluation" if self._trainer.validating else "the end of an epoch"
            problem = f"rank {self._trainer.global_rank} is at {here}, where it needs all ranks: others still train"
            raise RuntimeMismatchError(problem, EQUALLY_MANY)

    # What is asked: in the main thread by handlers, in others by the listener and the watch

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """The first time take note; again (by hand, or after `INTERRUPT_SECONDS`): now, wherever
        this is.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._ask(signum)

    def _listen(self, end: socket.socket) -> None:
        """Signals as they come, one byte each: while the main thread waits in a collective its
        handlers do not run.
        """
        while numbers := end.recv(16):
            for number in numbers:
                if number in ENDING:
                    self._ask(number)
        end.close()

    def _ask(self, signum: int, frame: FrameType | None = None) -> None:
        if self._asked is None:
            self._watch.tell(str(signum))
        self._begin_to_end(signum, interrupts=self._old_interrupt is not None)

    def _begin_to_end(self, signum: int, interrupts: bool) -> None:
        if self._asked is not None:
            return
        self._asked = signum
        self._timers = [threading.Timer(END_SECONDS, self._end)]
        if signum == signal.SIGINT and interrupts:
            self._timers.append(threading.Timer(INTERRUPT_SECONDS, self._interrupt))
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def _interrupt(self) -> None:
        self._interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _end(self) -> None:
        assert self._asked is not None
        ends = f"ends {END_SECONDS:.0f} s after {signal.Signals(self._asked).name}, in the middle of its work"
        print(f"\nalpa: rank {self._trainer.global_rank} {ends}", file=sys.stderr, flush=True)
        self._watch.end_process(128 + self._asked, CHILD_SECONDS)
