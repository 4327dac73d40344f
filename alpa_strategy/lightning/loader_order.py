"""In which order a training's rows come: on one device that of the user's loader, bit for bit.

Lightning puts a DistributedSampler into every loader of a distributed strategy, also where there is
one rank. That sampler shuffles whatever the loader does, and by a random state of its own: the same
script without the strategy would see other batches. With several ranks it divides the rows, as it
does under DDP.
"""

from typing import Any


class LoaderOrder:
    """Whether Lightning divides the rows of a Trainer's loaders; what the user asked for is
    kept.
    """

    def __init__(self) -> None:
        # The user's `use_distributed_sampler`.
        self._divides_rows: bool | None = None

    def use(self, trainer: Any, world_size: int) -> None:
        """Let the Trainer divide samples between ranks if there are several, unless the user has
        switched `use_distributed_sampler` off.

        To be called when a run begins, before any loader is made.
        """
        connector = trainer._accelerator_connector
        if self._divides_rows is None:
            self._divides_rows = connector.use_distributed_sampler
        connector.use_distributed_sampler = self._divides_rows and world_size > 1

    def restore(self, trainer: Any) -> None:
        """Let the Trainer order samples as several ranks do, for one device that takes up an epoch
        that several have begun.
        """
        if self._divides_rows is not None:
            trainer._accelerator_connector.use_distributed_sampler = self._divides_rows
