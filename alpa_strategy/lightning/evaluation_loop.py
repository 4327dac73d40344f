"""What an evaluation loop of the Trainer is like, and whether all ranks come to the same
dataloaders in it.

Lightning reduces logged values when a loader ends; a rank without a batch in it would be waited
for, or mix loaders up.
"""

from typing import Any

from alpa_strategy.comm.collectives import all_gather_object, any_rank, broadcast_tensors
from alpa_strategy.errors import RuntimeMismatchError


def next_loader(trainer: Any, loader: int, batch_idx: int) -> int | None:
    """Return the index of the dataloader of this rank's next batch in the running evaluation loop;
    None if it has no batch left. 0 unless loaders come one after the other.

    Args:
        loader: index of the dataloader of the last batch; -1: there is none yet.
        batch_idx: number of the last batch.
    """
    loop = trainer._active_loop
    if loop._data_fetcher.done:
        return None
    if loop._combined_loader._mode != "sequential":
        return 0
    # (batch, batch_idx, dataloader_idx): without a length.
    if ahead := getattr(loop._data_fetcher, "batches", ()):
        return ahead[0][2]
    if loader >= 0 and batch_idx + 1 < loop.max_batches[loader]:
        return loader
    return next(
        index for index, number in enumerate(loop.max_batches) if index > loader and number > 0
    )


def is_last_of_loader(trainer: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> bool:
    """Whether this rank has no more batches of this batch's dataloader in the evaluation loop that
    runs.
    """
    loader = dataloader_idx or 0
    return next_loader(trainer, loader, batch_idx) != loader


# Counters that are attributes of the Trainer.
_OF_TRAINER = ("global_step", "current_epoch")


class StepCounters(dict[str, Any]):
    """The counters that a step's guards and logs may read, by name.

    The Trainer's counters are read when they are asked for: few steps do, and reading both takes
    microseconds.
    """

    def __init__(self, trainer: Any, batch_idx: int) -> None:
        super().__init__(batch_idx=batch_idx)
        self._trainer = trainer

    def __missing__(self, name: str) -> int:
        if name not in _OF_TRAINER:
            raise KeyError(name)
        value: int = getattr(self._trainer, name)
        self[name] = value
        return value

    def all(self) -> dict[str, Any]:
        """Return the values of all counters."""
        return {**self, **{name: self[name] for name in _OF_TRAINER}}


class EvaluationLoop:
    """One evaluation loop as all ranks go through it together: dataloader by dataloader.
    Collective.

    As under DDP, a rank may lack a loader as long as nothing is synchronised. What is logged
    without `sync_dist` becomes all ranks' too: callbacks that monitor it (a checkpoint's name, a
    scheduler) must find the same everywhere.

    Args:
        trainer: in the loop's start hook.

    Raises:
        RuntimeMismatchError: (also `after_step`) a rank lacks a loader that others have, and
            something is synchronised.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Which ranks lack which loader; they are not asked any more.
        self._apart: str | None = None
        # Not where steps fetch themselves.
        self._is_watching = hasattr(trainer._active_loop._data_fetcher, "batches")
        self._buffers = [(buffer, buffer._version) for buffer in trainer.lightning_module.buffers()]
        if self._is_watching:
            self._meet(next_loader(trainer, -1, 0))

    def after_step(self, batch_idx: int = 0, dataloader_idx: int | None = None) -> None:
        """Note that the step of batch `batch_idx` of a dataloader (None: the only one) has run.

        After the last batch of a dataloader, the ranks' logs are reduced and the ranks compare
        which dataloader comes next. That is collective. Nothing happens if the loop is not watched.
        """
        loader = dataloader_idx or 0
        if (
            self._is_watching
            and (following := next_loader(self._trainer, loader, batch_idx)) != loader
        ):
            if self._apart is None:
                _reduce_logs(self._trainer)
            self._meet(following)

    def end(self) -> None:
        """Give all ranks rank 0's buffers if the loop's steps have changed any, as DDP does. To be
        called when the loop has ended. Collective.
        """
        if any_rank([any(buffer._version != version for buffer, version in self._buffers)])[0]:
            broadcast_tensors(self._trainer.lightning_module.buffers())

    def _meet(self, next_loader: int | None) -> None:
        """Compare between ranks which dataloader comes next: `next_loader` on this rank.

        Collective, unless the ranks differed before.

        Raises:
            RuntimeMismatchError: they differ, and some logged value is reduced over ranks.
        """
        # Whether anything of it is reduced when a loader ends.
        logged = (self._trainer._results or {}).values()
        needed = any(
            not x.is_tensor or (x.meta.sync.should and not x.meta.sync.rank_zero_only)
            for x in logged
        )
        if self._apart is None:
            following, needs = zip(*all_gather_object((next_loader, needed)), strict=True)
            if len(set(following)) > 1:
                missed = min(loader for loader in following if loader is not None)
                ranks = [rank for rank, loader in enumerate(following) if loader != missed]
                self._apart = (
                    f"ranks {ranks} have no batch of dataloader {missed} in this evaluation, the"
                    " others have"
                )
            needed = any(needs)
        if self._apart is not None and needed:
            raise RuntimeMismatchError(
                self._apart,
                "give every rank a batch of every dataloader (a DistributedSampler does), or log"
                " without sync_dist",
            )


def _reduce_logs(trainer: Any) -> None:
    """Reduce over all ranks the values that all have logged without `sync_dist` in the dataloader
    that ends. Collective.
    """
    results = trainer._results
    if results is None:
        return
    items = {key: item for key, item in results.valid_items() if _is_left_alone(item)}
    for key in sorted(set.intersection(*map(set, all_gather_object(list(items))))):
        item = items[key]
        # Not `item.meta.sync.should = True`: Lightning would refuse the same `self.log` in the next
        # epoch. A mean is the sum of values times rows, over the rows: ranks with fewer rows weigh
        # less.
        how = "sum" if item.meta.is_mean_reduction else item.meta.reduce_fx.__name__
        item.value = trainer.strategy.reduce(item.value.clone(), reduce_op=how)
        if item.meta.is_mean_reduction:
            item.cumulated_batch_size = trainer.strategy.reduce(
                item.cumulated_batch_size.clone(), reduce_op=how
            )


def _is_left_alone(item: Any) -> bool:
    """Whether a result is accumulated on this rank and would not be reduced over the ranks."""
    return (
        item.is_tensor
        and item.meta.on_epoch
        and not (item.meta.sync.should or item.meta.sync.rank_zero_only)
    )
