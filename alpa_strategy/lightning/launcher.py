"""Launcher: Lightning's subprocess launcher, except that it says which rank was lost before it ends the others.

Lightning's own observer kills all processes silently at a random moment within 5 s of a child's death.
"""

from __future__ import annotations

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

CHILD_POLL_SECONDS = 0.5
REPORT_SECONDS = 15.0  # that the other ranks have to say what they know and to end by themselves


class Launcher(_SubprocessScriptLauncher):
    """Starts the script again for every other rank of this node, and ends them all when one is lost."""

    def __init__(self, cluster_environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._ending = threading.Event()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            first_rank = self.cluster_environment.node_rank() * self.num_processes + 1
            watch = threading.Thread(
                target=watch_children,
                args=(self.procs, first_rank, self._ending),
                daemon=True,
                name="alpa-child-watch",
            )
            watch.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        self._ending.set()
        super().kill(signum)

    def children_to_end(self) -> Sequence[subprocess.Popen]:
        """The children, for a caller that ends them: what becomes of them from here on is no news."""
        self._ending.set()
        return self.procs


def watch_children(children: Sequence[subprocess.Popen], first_rank: int, ending: threading.Event) -> None:
    """Until all have ended well, or one has not: name it, and after `REPORT_SECONDS` kill the rest and this process.

    Args:
        first_rank: global rank of the first child.
        ending: set by who ends the children: nothing is left to watch.
    """
    while not any(codes := [child.poll() for child in children]):
        if all(code == 0 for code in codes) or ending.wait(CHILD_POLL_SECONDS):
            return
    for rank, (child, code) in enumerate(zip(children, codes, strict=True), start=first_rank):
        if code is not None and code < 0:
            print(f"\nalpa: rank {rank} (process {child.pid}) {_how(-code)}", file=sys.stderr, flush=True)
    if ending.wait(REPORT_SECONDS):
        return
    for child in children:
        if child.poll() is None:
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _how(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = "; out of memory is a common reason" if number == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
