"""The store of a job, which formed its process group; a restarted job uses a fresh one.

torchrun's store outlives its workers (`--max-restarts`). A restarted worker would find addresses of
processes in it that have ended, and wait for them in vain. So the ranks that are alive agree on a
new prefix.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from alpa_strategy.errors import LostRankError

HELLO_SECONDS = 0.01


def job_store() -> Any:
    """The store that formed the default process group."""
    return dist.distributed_c10d._get_default_store()


def fresh_store(rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Return the environment's store, under a name on which this attempt's ranks have reached
    consensus. Collective.

    Raises:
        LostRankError: a rank does not come in time.
    """
    limit = timedelta(seconds=timeout_seconds)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    return dist.PrefixStore(
        f"alpa/attempt/{agree_on_name(store, rank, world_size, timeout_seconds)}", store
    )


def agree_on_name(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Return a new name chosen by rank 0, the same on all ranks, whatever earlier attempts have
    left in the store. Collective.

    Every rank sets a hello with a number that no rank had before. Rank 0 answers under that number,
    until all ranks have answered in turn. The hello of a process that is gone is answered too, and
    then replaced by a new one.

    Raises:
        LostRankError: a rank does not come in time.
    """
    name = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    store.set(f"alpa/hello/{rank}", name)
    if rank != 0:
        key = f"alpa/welcome/{name}"
        while not store.check([key]):
            _check_time(deadline, "rank 0")
            time.sleep(HELLO_SECONDS)
        name = store.get(key).decode()
        store.set(f"alpa/here/{name}/{rank}", "")
        return name
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"alpa/here/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"alpa/hello/{other}"]):
                store.set(f"alpa/welcome/{store.get(f'alpa/hello/{other}').decode()}", name)
        if missing:
            _check_time(deadline, f"ranks {sorted(missing)}")
            time.sleep(HELLO_SECONDS)
    return name


def _check_time(deadline: float, whom: str) -> None:
    """Check that `deadline` (`time.monotonic` seconds) has not passed.

    Raises:
        LostRankError: it has; `whom` was waited for.
    """
    if time.monotonic() > deadline:
        raise LostRankError(
            f"{whom} did not come to the start of the job in time", "see why it has not started"
        )
