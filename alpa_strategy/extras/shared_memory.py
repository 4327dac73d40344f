"""Collectives of CPU tensors between ranks on one host, through shared memory.

Milliseconds, against gloo through sockets: an all-reduce of 1 KB 0.08 against 2 (gloo's threads
wait for a core), of 1 MB 0.35 against 2.2; 52 MB of gradients, overlapped with the backward, 35 to
55 against 70 to 84. A step that exchanges numbers after every layer spends its time there.

Each rank has `PLACES` slots in the memory. It copies its data there in pieces, increases a counter,
reads the pieces of all ranks in the order of the ranks, and increases a second counter. A slot is
free again when all ranks have read it. There are no threads: a rank copies and reads what it can
when a collective is launched, and the rest when one is waited for.
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
# Of a group. Docker gives a container 64 MB by default.
TOTAL_BYTES = 8 * 2**20
# Of each rank, used in turn: the most pieces that it may write before the others have read them.
PLACES = 8
# Bytes of a cache line: two ranks do not write to the same one.
LINE = 64

# Polls without a pause, some 0.2 ms.
SPINS = 100
# Between later polls.
POLL_SECONDS = 2e-5
# Between checks that the other ranks are alive.
LOOK_SECONDS = 0.5
# After as many polls the other rank is not just receiving a message: it loads data, or evaluates.
# Then it needs the core more than this rank needs half a millisecond.
PATIENT_LOOKS = 1000
PATIENT_SECONDS = 5e-4
# Polls before that if the group has more ranks than this process has cores: each of them takes the
# core from a rank that computes. Four ranks on two cores: a step of 1.1 s takes 1.0 s.
LOOKS_ON_SHARED_CORES = 5


class SharedMemoryGroup:
    """A process group for `torch.distributed`'s functions, as in `dist.all_reduce(tensor, op,
    group)`.

    Args:
        path: a file of `total_bytes` zeros that all ranks map; it may be removed once all have.
        seconds: timeout of a collective.
        total_bytes: result of `file_bytes`.
    """

    def __init__(
        self, path: str, rank: int, size: int, seconds: float, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self._rank = rank
        self._size = size
        self._seconds = seconds
        shares_cores = size > len(os.sched_getaffinity(0))
        self._num_spins = 0 if shares_cores else SPINS
        self._patient_looks = LOOKS_ON_SHARED_CORES if shares_cores else PATIENT_LOOKS
        self._file = _open_existing(path)
        weakref.finalize(self, os.close, self._file)
        # A group that is made in an evaluation is written to in training steps as well.
        with torch.inference_mode(False):
            # By its descriptor: `from_file` would make a file again that rank 0 has removed.
            memory = torch.from_file(
                f"/proc/self/fd/{self._file}",
                shared=True,
                size=total_bytes,
                dtype=torch.uint8,
                device="cpu",
            )

        # A line per rank with its counters, then the slots. A piece is a multiple of the ranks'
        # lines, so that it can be divided between them.
        counter_bytes = size * LINE
        most_bytes = (total_bytes - counter_bytes) // (PLACES * size)
        self.piece_bytes = most_bytes // (size * LINE) * size * LINE
        counters = memory[:counter_bytes].view(torch.int64).view(size, -1).numpy()
        # pieces that each rank has written
        self._written = counters[:, 0]
        # pieces that each rank has read
        self._read = counters[:, 1]
        slot_bytes = PLACES * size * self.piece_bytes
        # [slots, ranks, bytes]
        self._slots = memory[counter_bytes:][:slot_bytes].view(PLACES, size, -1)

        # pieces that are not written yet
        self._to_write: deque[Tensor] = deque()
        # functions that read a piece of all ranks, [ranks, bytes]
        self._to_read: deque[Callable[[Tensor], object]] = deque()
        self._num_launched = 0
        # A lock on a byte shows that the rank is alive: the system releases it when the process
        # ends, for whatever reason.
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)

    def rank(self) -> int:
        """Return this rank in the group; torch.distributed calls it."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks; torch.distributed calls it."""
        return self._size

    def _get_sequence_number_for_group(self) -> int:
        """A number that differs between ranks which have run different collectives.

        As process groups have it.
        """
        is_in_flight = bool(self._to_write or self._to_read)
        return 2 * self._num_launched + is_in_flight

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> SimpleNamespace:
        """Launch an all-reduce in place of `tensors[0]`: the maximum if `options.reduceOp` is MAX,
        else the sum.

        Every rank adds in the same order, so that all get the same bits.
        """
        combine = torch.maximum if options.reduceOp == dist.ReduceOp.MAX else torch.add

        def read(piece: Tensor, of_ranks: Tensor) -> None:
            first, *others = (data[: piece.nbytes].view(piece.dtype) for data in of_ranks)
            for other in others:
                first = combine(first, other, out=piece)

        pieces = tensors[0].view(-1).split(self.piece_bytes // tensors[0].itemsize)
        return self._launch(pieces, [partial(read, piece) for piece in pieces])

    def all_gather_single(self, output: Tensor, local: Tensor, *_: Any) -> SimpleNamespace:
        """Launch an all-gather: `output` [ranks * n] from `local` [n], bytes."""

        def read(target: Tensor, of_ranks: Tensor) -> None:
            target.copy_(of_ranks[:, : target.shape[1]])

        targets = output.view(self._size, -1).split(self.piece_bytes, 1)
        pieces = local.split(self.piece_bytes)
        return self._launch(pieces, [partial(read, target) for target in targets])

    def all_to_all_single(self, output: Tensor, local: Tensor, *_: Any) -> SimpleNamespace:
        """Launch an all-to-all of equal chunks, bytes: chunk i of `local` goes to rank i."""
        num_columns = self.piece_bytes // self._size

        def read(target: Tensor, of_ranks: Tensor) -> None:
            chunks = of_ranks[:, : target.numel()].view(self._size, *target.shape)
            target.copy_(chunks[:, self._rank])

        pieces = local.view(self._size, -1).split(num_columns, 1)
        targets = output.view(self._size, -1).split(num_columns, 1)
        return self._launch(pieces, [partial(read, target) for target in targets])

    # Their names in PyTorch 2.11.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single

    def _launch(
        self, pieces: Sequence[Tensor], readers: Sequence[Callable[[Tensor], object]]
    ) -> SimpleNamespace:
        """Write `pieces`; each of `readers` is called with a piece of all ranks.

        Returns:
            An object with a method `wait`.
        """
        self._to_write += pieces
        self._to_read += readers
        self._num_launched += len(pieces)
        with torch.no_grad():
            while self._advance():
                pass
        return SimpleNamespace(wait=partial(self._wait_for, self._num_launched))

    def _advance(self) -> bool:
        """Write a piece if a slot is free, or read one that all ranks have written.

        It is called some hundred times per step, mostly in vain: lists of numbers take a tenth of
        NumPy's reductions of them. The caller disables gradients.

        Returns:
            Whether either was possible.
        """
        written = self._written.tolist()
        read_counts = self._read.tolist()
        num_written = written[self._rank]
        num_read = read_counts[self._rank]
        if self._to_write and num_written - min(read_counts) < PLACES:
            piece = self._to_write.popleft()
            slot = self._slots[num_written % PLACES, self._rank, : piece.nbytes]
            slot.view(piece.dtype).view(piece.shape).copy_(piece)
            # x86 shows a core's writes to the others in their order.
            self._written[self._rank] = num_written + 1
            return True
        if self._to_read and min(written) > num_read:
            read = self._to_read.popleft()
            read(self._slots[num_read % PLACES])
            self._read[self._rank] = num_read + 1
            return True
        return False

    @torch.no_grad()
    def _wait_for(self, number: int) -> None:
        """Return when `number` pieces are read.

        Raises:
            LostRankError: a rank has ended, or the timeout has passed without any progress.
        """
        num_polls = 0
        started = time.monotonic()
        checked = started
        while self._read[self._rank] < number:
            if self._advance():
                num_polls = 0
                started = time.monotonic()
                continue
            num_polls += 1
            if num_polls > self._patient_looks:
                time.sleep(PATIENT_SECONDS)
            elif num_polls > self._num_spins:
                time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - checked > LOOK_SECONDS:
                checked = now
                self._check_alive()
                if now - started > self._seconds:
                    raise LostRankError(
                        f"a collective among {self._size} ranks of this host has not ended within"
                        f" {self._seconds:g} s",
                        "see what the other ranks do; the time is that of the process group",
                    )

    def _check_alive(self) -> None:
        """Raise LostRankError if another rank has ended without writing its pieces."""
        for rank in range(self._size):
            if rank != self._rank:
                # The lock of a rank that is alive cannot be taken.
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                    if self._written[rank] < self._num_launched:
                        raise LostRankError(
                            f"rank {rank} of {self._size} on this host has ended",
                            "see its own output",
                        )


def file_bytes(size: int, wanted_bytes: int) -> int:
    """Return the bytes of the file of `size` ranks.

    At least enough for the counters, and for the smallest piece in every slot.
    """
    counter_bytes = size * LINE
    smallest_piece = size * LINE
    return max(wanted_bytes, counter_bytes + PLACES * size * smallest_piece)


def shared_memory_group(
    group: Any, rank: int, size: int, wanted_bytes: int | None = None
) -> SharedMemoryGroup | None:
    """Make a group of the ranks of `group` if all are on one host; else, on other processors than
    x86-64, or without enough shared memory, return None. Collective.

    Args:
        wanted_bytes: of the group's memory; None: TOTAL_BYTES.
        rank, size: of this rank and of `group`.
    """
    total_bytes = file_bytes(size, TOTAL_BYTES if wanted_bytes is None else wanted_bytes)
    path = _new_file(total_bytes) if rank == 0 else None
    try:
        return _shared_by_all(path, group, rank, size, total_bytes)
    finally:
        if path is not None:
            os.unlink(path)


def _shared_by_all(
    path: str | None, group: Any, rank: int, size: int, total_bytes: int
) -> SharedMemoryGroup | None:
    """Map rank 0's file at `path` on every rank if all are on one host. Collective.

    Args:
        path: of the file, on rank 0; None elsewhere, and if it could not be made.
        size: number of ranks.
        total_bytes: of the file.

    Returns:
        The group once all ranks have mapped the file; None if there is no file, or several hosts.
    """
    host = _host()
    of_ranks: list[Any] = [None] * size
    dist.all_gather_object(of_ranks, (host, path), group)
    _, path = of_ranks[0]
    hosts = {other for other, _ in of_ranks}
    if path is None or host is None or hosts != {host}:
        return None
    backend_group: Any = group or dist.group.WORLD
    timeout = backend_group._get_backend(torch.device("cpu")).options._timeout
    shared = SharedMemoryGroup(path, rank, size, timeout.total_seconds(), total_bytes)
    dist.barrier(group)
    return shared


def _open_existing(path: str) -> int:
    """Open the file that rank 0 has made.

    Raises:
        LostRankError: rank 0 has failed, and has removed it.
    """
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise LostRankError(
            "the rank that makes the shared memory of this host has failed",
            "see its own output",
        ) from None


def _host() -> tuple[str, int, int] | None:
    """An identity that is equal for processes which share memory and a network.

    Network namespaces of one host may stand for several hosts, with slow links between them. None
    if it is unknown, or if the processor does not keep the order of writes (ARM).
    """
    if platform.machine() != "x86_64":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
        return boot, network, FOLDER.stat().st_dev
    except OSError:
        return None


def _new_file(total_bytes: int) -> str | None:
    """Make a file of zeros with its memory allocated; None if there is not enough.

    Without the allocation, writing to it could end the process. The name has the process's id, so
    that a file which a killed process has left behind can be told from one in use.
    """
    try:
        file, path = tempfile.mkstemp(prefix=f"alpa-{os.getpid()}-", dir=FOLDER)
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
