"""Writing checkpoints to URLs. Every rank writes its files into a local folder, and uploads them.

The file at the URL itself is written last, by rank 0, in one step: the pointer to the shards
(`checkpoint/pointer.py`), or an ordinary checkpoint. Until then readers find the previous one,
whose shards are removed afterwards.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alpa_strategy import urls
from alpa_strategy.checkpoint.directory import write_shards
from alpa_strategy.checkpoint.locks import locked
from alpa_strategy.checkpoint.opening import COMPLETE
from alpa_strategy.checkpoint.pointer import SHARDS, pointer_content, shards_url
from alpa_strategy.checkpoint.tensors import LocalShards
from alpa_strategy.comm.collectives import on_all_ranks, rank_in
from alpa_strategy.errors import AlpaError, CheckpointError

_TOKEN_BYTES = 8
_TOKEN = re.compile(r"[0-9a-f]{16}")

# Staged files without a living writer are deleted after this time.
_ABANDONED_SECONDS = 3600


def upload_directory(
    url: str,
    shards: Mapping[str, LocalShards],
    rest: bytes | Exception,
    group: Any,
    staging_root: Path,
) -> None:
    """Write a sharded checkpoint to a URL. Collective over `group`. Shards of older checkpoints
    there are removed.

    Args:
        url: of the checkpoint.
        shards, rest, group: as of `save_directory`.
        staging_root: local folder, in which the files are written first.

    Raises:
        CheckpointError: on every rank, if any rank fails. What was at the URL is unchanged, unless
            only the removal of older shards has failed.
    """
    folder_name = _begin(url, group)
    with _staged(staging_root / folder_name) as folder:
        written = write_shards(folder, shards, rest, group, url)
        target = shards_url(url, folder_name)

        def upload_files() -> None:
            for name in written:
                if name != COMPLETE:
                    urls.upload(folder / name, f"{target}/{name}")

        def complete() -> None:
            if COMPLETE not in written:
                return
            urls.upload(folder / COMPLETE, f"{target}/{COMPLETE}")
            pointer = folder / "pointer.json"
            pointer.write_bytes(pointer_content(folder_name))
            urls.replace(pointer, url)
            _remove_older_shards(url, current=folder_name)

        _on_all_ranks(upload_files, url, folder, group)
        _on_all_ranks(complete, url, folder, group)


def upload_file(
    url: str, write: Callable[[Path], None] | None, group: Any, staging_root: Path
) -> None:
    """Let rank 0 write an ordinary checkpoint to a URL. Collective over `group`. Shards of older
    checkpoints there are removed.

    Args:
        url: of the checkpoint.
        write: writes the content to the path that is its argument; None on all ranks but rank 0.
        group: of all ranks, with a CPU backend; None: this process alone.
        staging_root: local folder, in which the file is written first.

    Raises:
        CheckpointError: on every rank, if rank 0 fails. What was at the URL is unchanged, unless
            only the removal of older shards has failed.
    """
    name = _begin(url, group)
    with _staged(staging_root / name) as folder:

        def write_and_upload() -> None:
            if write is None:
                return
            file = folder / "checkpoint"
            write(file)
            urls.replace(file, url)
            _remove_older_shards(url, current=None)

        _on_all_ranks(write_and_upload, url, folder, group)


def remove_at_url(url: str) -> None:
    """Remove a checkpoint: first the file at the URL, then the shards.

    Raises:
        CheckpointError: it cannot be removed.
    """
    try:
        urls.remove(url)
        _remove_shards(url, current=None)
    except OSError as error:
        raise CheckpointError(str(error), "remove it by hand") from error


def _begin(url: str, group: Any) -> str:
    """Return a new name for the folder of the shards, the same on all ranks. Collective.

    Raises:
        CheckpointError: a folder is in the place of the checkpoint.
    """
    _, name = urls.parent_and_name(url)

    def check() -> str:
        if rank_in(group) == 0 and urls.is_folder(url):
            raise CheckpointError(
                f"{url} is a folder; it will not be replaced by a checkpoint",
                "give the checkpoint a name of its own",
            )
        return f"{name}.{secrets.token_hex(_TOKEN_BYTES)}"

    folder_names = _on_all_ranks(check, url, None, group)
    return str(folder_names[0])


def _on_all_ranks(work: Callable[[], Any], url: str, folder: Path | None, group: Any) -> list[Any]:
    """Run `work` on all ranks, and return the results of all, by rank. Collective.

    Args:
        work: a part of an upload.
        url: of the checkpoint, for the message.
        folder: with this attempt's files, for the message.

    Raises:
        AlpaError: `work` raised it on a rank: that of the lowest one; CheckpointError for any other
            error. Raised on all ranks.
    """

    def checked() -> Any:
        try:
            return work()
        except AlpaError:
            raise
        except Exception as error:
            rest = "" if folder is None else f"; this attempt's files are in {folder}"
            raise CheckpointError(
                f"the checkpoint {url} was not uploaded: {error}",
                f"the previous checkpoint, if any, is unchanged{rest}",
            ) from error

    _, results = on_all_ranks(checked, lambda result: result, group)
    return results


def _remove_older_shards(url: str, current: str | None) -> None:
    """Remove the shards of older checkpoints at a URL, after one was written.

    Args:
        current: name of the folder that stays; None: all go.

    Raises:
        CheckpointError: they cannot be removed.
    """
    try:
        _remove_shards(url, current)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {url} was written, but the shards of an older one stay: {error}",
            "let the job remove files there",
        ) from error


def _remove_shards(url: str, current: str | None) -> None:
    """Remove the shards of the checkpoints that were at a URL, of unfinished ones as well.

    Args:
        url: of the checkpoint.
        current: name of the folder that stays; None: none does.

    Raises:
        OSError: the folder of shards cannot be listed, or one cannot be removed.
    """
    parent, name = urls.parent_and_name(url)
    for folder_name in urls.names(f"{parent}/{SHARDS}"):
        own_name, _, token = folder_name.rpartition(".")
        if own_name == name and _TOKEN.fullmatch(token) and folder_name != current:
            urls.remove(f"{parent}/{SHARDS}/{folder_name}")


# The local folder


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Context with a local folder, which is deleted at the end; after an error it stays. Without
    one, abandoned folders beside it are deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder, is_shared=True)
    try:
        yield folder
        # Several ranks of one node do so.
        shutil.rmtree(folder, ignore_errors=True)
        _delete_abandoned(folder.parent)
    finally:
        if lock is not None:
            os.close(lock)


def _delete_abandoned(root: Path) -> None:
    """Delete staged files older than `_ABANDONED_SECONDS` that no job has locked, now that a newer
    checkpoint is uploaded.
    """
    for folder in root.iterdir():
        try:
            age_seconds = time.time() - folder.stat().st_mtime
        except FileNotFoundError:
            # Another rank was faster.
            continue
        lock = locked(folder) if age_seconds > _ABANDONED_SECONDS else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
