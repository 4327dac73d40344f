"""A store that no earlier attempt of the job has written to, for jobs that torchrun restarts.

torchrun's store outlives its workers (`--max-restarts`): in it, a restarted worker finds the addresses of processes
that are gone, and waits for them in vain. Here all workers that are alive agree on a name of their own within it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from alpa_strategy.errors import LostRankError

POLL_SECONDS = 0.01


def store_is_reused() -> bool:
    """Whether the job's store is that of a torchrun agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, world_size: int, timeout_seconds: float) -> Any:
    """The environment's store, under a name that this attempt's ranks have agreed on. Collective.

    Raises:
        LostRankError: a rank does not come in time.
    """
    limit = timedelta(seconds=timeout_seconds)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    return dist.PrefixStore(f"alpa/attempt/{agree_on_name(store, rank, world_size, timeout_seconds)}", store)


def agree_on_name(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Rank 0's new name, on all ranks; whatever earlier attempts have left in the store.

    Every rank says hello with a number that nobody had before; rank 0 answers under that number, until all have
    answered in turn. A hello of a process that is gone is answered too, and then replaced by a new one.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    store.set(f"alpa/hello/{rank}", own)
    if rank != 0:
        key = f"alpa/welcome/{own}"
        _wait_for(store, key, deadline, "rank 0")
        name = store.get(key).decode()
        store.set(f"alpa/here/{name}/{rank}", "")
        return name
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"alpa/here/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"alpa/hello/{other}"]):
                store.set(f"alpa/welcome/{store.get(f'alpa/hello/{other}').decode()}", own)
        if missing:
            _check_time(deadline, f"ranks {sorted(missing)}")
            time.sleep(POLL_SECONDS)
    return own


def _wait_for(store: Any, key: str, deadline: float, whom: str) -> None:
    while not store.check([key]):
        _check_time(deadline, whom)
        time.sleep(POLL_SECONDS)


def _check_time(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise LostRankError(f"{whom} did not come to the start of the job in time", "see why it has not started")
