"""Full values of checkpoint entries of which each rank has a shard, for hooks that compute with
them.

`on_save_checkpoint` runs on every rank, but need not do the same on all: `if
trainer.is_global_zero: ...` is common. So ranks exchange requests. In each exchange a rank names
the entry that it waits for, or None if it has come to the next collective. All ranks gather the
entries that any of them waits for, and no rank enters the collective before all have come to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.collectives import all_gather_object
from alpa_strategy.errors import CheckpointError


@dataclass(eq=False)
class Entry:
    """A tensor of a checkpoint of which this process stores a shard."""

    # The entries of the same checkpoint.
    owner: "LazyEntryGather"

    # Its index among these, the same on all ranks; -1: it is of an earlier checkpoint.
    number: int

    # Returns the full tensor; collective unless `is_local`.
    gather: Callable[[], Tensor]

    # Writes this rank's shard of a full tensor into the training's; no communication.
    put: Callable[[Tensor], None]

    # Whether this rank stores all of it.
    is_local: bool

    # The `LocalShards` that this rank writes of it.
    held: Any = None

    # The full tensor, if views of it may be in use.
    cached: Tensor | None = None

    # A copy of `cached` as it was gathered. The version of `cached` does not show changes: views
    # that an operation returns within `__torch_dispatch__` have versions of their own.
    gathered: Tensor | None = None

    def full(self, keeps: bool) -> Tensor:
        """Return the full tensor. Collective: see `LazyEntryGather.full`.

        Args:
            keeps: whether the caller may return a view of it, or change it in place. All later
                calls then return the same memory.
        """
        if self.cached is not None:
            return self.cached
        if self.is_local:
            return self.gather()
        tensor = self.owner.full(self)
        if keeps:
            self.cached = tensor
            self.gathered = tensor.clone()
        return tensor

    @property
    def is_changed(self) -> bool:
        """Whether a hook has changed it in place."""
        if self.cached is None or self.gathered is None:
            return False
        return not torch.equal(self.cached, self.gathered)


class LazyEntryGather:
    """Gathers entries of the checkpoint that is being made, on ranks that need different ones.

    Args:
        group: all ranks of the job, with a CPU backend; None for one process.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._entries: list[Entry] = []

    def begin(self) -> None:
        """Start another checkpoint: entries of the earlier one cannot be gathered any more."""
        for entry in self._entries:
            entry.number = -1
            entry.held = None
            entry.cached = None
            entry.gathered = None
        self._entries = []

    def add(
        self, gather: Callable[[], Tensor], put: Callable[[Tensor], None], is_local: bool
    ) -> Entry:
        """Add an entry to the checkpoint, in the same order on all ranks.

        Args:
            gather: returns the full tensor; collective unless `is_local`.
            put: writes this rank's shard of a full tensor into the training's.
            is_local: whether this rank stores all of it.
        """
        entry = Entry(self, len(self._entries), gather, put, is_local)
        self._entries.append(entry)
        return entry

    def full(self, entry: Entry) -> Tensor:
        """Return the entry's full tensor.

        Collective: the other ranks call this method for any entry, or `finish`.

        Raises:
            CheckpointError: it is an entry of an earlier checkpoint.
        """
        _check_current(entry.number)
        tensor = self._gathered(self._requested(entry.number), entry.number)
        assert tensor is not None
        return tensor

    def finish(self) -> None:
        """Gather entries that other ranks wait for, until every rank has called this method.

        No communication if every rank stores all entries.
        """
        while self._is_sharded:
            numbers = self._requested(None)
            self._gathered(numbers, None)
            if not numbers:
                return

    def held(self, number: int) -> Any:
        """Return the `LocalShards` that this rank writes of an entry.

        Raises:
            CheckpointError: it is an entry of an earlier checkpoint.
        """
        _check_current(number)
        return self._entries[number].held

    def take_changes(self) -> bool:
        """Write entries that hooks have changed in place into the shards of the training.

        Under DDP entries are the parameters themselves, so such changes count there too. Collective
        if there are shards.

        Returns:
            Whether any rank had changes; False if every rank stores all entries.
        """
        changed = [entry for entry in self._entries if entry.is_changed]
        with torch.inference_mode(False), torch.no_grad():
            for entry in changed:
                assert entry.cached is not None
                entry.put(entry.cached)
        return self._is_sharded and any(all_gather_object(bool(changed), self._group))

    @property
    def _is_sharded(self) -> bool:
        """Return whether any entry is in another process."""
        return not all(entry.is_local for entry in self._entries)

    def _requested(self, number: int | None) -> list[int]:
        """Return the numbers of the entries that any rank waits for, in ascending order.

        Args:
            number: of this rank's entry; None if it waits for none.
        """
        numbers = all_gather_object(number, self._group)
        return sorted({number for number in numbers if number is not None})

    def _gathered(self, numbers: list[int], requested: int | None) -> Tensor | None:
        """Gather entries on all ranks, and return the one that this rank has requested, or None.
        Collective.

        Args:
            numbers: of the entries, the same on all ranks.
            requested: number of this rank's; None: it has requested none.
        """
        result: Tensor | None = None
        # A tensor that is made under inference mode (a validation's end) cannot be changed later.
        with torch.inference_mode(False), torch.no_grad():
            for number in numbers:
                tensor = self._entries[number].gather()
                if number == requested:
                    result = tensor
        return result


def _check_current(number: int) -> None:
    """Check that entry `number` is one of the checkpoint that is being made (not negative).

    Raises:
        CheckpointError: it is one of an earlier checkpoint.
    """
    if number < 0:
        raise CheckpointError(
            "an entry of an earlier checkpoint was used, of which each rank stores a shard",
            "clone the tensors that are to be used later while the checkpoint is made"
            " (on_save_checkpoint)",
        )
