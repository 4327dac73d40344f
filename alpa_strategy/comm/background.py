"""Jobs beside the main thread, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Each job has a thread that waits for the one before and keeps no process alive: nothing has to be closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._last is not None and self._last.is_alive()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job; it is dropped when one before it has failed."""
        before = self._last

        def work() -> None:
            try:
                if before is not None:
                    before.join()
                if self._error is None:
                    job()
            except BaseException as error:  # raised in the main thread, by `wait`
                self._error = error

        self._last = threading.Thread(target=work, daemon=True, name=self._name)
        self._last.start()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when nothing is under way (or at the timeout); raise what failed."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        error, self._error = self._error, None
        if error is not None:
            raise error
