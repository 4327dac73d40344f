"""The extra at its hook point: what the strategy calls while a job runs."""

from collections.abc import Callable, Sequence
from subprocess import Popen
from typing import Any

from alpa_strategy.checkpoint.names import discard_unfinished
from alpa_strategy.extras.failure_watch.launcher import Launcher
from alpa_strategy.extras.failure_watch.signals import ENDS, PAUSES, JobSignals
from alpa_strategy.extras.failure_watch.watch import FailureWatch


def launcher(cluster_environment: Any, num_processes: int, num_nodes: int) -> Launcher:
    """Return a launcher for the other ranks of this node, which ends all if one is lost."""
    return Launcher(cluster_environment, num_processes, num_nodes)


def start(store: Any, rank: int, world_size: int, launcher: Any) -> "JobWatch":
    """Start to watch the other ranks; see `hook_points.FailureWatchExtra`."""
    return JobWatch(store, rank, world_size, launcher)


class JobWatch:
    """Watches the other ranks, and handles signals for all of them, until `stop`.

    Args: as of `start`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, launcher: Any) -> None:
        children: Callable[[], Sequence[Popen]] = tuple
        if isinstance(launcher, Launcher):
            children = launcher.children_to_end
        self._watch = FailureWatch(store, rank, world_size, children, last=discard_unfinished)
        self._watch.start()
        self._signals: JobSignals | None = None

    def handle_signals(self, trainer: Any) -> None:
        """Handle signals from now on, instead of Lightning."""
        self._signals = JobSignals(trainer, self._watch)
        self._signals.install()

    def before_evaluation(self) -> None:
        """Tell the other ranks that this one pauses, and check that all do. Collective.

        Raises:
            RuntimeMismatchError: other ranks still train, or have no more batches.
        """
        if self._signals is not None:
            self._signals.meet(PAUSES)
            self._signals.check_together()

    def before_exchange(self) -> None:
        """Check that all ranks come to the exchange.

        Raises:
            RuntimeMismatchError: other ranks still train.
        """
        if self._signals is not None:
            self._signals.check_together()

    def after_last_batch(self) -> None:
        """Handle the signals of all ranks. Collective.

        Raises:
            RuntimeMismatchError: other ranks still train.
        """
        if self._signals is not None:
            self._signals.meet(ENDS)

    def failed(self, error: BaseException) -> None:
        """Report `error` to the other ranks, so that they end as well."""
        self._watch.publish(error)

    def stop(self, ends_well: bool) -> None:
        """Stop to watch and to handle signals. `ends_well`: without an error. No communication."""
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        self._watch.stop(ends_well)
