"""FailureWatch: an exception on one rank ends all ranks of the job.

The failing rank writes its traceback to the job's store (the one that formed the process group). A
thread on every rank polls it once a second. That needs no collectives, so it also works while the
main thread hangs in one. A rank that was killed writes nothing: the others name it, as it does not
answer.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from alpa_strategy.errors import AlpaError, LostRankError

POLL_SECONDS = 1.0
GRACE_SECONDS = 2.0
LOST_SECONDS = 6.0
_NO_STORE = "rank 0 is gone, and the job's store with it"

# Keys of the store. `seen/{rank}` is set by each rank that has read the cause.

# The first error of the job.
_CAUSE = "cause"
# A text for all ranks.
_TOLD = "told"
# Set when rank 0 has ended well.
_ENDED = "ended"
# Set by the failing rank when it has shown its traceback: no other rank needs to.
_SHOWN = "shown"

# First word of the text of an error that has a traceback.
_TRACEBACK = "Traceback"


class FailureWatch:
    """Watches the other ranks of the job between `start` and `stop`.

    Args:
        store: the job's store. Clones with separate connections are used, so that a main thread
            that is blocked in a call does not block the watch.
        children: returns the processes that this one launched; they are ended first.
        last: called after these have ended, just before this process ends.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        children: Callable[[], Sequence[subprocess.Popen]] = tuple,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        # A process may train several times with one store; every rank counts its own watches, in
        # step with the others.
        prefix = f"alpa/failure/{store.add(f'alpa/failure/runs/{rank}', 1)}"
        # A connection each: a store's calls wait for each other, and the main thread may hang in
        # one.
        self._watch_store = dist.PrefixStore(prefix, store.clone())
        self._main_store = dist.PrefixStore(prefix, store.clone())
        self._rank = rank
        self._world_size = world_size
        self._children = children
        self._last = last
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._word: str | None = None
        self.on_told: Callable[[str], None] | None = None  # called once, in the watch's thread
        self._thread = threading.Thread(target=self._watch, daemon=True, name="alpa-failure-watch")

    def start(self) -> None:
        """Start to watch, in a thread."""
        self._thread.start()

    def stop(self, ends_well: bool = True) -> None:
        """Stop to watch: this rank has ended its training.

        Args:
            ends_well: whether without an error.
        """
        self._stopped.set()
        if self._rank == 0 and ends_well:
            # The store may end with this process: slower ranks must not take that for a failure.
            with contextlib.suppress(RuntimeError):
                self._main_store.set(_ENDED, "")
        if self._thread.is_alive():
            # It takes longer only in a call to a store that is gone.
            self._thread.join(1.0)

    def publish(self, error: BaseException) -> None:
        """Report `error`, which is about to end this rank, to the other ranks, and give them time
        to read it.

        If another rank failed first, this process ends at once with a line that names that rank's
        error: `error` is then only the consequence (a closed connection). An error that all ranks
        raise together ends each rank by itself.
        """
        self._stopped.set()
        text = f"{type(error).__name__}: {error}"
        message = text.splitlines()[0]
        if isinstance(
            error, LostRankError
        ):  # at once: whoever launched the job may end it any moment
            print(f"\nalpa: {error.problem}", file=sys.stderr, flush=True)
        trace = text
        if not isinstance(error, AlpaError):
            lines = traceback.format_exception(error)
            trace = f"{_TRACEBACK} of rank {self._rank}\n{''.join(lines)}"
        text = f"{self._rank}\n{message}\n{trace}"
        try:
            first = self._main_store.compare_set(_CAUSE, "", text).decode()
            self._main_store.set(f"seen/{self._rank}", "seen")
            if first == text:
                self._report_when_shown(error)
                self._name_the_silent(self._main_store)
                time.sleep(0.2)  # the store may end with this process: let the last answer arrive
                end_children(self._children(), GRACE_SECONDS)
                return
        except RuntimeError:
            # No rank is left that reads it. An error of ours has named this rank already: rank 0
            # may have ended a moment earlier by the same one.
            if not isinstance(error, AlpaError):
                print(f"\nalpa: rank {self._rank} ends: {_NO_STORE}", file=sys.stderr, flush=True)
            return
        rank, first_message, _ = first.split("\n", 2)
        if int(rank) != self._rank and first_message != message:
            self._end_because_of(first, self._main_store)

    def _report_when_shown(self, error: BaseException) -> None:
        """Replace `sys.excepthook`, to let the others know when Python has shown `error`, as it
        does where a script ends.
        """
        show = sys.excepthook
        store = self._main_store
        # The error itself would keep its traceback's frames alive, and with them the training.
        reported = type(error), str(error)

        def shown(kind: Any, raised: BaseException, traceback: Any) -> None:
            show(kind, raised, traceback)
            if (type(raised), str(raised)) == reported:
                sys.stderr.flush()
                with contextlib.suppress(RuntimeError):  # no rank is left that reads it
                    store.set(_SHOWN, "")

        sys.excepthook = shown

    def tell(self, word: str) -> None:
        """Send a word to all ranks (the first one counts): `on_told` is called with it on each. It
        may be called from a signal handler.
        """
        self._word = word

    def _pass_on(self) -> None:
        """Send this rank's pending word, and receive those of others, in the watch's thread.
        `on_told` is called once, with the first.
        """
        if self._word is not None:
            self._watch_store.compare_set(_TOLD, "", self._word)
            self._word = None
        if self.on_told is not None and self._watch_store.check([_TOLD]):
            on_told, self.on_told = self.on_told, None
            on_told(self._watch_store.get(_TOLD).decode())

    def _name_the_silent(self, store: Any) -> None:
        """Wait until every rank has seen the cause of a failure, and print the ranks that have not
        within the grace period: these were lost.
        """
        deadline = time.monotonic() + GRACE_SECONDS + 2 * POLL_SECONDS
        silent = list(range(self._world_size))
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([f"seen/{rank}"])]
            time.sleep(0.05)
        if silent:
            noun = "ranks" if len(silent) > 1 else "rank"
            ranks = f"{noun} {', '.join(map(str, silent))}"
            text = (
                f"\nalpa: rank {self._rank}: no sign of life from {ranks}: ended, stopped or killed"
            )
            print(text, file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """Poll the store until the job ends or fails; in the thread of the watch. Ends this process
        if a rank has failed or the store is gone.
        """
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._pass_on()
                if self._watch_store.check([_ENDED]):
                    return
                failed = self._watch_store.check([_CAUSE])
                first = self._watch_store.get(_CAUSE).decode() if failed else ""
            except RuntimeError:
                # Rank 0 has ended, and this rank has no more work without it.
                if not self._stopped.wait(LOST_SECONDS):
                    print(
                        f"\nalpa: rank {self._rank} ends: {_NO_STORE}", file=sys.stderr, flush=True
                    )
                    self.end_process()
                return
            if failed:
                with contextlib.suppress(RuntimeError):  # rank 0 may end before it could be told
                    self._watch_store.set(f"seen/{self._rank}", "seen")
                # An error that all ranks raise together reaches this rank's main thread by itself.
                if self._stopped.wait(GRACE_SECONDS / 2):
                    return
                self._end_because_of(first, self._watch_store)

    def _end_because_of(self, text: str, store: Any) -> None:
        """Name another rank's error in a line, name the ranks that were lost, and end; whichever of
        the two threads comes first. `text` has its rank, a line on it and its traceback.

        The failing rank shows its traceback itself. Only if it does not (it hangs, or its script
        goes on past the error) does rank 0 show it. An AlpaError has no traceback to be shown, and
        ranks other than 0 say but its first line: here rank 0 says all of it.
        """
        self._ending.acquire()  # never released: the process ends
        rank, message, trace = text.split("\n", 2)
        has_traceback = trace.startswith(_TRACEBACK)
        shows_all = self._rank == 0 and not has_traceback
        error = trace if shows_all else message
        sys.stdout.flush()
        line = f"\nalpa: rank {self._rank} ends because rank {rank} failed: {error}"
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._name_the_silent(store)
        if has_traceback and self._rank == 0 and not _is_shown(store):
            print(f"\nalpa: rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        self.end_process()

    def end_process(self, code: int = 1, grace_seconds: float = GRACE_SECONDS) -> None:
        """End this process and its children at once: its main thread may hang in a collective for
        good.

        Args:
            code: the exit status.
            grace_seconds: in which the children may end by themselves.
        """
        end_children(self._children(), grace_seconds)
        self._last()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _is_shown(store: Any) -> bool:
    """Whether the failing rank shows its own error, within `GRACE_SECONDS`."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        try:
            if store.check([_SHOWN]):
                return True
        except RuntimeError:  # the store has ended with its process
            return False
        time.sleep(0.05)
    return False


def end_children(children: Sequence[subprocess.Popen], grace_seconds: float) -> None:
    """Wait up to `grace_seconds` for `children` to end by themselves, then kill what is left: no
    orphan stays behind.
    """
    deadline = time.monotonic() + grace_seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
