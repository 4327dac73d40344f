"""What an evaluation loop of the Trainer is like, and whether all ranks come to the same dataloaders in it.

Lightning reduces what was logged when a loader ends, and a rank without a batch in it is not there. The others would
wait, or add up what belongs to other loaders.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.errors import RuntimeMismatchError

_LIGHTNING = ("lightning.", "pytorch_lightning.")


def hooks_look(trainer: Any, kind: str) -> bool:
    """Whether the user's own hooks run between the steps of an evaluation, where they may call the module.

    kind: `validation`, `test` or `predict`. Hooks of Lightning's own callbacks only look at results.
    """
    names = [f"on_{kind}_{when}" for when in ("epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
    owners = (trainer.lightning_module, *trainer.callbacks)
    methods = (getattr(type(owner), name, None) for owner in owners for name in names)
    return any(method is not None and not method.__module__.startswith(_LIGHTNING) for method in methods)


def why_uneven(trainer: Any) -> str | None:
    """Why some rank may have fewer batches than others in the evaluation loop that runs, or None. Collective."""
    loop = trainer._active_loop
    given = loop.max_batches
    lengths = list(given) if isinstance(given, list) else [given]
    loaders = loop._combined_loader.flattened
    if any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders) or math.inf in lengths:
        own = "an iterable dataset may end sooner on one rank than on another"
    else:
        own = str(lengths)
    if world_size() == 1:
        return None
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, own)
    streams = [text for text in found if not text.startswith("[")]
    if streams:
        return streams[0]
    return None if len(set(found)) == 1 else f"the ranks have different numbers of batches: {', '.join(found)}"


def is_last_of_loader(trainer: Any, batch_idx: int, dataloader_idx: int | None) -> bool:
    """Whether this rank has no more batches of this batch's dataloader in the evaluation loop that runs."""
    loop, loader = trainer._active_loop, dataloader_idx or 0
    if loop.batch_progress.is_last_batch or loop._combined_loader._mode != "sequential":
        return bool(loop.batch_progress.is_last_batch)
    ahead = getattr(loop._data_fetcher, "batches", ())  # known where a loader has no length
    return ahead[0][2] != loader if ahead else batch_idx + 1 >= loop.max_batches[loader]


def next_loader(trainer: Any, loader: int) -> int | None:
    """The dataloader of this rank's first batch after those of `loader` (-1: of all) in the evaluation loop that runs,
    None where it has none left."""
    loop = trainer._active_loop
    fetcher = loop._data_fetcher
    if fetcher.done:
        return None
    if loop._combined_loader._mode != "sequential":
        return 0
    if fetcher.batches:
        return fetcher.batches[0][2]
    return next(index for index, number in enumerate(loop.max_batches) if index > loader and number > 0)


def step_counters(trainer: Any, batch_idx: int) -> dict[str, int]:
    """What a step's guards and logs are asked about."""
    return {"batch_idx": batch_idx, "global_step": trainer.global_step, "current_epoch": trainer.current_epoch}


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
