"""The C library's allocator, where tensors lie in host memory: freed blocks are kept, as far as the
plan has room.

glibc gives a large freed block back to the system, and the next step pays a page fault for every 4
KB of it: a step was seen to take 1.7 x as long. Where blocks are kept, the next tensor of the same
size often does not fit where one was: PyTorch wants multiples of 64 bytes, for which glibc looks
for more than it frees (its bug 14581). Data parallelism held
1.1 x what is alive, recomputation and ZeRO-3 1.8 to 2.1 x. So a thread looks at how much the
process holds, and where that is more than it may, all that is free goes back at once.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.ir.plan import Plan

TIGHT = 0.5  # of the limit: kept blocks were seen to hold up to twice what is alive
LEAST_BYTES = (
    50 * 10**6
)  # planned: what freed blocks add to less is little beside what Python itself holds
LARGE_BYTES = 250 * 10**6  # planned: what such a plan keeps in vain would be much
# bytes held for each that is planned: 1.1 to 1.2 were seen in most plans, up to 1.5 in some
KEPT_BLOCKS = 1.25
PAGE_FAULTS = (
    0.15  # of a step's seconds at least, where blocks are given back: up to 0.35 were seen
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Bytes from which blocks are given back (glibc allows no more than 32 MB), and that are kept at a
# heap's end.
GIVEN_BACK, KEPT = (2**20, 2**25), (2**25, 2**30)
LOOK_SECONDS = 0.004  # between two looks at what the process holds; one takes 20 microseconds
THREAD = "alpa-free-memory"
HELD = 1.2  # bytes for each that is planned, from which on free memory is given back
SLACK = 0.05  # of what is planned: held once more before it is given back again


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """Around what shards a module: what planning took is given back; freed blocks are kept with
    tensors on the host.
    """
    if device.type == "cpu":
        keep_freed(True)
    yield
    if device.type == "cpu":
        trim()
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # its blocks have other sizes than training wants


def enforce_memory_plan(
    owner: object,
    plan: Plan,
    limit_bytes: float,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
) -> Callable[[], object]:
    """Until what is returned is called, or `owner` is gone, give free memory back where this
    process holds as much as
    it may besides itself: what is planned, or the limit where that is not far away.

    Nothing is done where the limit has room for all that may be kept and little is planned, nor
    without glibc.
    """
    peak = plan.predicted.peak_bytes
    is_tight = peak > TIGHT * limit_bytes
    is_whole = all(p.is_whole for stage in plan.stages for p in stage.parameter_plans.values())
    # Activations of steps as written are in no plan: only the limit can be held to.
    keeps_little = peak < LARGE_BYTES or (not plan.is_pipelined and is_whole) or plan.is_eager
    slack, ended = int(SLACK * peak), threading.Event()
    if _glibc("malloc_trim") is None or (keeps_little and not is_tight):
        return ended.set
    itself = max(0, _held_bytes(psutil.Process()) - _tensor_bytes(module, optimizers))
    most = itself + int(limit_bytes if is_tight else HELD * peak) - slack
    threading.Thread(
        target=_trim_beyond, args=(most, slack, ended), name=THREAD, daemon=True
    ).start()
    return weakref.finalize(owner, ended.set)


def _trim_beyond(most: int, slack: int, ended: threading.Event) -> None:
    """Until `ended`, wherever more than `most` bytes are held, or `slack` more than were alive at
    the last time.
    """
    process, allowed = psutil.Process(), most
    while not ended.wait(LOOK_SECONDS):
        held = _held_bytes(process)
        if held > allowed:
            trim()
            allowed = max(most, _held_bytes(process) + slack)
        elif held < most:
            allowed = most


def _held_bytes(process: psutil.Process) -> int:
    """Resident memory, pages of files apart: the system takes those and gives them back as it
    likes.
    """
    info = process.memory_info()
    return info.rss - info.shared


def keep_freed(keep: bool) -> None:
    """Whether freed blocks are kept from now on, in this process; nothing is done without glibc.

    The user's `MALLOC_MMAP_THRESHOLD_` in the environment wins.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        from_bytes, kept_bytes = KEPT if keep else GIVEN_BACK
        mallopt(M_MMAP_THRESHOLD, from_bytes)
        mallopt(M_TRIM_THRESHOLD, kept_bytes)


def trim() -> None:
    """Give back all free memory that glibc holds."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


@cache  # each CDLL brings a class of its own, which a garbage collection alone frees
def _glibc(name: str) -> Any:
    """A function of glibc's; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None)


def process_bytes(module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> int:
    """What this process takes of the host's memory beside tensors: Python, libraries and their
    pages. 0 on GPUs.

    The process's tensors are those of the module and of the optimizers.
    """
    if device.type != "cpu":
        return 0
    return max(0, psutil.Process().memory_info().rss - _tensor_bytes(module, optimizers))


def _tensor_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    state = (value for values in states for value in values.values() if isinstance(value, Tensor))
    tensors = (*module.parameters(), *module.buffers(), *state)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
