"""Progress: the current phase of planning, and the seconds of each phase.

A spinner on a terminal, and a line when a phase ends.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console, RenderableType
from rich.text import Text

from alpa_strategy.display.console import make_console, plain
from alpa_strategy.units import format_seconds


class Progress:
    """Named phases: `phases = Progress()`, then `with phases("capture"): ...`.

    Args:
        enabled: whether to print anything.
        console: on which to print; by default stderr, so that a piped result stays clean.
    """

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self.enabled = enabled
        self.console = console or make_console(stderr=True)
        self._open = 0

    def say(self, line_or_table: RenderableType) -> None:
        """Print a line or a table, if this is enabled."""
        if self.enabled:
            is_text = isinstance(line_or_table, str)
            self.console.print(plain(line_or_table, keeps_lines=True) if is_text else line_or_table)

    def tell(self, line: str) -> None:
        """Print a line of text, without markup, whatever names of files it has."""
        self.say(Text(line))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context of a phase: prints its seconds when it ends, and marks a phase that raised."""
        start = time.perf_counter()

        # rich has one live display at a time.
        spins = self.enabled and self.console.is_terminal and not self._open
        status = Text.assemble(("alpa", "bold"), " · ", plain(name))
        self._open += 1
        mark = ("✗", "red")
        try:
            with self.console.status(status) if spins else nullcontext():
                yield
            mark = ("✓", "green")
        finally:
            self._open -= 1
            if self.enabled:
                elapsed = format_seconds(time.perf_counter() - start)
                indent = " " + "  " * self._open
                line = Text.assemble(("alpa", "bold"), indent, mark, " ", plain(name), " ")
                self.console.print(line.append(elapsed, "dim"))


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # Bytes on macOS, KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024
