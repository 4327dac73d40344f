"""Keeps lines that HiGHS prints by itself off the standard output.

The copy of HiGHS in OR-tools 9.15 has a line of its debugging left in its integer search, which is
printed whatever its options say. It goes through the C library, beside Python's `sys.stdout`. So
only the C library's stream is changed: what Python, other threads and other processes write appears
as ever, and a terminal stays one.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();
SOLVER_LINE = b"Highs"

# The C library has one standard output for all threads.
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop what the C library is given to print where a line begins with `SOLVER_LINE`.

    Other lines that C code prints meanwhile are printed at the end. Does nothing where the C
    library has no variable for its standard output (Windows).
    """
    printed = _c_output()
    if printed is None:
        yield
        return
    with _ONE_AT_A_TIME:
        before = printed.slot.value
        printed.slot.value = printed.stream
        try:
            yield
        finally:
            printed.slot.value = before
            other_lines = [line for line in printed.take() if not line.startswith(SOLVER_LINE)]
            if other_lines:
                text = b"".join(other_lines)
                printed.library.fwrite(text, 1, len(text), before)


@dataclass(frozen=True)
class _COutput:
    """A stream in memory that can take the place of the C library's standard output.

    It is never closed: another thread may be about to print to it.

    Attributes:
        slot: the C library's variable `stdout`.
        stream: the stream in memory, a `FILE *`.
        text, size: where the C library keeps its buffer, valid after a flush.
    """

    library: ctypes.CDLL
    slot: ctypes.c_void_p
    stream: int
    text: ctypes.c_void_p
    size: ctypes.c_size_t

    def take(self) -> list[bytes]:
        """Return the lines printed since the last call."""
        self.library.fflush(self.stream)
        text = ctypes.string_at(self.text.value, self.size.value) if self.text.value else b""
        self.library.rewind(self.stream)
        return text.splitlines(keepends=True)


@functools.cache
def _c_output() -> _COutput | None:
    """Return the C stream of this process; None if the standard output cannot be exchanged.

    In glibc `stdout` may be assigned like any variable, and macOS has it under another name. In
    musl it is constant, and Windows has none.
    """
    if sys.platform == "win32":
        return None
    library = ctypes.CDLL(None)
    name = "__stdoutp" if sys.platform == "darwin" else "stdout"
    if sys.platform != "darwin" and not hasattr(library, "gnu_get_libc_version"):
        return None

    slot = ctypes.c_void_p.in_dll(library, name)
    library.open_memstream.restype = ctypes.c_void_p
    for function in (library.fflush, library.rewind):
        function.argtypes = [ctypes.c_void_p]
    library.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = library.open_memstream(ctypes.byref(text), ctypes.byref(size))
    return _COutput(library, slot, stream, text, size) if stream else None
