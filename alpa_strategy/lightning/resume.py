"""What a checkpoint holds beyond Lightning's own: every rank's random states and place in its data.

It lies where Lightning keeps the fit loop's own state: a plain Trainer reads such a checkpoint and passes it over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alpa_strategy.lightning.position import Pass, ResumableLoader
from alpa_strategy.lightning.random_state import random_state

KEY = "alpa"
VERSION = 1


@dataclass(frozen=True)
class Resume:
    """What this rank takes up from a checkpoint.

    Attributes:
        passes: per training dataloader.
        run: `TrainingRun.state_dict()`, None where the ranks are not those that wrote it.
    """

    passes: tuple[Pass, ...]
    run: dict[str, Any] | None


def rank_state(trainer: Any, run: dict[str, Any] | None) -> dict[str, Any]:
    """This rank's part of the state."""
    loop = trainer.fit_loop
    ahead = len(getattr(loop._data_fetcher, "batches", ()))
    flattened = [] if loop._combined_loader is None else loop._combined_loader.flattened
    passes = [loader.position(ahead) for loader in flattened if type(loader) is ResumableLoader]
    loader_states = [] if loop._combined_loader is None else loop._combined_loader._state_dicts()
    return {
        "random": random_state(),
        "passes": [None if at is None else asdict(at) for at in passes],
        "loader_states": loader_states,
        "run": run,
    }


def put_states(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Add all ranks' states to a Lightning checkpoint."""
    checkpoint["loops"]["fit_loop"]["state_dict"][KEY] = {"version": VERSION, "ranks": states}


def take_up(checkpoint: dict[str, Any], rank: int, world_size: int) -> Resume | None:
    """What rank `rank` of `world_size` takes up, None when the checkpoint says nothing; corrects the loop's counters.

    On another number of ranks than the writing ones, the place in the data is the same number of samples, and random
    states start anew.
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
    if len(states) == world_size:
        own = states[rank]
        if own["loader_states"]:
            loop["state_dict"]["combined_loader"] = own["loader_states"]
        passes = [_pass(at, own["random"], in_the_middle) for at in own["passes"]]
        return Resume(tuple(passes), own["run"])
    passes = []
    if in_the_middle:
        passes = [_rescaled(at, len(states), world_size) for at in states[0]["passes"]]
        _rescale_counters(batches["current"], len(states), world_size)
    return Resume(tuple(passes), None)


def _pass(at: dict[str, Any] | None, now: dict[str, Any], in_the_middle: bool) -> Pass:
    if at is None:
        return Pass(None, 0, 0, None, None, now)
    if not in_the_middle:
        return Pass(None, 0, 0, None, at["epoch"] + 1, now)
    return Pass(**{**at, "now": now})


def _rescaled(at: dict[str, Any] | None, num_before: int, num_now: int) -> Pass:
    """The same samples in batches of another number of ranks."""
    if at is None:
        return Pass(None, 0, 0, None, None, None)
    return Pass(
        random_state(), _scaled(at["num_drawn"] - at["num_ahead"], num_before, num_now), 0, None, at["epoch"], None
    )


def _rescale_counters(current: dict[str, int], num_before: int, num_now: int) -> None:
    shift = _scaled(current["ready"], num_before, num_now) - current["ready"]
    for key in ("ready", "started", "processed", "completed"):
        current[key] += shift


def _scaled(num_batches: int, num_before: int, num_now: int) -> int:
    scaled, rest = divmod(num_batches * num_before, num_now)
    if rest:
        rank_zero_warn(
            f"alpa: {num_batches} batches of {num_before} ranks are no whole number of batches of {num_now}: up to "
            f"{num_now - 1} batches of this epoch are trained on again"
        )
    return scaled


def _open_epoch(progress: dict[str, dict[str, int]], epoch: int, in_the_middle: bool) -> None:
    """Let the counters say that epoch number `epoch` has begun, and that it is not over where this is its middle.

    Lightning's say something else where `max_steps` ended it in its middle (then it counts as a whole one), and in the
    first epoch after a resumption at the end of one: then it was never counted as begun, and a resumption at its end
    would repeat it.
    """
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["started"] = epoch + 1
        if in_the_middle:
            counts["processed"] = counts["completed"] = epoch
