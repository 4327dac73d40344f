"""Whether all ranks come to the same dataloaders in an evaluation: Lightning reduces what was logged when a loader
ends, and a rank without a batch in it is not there. The others would wait, or add up what belongs to other loaders.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.lightning.loops import is_last_of_loader, next_loader, why_uneven


class SameLoaders:
    """Watches one evaluation loop; collective where the ranks may have different numbers of batches.

    As under DDP, a rank may lack a loader as long as nothing is synchronised.

    Args:
        trainer: in the loop's start hook.
        must_meet: whether the ranks compute their steps together.

    Raises:
        RuntimeMismatchError: (also `after_step`) a rank lacks a loader that others have, where they have to meet.
    """

    def __init__(self, trainer: Any, must_meet: bool) -> None:
        self._trainer, self._must_meet = trainer, must_meet
        self._apart: str | None = None  # which ranks lack which loader; they are not asked any more
        can_look = hasattr(trainer._active_loop._data_fetcher, "batches")  # not where steps fetch by themselves
        self._is_watching = world_size() > 1 and can_look and why_uneven(trainer) is not None
        if self._is_watching:
            self._meet(-1)

    def after_step(self, batch_idx: int = 0, dataloader_idx: int | None = None) -> None:
        """A step has run, on the batch of this number."""
        if self._is_watching and is_last_of_loader(self._trainer, batch_idx, dataloader_idx):
            self._meet(dataloader_idx or 0)

    def _meet(self, loader: int) -> None:
        """This rank is done with `loader`."""
        needed = self._must_meet or _synchronises(self._trainer)
        if self._apart is None:
            found: list[Any] = [None] * world_size()
            dist.all_gather_object(found, (next_loader(self._trainer, loader), needed))
            following, needs = zip(*found, strict=True)
            if len(set(following)) > 1:
                missed = min(each for each in following if each is not None)
                ranks = [rank for rank, each in enumerate(following) if each != missed]
                self._apart = f"ranks {ranks} have no batch of dataloader {missed} in this evaluation, the others have"
            needed = any(needs)
        if self._apart is not None and needed:
            raise RuntimeMismatchError(
                self._apart,
                "give every rank a batch of every dataloader (a DistributedSampler does), or, where the model fits "
                "into one device, log without sync_dist",
            )


def _synchronises(trainer: Any) -> bool:
    """Whether anything that this loop has logged is reduced over the ranks when a loader ends."""
    logged = (trainer._results or {}).values()
    return any(not each.is_tensor or (each.meta.sync.should and not each.meta.sync.rank_zero_only) for each in logged)
