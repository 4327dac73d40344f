"""Full values of checkpoint entries of which each rank has a shard, for hooks that compute with
them.

`on_save_checkpoint` runs on every rank, but need not do the same on all: `if
trainer.is_global_zero: ...` is common. So ranks meet in rounds. In each a rank names the entry that
it waits for, or None when it has come to the next collective; all ranks gather what any of them
waits for, and nobody goes on to the collective before all have come to it.
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
    """A tensor of a checkpoint of which this process holds a shard."""

    owner: "LazyEntryGather"
    # Its place among the entries of one checkpoint, the same on all ranks; -1: of an earlier one.
    number: int
    gather: Callable[[], Tensor]  # the full tensor; collective unless `is_local`
    put: Callable[[Tensor], None]  # writes this rank's shard of a full tensor; no communication
    is_local: bool  # this rank holds all of it
    held: Any = None  # the `LocalShards`: what this rank writes of it
    cached: Tensor | None = None  # the full tensor, where views of it may be in use
    # `cached` as it was gathered: versions of tensors do not tell, as views that an operation gives
    # within `__torch_dispatch__` have versions of their own.
    gathered: Tensor | None = None

    def full(self, keeps: bool) -> Tensor:
        """The full tensor. Collective with what the other ranks do in `LazyEntryGather`.

        Args:
            keeps: the result may be a view of it, or changes it in place: all later results are of
                the same memory.
        """
        if self.cached is not None:
            return self.cached
        if self.is_local:
            return self.gather()
        tensor = self.owner.full(self)
        if keeps:
            self.cached, self.gathered = tensor, tensor.clone()
        return tensor

    @property
    def is_changed(self) -> bool:
        """Whether a hook has changed it in place."""
        if self.cached is None or self.gathered is None:
            return False
        return not torch.equal(self.cached, self.gathered)


class LazyEntryGather:
    """The entries of the checkpoint that is being made. See the file's docstring.

    Args:
        group: all ranks of the job, with a CPU backend; None for one process.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._entries: list[Entry] = []

    def begin(self) -> None:
        """The entries that are added from now on are those of another checkpoint."""
        for entry in self._entries:
            entry.number, entry.held = -1, None
            entry.cached = entry.gathered = None
        self._entries = []

    def add(
        self, gather: Callable[[], Tensor], put: Callable[[Tensor], None], is_local: bool
    ) -> Entry:
        """Another entry of the checkpoint, in the same order on all ranks."""
        entry = Entry(self, len(self._entries), gather, put, is_local)
        self._entries.append(entry)
        return entry

    def full(self, entry: Entry) -> Tensor:
        """The entry's full tensor. Collective: the others do the same, or come to `finish`.

        Raises:
            CheckpointError: it is an entry of an earlier checkpoint, which is not held any more.
        """
        _check_current(entry.number)
        tensor = self._round(entry)
        assert tensor is not None
        return tensor

    def finish(self) -> None:
        """Return when every rank has come here; gather what others wait for until then.

        No communication where there is nothing to gather.
        """
        while self._is_divided and self._is_wanted_anywhere():
            pass

    def held(self, number: int) -> Any:
        """What this rank writes of an entry.

        Raises:
            CheckpointError: it is an entry of an earlier checkpoint.
        """
        _check_current(number)
        return self._entries[number].held

    def take_changes(self) -> bool:
        """Bring what hooks have changed in place into the shards of the training, as under DDP,
        where entries are the parameters themselves. Returns whether any rank had changes.
        Collective where there are shards.
        """
        changed = [entry for entry in self._entries if entry.is_changed]
        with torch.inference_mode(False), torch.no_grad():
            for entry in changed:
                assert entry.cached is not None
                entry.put(entry.cached)
        return self._is_divided and any(all_gather_object(bool(changed), self._group))

    @property
    def _is_divided(self) -> bool:
        return not all(entry.is_local for entry in self._entries)

    def _is_wanted_anywhere(self) -> bool:
        numbers = self._wanted(None)
        self._gathered(numbers, None)
        return bool(numbers)

    def _round(self, entry: Entry) -> Tensor | None:
        return self._gathered(self._wanted(entry.number), entry.number)

    def _wanted(self, own: int | None) -> list[int]:
        """Numbers of the entries that some rank waits for."""
        numbers = all_gather_object(own, self._group)
        return sorted({number for number in numbers if number is not None})

    def _gathered(self, numbers: list[int], own: int | None) -> Tensor | None:
        """Gather these entries on all ranks; returns that of number `own`."""
        mine: Tensor | None = None
        # A tensor that is made under inference mode (a validation's end) cannot be changed later.
        with torch.inference_mode(False), torch.no_grad():
            for number in numbers:
                tensor = self._entries[number].gather()
                if number == own:
                    mine = tensor
        return mine


def _check_current(number: int) -> None:
    if number < 0:
        raise CheckpointError(
            "an entry of an earlier checkpoint was used, of which each rank holds a shard",
            "clone what is to be used later while the checkpoint is made (on_save_checkpoint)",
        )
