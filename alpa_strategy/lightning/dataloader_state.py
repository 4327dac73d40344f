"""Where a training is in its data and its random numbers: recorded in checkpoints, and taken up
again exactly.

Lightning restores its counters, but iterates the loader from its beginning. Here the loader is
wound forward: the epoch's random state is set again, and the batches that were trained on are
loaded and dropped. Loaders that keep their own state (`state_dict`) are left to it. It lies where
Lightning keeps the fit loop's: a plain Trainer passes it over.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils import _pytree as pytree


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and PyTorch's default generators: tensors, numbers and strings
    only.
    """
    states = _collect_rng_states(include_cuda=False)
    # int64: what is sent to other ranks is pickled in a form that knows no unsigned numbers.
    found = pytree.tree_map_only(
        numpy.ndarray, lambda keys: torch.from_numpy(keys.astype("int64")), states
    )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Let all default generators go on from `state`."""
    _set_rng_states(
        {**state, "numpy": pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, state["numpy"])}
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@dataclass
class Pass:
    """One iteration over a loader, as far as it has come."""

    # Random state before the iteration began; None: as it is.
    start: dict[str, Any] | None = None
    # Batches that were taken from it.
    num_drawn: int = 0
    # Of those, how many the Trainer has not used yet.
    num_ahead: int = 0
    # Random state before the last was taken, where that is known.
    before_last: dict[str, Any] | None = None
    # Which one it is, counted from 0 (and its sampler's); None: what the Trainer says.
    epoch: int | None = None
    # Random state with which the training goes on.
    now: dict[str, Any] | None = None


class ResumableLoader:
    """A training dataloader that knows its position; to everyone else it is the loader itself.

    Args:
        loader: any iterable of batches.
        epoch: says which epoch the Trainer is in.
        resume: the pass that the first iteration takes up.
    """

    _resume: Pass | None
    _at: Pass | None

    def __init__(self, loader: Any, epoch: Callable[[], int], resume: Pass | None = None) -> None:
        # Past `__setattr__`, which hands what is not known here to the loader.
        self.__dict__.update(_loader=loader, _epoch=epoch, _resume=resume, _at=None)

    @property  # type: ignore[misc]
    # Isinstance(self, DataLoader) holds where it holds inside.
    def __class__(self) -> type:
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    # What is stored or copied is the loader, at no position.
    def __reduce__(self) -> Any:
        return _itself, (self._loader,)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        again = resume or Pass()
        if again.epoch is not None:
            # Lightning sets the epoch after this, too late for workers: they have begun with the
            # first batches.
            _set_sampler_epoch(self._loader, again.epoch)
        if (state := again.start or again.now) is not None:
            set_random_state(state)
        self._at = Pass(random_state(), epoch=self._epoch() if again.epoch is None else again.epoch)
        batches = iter(self._loader)
        # There is nothing to replay: the pass begins anew.
        if again.start is None and resume is not None:
            resume = Pass(now=random_state())
        for _ in range(again.num_drawn - again.num_ahead):
            next(batches, None)
            self._at.num_drawn += 1
        return self._batches(batches, self._at, resume)

    def _batches(self, batches: Iterator[Any], at: Pass, resume: Pass | None) -> Iterator[Any]:
        """In a resumed pass what was used up between the batches then is not used up by replaying
        them.
        """
        is_sized = sized_len(self._loader) is not None
        while True:
            if resume is not None:
                is_there = at.num_drawn >= resume.num_drawn
                if (state := resume.now if is_there else resume.before_last) is not None:
                    set_random_state(state)
                resume = None if is_there else resume
            if not is_sized:
                at.before_last = random_state()
            try:
                batch = next(batches)
            except StopIteration:
                return
            at.num_drawn += 1
            yield batch

    def position(self, num_ahead: int) -> Pass | None:
        """The pass that is under way, of whose batches `num_ahead` are not used yet; None before
        the first.
        """
        return None if self._at is None else replace(self._at, num_ahead=num_ahead)


def _itself(loader: Any) -> Any:
    return loader


KEY = "alpa"
VERSION = 1


@dataclass(frozen=True)
class Resume:
    """What this rank takes up from a checkpoint."""

    # Per training dataloader.
    passes: tuple[Pass, ...]
    # `Run.state_dict()`, None where the ranks are not those that wrote it.
    run: dict[str, Any] | None
    # The passes are the rest of an epoch that others shared.
    is_of_other_ranks: bool = False


def rank_state(trainer: Any, run: dict[str, Any] | None) -> dict[str, Any]:
    """This rank's part of the state."""
    loop = trainer.fit_loop
    # An interrupted step's batch was drawn, and not trained on.
    at = loop.epoch_loop.batch_progress.current
    ahead = len(getattr(loop._data_fetcher, "batches", ())) + at.ready - at.processed
    flattened = [] if loop._combined_loader is None else loop._combined_loader.flattened
    positions = [loader.position(ahead) for loader in flattened if type(loader) is ResumableLoader]
    passes = [None if each is None else asdict(each) for each in positions]
    loader_states = [] if loop._combined_loader is None else loop._combined_loader._state_dicts()
    return {"random": random_state(), "passes": passes, "loader_states": loader_states, "run": run}


def put_states(checkpoint: dict[str, Any], states: list[dict[str, Any]], num_shares: int) -> None:
    """Add all ranks' states to a Lightning checkpoint; of the ranks, `num_shares` load rows that
    others do not.
    """
    found = {"version": VERSION, "ranks": states, "num_shares": num_shares}
    checkpoint["loops"]["fit_loop"]["state_dict"][KEY] = found


def take_up(
    checkpoint: dict[str, Any], rank: int, world_size: int, num_shares: int
) -> Resume | None:
    """What rank `rank` of `world_size` takes up, None when the checkpoint says nothing; corrects
    the loop's counters.

    On another number of ranks, or shares of rows, than the writing ones', as many samples are gone;
    random states anew.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    stored = loop.get("state_dict", {}).get(KEY)
    if stored is None or stored.get("version") != VERSION:
        return None
    states = stored["ranks"]
    batches = loop["epoch_loop.batch_progress"]
    in_the_middle = not batches["is_last_batch"]
    epochs = [at["epoch"] for at in states[0]["passes"] if at is not None]
    if batches["current"]["ready"] and epochs:
        _open_epoch(loop["epoch_progress"], epochs[0], in_the_middle)
    shares_before = stored.get("num_shares", len(states))
    if (len(states), shares_before) == (world_size, num_shares):
        own = states[rank]
        if own["loader_states"]:
            loop["state_dict"]["combined_loader"] = own["loader_states"]
        passes = [_pass(at, own["random"], in_the_middle) for at in own["passes"]]
        return Resume(tuple(passes), own["run"])
    passes = []
    if in_the_middle:
        passes = [_rescaled(at, shares_before, num_shares) for at in states[0]["passes"]]
        current = batches["current"]
        shift = _scaled(current["ready"], shares_before, num_shares) - current["ready"]
        for key in ("ready", "started", "processed", "completed"):
            current[key] += shift
        if shares_before == 1:
            _warn_of_other_order()
    return Resume(tuple(passes), None, in_the_middle and shares_before > 1)


def _pass(at: dict[str, Any] | None, now: dict[str, Any], in_the_middle: bool) -> Pass:
    if at is None:
        return Pass(now=now)
    return Pass(**{**at, "now": now}) if in_the_middle else Pass(epoch=at["epoch"] + 1, now=now)


def _rescaled(at: dict[str, Any] | None, num_before: int, num_now: int) -> Pass:
    """The same samples in batches of another number of ranks."""
    if at is None:
        return Pass()
    num_drawn = _scaled(at["num_drawn"] - at["num_ahead"], num_before, num_now)
    return Pass(random_state(), num_drawn, epoch=at["epoch"])


def _warn_of_other_order() -> None:
    """One device draws in the order of the loader's sampler, several in DistributedSampler's."""
    rank_zero_warn(
        "alpa: the checkpoint is of the middle of an epoch on one device. If the loader shuffles, "
        "the rest of this epoch is in the order that several devices share: some of its rows come "
        "twice, others not at all, until the next epoch"
    )


def _scaled(num_batches: int, num_before: int, num_now: int) -> int:
    scaled, rest = divmod(num_batches * num_before, num_now)
    if rest:
        rank_zero_warn(
            f"alpa: {num_batches} batches of {num_before} ranks are no whole number of batches of"
            f" {num_now}: up to "
            f"{num_now - 1} batches of this epoch are trained on again"
        )
    return scaled


def _open_epoch(progress: dict[str, dict[str, int]], epoch: int, in_the_middle: bool) -> None:
    """Let the counters say that epoch number `epoch` has begun, and that it is not over where this
    is its middle.

    Lightning's say something else where `max_steps` ended it in its middle (it counts as a whole
    one), and in the first
    epoch after a resumption at the end of one: never counted as begun, it would be repeated by a
    resumption at its end.
    """
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["started"] = epoch + 1
        if in_the_middle:
            counts["processed"] = counts["completed"] = epoch
