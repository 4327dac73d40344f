"""Names in a local folder: a checkpoint appears, is replaced and disappears in one step.

It is written under a hidden name, which its writer has locked, and renamed when it is complete.
"""

import ctypes
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from alpa_strategy.checkpoint import opening
from alpa_strategy.checkpoint.locks import locked
from alpa_strategy.checkpoint.opening import COMPLETE
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import sync

# Hidden path that this process is writing -> descriptor with its lock, on rank 0; None on others.
LOCKS: dict[Path, int | None] = {}

# Arguments of `renameat2`: paths are relative to the working directory, names are swapped.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """Write one file under a hidden name, and rename it to `path` when it is complete.

    What is at `path` is replaced, a folder too; abandoned files of earlier saves are deleted.

    Args:
        path: of the file; missing folders are made.
        write: writes the content into the file whose path it gets.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_abandoned(path.parent)
    staging = opening.beside(path, "saving")
    delete(staging)
    staging.touch()
    LOCKS[staging] = locked(staging)
    try:
        write(staging)
        sync(staging)
        if path.is_dir() and not path.is_symlink():
            # A sharded checkpoint: a file cannot be renamed to a directory's name.
            put_in_place(staging, path)
        else:
            staging.replace(path)
    finally:
        unlock(staging)
        delete(staging)


def discard_unfinished() -> None:
    """Remove the unfinished checkpoints that this process is writing, unless rank 0 is still alive
    to do so.
    """
    for staging in list(LOCKS):
        unlock(staging)
        delete_abandoned(staging.parent)


def delete_abandoned(folder: Path) -> None:
    """Remove unfinished checkpoints in `folder` that no process has locked: their rank 0 is
    gone.
    """
    for staging in folder.glob(".alpa.*.saving"):
        if (staging / COMPLETE).exists():
            continue
        lock = locked(staging)
        if lock is not None:
            # OSError: other ranks do the same.
            with suppress(OSError):
                delete(staging)
            os.close(lock)


def unlock(staging: Path) -> None:
    """Release the lock of a staging folder, if this process has it."""
    lock = LOCKS.pop(staging, None)
    if lock is not None:
        os.close(lock)


def check_replaceable(target: Path) -> None:
    """Check that no data is lost when `target` is replaced.

    Raises:
        CheckpointError: `target` is a directory with files that is no checkpoint, and no link to
            one.
    """
    if not target.is_dir() or target.is_symlink():
        return
    is_empty = next(target.iterdir(), None) is None
    if not is_empty and not (target / COMPLETE).exists():
        raise CheckpointError(
            f"{target} is a directory that is not a checkpoint; it will not be replaced by one",
            "give the checkpoint a name of its own",
        )


def put_in_place(staging: Path, target: Path) -> None:
    """Rename the complete `staging` to `target`, and delete a previous checkpoint there.

    A reader sees the previous checkpoint or the new one; on a file system that cannot swap names,
    neither for an instant. The new name is on disk when this returns.

    Raises:
        OSError: a file cannot be renamed or deleted.
    """
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not _exchange(staging, target):
        # `opening.restore_interrupted` repairs an interruption between the two renames.
        old = opening.beside(target, "replaced")
        delete(old)
        os.rename(target, old)
        os.rename(staging, target)
        delete(old)
    sync(target.parent)
    delete(staging)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one atomic step (Linux); return False if that is not supported or fails."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    first_name = os.fsencode(first)
    second_name = os.fsencode(second)
    return rename(_AT_FDCWD, first_name, _AT_FDCWD, second_name, _RENAME_EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a checkpoint (a directory, file or link), if any: its name in one step, then its
    content. What a killed process left beside it is removed, too.
    """
    # A killed process may have left these.
    for purpose in ("saving", "replaced"):
        delete(opening.beside(path, purpose))
    if os.path.lexists(path):
        trash = opening.beside(path, "removed")
        delete(trash)
        os.rename(path, trash)
        delete(trash)


def delete(path: Path) -> None:
    """Remove the directory, file or link at `path`, if any."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
