"""The C library's allocator, where tensors lie in host memory: what is freed goes back to the system at once.

glibc raises its threshold for memory of its own mapping as such memory is freed, up to 32 MB: blocks of a training step
then share heaps with small objects, which never shrink. A step of ZeRO-3 was seen to hold twice what is alive.
"""

from __future__ import annotations

import ctypes
import os

M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_BYTES = 2**20


def return_freed_memory() -> bool:
    """Give every block of `MAPPED_BYTES` or more a mapping of its own, for good; False where the library is another.

    `MALLOC_MMAP_THRESHOLD_` in the environment wins.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES))
