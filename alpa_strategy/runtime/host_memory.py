"""The C library's allocator, where tensors lie in host memory: freed blocks are kept for the next step, or given back.

glibc gives a large freed block back to the system, and the next step pays a page fault for every 4 KB of it: the
temporaries of an optimizer step were seen to take 2.6 x as long. Kept blocks share heaps with small objects, which
never shrink: a step of ZeRO-3 was seen to hold 1.8 x what is alive, 1.1 x where blocks from 4 MB on are given back, and
1.0 x where those from 1 MB on are. So it depends on which is short, memory or time.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TIGHT = 0.5  # of what a device may use: above it memory counts more than the time that returning it takes
LARGE_BYTES = 500 * 10**6  # planned: above it what is kept in vain would be much
# (bytes from which blocks are given back, bytes kept at a heap's end); glibc allows no more than 32 MB of the first.
EXACT, FAIR, FAST = (2**20, 2**25), (2**22, 2**27), (2**25, 2**30)


def set_up_for(planned_bytes: float, usable_bytes: float) -> bool:
    """Give freed memory back as the plan needs it, from now on; give back what planning left. False without glibc."""
    roomy = FAIR if planned_bytes > LARGE_BYTES else FAST
    from_bytes, kept_bytes = EXACT if planned_bytes > TIGHT * usable_bytes else roomy
    return _set(M_MMAP_THRESHOLD, from_bytes) and _set(M_TRIM_THRESHOLD, kept_bytes) and trim()


def trim() -> bool:
    """Give back all free memory that the C library holds; False without glibc."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    malloc_trim(0)
    return True


def _set(parameter: int, value: int) -> bool:
    """`mallopt`, for good. The user's `MALLOC_MMAP_THRESHOLD_` in the environment wins."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(parameter, value))
