"""Signals end a job as one: every rank at the same step where it can be, and within `END_SECONDS` in any case.

Lightning's SIGTERM handler broadcasts from within the handler, and only from rank 0: ranks that are in the middle of
another collective then wait for each other until it times out. Here a handler only takes note. A thread, which the
signal reaches even while the main thread waits in a collective, tells the other ranks through the job's store; at the
start of the next training batch all ranks agree that one was asked to end (or to save and requeue, under SLURM), and do
so together, as Lightning would. What has not come to that point in time (planning, a hanging collective) is ended.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import any_rank
from alpa_strategy.comm.failure import FailureWatch

END_SECONDS = 5.0  # schedulers kill after 10 to 30; some of that passes until every rank knows
INTERRUPT_SECONDS = 2.0
CHILD_SECONDS = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)


class JobSignals:
    """What this rank does about signals, from `install` to `remove`. Only in the main thread, and with several ranks.

    Args:
        watch: how ranks tell each other, and end.
    """

    def __init__(self, trainer: pl.Trainer, watch: FailureWatch) -> None:
        self._trainer, self._watch = trainer, watch
        self._connector = trainer._signal_connector
        self._requeue = self._connector._slurm_sigusr_handler_fn
        self._asked: int | None = None  # the signal by which the job ends
        self._is_requeued = self._interrupted = False
        self._timers: list[threading.Timer] = []
        self._taken = ExitStack()  # what stands in the place of Lightning's and the process's own
        self._old_interrupt: Any = None

    def install(self) -> None:
        """Take the place of what Lightning would do. Before it registers its handlers."""
        if threading.current_thread() is not threading.main_thread():
            return  # nor does Lightning get signals there
        taken = [
            (self._connector, "_sigterm_notifier_fn", self._ask),
            (self._connector, "_slurm_sigusr_handler_fn", self._on_requeue),
            (self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.meet),
        ]
        self._taken.enter_context(patched(taken))
        self._watch.on_told = self._told
        heard, rung = socket.socketpair()
        rung.setblocking(False)
        listener = threading.Thread(target=self._listen, args=(heard,), daemon=True, name="alpa-signals")
        listener.start()
        self._taken.callback(listener.join, 1.0)
        self._taken.callback(rung.close)  # ends the listener
        before = signal.set_wakeup_fd(rung.fileno(), warn_on_full_buffer=False)
        self._taken.callback(signal.set_wakeup_fd, before)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the user's own, or ignored
            self._old_interrupt = signal.signal(signal.SIGINT, self._on_interrupt)
            self._taken.callback(self._give_interrupt_back)

    def remove(self) -> None:
        """The Trainer is done: signals are the process's own again."""
        for timer in self._timers:
            timer.cancel()
        self._taken.close()

    def _give_interrupt_back(self) -> None:
        self._connector._original_handlers[signal.SIGINT] = self._old_interrupt  # what its teardown restores
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._old_interrupt)

    def meet(self) -> None:
        """Before each training batch: what any rank was asked to do, all do now. Collective.

        Raises:
            SIGTERMException, KeyboardInterrupt: the job ends, on all ranks at this batch.
        """
        ends, interrupts, requeues = any_rank([*(self._asked == number for number in ENDING), self._is_requeued])
        if requeues:
            self._is_requeued = False
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]  # the frame is not looked at
        if ends:
            self._connector.received_sigterm = True
            raise SIGTERMException
        if interrupts:
            self._asked = self._asked or signal.SIGINT  # what comes late is no second Ctrl+C
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does once it shuts down
            raise KeyboardInterrupt

    # What is asked: in the main thread by handlers, in others by the listener and the watch

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """The first time take note; again (by hand, or after `INTERRUPT_SECONDS`): now, wherever this is."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._ask(signum)

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._is_requeued = True

    def _listen(self, end: socket.socket) -> None:
        """Signals as they come, one byte each: while the main thread waits in a collective its handlers do not run."""
        while numbers := end.recv(16):
            for number in numbers:
                if number in ENDING:
                    self._ask(number)
        end.close()

    def _ask(self, signum: int, frame: FrameType | None = None) -> None:
        if self._asked is None:
            self._watch.tell(str(signum))
            self._begin_to_end(signum, interrupts=self._old_interrupt is not None)

    def _told(self, word: str) -> None:
        """Another rank was asked to end."""
        if self._asked is None:
            self._begin_to_end(int(word), interrupts=True)  # as if Ctrl+C had reached this rank, too

    def _begin_to_end(self, signum: int, interrupts: bool) -> None:
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
        name = signal.Signals(self._asked).name
        text = (
            f"\nalpa: rank {self._trainer.global_rank} ends {END_SECONDS:.0f} s after {name}, in the middle of its work"
        )
        print(text, file=sys.stderr, flush=True)
        self._watch.end_process(128 + self._asked, CHILD_SECONDS)
