"""The position of a training in its data and random numbers, stored in checkpoints.

Lightning restores its counters, but iterates the loader from its beginning. Here a resumed run
fast-forwards the loader: it sets the epoch's random state, and loads and drops the batches that
were trained on. Loaders with a state of their own (`state_dict`) restore that instead. The position
is stored in the state of Lightning's fit loop, where a plain Trainer ignores it.
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
    """Return the states of Python's, NumPy's and PyTorch's default generators, and that of the
    current GPU if CUDA is initialized.

    The values are tensors, numbers and strings only.
    """
    states = _collect_rng_states(include_cuda=False)
    # int64, as values for other ranks are pickled in a form without unsigned numbers.
    states["numpy"] = pytree.tree_map_only(
        numpy.ndarray, lambda keys: torch.from_numpy(keys.astype("int64")), states["numpy"]
    )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(state: dict[str, Any]) -> None:
    """Set all default generators to `state`, as of `random_state`."""
    numpy_state = pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, state["numpy"])
    _set_rng_states({**state, "numpy": numpy_state})
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@dataclass
class Pass:
    """The position in one iteration over a loader."""

    # Random state before the iteration started; None: unknown, the current one is used.
    start: dict[str, Any] | None = None

    # Number of batches that were taken from the loader.
    num_drawn: int = 0

    # Number of taken batches that the Trainer has not used yet (prefetched).
    num_ahead: int = 0

    # Random state before the last batch was taken; None: unknown.
    before_last: dict[str, Any] | None = None

    # Number of the iteration, from 0, and epoch of its sampler; None: the Trainer's epoch.
    epoch: int | None = None

    # Random state with which the training continues.
    now: dict[str, Any] | None = None


class ResumableLoader:
    """A training dataloader with a known position. Otherwise it behaves as the loader itself.

    Args:
        loader: any iterable of batches.
        epoch: returns the Trainer's epoch.
        resume: the pass that the first iteration continues.
    """

    _resume: Pass | None
    _at: Pass | None

    def __init__(self, loader: Any, epoch: Callable[[], int], resume: Pass | None = None) -> None:
        # Not through `__setattr__`, which sets unknown attributes on the loader.
        self.__dict__.update(_loader=loader, _epoch=epoch, _resume=resume, _at=None)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # The loader's class, so that isinstance(self, DataLoader) is true for a DataLoader.
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def __reduce__(self) -> Any:
        # A copy or pickle is the plain loader, without a position.
        return _itself, (self._loader,)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume = self._resume
        self._resume = None
        replayed = resume or Pass()
        if replayed.epoch is not None:
            # Lightning sets the epoch later. Workers would load the first batches before that.
            _set_sampler_epoch(self._loader, replayed.epoch)
        state = replayed.start or replayed.now
        if state is not None:
            set_random_state(state)

        epoch = self._epoch() if replayed.epoch is None else replayed.epoch
        self._at = Pass(random_state(), epoch=epoch)
        batches = iter(self._loader)
        # Without a known start nothing can be replayed: the pass starts anew.
        if replayed.start is None and resume is not None:
            resume = Pass(now=random_state())
        for _ in range(replayed.num_drawn - replayed.num_ahead):
            next(batches, None)
            self._at.num_drawn += 1
        return self._batches(batches, self._at, resume)

    def _batches(self, batches: Iterator[Any], at: Pass, resume: Pass | None) -> Iterator[Any]:
        """Yield the batches and count them in `at`.

        The training drew random numbers between the batches. A resumed pass does not draw them when
        it replays batches, so the state after them is set: `resume.before_last`, then `resume.now`.
        """
        is_sized = sized_len(self._loader) is not None
        while True:
            if resume is not None:
                is_replayed = at.num_drawn >= resume.num_drawn
                state = resume.now if is_replayed else resume.before_last
                if state is not None:
                    set_random_state(state)
                if is_replayed:
                    resume = None
            if not is_sized:
                at.before_last = random_state()
            try:
                batch = next(batches)
            except StopIteration:
                return
            at.num_drawn += 1
            yield batch

    def position(self, num_ahead: int) -> Pass | None:
        """Return the current pass; None before the first.

        Args:
            num_ahead: number of its taken batches that the Trainer has not used.
        """
        return None if self._at is None else replace(self._at, num_ahead=num_ahead)


def _itself(loader: Any) -> Any:
    return loader


KEY = "alpa"
VERSION = 1


@dataclass(frozen=True)
class Resume:
    """The state of a checkpoint with which this rank continues."""

    # Position in each training dataloader.
    passes: tuple[Pass, ...]

    # `Run.state_dict()`; None if another number of ranks wrote it.
    run: dict[str, Any] | None

    # Whether the passes are the rest of an epoch whose samples another number of ranks shared.
    is_of_other_ranks: bool = False

    # Batches of this rank after which the training stopped within the epoch that is continued, such
    # as by `max_steps`; 0: it did not. Lightning takes that epoch as complete.
    num_batches_at_stop: int = 0


def rank_state(trainer: Any, run: dict[str, Any] | None) -> dict[str, Any]:
    """Return this rank's state for a checkpoint: random state, loaders, `Run.state_dict()`."""
    loop = trainer.fit_loop
    # The batch of an interrupted step was drawn, but not trained on.
    progress = loop.epoch_loop.batch_progress.current
    num_prefetched = len(getattr(loop._data_fetcher, "batches", ()))
    num_ahead = num_prefetched + progress.ready - progress.processed

    combined = loop._combined_loader
    passes = []
    for loader in [] if combined is None else combined.flattened:
        if type(loader) is ResumableLoader:
            position = loader.position(num_ahead)
            passes.append(None if position is None else asdict(position))
    loader_states = [] if combined is None else combined._state_dicts()
    return {"random": random_state(), "passes": passes, "loader_states": loader_states, "run": run}


def put_states(checkpoint: dict[str, Any], states: list[dict[str, Any]], num_shares: int) -> None:
    """Add all ranks' states to a Lightning checkpoint.

    Args:
        checkpoint: Lightning's checkpoint, which is changed.
        states: `rank_state` of every rank.
        num_shares: number of shares of the samples, each loaded by one or several ranks.
    """
    data = {"version": VERSION, "ranks": states, "num_shares": num_shares}
    checkpoint["loops"]["fit_loop"]["state_dict"][KEY] = data


def take_up(
    checkpoint: dict[str, Any], rank: int, world_size: int, num_shares: int
) -> Resume | None:
    """Return the state with which a rank continues, and correct the loops' state in the checkpoint.

    With another number of ranks or shares than the writing ones, the run continues after the same
    number of samples, with new random states; rank 0 warns if samples come in another order.

    Args:
        checkpoint: Lightning's checkpoint, whose counters and loader states are changed.
        rank: this rank.
        world_size: number of ranks.
        num_shares: as of `put_states`, now.

    Returns:
        The state; None if the checkpoint has none, or one of another format version.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    stored = loop.get("state_dict", {}).get(KEY)
    if stored is None or stored.get("version") != VERSION:
        return None

    states = stored["ranks"]
    batches = loop["epoch_loop.batch_progress"]
    in_the_middle = not batches["is_last_batch"]
    epochs = [at["epoch"] for at in states[0]["passes"] if at is not None]
    has_stopped = False
    if batches["current"]["ready"] and epochs:
        num_processed = loop["epoch_progress"]["current"]["processed"]
        has_stopped = in_the_middle and num_processed > epochs[0]
        _open_epoch(loop["epoch_progress"], epochs[0], in_the_middle)

    shares_before = stored.get("num_shares", len(states))
    if (len(states), shares_before) == (world_size, num_shares):
        state = states[rank]
        if state["loader_states"]:
            loop["state_dict"]["combined_loader"] = state["loader_states"]
        passes = [_pass(at, state["random"], in_the_middle) for at in state["passes"]]
        num_at_stop = batches["current"]["ready"] if has_stopped else 0
        return Resume(tuple(passes), state["run"], num_batches_at_stop=num_at_stop)

    passes = []
    if in_the_middle:
        passes = [_rescaled(at, shares_before, num_shares) for at in states[0]["passes"]]
        current = batches["current"]
        shift = _scaled(current["ready"], shares_before, num_shares) - current["ready"]
        for key in ("ready", "started", "processed", "completed"):
            current[key] += shift
        if shares_before == 1:
            _warn_of_other_order()
    num_at_stop = batches["current"]["ready"] if has_stopped else 0
    return Resume(tuple(passes), None, in_the_middle and shares_before > 1, num_at_stop)


def _pass(at: dict[str, Any] | None, now: dict[str, Any], in_the_middle: bool) -> Pass:
    """Return the pass over the data to be resumed, at the stored state or after its epoch.

    Args:
        at: the pass as stored; None without one.
        now: the loader's own state.
        in_the_middle: whether the checkpoint was made within the epoch.
    """
    if at is None:
        return Pass(now=now)
    if in_the_middle:
        return Pass(**{**at, "now": now})
    return Pass(epoch=at["epoch"] + 1, now=now)


def _rescaled(at: dict[str, Any] | None, num_before: int, num_now: int) -> Pass:
    """Return the pass after the same number of samples, in batches of another number of shares.

    Args:
        at: the pass as stored; None without one.
        num_before, num_now: numbers of shares.
    """
    if at is None:
        return Pass()
    num_drawn = _scaled(at["num_drawn"] - at["num_ahead"], num_before, num_now)
    return Pass(random_state(), num_drawn, epoch=at["epoch"])


def warn_of_stop(resume: Resume, trainer: Any) -> None:
    """Warn of a resumed run that makes more steps than under Lightning's own strategies."""
    num_batches = resume.num_batches_at_stop
    if not num_batches:
        return

    epoch = trainer.current_epoch
    num_of_epoch = trainer.num_training_batches
    others = "its other batches"
    if num_of_epoch != float("inf"):
        others = f"its other {num_of_epoch - num_batches} of {num_of_epoch}"
    rank_zero_warn(
        f"alpa: the checkpoint is of a training that stopped after {num_batches} batches of epoch"
        f" {epoch} (max_steps, max_time). This run goes on with {others}, as if it had not stopped,"
        f" and then begins epoch {epoch + 1}. Under DDP Lightning takes the epoch as complete, and"
        " leaves these batches out"
    )


def _warn_of_other_order() -> None:
    """Warn that several devices use the order of DistributedSampler, one the loader's sampler's."""
    rank_zero_warn(
        "alpa: the checkpoint is of the middle of an epoch on one device. If the loader shuffles, "
        "the rest of this epoch is in the order that several devices share: some of its samples are"
        " loaded twice, others not at all, until the next epoch"
    )


def _scaled(num_batches: int, num_before: int, num_now: int) -> int:
    """Return `num_batches` of `num_before` ranks in batches of `num_now` ranks, rounded down with a
    warning.
    """
    scaled, rest = divmod(num_batches * num_before, num_now)
    if rest:
        rank_zero_warn(
            f"alpa: {num_batches} batches of {num_before} ranks are no whole number of batches of"
            f" {num_now}: up to {num_now - 1} batches of this epoch are trained on again"
        )
    return scaled


def _open_epoch(progress: dict[str, dict[str, int]], epoch: int, in_the_middle: bool) -> None:
    """Set the counters of Lightning's loop: epoch `epoch` has started, and perhaps not ended.

    Lightning's counters are wrong in two cases. An epoch that `max_steps` ended in its middle
    counts as complete. The first epoch after a resumption at an epoch's end never counts as
    started, so that a resumption at its own end would repeat it.

    Args:
        progress: counters of epochs, which are changed.
        epoch: number of the epoch, from 0.
        in_the_middle: whether the epoch has not ended.
    """
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["started"] = epoch + 1
        if in_the_middle:
            counts["processed"] = counts["completed"] = epoch
