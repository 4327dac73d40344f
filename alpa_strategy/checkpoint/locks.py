"""Locks on local files and folders, which end with the process that holds them."""

import fcntl
import os
from pathlib import Path


def locked(path: Path, is_shared: bool = False) -> int | None:
    """Lock a file or folder without waiting, and return the file descriptor that has the lock.

    The caller closes the descriptor, which releases the lock.

    Args:
        path: of the file or folder.
        is_shared: whether other processes may have such a lock at the same time.

    Returns:
        None if another process has locked it, if it cannot be opened (it does not exist), or if
        the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None
