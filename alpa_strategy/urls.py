"""Files at URLs (s3://, gs://, memory://), through fsspec, which Lightning requires.

Every failure is an OSError whose message names the URL: callers treat it as they treat a folder
that cannot be read or written. `file://` URLs are local paths.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from alpa_strategy.errors import SetupError

_LOCAL_SCHEMES = ("file", "local")
_COPIED_BYTES = 16 << 20


class UrlError(OSError):
    """A URL cannot be read, written or removed."""


def is_url(path: Any) -> bool:
    """Whether a path is a URL, and no path of a local or mounted folder."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme not in _LOCAL_SCHEMES


def is_of_process(path: str | Path) -> bool:
    """Whether files at a URL are in the memory of this process alone."""
    return str(path).startswith("memory://")


def local_path(path: str | Path) -> Path:
    """Return a local path, given as such or as a `file://` URL."""
    scheme, separator, rest = str(path).partition("://")
    if separator and scheme in _LOCAL_SCHEMES:
        return Path(unquote(rest))
    return Path(path)


def parent_and_name(url: str) -> tuple[str, str]:
    """Return the URL of the folder of a URL, and the name in it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def digest(url: str) -> str:
    """Return a name for local copies of what is at a URL."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def check_scheme(url: str | Path) -> None:
    """Check that this machine has the library for the scheme of a URL. No network is used.

    Raises:
        SetupError: it has not, or fsspec does not know the scheme.
    """
    _file_system(str(url))


def exists(url: str) -> bool:
    """Whether there is a file or folder at a URL, now. Errors as of `_using`."""
    with _using(url, "read") as (file_system, path):
        file_system.invalidate_cache()
        return bool(file_system.exists(path))


def is_folder(url: str) -> bool:
    """Whether there is a folder with files at a URL, now. Errors as of `_using`."""
    with _using(url, "read") as (file_system, path):
        file_system.invalidate_cache()
        return bool(file_system.isdir(path))


def names(url: str) -> list[str]:
    """Return the names of files and folders in a folder, sorted; none if there is no folder.
    Errors as of `_using`.
    """
    with _using(url, "read") as (file_system, path):
        file_system.invalidate_cache()
        if not file_system.exists(path):
            return []
        entries = file_system.ls(path, detail=False)
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)


def version(url: str) -> str:
    """Return a text that changes with the file at a URL.

    Raises:
        FileNotFoundError: there is none.
        UrlError, SetupError: as of `_using`.
    """
    with _using(url, "read") as (file_system, path):
        file_system.invalidate_cache()
        return str(file_system.ukey(path))


def read_start(url: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file.

    Raises:
        FileNotFoundError: there is none.
    """
    with _using(url, "read") as (file_system, path), file_system.open(path, "rb") as file:
        return bytes(file.read(num_bytes))


def download(url: str, target: Path) -> None:
    """Copy a file to a local path.

    Raises:
        FileNotFoundError: there is none.
    """
    with _using(url, "read") as (file_system, path):
        file_system.get_file(path, str(target))


def upload(source: Path, url: str) -> None:
    """Copy the local file `source` to `url`, and make its folder.

    Not atomic: no process may read `url` before this returns. `replace` has no such condition.

    Raises:
        OSError: it cannot be written, or has another size then.
        SetupError: as of `_file_system`.
    """
    with _using(url, "written") as (file_system, path):
        file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        file_system.put_file(str(source), path)
        file_system.invalidate_cache()
        num_bytes = file_system.size(path)
        if num_bytes != source.stat().st_size:
            raise UrlError(f"{num_bytes} of {source.stat().st_size} bytes have arrived")


def replace(source: Path, url: str) -> None:
    """Copy the local file `source` to `url`, where a reader sees the old file or all of the new
    one.

    Raises:
        OSError: it cannot be written.
        SetupError: as of `_file_system`.
    """
    with _using(url, "written") as (file_system, path):
        file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        # A transaction defers all writes through its instance, so this instance is not shared.
        writer, _ = url_to_fs(url, skip_instance_cache=True)
        with writer.transaction, writer.open(path, "wb") as target, source.open("rb") as content:
            shutil.copyfileobj(content, target, _COPIED_BYTES)
        file_system.invalidate_cache()


def remove(url: str) -> None:
    """Remove a file, or a folder with all of its files; nothing if there is none. Errors as of
    `_using`.
    """
    with _using(url, "removed") as (file_system, path):
        file_system.invalidate_cache()
        if file_system.exists(path):
            file_system.rm(path, recursive=True)
        file_system.invalidate_cache()


@contextmanager
def _using(url: str, verb: str) -> Iterator[tuple[Any, str]]:
    """Context with the file system of a URL and the path in it; any error in the block becomes a
    FileNotFoundError or `UrlError`, which are OSErrors. SetupError as of `_file_system`.

    Args:
        verb: what is done there, for the message: `read`, `written`.
    """
    file_system, path = _file_system(url)
    try:
        yield file_system, path
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {url}") from error
    except Exception as error:
        # Each kind of file system has errors of its own.
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UrlError(f"{url} cannot be {verb}: {cause}") from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        SetupError: the library for the URL is not installed, or fsspec does not know the scheme.
    """
    scheme = url.partition("://")[0]
    try:
        file_system, path = url_to_fs(url)
    except ImportError as error:
        module = str(known_implementations.get(scheme, {}).get("class", "fsspec"))
        package = module.partition(".")[0]
        raise SetupError(
            f"{url} needs a library that is not installed: {error}",
            f"pip install {package}" if package != "fsspec" else "install it on every node",
        ) from error
    except ValueError as error:
        raise SetupError(
            f"{url} cannot be used: {error}",
            "give a URL that fsspec knows, such as s3://, gs://, abfs://, sftp://, or a local path",
        ) from error
    return file_system, str(path)
