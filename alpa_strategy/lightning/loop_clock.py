"""Seconds of a training that neither the ops of a step nor its optimizer take: the Trainer's loop.

Known only by running it: what callbacks, loggers and the loader do is the user's. The first steps
are watched; the prediction that later steps are compared with has the median of these.
"""

import statistics
import time

# The first steps, of which the very first loads code, connections and the allocator's memory.
WATCHED_STEPS = range(1, 5)


class LoopClock:
    """Adds up the time between an optimizer's step and the next ops, and between ops and backward.

    The methods are called as a step goes on, each marking where a part begins or ends.
    """

    def __init__(self) -> None:
        self._outside_since: float | None = None
        self._outside = 0.0
        self._steps: list[float] = []

        # Whether enough steps were watched.
        self.is_done = False

    @property
    def seconds(self) -> float | None:
        """Median seconds of a step; None until enough were watched."""
        if not self.is_done:
            return None
        return statistics.median(self._steps[1 + WATCHED_STEPS.start :])

    def leave(self) -> None:
        """Note that the ops of a step, or of its optimizer, have ended: the Trainer's loop runs."""
        if not self.is_done:
            self._outside_since = time.perf_counter()

    def enter(self) -> None:
        """Note that the ops of a step, or its backward, begin."""
        if self._outside_since is not None:
            self._outside += time.perf_counter() - self._outside_since
            self._outside_since = None

    def end_step(self) -> None:
        """Note that the next training step begins: the seconds so far belong to the last one.

        Does nothing once enough steps were watched.
        """
        if not self.is_done:
            self._steps.append(self._outside)
            self._outside = 0.0
            # The first entry is of no step.
            self.is_done = len(self._steps) > WATCHED_STEPS.stop
