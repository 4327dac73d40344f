"""Results of an unfinished planning: stored when they are computed, so that a killed planning
continues from them.

A result is found by its key: the hash of everything that its value depends on, the source of this
package included. Each is one JSON file with a checksum, arrays as base64. It is written to a
temporary file and renamed, so several processes may write into one folder. A file that is torn, or
that another program wrote, is reported and its result computed again. At the end of a planning, the
files that it used are deleted. Files of a killed planning are deleted after a week, or when the
folder exceeds `MAX_FOLDER_BYTES`.
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

FORMAT_VERSION = 2
MAX_FOLDER_BYTES = 256 << 20
MAX_AGE_SECONDS = 7 * 24 * 3600.0

# Results that took less are not stored: there are thousands, and they are cheap to recompute.
LEAST_SECONDS = 0.05

MAX_ARRAY_ENTRIES = 10**7

# NumPy's names of the types that arrays are stored as.
_DTYPES = ("<f8", "<i8", "|b1")

# File names of results, and of temporary files that an interrupted write left.
_OUR_NAMES = re.compile(r"\.?[a-z]+-[0-9a-f]{32}\.json(\..*\.tmp)?")

# Name -> plain value or array.
Record = Mapping[str, Any]

T = TypeVar("T")


class PartialResults:
    """The stored results of one folder, around a planning: `with PartialResults(...) as results`.

    A context that ends, or that an AlpaError leaves, has finished its planning: its files are
    deleted. Any other exception (Ctrl-C, a defect) leaves them for the next planning.

    Args:
        folder: the folder of the files; None: nothing is stored or found.
        say: called with a line for the user: which results are used, or why none can be stored.
    """

    def __init__(
        self, folder: str | Path | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = None if folder is None else Path(folder)

        # Counts for the final report.
        self.num_used = 0
        self.num_stored = 0
        # CPU seconds that it took to compute the used results.
        self.seconds_used = 0.0

        self._say = say
        self._is_reported = False
        # False after a failed write.
        self._can_store = True
        # Names of the files in the folder.
        self._names: set[str] = set()
        # Names of the files that this process read or wrote.
        self._touched: set[str] = set()
        # For each result that is being computed, innermost last: the files used for it.
        self._open: list[set[str]] = []
        if self.folder is not None:
            self._names = _delete_old_files(self.folder)

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
        """Return the stored result of `kind` and `key`; if there is none, compute it, and store it
        if that took long.

        Args:
            kind: a word for the file name.
            key: returns the key. Not called if there is no folder.
            compute: returns the result.
            encode: returns the record of a result.
            decode: the inverse of `encode`. Raises one of `UNUSABLE` if the record is not one of
                such a result.

        Raises:
            PlanError: `compute` raises it, or raised it in the interrupted planning.
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
        """Return the content of a file; None if it cannot be used, after reporting why."""
        try:
            return self._read(name, decode)
        except UNUSABLE as error:
            self._reject(name, error)
            return None

    def _computed(
        self, name: str, compute: Callable[[], T], encode: Callable[[T], Record]
    ) -> "_Result[T] | _Failure":
        """Compute a result, and store it if that took `LEAST_SECONDS` of CPU time.

        Args:
            name: of the file.
            compute: returns the result; a PlanError of a class in `_FAILURES` becomes a `_Failure`,
                which is stored as well. Other errors pass.
            encode: returns it as JSON.
        """
        outcome: _Result[T] | _Failure
        started = time.process_time()
        self._open.append(set())
        try:
            outcome = _Result(compute())
        except PlanError as error:
            if type(error).__name__ not in _FAILURES:
                raise
            # The frames have large tables as local variables.
            clear_frames(error.__traceback__)
            least_bytes = getattr(error, "least_bytes", None)
            outcome = _Failure(type(error).__name__, error.problem, error.fix, least_bytes)
        finally:
            inner = self._open.pop()
            self._note(inner)

        seconds = time.process_time() - started
        if seconds >= LEAST_SECONDS and self._can_store:
            if isinstance(outcome, _Failure):
                self._write(name, {_FAILED: vars(outcome)}, seconds, inner)
            else:
                self._write(name, encode(outcome.result), seconds, inner)
        return outcome

    def _read(self, name: str, decode: Callable[[Record], T]) -> "_Result[T] | _Failure":
        """Return the content of a file. Those of another process are counted as used; the first is
        reported.

        Raises:
            UNUSABLE: this package did not store it under this name.
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

        names = {name, *filter(_OUR_NAMES.fullmatch, content["inner"])}
        is_of_another_process = name not in self._touched
        if is_of_another_process:
            if not self.num_used:
                self._say(
                    f"alpa: an interrupted planning goes on: its results in {self.folder} are used"
                )
            self.num_used += 1
            self.seconds_used += seconds
        self._note(names)
        return outcome

    def _note(self, names: set[str]) -> None:
        """Record files as used by this planning, and by the result that is being computed."""
        self._touched |= names
        if self._open:
            self._open[-1] |= names

    def _reject(self, name: str, error: Exception) -> None:
        """Report a file that cannot be used, and delete it.

        Args:
            name: of the file.
            error: raised when it was read. A file that is gone is not reported.
        """
        assert self.folder is not None
        self._names.discard(name)
        # Another process has finished the planning.
        if isinstance(error, FileNotFoundError):
            return
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self._say(f"alpa: {self.folder / name} cannot be used ({reason}): computed again")
        _delete(self.folder / name)

    def _write(self, name: str, record: Record, seconds: float, inner: set[str]) -> None:
        """Store a record, unless it is larger than `MAX_BYTES`. If that fails, report it, and store
        no more.

        Args:
            seconds: CPU seconds that computing it took.
            inner: the files that were used for it. They are deleted together with it.
        """
        assert self.folder is not None
        data = {label: _encoded(value) for label, value in record.items()}
        content = {
            "version": FORMAT_VERSION,
            "name": name,
            "seconds": seconds,
            "inner": sorted(inner),
            "checksum": _checksum(data),
            "data": data,
        }
        text = json.dumps(content)
        # Files above the limit are not read.
        if len(text) > MAX_BYTES:
            return

        path = self.folder / name
        try:
            # Not durable: the checksum reveals a file that a power failure has torn.
            with replacing(path, durable=False) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            # This planning does not need the file, so it goes on.
            self._say(
                f"alpa: results cannot be stored in {self.folder} ({error.strerror}): a planning "
                "that is interrupted will start anew"
            )
            self._can_store = False
            return
        self._names.add(name)
        self._note({name})
        self.num_stored += 1

    def report(self) -> None:
        """Report the used results, at the first call that finds some."""
        if self.num_used and not self._is_reported:
            self._is_reported = True
            self._say(
                f"alpa: {self.num_used} results of an interrupted planning were used "
                f"({self.seconds_used:.1f} s of work), {self.num_stored} were computed"
            )

    def done(self) -> None:
        """Report the used results, if `report` has not, and delete the files of this planning, and
        their folder and its parent if they are empty: its plan is stored, or there is none.
        """
        self.report()
        if self.folder is not None:
            for name in self._touched:
                _delete(self.folder / name)
            self._touched.clear()
            self._names.clear()
            _remove_if_empty(self.folder)
            _remove_if_empty(self.folder.parent)


# For plannings that store nothing.
NOT_STORED = PartialResults()

# The exceptions of reading a file and decoding a result.
UNUSABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)

# Errors that are results: nothing fits. Subclasses that are not listed end the planning.
_FAILURES: dict[str, type[PlanError]] = {"PlanError": PlanError, "DoesNotFitError": DoesNotFitError}
_FAILED = "failed"


@dataclass(frozen=True)
class _Result(Generic[T]):
    """A computed value."""

    result: T


@dataclass(frozen=True)
class _Failure:
    """An error that was raised instead of a value."""

    # Name of its class, one of `_FAILURES`.
    kind: str

    # As of `AlpaError`.
    problem: str
    fix: str

    # As of `DoesNotFitError`.
    least_bytes: float | None = None

    def error(self) -> PlanError:
        """Return an equal error, to be raised."""
        error = _FAILURES[self.kind](str(self.problem), str(self.fix))
        if isinstance(error, DoesNotFitError) and self.least_bytes is not None:
            error.least_bytes = float(self.least_bytes)
        return error


class Key:
    """A hash of values, arrays and texts, each with its length or shape.

    Floats are hashed bit by bit, so results with equal keys are equal bit by bit.
    """

    def __init__(self, *parts: object) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(source_digest().encode())
        self.add(*parts)

    def add(self, *parts: object) -> None:
        """Add values with a complete `repr`: numbers, texts and tuples of these."""
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
    """Return a hash of this package's source, as other source may compute other results."""
    package = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _checked(content: Any, name: str) -> Record:
    """Return the record of the file called `name`.

    Raises:
        UNUSABLE: the file is torn, or has another result.
    """
    version = content["version"]
    if version != FORMAT_VERSION:
        raise BadFileError(f"format version {version!r}, this package writes {FORMAT_VERSION}")
    if content["name"] != name:
        raise BadFileError("its name belongs to another result")
    if content["checksum"] != _checksum(content["data"]):
        raise BadFileError("its content does not have its checksum")
    return {label: _decoded(value) for label, value in content["data"].items()}


def _checksum(data: Any) -> str:
    """Return a checksum of JSON data."""
    text = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encoded(value: Any) -> Any:
    """Return an array of floats, integers (both with 64 bits) or booleans as JSON, bit for bit;
    anything else unchanged.
    """
    if not isinstance(value, np.ndarray):
        return value
    dtype = {"f": "<f8", "i": "<i8", "b": "|b1"}[value.dtype.kind]
    content = np.ascontiguousarray(value, dtype=dtype).tobytes()
    text = base64.b64encode(zlib.compress(content, 1)).decode("ascii")
    return {"dtype": dtype, "shape": list(value.shape), "zlib": text}


def _decoded(value: Any) -> Any:
    """Return the value that `_encoded` was given.

    Raises:
        BadFileError: an array is damaged or too large.
    """
    is_array = isinstance(value, dict) and "zlib" in value
    if not is_array:
        return value

    shape = value["shape"]
    dtype = value["dtype"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise BadFileError(f"it has an array of shape {shape}")
    if math.prod(shape) > MAX_ARRAY_ENTRIES or dtype not in _DTYPES:
        raise BadFileError(f"it has an array of {dtype!r} and shape {shape}")

    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        packed = base64.b64decode(value["zlib"], validate=True)
        content = zlib.decompressobj().decompress(packed, num_bytes + 1)
    except (binascii.Error, zlib.error) as error:
        raise BadFileError(f"it has an array that cannot be unpacked: {error}") from None
    if len(content) != num_bytes:
        raise BadFileError(f"it has {len(content)} bytes of an array of {num_bytes}")
    return np.frombuffer(content, dtype=dtype).reshape(shape).copy()


def _delete_old_files(folder: Path) -> set[str]:
    """Delete old files from `folder`, and return the names of the others; none if the folder cannot
    be read. Files of others stay.

    A file is old after `MAX_AGE_SECONDS`, or if all newer ones have `MAX_FOLDER_BYTES` together.
    """
    files = []
    try:
        for path in folder.iterdir():
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    except OSError:
        # There is no folder yet, it cannot be read, or a file was deleted meanwhile.
        files = []

    remaining: set[str] = set()
    total_bytes = 0
    for changed, num_bytes, path in sorted(files, reverse=True):
        total_bytes += num_bytes
        is_old = time.time() - changed > MAX_AGE_SECONDS
        is_ours = _OUR_NAMES.fullmatch(path.name) is not None
        if is_ours and (is_old or total_bytes > MAX_FOLDER_BYTES):
            _delete(path)
        else:
            remaining.add(path.name)
    return remaining


def _delete(path: Path) -> None:
    """Delete a file if it exists and may be deleted; others are deleted when they are old."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder, if it is empty and may be removed."""
    try:
        folder.rmdir()
    except OSError:
        # It is not empty.
        return
