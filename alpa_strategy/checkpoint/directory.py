"""A sharded checkpoint as a directory: what is in it, when it counts as complete, how it comes and goes at once.

It is written beside its place under a hidden name, and takes its place when everything is on disk: a reader sees the
whole old checkpoint or the whole new one. The hidden name holds no part of the checkpoint's own: nothing that lists a
folder (`ckpt_path="last"`, SLURM's `hpc_ckpt_*`) takes it for one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from pathlib import Path

from alpa_strategy.errors import CheckpointError

FORMAT_VERSION = 1
REST = "lightning.pt"  # everything but the tensors
COMPLETE = "complete.json"  # names and bytes of all other files; written last
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a complete sharded checkpoint."""
    return (Path(path) / COMPLETE).is_file()


def check_complete(path: Path) -> None:
    """CheckpointError unless the directory `path` holds a complete checkpoint of this format."""
    try:
        marker = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in marker["files"].items()}
        version = marker["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is a directory, but not a complete checkpoint ({COMPLETE}: {error})", "load another one"
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}", "use the version that wrote it"
        )
    _check_files(path, files)


def mark_complete(path: Path, names: set[str]) -> None:
    """Write the marker after all files, which must be there.

    Raises:
        CheckpointError: a file that a rank has written is not here.
    """
    _check_files(path, dict.fromkeys(names, -1))
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    write_synced(path / COMPLETE, json.dumps({"format": FORMAT_VERSION, "files": files}).encode())
    sync_folder(path)


def _check_files(path: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(
                f"{name} is missing in {path}", "write checkpoints to a folder that all nodes share, and copy all of it"
            )
        if size >= 0 and file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {size} were written", "copy it again")


def staging_path(target: Path) -> Path:
    """Where the next checkpoint of that name is written: the same on every rank, and cleared by the next try."""
    return _beside(target, "saving")


def check_replaceable(target: Path) -> None:
    """CheckpointError when something stands at `target` that is no checkpoint and would be lost."""
    if target.is_dir() and not target.is_symlink() and any(target.iterdir()) and not (target / COMPLETE).exists():
        raise CheckpointError(
            f"{target} is a directory that is not a checkpoint; it will not be replaced by one",
            "give the checkpoint a name of its own",
        )


def put_in_place(staging: Path, target: Path) -> None:
    """Let the complete `staging` be `target`, in the place of what may be there."""
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not _exchange(staging, target):  # a file system without the exchange: for an instant neither is there
        old = _beside(target, "replaced")
        delete(old)
        os.rename(target, old)
        os.rename(staging, target)
        delete(old)
    sync_folder(target.parent)
    delete(staging)


def restore_interrupted(target: Path) -> None:
    """Finish what `put_in_place` left undone between its two renames (file systems without the exchange)."""
    if os.path.lexists(target):
        return
    for candidate in (staging_path(target), _beside(target, "replaced")):
        if is_checkpoint(candidate):
            os.rename(candidate, target)
            return


def remove(target: Path) -> None:
    """Remove a checkpoint (a directory, file or link): at once under its name, then its content."""
    for purpose in ("saving", "replaced"):  # what a killed process may have left of it
        delete(_beside(target, purpose))
    if os.path.lexists(target):
        trash = _beside(target, "removed")
        delete(trash)
        os.rename(target, trash)
        delete(trash)


def delete(path: Path) -> None:
    """Remove whatever stands at `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(target: Path, purpose: str) -> Path:
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return target.parent / f".alpa.{digest}.{purpose}"


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux); False where it is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
