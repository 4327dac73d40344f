"""Recorder: torch's profiler on one rank, and the exchange of what all ranks have recorded."""

import json
import os
import pickle
import platform
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from alpa_strategy.comm.collectives import all_gather_object, host_group, rank_in, world_size
from alpa_strategy.profiling.waiting import RankRecord

# Exchanges from which a clock's difference is taken: the fastest one counts.
CLOCK_ROUNDS = 9

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Recorder:
    """Torch's profiler between `start` and `stop`."""

    def __init__(self) -> None:
        # Read when the profiler is loaded: it would print a line at each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Start to record. Raises RuntimeError if another profiler records."""
        self._profile.start()

    def stop(self) -> dict[str, Any]:
        """Stop, and return the events as the JSON data of a Chrome trace."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            return json.loads(path.read_text(encoding="utf-8"))


def clock_name() -> str:
    """Return a name of the clock of this rank: ranks of one host have the same."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        # Not Linux.
        return platform.node()


def clock_offset(group: Any = None) -> int:
    """Return the nanoseconds that this rank's clock is ahead of rank 0's. Collective.

    The first rank of each other host exchanges the time with rank 0: half of the fastest exchange
    is the time of the way back.

    Args:
        group: of the ranks; None: all.
    """
    if world_size(group) == 1:
        return 0
    hosts = all_gather_object(clock_name(), group)
    rank = rank_in(group)
    offset = 0
    for host in dict.fromkeys(hosts):
        first = hosts.index(host)
        if first and rank in (0, first):
            offset = _exchanged_offset(first, group)
    # Rank 0 measured those of others; its own is 0.
    offsets = all_gather_object(0 if rank == 0 else offset, group)
    return offsets[hosts.index(hosts[rank])]


def _exchanged_offset(other: int, group: Any) -> int:
    """Return on rank `other` by how many nanoseconds its clock is ahead of rank 0's, and 0 on rank
    0; both call.
    """
    through = host_group(group)
    is_first = rank_in(group) == 0
    peer = _global_rank(through, other if is_first else 0)
    message = torch.zeros(1, dtype=torch.int64)
    best: tuple[int, int] | None = None
    for _ in range(CLOCK_ROUNDS):
        sent = time.time_ns()
        if is_first:
            dist.recv(message, peer, through)
            message[0] = time.time_ns()
            dist.send(message, peer, through)
            continue
        dist.send(message, peer, through)
        dist.recv(message, peer, through)
        arrived = time.time_ns()
        took = arrived - sent
        ahead = (sent + arrived) // 2 - int(message[0])
        if best is None or took < best[0]:
            best = took, ahead
    return 0 if best is None else best[1]


def gather_records(record: RankRecord, group: Any = None) -> list[RankRecord]:
    """Return the records of all ranks on rank 0, on one clock; an empty list elsewhere.

    Collective.

    Args:
        group: of the ranks; None: all.
    """
    if world_size(group) == 1:
        return [record]
    packed = zlib.compress(pickle.dumps(record), 1)
    rank = rank_in(group)
    through = host_group(group)
    gathered: list[Any] | None = [None] * world_size(group) if rank == 0 else None
    dist.gather_object(packed, gathered, _global_rank(through, 0), through)
    records: list[RankRecord] = []
    for item in gathered or ():
        of_rank: RankRecord = pickle.loads(zlib.decompress(item))
        of_rank.align()
        records.append(of_rank)
    return records


def _global_rank(group: Any, rank: int) -> int:
    """Return the job's rank of a rank of `group` (None: all)."""
    return rank if group is None else dist.get_global_rank(group, rank)
