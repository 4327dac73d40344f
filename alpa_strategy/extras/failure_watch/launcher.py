"""The launcher of a job's ranks on one node, which ends all of them if one is lost.

Lightning's own launcher kills the others silently within 5 s. Here it is reported which one was
lost, and the others have time to report why they end.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from alpa_strategy.checkpoint.names import discard_unfinished
from alpa_strategy.lightning.exit_text import exit_text

CHILD_POLL_SECONDS = 0.5

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
        """Start the other ranks of this node, unless a job manager does, and return the result of
        `function` on this one.
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


def _report_ended(rank: int) -> None:
    """Report a rank that has not noticed the lost one, because it plans or waits for the plan."""
    text = (
        f"\nalpa: rank {rank} is ended: it was still at work {REPORT_SECONDS:.0f} s after another"
        " was lost"
    )
    print(text, file=sys.stderr, flush=True)
