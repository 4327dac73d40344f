"""Where a training is in its data: recorded in checkpoints, and taken up again exactly, shuffled or not.

Lightning restores its counters, but iterates the loader from its beginning. Here the loader is wound forward: the
epoch's random state is set again, and the batches that were trained on are loaded and dropped. Loaders that keep their
own state (`state_dict`) are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from alpa_strategy.lightning.random_state import random_state, set_random_state


@dataclass(frozen=True)
class Pass:
    """One iteration over a loader, as far as it has come.

    Attributes:
        start: random state before the iteration began; None: as it is.
        num_drawn: batches that were taken from it.
        num_ahead: of those, how many the Trainer has not used yet.
        before_last: random state before the last of them was taken, where that is known.
        epoch: which one it is, counted from 0 (and its sampler's); None: what the Trainer says.
        now: random state with which the training goes on.
    """

    start: dict[str, Any] | None
    num_drawn: int
    num_ahead: int
    before_last: dict[str, Any] | None
    epoch: int | None
    now: dict[str, Any] | None

    def of_stateful_loader(self) -> Pass:
        """For a loader that finds its position by itself."""
        return Pass(None, 0, 0, None, self.epoch, self.now)


class ResumableLoader:
    """A training dataloader that knows its position; to everyone else it is the loader itself.

    Args:
        loader: any iterable of batches.
        epoch: says which epoch the Trainer is in.
        resume: the pass that the first iteration takes up.
    """

    def __init__(self, loader: Any, epoch: Callable[[], int], resume: Pass | None = None) -> None:
        own = {"_loader": loader, "_epoch": epoch, "_resume": resume, "_iteration": None}
        self.__dict__.update(own)

    @property
    def __class__(self) -> type:  # type: ignore[override]  # isinstance(self, DataLoader) holds where it holds inside
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._iteration = _Iteration(self._loader, self._epoch(), resume)
        return self._iteration

    def position(self, num_ahead: int) -> Pass | None:
        """The pass that is under way, of whose batches `num_ahead` are not used yet; None before the first."""
        if self._iteration is None:
            return None
        at = self._iteration
        return Pass(at.start, at.num_drawn, num_ahead, at.before_last, at.epoch, None)


class _Iteration:
    """The iterator over one pass."""

    def __init__(self, loader: Any, epoch: int, resume: Pass | None) -> None:
        self._resume = resume
        self._is_sized = _is_sized(loader)
        self.num_drawn, self.before_last, self.epoch = 0, None, epoch
        in_the_middle = resume is not None and resume.start is not None
        if resume is not None:
            if resume.epoch is not None:
                # Lightning sets the epoch after this, too late for workers: they have begun with the first batches.
                self.epoch = resume.epoch
                _set_epoch(loader, resume.epoch)
            state = resume.start if in_the_middle else resume.now
            if state is not None:
                set_random_state(state)
        self.start = random_state()
        self._iterator = iter(loader)
        if not in_the_middle:
            self._go_on = None if resume is None else random_state()
            return
        self._go_on = resume.now
        for _ in range(resume.num_drawn - resume.num_ahead):
            next(self._iterator, None)
            self.num_drawn += 1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._set_state_of_next()
        if not self._is_sized:
            self.before_last = random_state()
        batch = next(self._iterator)
        self.num_drawn += 1
        return batch

    def _set_state_of_next(self) -> None:
        """In a resumed pass: what was used up between the batches then is not used up by replaying them."""
        resume = self._resume
        if resume is None:
            return
        if self.num_drawn >= resume.num_drawn or resume.start is None:
            if self._go_on is not None:
                set_random_state(self._go_on)
            self._resume = None
        elif resume.before_last is not None:
            set_random_state(resume.before_last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


def keeps_own_state(loader: Any) -> bool:
    """Whether a loader can continue by itself (Lightning's protocol)."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_sized(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def _set_epoch(loader: Any, epoch: int) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
