"""Files that people edit and other jobs write: read within limits, written whole or not at all;
shipped ones by name.

A plan, a cluster, a recipe or a store of measured times is input like any other: it may be cut off,
nested a million deep or hold `1e999`. `read_json` and `read_yaml` say so in a line (`BadFileError`)
before anything is made of it.
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

# A plan of 100,000 ops has 20 MB.
MAX_BYTES = 64 << 20
MAX_DEPTH = 64
MAX_YAML_BYTES = 1 << 20
# With what aliases repeat: a few lines can stand for a billion.
MAX_YAML_VALUES = 100_000
# Of a whole number: 64 bits.
MAX_DIGITS = 19
# The folders of a checkout, as package data in a wheel (see setup.py).
RECIPES = "recipes"
CLUSTERS = "configs/clusters"
# Op_coverage.json alone.
FINDINGS = "docs"
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9_]+")


class BadFileError(ValueError):
    """What is wrong with a file's content, as a sentence that follows the file's name."""


def read_json(path: str | Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read.
        BadFileError: it is no JSON, or larger, deeper or with other numbers than a file of ours can
            be.
    """
    return parse_json(_text(Path(path), MAX_BYTES))


def parse_json(text: str) -> Any:
    """As `read_json`, from the text."""
    try:
        data = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise BadFileError(f"is nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise BadFileError(f"is not JSON: {error}") from None
    _check_values(data)
    return data


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file as OmegaConf has it, interpolations as written.

    Raises:
        OSError: it cannot be read.
        BadFileError: it is no YAML, or larger, deeper or stands for more than a file of ours can.
    """
    # Loaded where a file is read: most processes read none.
    from omegaconf import OmegaConf

    text = _text(Path(path), MAX_YAML_BYTES)
    try:
        # Every value as its text.
        data = yaml.load(text, Loader=yaml.BaseLoader)
        if isinstance(data, str):
            raise BadFileError("is one value, not a mapping of keys to values")
        _check_values(data, MAX_YAML_VALUES, MAX_DIGITS, takes_control_characters=False)
        return OmegaConf.create(text)
    except RecursionError:
        raise BadFileError(f"is nested more than {MAX_DEPTH} deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadFileError(
            f"is not valid YAML{place}: {getattr(error, 'problem', None) or error}"
        ) from None


def write_json(path: str | Path, data: Any) -> None:
    """Write so that a reader sees the old file or the new one, never a part; readable as the umask
    says.
    """
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A file beside `path`, to be written in the context, that takes its place at the end. Its
    folder is made.

    durable: wait until the content is on the disk, so that it is whole after a power cut, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: it makes files that only their owner can read, and teammates share a store.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_possible(path: Path) -> bool:
    """Whether a file can have this path: no NUL, no lone surrogate, no name that is too long."""
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _text(path: Path, max_bytes: int) -> str:
    if not is_possible(path):
        raise BadFileError("has a name that no file can have")
    if path.exists() and not path.is_file() and not path.is_dir():
        # Opening a pipe waits for somebody to write into it.
        raise BadFileError("is no ordinary file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise BadFileError(f"is larger than {max_bytes >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFileError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise BadFileError(f"holds a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadFileError(f"holds {text:.20}, which is no finite number")
    return value


def _check_values(
    data: Any,
    most: float = math.inf,
    most_digits: float = math.inf,
    takes_control_characters: bool = True,
) -> None:
    """BadFileError for values that are too deep, too many, too long or, in YAML, no text.

    Args:
        most: values, each counted as often as it stands in another.
        most_digits: of whole numbers that are texts here.
        takes_control_characters: a plan holds the names of a module's parameters, whatever these
            are (`display/console.py` draws them as escapes); a file that people write does not.
    """
    waiting, count = [(data, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > most:
            raise BadFileError(f"stands for more than {most} values")
        if isinstance(value, str):
            if not takes_control_characters:
                _check_printable(value)
            if len(value) > most_digits and _WHOLE_NUMBER.fullmatch(value):
                raise BadFileError(f"holds a number of {len(value)} digits")
        elif isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise BadFileError(f"is nested more than {MAX_DEPTH} deep")
            inside = value if isinstance(value, list) else (*value, *value.values())
            waiting += [(item, depth + 1) for item in inside]


def _check_printable(text: str) -> None:
    if not text.isprintable() and (bad := UNPRINTABLE.search(text)):
        raise BadFileError(f"holds the control character {bad[0]!a} in the text {text[:40]!a}")


def shipped_folder(folder: str) -> Path:
    """Where `RECIPES`, `CLUSTERS` or `FINDINGS` lies: inside the installed package, or beside it in
    a checkout.
    """
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def find_named(name: str | Path, folder: str) -> Path | None:
    """The YAML file that `name` means: a path as given, else the shipped one of that name; None
    where there is neither.

    A name has no folder and may come without `.yaml`. A file of the user's own goes first.
    """
    given = Path(name)
    places = [given] if given.suffix in (".yaml", ".yml") else []
    if len(given.parts) == 1:
        places.append(shipped_folder(folder) / f"{given.name.removesuffix('.yaml')}.yaml")
    return next(
        (place for place in [*places, given] if is_possible(place) and place.is_file()), None
    )


def shipped_names(folder: str) -> list[str]:
    """The names that `find_named` knows."""
    return sorted(file.stem for file in shipped_folder(folder).glob("*.yaml"))
