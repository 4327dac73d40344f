"""Collectives of ranks on one host through shared memory: what gloo does through sockets, for
tensors on the CPU.

An all-reduce of 1 KB took 0.08 ms here where gloo's takes 2 (its threads wait for a core), one of 1
MB 0.35 where gloo's takes 2.2; a step's 52 MB of gradients, beside the backward, 35 to 55 where
gloo's take 70 to 84. A step that exchanges numbers after every layer spends its time there.

A rank copies what it gives, in pieces, to memory that all see, says so by a number, reads what the
others gave, in the
order of the ranks, and says so, too: a place is free again when all have read it. Nothing runs on
its own: a rank gives and takes what it can when a collective begins, and all that is left when one
is waited for.
"""

import contextlib
import fcntl
import os
import platform
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alpa_strategy.errors import LostRankError

FOLDER = Path("/dev/shm")
TOTAL_BYTES = 8 * 2**20  # of a group: Docker gives a container 64 MB unless told otherwise
AGREEMENT_BYTES = 2**18  # of a group that exchanges a few numbers
PLACES = 8  # of each rank, in turn: so many pieces may be given before others have taken them
LINE = 64  # bytes of a cache line: two ranks do not write into the same one
# A wait begins with so many looks without a pause, some 0.2 ms.
SPINS = 100
# Between later looks; between looks for signs of life.
POLL_SECONDS, LOOK_SECONDS = 2e-5, 0.5
# After so many looks the other rank is late by more than a message: it loads data, or evaluates. A
# core is worth more to it than half a millisecond to who waits.
PATIENT_LOOKS, PATIENT_SECONDS = 1000, 5e-4


class SharedMemoryGroup:
    """Stands for a process group in `torch.distributed`'s functions: `dist.all_reduce(tensor, op,
    group)`.

    Args:
        path: a file of `total_bytes` zeros that all ranks map; it may be removed once all have.
        seconds: a collective that takes longer has failed.
        total_bytes: as `file_bytes` gives them.
    """

    def __init__(
        self, path: str, rank: int, size: int, seconds: float, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self._rank, self._size, self._seconds = rank, size, seconds
        # Made in an evaluation, it is written to in training steps as well.
        with torch.inference_mode(False):
            whole = torch.from_file(
                path, shared=True, size=total_bytes, dtype=torch.uint8, device="cpu"
            )
        marks = size * LINE
        self.piece_bytes = (total_bytes - marks) // (PLACES * size) // (size * LINE) * size * LINE
        counters = whole[:marks].view(torch.int64).view(size, -1).numpy()
        self._given, self._taken = counters[:, 0], counters[:, 1]  # pieces of each rank
        self._places = whole[marks:][: PLACES * size * self.piece_bytes].view(
            PLACES, size, -1
        )  # [place, ranks, bytes]
        self._to_give: deque[Tensor] = deque()
        self._to_take: deque[Callable[[Tensor], object]] = (
            deque()
        )  # with what all ranks give, [ranks, bytes]
        self._begun = 0
        # A lock on a byte is a sign of life: the system lifts it when the process ends, however
        # that happens.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_sequence_number_for_group(self) -> int:
        """As process groups have it: differs between ranks that failures have left apart."""
        is_under_way = bool(self._to_give or self._to_take)
        return 2 * self._begun + is_under_way

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> SimpleNamespace:
        """In place; every rank adds up in the same order, so that all have the same bits."""
        combine = torch.maximum if options.reduceOp == dist.ReduceOp.MAX else torch.add

        def take(piece: Tensor, parts: Tensor) -> None:
            first, *rest = (part[: piece.nbytes].view(piece.dtype) for part in parts)
            for part in rest:
                first = combine(first, part, out=piece)

        pieces = tensors[0].view(-1).split(self.piece_bytes // tensors[0].itemsize)
        return self._begin(pieces, [partial(take, piece) for piece in pieces])

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any) -> SimpleNamespace:
        """`output` [ranks * n] from `own` [n], bytes."""

        def take(to: Tensor, parts: Tensor) -> None:
            to.copy_(parts[:, : to.shape[1]])

        rows = output.view(self._size, -1).split(self.piece_bytes, 1)
        return self._begin(own.split(self.piece_bytes), [partial(take, to) for to in rows])

    def all_to_all_single(self, output: Tensor, own: Tensor, *_: Any) -> SimpleNamespace:
        """Equal parts, bytes: part i of `own` goes to rank i."""
        columns = self.piece_bytes // self._size

        def take(to: Tensor, parts: Tensor) -> None:
            to.copy_(parts[:, : to.numel()].view(self._size, *to.shape)[:, self._rank])

        pieces = own.view(self._size, -1).split(columns, 1)
        rows = output.view(self._size, -1).split(columns, 1)
        return self._begin(pieces, [partial(take, to) for to in rows])

    _allgather_base, alltoall_base = (
        all_gather_single,
        all_to_all_single,
    )  # as PyTorch 2.11 calls them

    def _begin(
        self, own: Sequence[Tensor], take: Sequence[Callable[[Tensor], object]]
    ) -> SimpleNamespace:
        """Give the pieces `own`; each of `take` gets what all ranks give. What is returned has a
        `wait`.
        """
        self._to_give += own
        self._to_take += take
        self._begun += len(own)
        with torch.no_grad():
            while self._advance():
                pass
        return SimpleNamespace(wait=partial(self._wait_for, self._begun))

    def _advance(self) -> bool:
        """Give a piece if there is room, or take one that all have given; whether there was any.

        Called some hundred times a step, mostly in vain: lists of numbers take a tenth of NumPy's
        reductions of them. Without gradients.
        """
        all_given, all_taken = self._given.tolist(), self._taken.tolist()
        given, taken = all_given[self._rank], all_taken[self._rank]
        if self._to_give and given - min(all_taken) < PLACES:
            own = self._to_give.popleft()
            self._places[given % PLACES, self._rank, : own.nbytes].view(own.dtype).view(
                own.shape
            ).copy_(own)
            self._given[self._rank] = (
                given + 1
            )  # x86 shows a core's writes to the others in their order
        elif self._to_take and min(all_given) > taken:
            self._to_take.popleft()(self._places[taken % PLACES])
            self._taken[self._rank] = taken + 1
        else:
            return False
        return True

    @torch.no_grad()
    def _wait_for(self, number: int) -> None:
        """Until so many pieces are taken. LostRankError where a rank has ended, or the time is
        over.
        """
        looks, started = 0, time.monotonic()
        looked = started
        while self._taken[self._rank] < number:
            if self._advance():
                looks, started = 0, time.monotonic()
                continue
            looks += 1
            if looks > PATIENT_LOOKS:
                time.sleep(PATIENT_SECONDS)
            elif looks > SPINS:
                time.sleep(POLL_SECONDS)
            if (now := time.monotonic()) - looked > LOOK_SECONDS:
                looked = now
                self._check_alive()
                if now - started > self._seconds:
                    raise LostRankError(
                        f"a collective among {self._size} ranks of this host has not ended within"
                        f" {self._seconds:g} s",
                        "see what the other ranks do; the time is that of the process group",
                    )

    def _check_alive(self) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                    if self._given[rank] < self._begun:  # else it has ended well
                        raise LostRankError(
                            f"rank {rank} of {self._size} on this host has ended",
                            "see its own output",
                        )


def file_bytes(size: int, wanted_bytes: int) -> int:
    """Bytes of the file of `size` ranks: at least the smallest piece of each in every place."""
    marks = size * LINE
    return max(wanted_bytes, marks + PLACES * size * (size * LINE))


def shared_memory_group(
    group: Any, rank: int, size: int, wanted_bytes: int | None = None
) -> SharedMemoryGroup | None:
    """For the ranks of `group`, where all are on one host; else None. Collective over them.

    Args:
        wanted_bytes: of the group's memory; None: TOTAL_BYTES.
    """
    total_bytes = file_bytes(size, TOTAL_BYTES if wanted_bytes is None else wanted_bytes)
    path = _new_file(total_bytes) if rank == 0 else None
    place = _host()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (place, path), group)
    path = found[0][1]
    made = None
    if path is not None and place is not None and all(each == place for each, _ in found):
        named: Any = group or dist.group.WORLD
        timeout = named._get_backend(torch.device("cpu")).options._timeout
        made = SharedMemoryGroup(path, rank, size, timeout.total_seconds(), total_bytes)
        dist.barrier(group)
    if rank == 0 and path is not None:
        os.unlink(path)
    return made


def _host() -> tuple[str, int, int] | None:
    """Equal for processes that share memory and a network: namespaces of one host may play several,
    with slow links
    between them. None where it cannot be known, or writes of a rank may be seen in another order
    (ARM)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
        return (boot, network, FOLDER.stat().st_dev) if platform.machine() == "x86_64" else None
    except OSError:
        return None


def _new_file(total_bytes: int) -> str | None:
    """A file of zeros whose memory is there: where there is none, writing would end the process."""
    try:
        file, path = tempfile.mkstemp(prefix="alpa-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, total_bytes)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path
