"""Signals end a job as one: every rank at the same step where it can be, and within `END_SECONDS` in any case.

Lightning's SIGTERM handler broadcasts from within the handler, and only from rank 0: ranks that are in the middle of
another collective then wait for each other until it times out. Here a handler only takes note. A thread, which the
signal reaches even while the main thread waits in a collective, tells the other ranks through the job's store; at the
start of the next training batch all ranks agree that one was asked to end (or to save and requeue, under SLURM), and do
so together, as Lightning would. What has not come to that point in time (planning, a hanging collective) is ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from subprocess import Popen
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from alpa_strategy.comm.failure import FailureWatch, end_children

END_SECONDS = 7.0  # schedulers kill after 10 to 30; some of that passes until every rank knows
CHILD_SECONDS = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)


class JobSignals:
    """What this rank does about signals, from `install` to `remove`. Only in the main thread, and with several ranks.

    Args:
        watch: how ranks tell each other.
        children: the processes that this one launched.
    """

    def __init__(self, trainer: pl.Trainer, watch: FailureWatch, children: Callable[[], Sequence[Popen]]) -> None:
        self._trainer, self._watch, self._children = trainer, watch, children
        self._connector = trainer._signal_connector
        self._requeue = self._connector._slurm_sigusr_handler_fn
        self._asked: int | None = None  # the signal by which the job ends
        self._is_requeued = False
        self._timer: threading.Timer | None = None
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._old_wakeup = -1

    def install(self) -> None:
        """Take the place of what Lightning would do. Before it registers its handlers."""
        if threading.current_thread() is not threading.main_thread():
            return  # nor does Lightning get signals there
        self._connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[method-assign,assignment]
        self._connector._slurm_sigusr_handler_fn = self._on_requeue  # type: ignore[method-assign,assignment]
        self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.meet  # type: ignore[method-assign]
        self._watch.on_told = self._told
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(self._ends[0],), daemon=True, name="alpa-signals").start()

    def remove(self) -> None:
        """The Trainer is done: signals are the process's own again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ends is None:
            return
        signal.set_wakeup_fd(self._old_wakeup)
        self._ends[1].close()  # ends the listener
        self._ends = None
        for owner, name in (
            (self._connector, "_sigterm_notifier_fn"),
            (self._connector, "_slurm_sigusr_handler_fn"),
            (self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
        ):
            vars(owner).pop(name, None)

    def meet(self) -> None:
        """Before each training batch: what any rank was asked to do, all do now. Collective.

        Raises:
            SIGTERMException: the job ends, on all ranks at this batch.
        """
        asked = torch.tensor([self._asked == signal.SIGTERM, self._is_requeued], dtype=torch.int32)
        asked = asked.to(self._trainer.strategy.root_device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        ends, requeues = asked.tolist()
        if requeues:
            self._is_requeued = False
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]  # the frame is not looked at
        if ends:
            self._connector.received_sigterm = True
            raise SIGTERMException

    # What is asked: in the main thread by handlers, in others by the listener and the watch

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._ask(signum)

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._is_requeued = True

    def _listen(self, end: socket.socket) -> None:
        """Signals as they come, one byte each: while the main thread waits in a collective its handlers do not run."""
        end.setblocking(True)
        while numbers := end.recv(16):
            for number in numbers:
                if number in ENDING:
                    self._ask(number)
        end.close()

    def _ask(self, signum: int) -> None:
        if self._asked is None:
            self._watch.tell(str(signum))
            self._begin_to_end(signum)

    def _told(self, word: str) -> None:
        """Another rank was asked to end."""
        if self._asked is None:
            self._begin_to_end(int(word))
            if int(word) == signal.SIGINT:
                os.kill(os.getpid(), signal.SIGINT)  # as if Ctrl+C had reached this rank too

    def _begin_to_end(self, signum: int) -> None:
        self._asked = signum
        self._timer = threading.Timer(END_SECONDS, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        assert self._asked is not None
        name = signal.Signals(self._asked).name
        text = (
            f"\nalpa: rank {self._trainer.global_rank} ends {END_SECONDS:.0f} s after {name}, in the middle of its work"
        )
        print(text, file=sys.stderr, flush=True)
        end_children(self._children(), CHILD_SECONDS)
        sys.stdout.flush()
        os._exit(128 + self._asked)


def install_signals(
    trainer: Any, watch: FailureWatch | None, children: Callable[[], Sequence[Popen]]
) -> JobSignals | None:
    """`JobSignals`, installed; None on one rank, where Lightning's own handlers do."""
    if watch is None:
        return None
    signals = JobSignals(trainer, watch, children)
    signals.install()
    return signals
