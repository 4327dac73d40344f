"""Locks on local files and folders, which end with the process that holds them."""

import fcntl
import os
from pathlib import Path


def locked(folder: Path, is_shared: bool = False) -> int | None:
    """Lock a file or folder, and return the descriptor that has the lock.

    None if another process has locked it, or if the file system has no locks.

    Args:
        folder: path of the file or folder.
        is_shared: whether other processes may have such a lock at the same time.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None
