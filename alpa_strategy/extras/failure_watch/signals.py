"""Signals of one rank end all ranks of the job at the same step if possible, and within
`END_SECONDS` in any case.

Lightning's SIGTERM handler broadcasts from rank 0 within the handler: ranks that are in another
collective then wait for each other until it times out. Here a handler only stores the signal. A
thread, which receives the signal even while the main thread waits in a collective, notifies the
other ranks through the job's store. At the start of the next training batch all ranks reach
consensus that one received a signal, and end together (or save and requeue, under SLURM), as
Lightning would. A rank that does not get there in time (it plans, or a collective hangs) is ended.
"""

import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import all_gather_object, any_rank
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.extras.failure_watch.watch import FailureWatch

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
        """Replace Lightning's handling of signals, before it registers its handlers.

        Nothing is replaced outside of the main thread.
        """
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
        alone, and synchronizes with them later. Signals are handled when no rank pauses.

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
        """Check, before a collective, that all ranks come to it, by what this rank knows. No
        communication.

        Raises:
            RuntimeMismatchError: others are known to still train: this rank stops alone, or has
                come to an evaluation or an epoch's end before them.
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
        """Read signals from the socket, one byte each, until it is closed; `_receive` gets those
        that end a job.

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
        """Start the timers that end this process after a signal, if it does not end by itself.

        Args:
            signum: the signal; later ones start no timers.
            interrupts: whether SIGINT interrupts the main thread before the process ends.
        """
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
        """End this process, which has not ended by itself in time, with a message and the status
        128 + signal.
        """
        assert self._ending_signal is not None
        name = signal.Signals(self._ending_signal).name
        rank = self._trainer.global_rank
        text = (
            f"\nalpa: rank {rank} ends {END_SECONDS:.0f} s after {name}, in the middle of its work"
        )
        print(text, file=sys.stderr, flush=True)
        self._watch.end_process(128 + self._ending_signal, CHILD_SECONDS)
