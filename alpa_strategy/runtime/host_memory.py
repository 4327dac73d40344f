"""The C library's allocator, where tensors lie in host memory: freed blocks are kept for the next step, or given back.

glibc gives a large freed block back to the system, and the next step pays a page fault for every 4 KB of it: the
temporaries of an optimizer step were seen to take 2.6 x as long. Kept blocks share heaps with small objects, which
never shrink: a step of ZeRO-3 was seen to hold twice what is alive. So it depends on which is short, memory or time.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES = 2**20  # blocks that are given back
KEPT_BYTES, TOP_BYTES = 2**25, 2**30  # blocks that are kept (glibc allows no more), and how much at a heap's end


def return_freed_memory() -> bool:
    """Give every block of `MAPPED_BYTES` or more back as soon as it is free; False where nothing could be set."""
    return _set(M_MMAP_THRESHOLD, MAPPED_BYTES)


def keep_freed_memory() -> bool:
    """Keep blocks of less than `KEPT_BYTES` for the next step; False where nothing could be set."""
    return _set(M_MMAP_THRESHOLD, KEPT_BYTES) and _set(M_TRIM_THRESHOLD, TOP_BYTES)


def _set(parameter: int, value: int) -> bool:
    """`mallopt`, for good. The user's `MALLOC_MMAP_THRESHOLD_` in the environment wins."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(parameter, value))
