"""Results of an unfinished planning: stored as they are computed, so that a planning that was
killed goes on where it stopped.

A result is found by a key: the hash of everything that its value depends on, the package's own
source included. Each is one JSON file with arrays as base64 and a checksum, written beside its
place and moved there, so several processes may write into one folder. A file that is torn, or that
somebody else wrote, is reported and its result computed again. When the command is done, the files
that it used are deleted; what a killed one left is deleted after a week, or when the folder grows
beyond `MAX_FOLDER_BYTES`.
"""

import base64
import binascii
import hashlib
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import clear_frames
from typing import Any, Generic, TypeVar

import numpy as np

from alpa_strategy.errors import AlpaError, DoesNotFitError, PlanError
from alpa_strategy.files import MAX_BYTES, BadFileError, read_json, replacing

FORMAT_VERSION = 1
MAX_FOLDER_BYTES = 256 << 20
MAX_AGE_SECONDS = 7 * 24 * 3600.0
# Computing less than this again costs nobody anything, and there are thousands of such results.
LEAST_SECONDS = 0.05
MAX_ARRAY_ENTRIES = 10**7
_DTYPES = ("<f8", "<i8", "|b1")
_OURS = re.compile(r"\.?[a-z]+-[0-9a-f]{32}\.json(\..*\.tmp)?")  # results, and what was cut off

Record = Mapping[str, Any]  # plain values and arrays by name
T = TypeVar("T")


class PartialResults:
    """The stored results of one folder, around a planning: `with PartialResults(...) as results`.

    At the end of the context, also by an error for the user, the planning is done and its files are
    deleted; what else ends it (Ctrl-C, a defect) leaves them.

    Args:
        folder: where the files are; None: nothing is stored or found.
        say: is given a line for the user: what is used, or why nothing can be stored.
    """

    def __init__(
        self, folder: str | Path | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.num_used = 0
        self.num_stored = 0
        self.seconds_used = 0.0  # that the used results took when they were computed
        self._say = say
        self._stores = True  # until that fails
        self._names: set[str] = set()  # of the files that there are
        self._touched: set[str] = set()  # names of what this process used or wrote
        self._open: list[set[str]] = []  # of results that are being computed: names of their parts
        if self.folder is not None:
            self._names = _without_old_ones(self.folder)

    def __enter__(self) -> "PartialResults":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, AlpaError):
            self.done()

    def get(
        self,
        kind: str,
        key: Callable[[], "Key"],
        compute: Callable[[], T],
        encode: Callable[[T], Record],
        decode: Callable[[Record], T],
    ) -> T:
        """The stored result of a kind (a word) and key, else what `compute` gives, which is stored.

        decode: raises one of `UNUSABLE` where a record cannot be this result.

        Raises:
            PlanError: `compute` does, or did so in the planning that was interrupted.
        """
        if self.folder is None:
            return compute()
        name = f"{kind}-{key().text}.json"
        outcome = self._outcome(name, decode) if name in self._names else None
        if outcome is None:
            outcome = self._computed(name, compute, encode)
        if isinstance(outcome, _Failure):
            raise outcome.error()
        return outcome.result

    def _outcome(self, name: str, decode: Callable[[Record], T]) -> "_Result[T] | _Failure | None":
        """What a file holds; None, with a line that says why, where it cannot be used."""
        try:
            return self._read(name, decode)
        except UNUSABLE as error:
            self._reject(name, error)
            return None

    def _computed(
        self, name: str, compute: Callable[[], T], encode: Callable[[T], Record]
    ) -> "_Result[T] | _Failure":
        """What is computed now, stored where that took long enough."""
        outcome: _Result[T] | _Failure
        started = time.process_time()
        self._open.append(set())
        try:
            outcome = _Result(compute())
        except PlanError as error:
            if type(error).__name__ not in _FAILURES:
                raise
            clear_frames(error.__traceback__)  # they hold large tables
            least_bytes = getattr(error, "least_bytes", None)
            outcome = _Failure(type(error).__name__, error.problem, error.fix, least_bytes)
        finally:
            inner = self._open.pop()
            self._note(inner)

        seconds = time.process_time() - started
        if seconds >= LEAST_SECONDS and self._stores:
            if isinstance(outcome, _Failure):
                self._write(name, {_FAILED: vars(outcome)}, seconds, inner)
            else:
                self._write(name, encode(outcome.result), seconds, inner)
        return outcome

    def _read(self, name: str, decode: Callable[[Record], T]) -> "_Result[T] | _Failure":
        """What a file holds.

        Raises:
            UNUSABLE: it is nothing that this package has stored under this name.
        """
        assert self.folder is not None
        content = read_json(self.folder / name)
        record = _checked(content, name)
        seconds = float(content["seconds"])
        outcome: _Result[T] | _Failure
        if _FAILED in record:
            outcome = _Failure(**record[_FAILED])
            outcome.error()
        else:
            outcome = _Result(decode(record))

        names = {name, *filter(_OURS.fullmatch, content["inner"])}
        if name not in self._touched:  # not of this process
            if not self.num_used:
                self._say(
                    f"alpa: an interrupted planning goes on: its results in {self.folder} are used"
                )
            self.num_used += 1
            self.seconds_used += seconds
        self._note(names)
        return outcome

    def _note(self, names: set[str]) -> None:
        """Files belong to this planning, and to the result that is being computed."""
        self._touched |= names
        if self._open:
            self._open[-1] |= names

    def _reject(self, name: str, error: Exception) -> None:
        """Report a file that cannot be used, and delete it."""
        assert self.folder is not None
        self._names.discard(name)
        if isinstance(error, FileNotFoundError):  # another process has come to the planning's end
            return
        why = error.strerror if isinstance(error, OSError) else str(error)
        self._say(f"alpa: {self.folder / name} cannot be used ({why}): computed again")
        _delete(self.folder / name)

    def _write(self, name: str, record: Record, seconds: float, inner: set[str]) -> None:
        """Store a record. inner: the files of what was computed for it, which end with it."""
        assert self.folder is not None
        data = {label: _encoded(value) for label, value in record.items()}
        content = {"version": FORMAT_VERSION, "name": name, "seconds": seconds}
        content["inner"] = sorted(inner)
        text = json.dumps(content | {"checksum": _checksum(data), "data": data})
        if len(text) > MAX_BYTES:  # nobody would read it
            return

        path = self.folder / name
        try:
            # Not durable: what a power cut tears is told by its checksum.
            with replacing(path, durable=False) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:  # costs the next planning its time, not this one
            self._say(
                f"alpa: results cannot be stored in {self.folder} ({error.strerror}): a planning "
                "that is interrupted will start anew"
            )
            self._stores = False
            return
        self._names.add(name)
        self._note({name})
        self.num_stored += 1

    def done(self) -> None:
        """Say what was used, and delete this planning's files: it has come to its end."""
        if self.num_used:
            self._say(
                f"alpa: {self.num_used} results of an interrupted planning were used "
                f"({self.seconds_used:.1f} s of work), {self.num_stored} were computed"
            )
        if self.folder is not None:
            for name in self._touched:
                _delete(self.folder / name)
            self._touched.clear()
            self._names.clear()
            _remove_if_empty(self.folder)
            _remove_if_empty(self.folder.parent)


NOT_STORED = PartialResults()
# What reading a file and making a result of it may raise.
UNUSABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
# Errors that are results: nothing fits. Others end the planning.
_FAILURES: dict[str, type[PlanError]] = {"PlanError": PlanError, "DoesNotFitError": DoesNotFitError}
_FAILED = "failed"


@dataclass(frozen=True)
class _Result(Generic[T]):
    """What was computed."""

    result: T


@dataclass(frozen=True)
class _Failure:
    """The error that was raised instead."""

    kind: str
    problem: str
    fix: str
    least_bytes: float | None = None

    def error(self) -> PlanError:
        """The error once more."""
        error = _FAILURES[self.kind](str(self.problem), str(self.fix))
        if isinstance(error, DoesNotFitError) and self.least_bytes is not None:
            error.least_bytes = float(self.least_bytes)
        return error


class Key:
    """A hash of values, arrays and texts, each with its length or shape.

    Floats count by their bits, so equal keys mean equal results to the last bit.
    """

    def __init__(self, *parts: object) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(source_digest().encode())
        self.add(*parts)

    def add(self, *parts: object) -> None:
        """Add values whose `repr` says all of them, such as numbers, texts and tuples of these."""
        text = repr(parts).encode()
        self._hash.update(b"%d:" % len(text) + text)

    def add_array(self, array: np.ndarray) -> None:
        """Add an array's shape, type and content."""
        self._hash.update(f"{array.dtype.str}{array.shape}".encode())
        self._hash.update(np.ascontiguousarray(array).data)

    @property
    def text(self) -> str:
        """The hash, in hexadecimal digits."""
        return self._hash.hexdigest()


@cache
def source_digest() -> str:
    """Hash of this package's source: what other code computed is no result of ours."""
    package = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _checked(content: Any, name: str) -> Record:
    """The record of the file of that name.

    Raises:
        UNUSABLE: it is another's, or torn.
    """
    version = content["version"]
    if version != FORMAT_VERSION:
        raise BadFileError(f"format version {version!r}, this package writes {FORMAT_VERSION}")
    if content["name"] != name:
        raise BadFileError("it holds another result than its name says")
    if content["checksum"] != _checksum(content["data"]):
        raise BadFileError("its content does not have its checksum")
    return {label: _decoded(value) for label, value in content["data"].items()}


def _checksum(data: Any) -> str:
    text = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encoded(value: Any) -> Any:
    """An array as JSON, bit for bit; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    dtype = {"f": "<f8", "i": "<i8", "b": "|b1"}[value.dtype.kind]
    content = np.ascontiguousarray(value, dtype=dtype).tobytes()
    text = base64.b64encode(zlib.compress(content, 1)).decode("ascii")
    return {"dtype": dtype, "shape": list(value.shape), "zlib": text}


def _decoded(value: Any) -> Any:
    """The inverse of `_encoded`.

    Raises:
        BadFileError: it is no array of ours.
    """
    if not (isinstance(value, dict) and "zlib" in value):
        return value
    shape, dtype = value["shape"], value["dtype"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise BadFileError(f"it holds an array of shape {shape}")
    if math.prod(shape) > MAX_ARRAY_ENTRIES or dtype not in _DTYPES:
        raise BadFileError(f"it holds an array of {dtype!r} and shape {shape}")

    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        packed = base64.b64decode(value["zlib"], validate=True)
        content = zlib.decompressobj().decompress(packed, num_bytes + 1)
    except (binascii.Error, zlib.error) as error:
        raise BadFileError(f"it holds an array that cannot be unpacked: {error}") from None
    if len(content) != num_bytes:
        raise BadFileError(f"it holds {len(content)} bytes of an array of {num_bytes}")
    return np.frombuffer(content, dtype=dtype).reshape(shape).copy()


def _without_old_ones(folder: Path) -> set[str]:
    """The names of the files in `folder`, after deleting what is too old or too much.

    Files are looked at from new to old: all that come after the limit of bytes are deleted.
    """
    files = []
    try:
        for path in folder.iterdir():
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    except OSError:  # no folder yet, or none that can be read; files that vanish meanwhile
        files = []

    kept: set[str] = set()
    total = 0
    for changed, size, path in sorted(files, reverse=True):
        total += size
        is_old = time.time() - changed > MAX_AGE_SECONDS
        is_ours = _OURS.fullmatch(path.name) is not None
        if is_ours and (is_old or total > MAX_FOLDER_BYTES):
            _delete(path)
        else:
            kept.add(path.name)
    return kept


def _delete(path: Path) -> None:
    """Delete a file if it is there and may be deleted; what stays is deleted when it is old."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # there is something in it
        return
