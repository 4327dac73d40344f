"""Local copies of checkpoints at URLs. The processes of a node share them: each file is downloaded
once, by the process that needs it first, when it needs it.

The copies are in the folder for temporary files (`TMPDIR`). They are deleted when no process uses
them any more.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from alpa_strategy import urls
from alpa_strategy.checkpoint.locks import locked
from alpa_strategy.errors import CheckpointError

# The copies that this process has used last. Other ranks of the node may come for them later.
_last: list["Download"] = []


class Download:
    """The local copy of the files in a folder at a URL.

    Args:
        url: of the folder.
        version: changes with the content of the folder.
    """

    def __init__(self, url: str, version: str) -> None:
        self._url = url
        root = _root()
        _delete_unused(root)
        self.folder = root / urls.digest(f"{url} {version}")
        descriptor = _held(self.folder)
        weakref.finalize(self, _release, self.folder, descriptor)
        _last[:] = [self]

    def file(self, name: str, num_bytes: int | None = None) -> Path:
        """Return the local path of a file, which is downloaded if it is not there yet.

        Args:
            name: of the file.
            num_bytes: that it must have when it is downloaded; None: any number.

        Raises:
            CheckpointError: it cannot be downloaded, or has another size.
        """
        target = self.folder / name
        with _exclusive(self.folder / f"{name}.lock"):
            if not target.exists():
                self._download(name, target, num_bytes)
        return target

    def _download(self, name: str, target: Path, num_bytes: int | None) -> None:
        """Download a file under another name, and rename it when it is complete. Arguments as of
        `file`.

        Raises:
            CheckpointError: it cannot be downloaded, or does not have `num_bytes` bytes.
        """
        url = f"{self._url}/{name}"
        temporary = self.folder / f"{name}.{secrets.token_hex(4)}.part"
        try:
            urls.download(url, temporary)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint is incomplete: {error}", "load another one"
            ) from error
        size = temporary.stat().st_size
        if num_bytes is not None and size != num_bytes:
            raise CheckpointError(
                f"{url} has {size} bytes, {num_bytes} were written", "copy it again"
            )
        temporary.replace(target)


def release_downloads() -> None:
    """Let the copies that this process has used last be deleted, unless they are still in use."""
    _last.clear()


def _root() -> Path:
    """Return the folder of all copies, made if it is missing, which other users of this machine
    cannot write to; CheckpointError if it belongs to another user.
    """
    root = Path(tempfile.gettempdir()) / f"alpa-checkpoints-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise CheckpointError(
            f"{root} belongs to another user", "set TMPDIR to a folder of your own"
        )
    return root


def _held(folder: Path) -> int:
    """Make a folder, and return a descriptor with a shared lock on it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Another process may have renamed the folder before the lock was there.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)


def _release(folder: Path, descriptor: int) -> None:
    """Give up a folder, and delete it if no process holds it."""
    os.close(descriptor)
    _delete_if_unused(folder)


def _delete_unused(root: Path) -> None:
    """Delete the copies that killed processes have left."""
    for folder in root.iterdir():
        _delete_if_unused(folder)


def _delete_if_unused(folder: Path) -> None:
    """Delete a folder, unless a process holds it."""
    lock = locked(folder)
    if lock is None:
        return
    # A reader finds a folder of another name, or none.
    trash = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.trash")
    try:
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    except FileNotFoundError:
        # Another process was faster.
        return
    finally:
        os.close(lock)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Context that one process of this node is in at a time, by a lock on the file `path`, which is
    made and stays.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
