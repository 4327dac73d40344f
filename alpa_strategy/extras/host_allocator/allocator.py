"""The C library's allocator, if tensors are in host memory: freed blocks are kept for reuse as far
as the plan leaves memory headroom.

glibc returns a large freed block to the system, and the next step pays a page fault for every 4 KB
of it: steps took up to 1.7 x as long. If blocks are kept instead, the next tensor of the same size
often does not fit where one was: PyTorch wants multiples of 64 bytes, for which glibc looks for
more than it frees (its bug 14581). Measured memory was 1.1 x the live bytes under data parallelism,
and 1.8 to 2.1 x with recomputation or ZeRO-3. So a thread polls the memory of the process, and
returns all free blocks at once when it exceeds the limit.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil

from alpa_strategy.ir.plan import Plan

# A plan is tight from this share of the limit on: kept blocks took up to as much again as live
# ones.
TIGHT = 0.5

# Planned bytes below which freed blocks do not matter: they are few compared with Python's own.
LEAST_BYTES = 50 * 10**6

# Planned bytes from which the blocks that a plan keeps in vain would be much.
LARGE_BYTES = 250 * 10**6

# Resident bytes per planned byte: 1.1 to 1.2 were measured in most plans, up to 1.5 in some.
KEPT_BLOCKS = 1.25

# Options of `mallopt`, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) in bytes: blocks from the first size on have memory of their
# own, which is returned when they are freed (glibc allows at most 32 MB); a free heap's end is
# returned from the second size on.
GIVEN_BACK = (2**20, 2**25)
KEPT = (2**25, 2**30)

# Seconds between two polls of the process's memory; one takes 20 microseconds.
LOOK_SECONDS = 0.004

# Name of the thread that polls.
THREAD = "alpa-free-memory"

# Resident bytes per planned byte from which on free blocks are returned.
HELD = 1.2

# Share of the planned bytes by which memory has to grow before free blocks are returned again.
SLACK = 0.05


def enforce_memory_plan(
    owner: object,
    plan: Plan,
    limit_bytes: float,
    tensor_bytes: int,
) -> Callable[[], object]:
    """Start a thread that returns free blocks to the system when the process exceeds its memory.

    The bound is the planned bytes, or the limit if that is not far away, in addition to what the
    process takes without tensors. No thread is started without glibc, nor if the limit has enough
    headroom for all blocks that may be kept and these are few.

    Args:
        owner: the thread ends when this object is freed.
        plan: whose predicted peak bytes count.
        limit_bytes: of tensors, for this process.
        tensor_bytes: of the tensors that the process has now.

    Returns:
        A function that ends the thread.
    """
    ended = threading.Event()
    peak = plan.predicted.peak_bytes
    is_tight = peak > TIGHT * limit_bytes
    if _glibc("malloc_trim") is None or (_keeps_few_blocks(plan) and not is_tight):
        return ended.set

    slack = int(SLACK * peak)
    without_tensors = max(0, _held_bytes(psutil.Process()) - tensor_bytes)
    allowed_bytes = limit_bytes if is_tight else HELD * peak
    bound = without_tensors + int(allowed_bytes) - slack
    arguments = (bound, slack, ended)
    threading.Thread(target=_trim_beyond, args=arguments, name=THREAD, daemon=True).start()
    return weakref.finalize(owner, ended.set)


def _keeps_few_blocks(plan: Plan) -> bool:
    """Whether freed blocks of a plan are few, or the plan has no figure to compare them with."""
    if plan.predicted.peak_bytes < LARGE_BYTES:
        return True
    if plan.is_eager:
        # Activations of eager steps are in no plan: only the limit can be enforced.
        return True
    is_unsharded = all(
        p.is_unsharded for stage in plan.stages for p in stage.parameter_plans.values()
    )
    return is_unsharded and not plan.is_pipelined


def _trim_beyond(bound: int, slack: int, ended: threading.Event) -> None:
    """Poll until `ended`, and trim whenever the process has more than `bound` bytes.

    If more than that are in use, it trims only after `slack` more bytes than after the last trim.
    """
    process = psutil.Process()
    allowed = bound
    while not ended.wait(LOOK_SECONDS):
        resident = _held_bytes(process)
        if resident > allowed:
            trim()
            allowed = max(bound, _held_bytes(process) + slack)
        elif resident < bound:
            allowed = bound


def _held_bytes(process: psutil.Process) -> int:
    """Return the resident bytes without pages of files, which the system drops when it needs
    them.
    """
    info = process.memory_info()
    return info.rss - info.shared


def keep_freed(keep: bool) -> None:
    """Set whether this process keeps freed blocks from now on. Does nothing without glibc.

    The user's `MALLOC_MMAP_THRESHOLD_` in the environment takes precedence.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mmap_threshold, trim_threshold = KEPT if keep else GIVEN_BACK
        mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(M_TRIM_THRESHOLD, trim_threshold)


def trim() -> None:
    """Return all free memory of glibc's allocator to the system."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


# Cached: each CDLL makes a class of its own, which only the garbage collector frees.
@cache
def _glibc(name: str) -> Any:
    """Return a function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None)
