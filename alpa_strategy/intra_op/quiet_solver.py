"""Keeps lines that HiGHS prints by itself off the standard output: leftovers of its debugging, beyond its options."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = b"Highs"  # HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();
ONE_AT_A_TIME = threading.Lock()  # the standard output is the process'


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Lines that begin like HiGHS's are dropped; what else is written meanwhile (by other threads) appears after it."""
    if os.name != "posix":  # the C library's buffer cannot be reached the same way
        yield
        return
    library = ctypes.CDLL(None)
    try:
        sys.stdout.flush()
        library.fflush(None)
        os.fstat(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output
        yield
        return
    with ONE_AT_A_TIME, tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            library.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            kept = b"".join(line for line in file if not line.startswith(PREFIX))
            while kept:
                kept = kept[os.write(1, kept) :]
