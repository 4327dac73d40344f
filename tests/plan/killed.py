"""Runs a function in a child process that is killed after it has stored `n` results."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from alpa_strategy import partial_results
from alpa_strategy.partial_results import PartialResults


def in_child(work: Callable[[], object], folder: Path, kill_after: int | None = None) -> int:
    """Run `work` in a forked process, inside `folder`; every result is stored, however quick.

    What it says on stderr is in `folder/said` afterwards, the number of results that it stored in
    `folder/stored`.

    Args:
        kill_after: results, after which SIGKILL ends it.

    Returns:
        The exit code; -9 where it was killed.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            sys.stderr = (folder / "said").open("w", buffering=1)
            _count(folder / "stored", kill_after)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _count(path: Path, kill_after: int | None) -> None:
    """Store all results from here on, write their number to `path`, and die after `kill_after`."""
    partial_results.LEAST_SECONDS = 0.0
    write = PartialResults._write
    count = 0

    def counted(self: PartialResults, *arguments: object) -> None:
        nonlocal count
        write(self, *arguments)
        count += 1
        path.write_text(str(count))
        if count == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    path.write_text("0")
    PartialResults._write = counted
