"""Files that users edit and other jobs write: read within limits, written atomically.

A plan, a cluster, a recipe or a store of measured times is untrusted input: it may be truncated,
nested a million deep or contain `1e999`. `read_json` and `read_yaml` raise a BadFileError of one
line before the content is used. Shipped files are found by name.
"""

import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from alpa_strategy.errors import UNPRINTABLE
from alpa_strategy.urls import is_url, read_start

# Largest JSON file. A plan of 100,000 ops has 20 MB.
MAX_BYTES = 64 << 20

MAX_DEPTH = 64
MAX_YAML_BYTES = 1 << 20

# Values of a YAML file, each as often as aliases repeat it: a few lines can stand for a billion.
MAX_YAML_VALUES = 100_000

# Digits of an integer of 64 bits.
MAX_DIGITS = 19

# Folders of a checkout that a wheel has as package data (see setup.py).
RECIPES = "recipes"
CLUSTERS = "configs/clusters"

# A wheel has `op_coverage.json` of this folder, and no other file.
FINDINGS = "docs"
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9_]+")


class BadFileError(ValueError):
    """A file has invalid content. The message continues a sentence that begins with its name."""


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file, at a path or a URL.

    Raises:
        OSError: the file cannot be read.
        BadFileError: it is no JSON, or exceeds the limits of size, depth or numbers.
        SetupError: the library for a URL is not installed.
    """
    if is_url(path):
        return parse_json(_decoded(read_start(str(path), MAX_BYTES + 1), MAX_BYTES))
    return parse_json(_text(Path(path), MAX_BYTES))


def parse_json(text: str) -> Any:
    """Return the content of a JSON text.

    Raises:
        BadFileError: it is no JSON, or exceeds the limits of depth or numbers.
    """
    try:
        data = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise BadFileError(f"is nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise BadFileError(f"is not JSON: {error}") from None
    _check_values(data)
    return data


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file as an OmegaConf node, interpolations unresolved.

    Raises:
        OSError: the file cannot be read.
        BadFileError: it is no YAML or one value, or exceeds the limits of size, depth or number of
            values.
        OmegaConfBaseException: OmegaConf refuses it.
    """
    # Imported here, as most processes read no YAML file.
    from omegaconf import OmegaConf

    text = _text(Path(path), MAX_YAML_BYTES)
    try:
        # This loader reads every value as a text.
        data = yaml.load(text, Loader=yaml.BaseLoader)
        if isinstance(data, str):
            raise BadFileError("is one value, not a mapping of keys to values")
        _check_values(data, MAX_YAML_VALUES, MAX_DIGITS, takes_control_characters=False)
        return OmegaConf.create(text)
    except RecursionError:
        raise BadFileError(f"is nested more than {MAX_DEPTH} deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise BadFileError(f"is not valid YAML{location}: {problem}") from None


def write_json(path: str | Path, data: Any) -> None:
    """Write `data` as a JSON file, atomically: a reader sees the old file or the new one."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Context with a temporary file in the folder of `path`, which replaces `path` at the end;
    after an error it is deleted instead.

    Args:
        path: the file to be replaced; its folder is made.
        durable: wait until the content is on the disk, so that a power cut cannot truncate it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # `tempfile` makes files that only their owner can read, but teammates share a store.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_possible(path: Path) -> bool:
    """Whether a file can have this path: no NUL, no character without an encoding in file names, no
    name that is too long.
    """
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _text(path: Path, max_bytes: int) -> str:
    """Return the content of a text file.

    Args:
        path: the file.
        max_bytes: larger files are refused.

    Raises:
        BadFileError: it is no ordinary file, too large, or not UTF-8.
        OSError: it cannot be read.
    """
    if not is_possible(path):
        raise BadFileError("has a name that no file can have")
    if path.exists() and not path.is_file() and not path.is_dir():
        # Opening a pipe would wait for its writer.
        raise BadFileError("is no ordinary file")
    with path.open("rb") as file:
        return _decoded(file.read(max_bytes + 1), max_bytes)


def _decoded(content: bytes, max_bytes: int) -> str:
    """Return content as text. Raises: BadFileError: it is too large, or not UTF-8."""
    if len(content) > max_bytes:
        raise BadFileError(f"is larger than {max_bytes >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFileError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _integer(text: str) -> int:
    """Return an integer of a JSON file.

    Raises:
        BadFileError: it has too many digits to convert.
    """
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise BadFileError(f"contains a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """Return a number of a JSON file.

    Raises:
        BadFileError: it is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise BadFileError(f"contains {text:.20}, which is no finite number")
    return value


def _check_values(
    data: Any,
    most: float = math.inf,
    most_digits: float = math.inf,
    takes_control_characters: bool = True,
) -> None:
    """Check the depth, number and texts of the values of a file.

    Args:
        data: nested dicts, lists and values.
        most: largest number of values; one that several others contain counts for each.
        most_digits: largest number of digits of integers, which YAML's reader returns as texts.
        takes_control_characters: whether texts may have control characters. A plan contains the
            names of a module's parameters, which may have some; `display/console.py` escapes them.
            A file that users write must not.

    Raises:
        BadFileError: a limit is exceeded.
    """
    remaining = [(data, 0)]
    count = 0
    while remaining:
        value, depth = remaining.pop()
        count += 1
        if count > most:
            raise BadFileError(f"stands for more than {most} values")
        if isinstance(value, str):
            if not takes_control_characters:
                _check_printable(value)
            if len(value) > most_digits and _WHOLE_NUMBER.fullmatch(value):
                raise BadFileError(f"contains a number of {len(value)} digits")
        elif isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise BadFileError(f"is nested more than {MAX_DEPTH} deep")
            items = value if isinstance(value, list) else (*value, *value.values())
            remaining += [(item, depth + 1) for item in items]


def _check_printable(text: str) -> None:
    """Check that a text has no control characters.

    Raises:
        BadFileError: it has.
    """
    if text.isprintable():
        return

    match = UNPRINTABLE.search(text)
    if match is not None:
        character = match[0]
        raise BadFileError(
            f"contains the control character {character!a} in the text {text[:40]!a}"
        )


def shipped_folder(folder: str) -> Path:
    """Return the path of `RECIPES`, `CLUSTERS` or `FINDINGS` in the wheel or the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / folder
    return installed if installed.is_dir() else package.parent / folder


def find_named(name: str | Path, folder: str) -> Path | None:
    """Return the YAML file that `name` means, or None if there is none.

    Args:
        name: a path, or the name of a shipped file, with or without `.yaml`. A user's path with
            the suffix `.yaml` or `.yml` comes first, one without after the shipped files.
        folder: `RECIPES` or `CLUSTERS`.
    """
    path = Path(name)
    candidates = [path] if path.suffix in (".yaml", ".yml") else []
    if len(path.parts) == 1:
        candidates.append(shipped_folder(folder) / f"{path.name.removesuffix('.yaml')}.yaml")
    candidates.append(path)

    for candidate in candidates:
        if is_possible(candidate) and candidate.is_file():
            return candidate
    return None


def shipped_names(folder: str) -> list[str]:
    """Return the names of shipped files in `folder` that `find_named` accepts, sorted."""
    return sorted(file.stem for file in shipped_folder(folder).glob("*.yaml"))
