"""The pointer: the small file at the URL of a sharded checkpoint. It names the folder with the
shards, a complete checkpoint directory.

Object stores cannot rename folders, but write one file in one step: whoever finds the pointer
finds all shards.
"""

import json
from pathlib import Path

from alpa_strategy import urls
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import BadFileError, parse_json

# Folder of the shards of all checkpoints in a folder. Code that lists the folder does not take it
# for a checkpoint.
SHARDS = ".alpa"

_MAX_BYTES = 4096
_KEY = "shards"
_TO_READ = (
    "the shards are in the folder that this file names, which is a checkpoint of alpa_strategy"
)


def pointer_content(folder_name: str) -> bytes:
    """Return the content of the pointer to the folder `.alpa/<folder_name>` beside it."""
    content = {"to_read": _TO_READ, _KEY: folder_name}
    return (json.dumps(content, indent=1) + "\n").encode()


def shards_url(url: str, folder_name: str) -> str:
    """Return the URL of the folder that the pointer at `url` names."""
    parent, _ = urls.parent_and_name(url)
    return f"{parent}/{SHARDS}/{folder_name}"


def find_shards(url: str, marker: str) -> str | None:
    """Return the URL of the folder of a sharded checkpoint; None if an ordinary file is at `url`.

    Args:
        url: of the checkpoint: of a pointer, or of a directory that was copied there.
        marker: name of the file that makes a directory a complete checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: there is an incomplete directory, or the pointer is damaged.
        OSError: the URL cannot be read.
    """
    try:
        start = urls.read_start(url, _MAX_BYTES)
    except OSError:
        if urls.exists(f"{url}/{marker}"):
            return url
        if urls.is_folder(url):
            raise CheckpointError(
                f"{url} is a folder, but not a complete checkpoint", "load another one"
            ) from None
        raise
    folder_name = _folder_name(start, url)
    return None if folder_name is None else shards_url(url, folder_name)


def find_local_shards(path: Path) -> Path | None:
    """Return the folder that a local copy of a pointer names; None if `path` is no pointer.

    Raises:
        CheckpointError: the pointer is damaged.
    """
    with path.open("rb") as file:
        folder_name = _folder_name(file.read(_MAX_BYTES), str(path))
    return None if folder_name is None else path.parent / SHARDS / folder_name


def _folder_name(start: bytes, path: str) -> str | None:
    """Return the name in a pointer; None for the start of any other file.

    Args:
        start: the first bytes of a file.
        path: of the file, for the message.

    Raises:
        CheckpointError: it begins like a pointer, and is none.
    """
    if not start.startswith(b"{"):
        return None
    try:
        name = parse_json(start.decode())[_KEY]
    except (BadFileError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}", "load another one") from error
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise CheckpointError(
            f"{path} names the folder {name!r}, which is none beside it", "load another one"
        )
    return name
