"""Running ops that nobody vouches for: in a forked child, where one that crashes or hangs ends the child only.

A run that crashed is noted by its number, the experiment is repeated, and there that run raises: a crash counts as a
refusal, which experiments handle anyway. For that, experiments must be repeatable. Where no child can do it (not Linux,
or autograd has threads for a GPU, which a child does not get), only ops that need no such care are tried: `tried`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import IO, Any, NoReturn, TypeVar

import torch

from alpa_strategy.ir.op import OpCall, target_name

T = TypeVar("T")

MAX_CRASHES = 12
MAX_HANGS = 2
SECONDS_PER_RUN = 30.0  # of tiny operands

_DONE, _FAILED, _NO_BACKWARD = 101, 102, 103  # exit codes of a child; of an op that exits itself rather 0 or 1
_log = logging.getLogger(__name__)


class CannotForkError(Exception):
    """A forked child cannot run PyTorch's backward here."""


class CrashingError(Exception):
    """The op ended its process, or hung, in one run too many."""


class CrashedRunError(Exception):
    """Stands in a repeated experiment for a run that crashed."""


class _Watched:
    """A target that counts its runs, and raises in those that are known to crash."""

    def __init__(self, target: Any, counter: mmap.mmap, crashed: frozenset[int], seconds: float) -> None:
        self.__module__, _, self.__qualname__ = target_name(target).partition(".")  # the name stays
        self._target, self._counter, self._crashed, self._seconds = target, counter, crashed, seconds
        self._number = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._number += 1
        # In shared memory before the run: what the parent reads when the run was the last.
        self._counter[:8] = self._number.to_bytes(8, "little")
        if self._number in self._crashed:
            raise CrashedRunError
        signal.setitimer(signal.ITIMER_REAL, self._seconds)  # unhandled, it ends this process
        return self._target(*args, **kwargs)


def tried(call: OpCall, experiment: Callable[[Any], T]) -> T | None:
    """`isolated` for the call's target; None: the op cannot be tried, or crashes too often.

    Where no child can be forked, the experiment runs in this process if it is certain to leave it alive: PyTorch's own
    ops check shapes, but some take integers for granted (positions, counts), and ops of others promise nothing.
    """
    try:
        return isolated(call.target, experiment)
    except CannotForkError:
        return experiment(call.target) if _is_harmless(call) else None
    except CrashingError:
        return None


def _is_harmless(call: OpCall) -> bool:
    if not isinstance(call.target, torch._ops.OpOverload):
        return True  # a function of ours
    floating = all(m.dtype.is_floating_point or m.dtype.is_complex or m.dtype == torch.bool for m in call.operands)
    return call.target.namespace in ("aten", "prims", "alpa") and floating


def isolated(target: Any, experiment: Callable[[Any], T], seconds_per_run: float = SECONDS_PER_RUN) -> T:
    """What `experiment(target)` returns, from a child process in which the op may crash or hang.

    Args:
        target: the op.
        experiment: calls what it is given like the op, always in the same order; what it returns can be pickled.

    Raises:
        CannotForkError: no child can do this on this machine, or not any more in this process.
        CrashingError: the op crashed in more than `MAX_CRASHES` runs or hung in more than `MAX_HANGS`.
        RuntimeError: the experiment itself failed; with the child's traceback.
    """
    if not sys.platform.startswith("linux"):
        raise CannotForkError
    crashed: set[int] = set()
    num_hangs = 0
    while True:
        with tempfile.TemporaryFile() as answer, mmap.mmap(-1, 8) as counter:
            watched = _Watched(target, counter, frozenset(crashed), seconds_per_run)
            code = _exit_code_of_child(partial(experiment, watched), answer)
            number = int.from_bytes(counter[:8], "little")
            answer.seek(0)
            if code == _DONE:  # an op that calls exit() itself gives 0 or 1
                return pickle.load(answer)
            if code == _FAILED:
                raise RuntimeError(f"trials of {target_name(target)} failed:\n{answer.read().decode()}")
        if code == _NO_BACKWARD or number == 0:
            raise CannotForkError
        crashed.add(number)  # refused next time, and everything before it runs as it did
        num_hangs += code == -signal.SIGALRM
        how = "hangs" if code == -signal.SIGALRM else f"ends its process ({_name_of(code)})"
        _log.info("%s %s in a trial: run %d is taken as refused", target_name(target), how, number)
        if len(crashed) > MAX_CRASHES or num_hangs > MAX_HANGS:
            raise CrashingError(f"{target_name(target)} {how}")


def _name_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _exit_code_of_child(work: Callable[[], Any], answer: IO[bytes]) -> int:
    """Fork, let the child pickle what `work` returns into `answer`, and wait for it. Minus the signal that ended it."""
    try:
        child = os.fork()
    except OSError as error:  # no memory or no process left
        raise CannotForkError from error
    if child == 0:
        _run_as_child(work, answer)
    status = None
    try:
        _, status = os.waitpid(child, 0)
    finally:
        if status is None:  # interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run_as_child(work: Callable[[], Any], answer: IO[bytes]) -> NoReturn:
    code = _FAILED
    try:
        _detach_from_parent()
        if not _backward_works():
            code = _NO_BACKWARD
        else:
            pickle.dump(work(), answer)
            code = _DONE
    except BaseException:
        answer.seek(0)
        answer.truncate()
        answer.write(traceback.format_exc().encode())
    finally:
        answer.flush()
        os._exit(code)  # nothing of the parent's is flushed, closed or torn down twice


def _detach_from_parent() -> None:
    """No output, no core file, no life after the parent's or beyond a run's time; threads of pools are not here."""
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_RUN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork: a parallel kernel would wait for them


def _backward_works() -> bool:
    """False where the parent's autograd has threads for GPUs: they do not exist in a child."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(2, device="cpu", requires_grad=True)
            torch.autograd.grad((x * x).sum(), [x])
    except RuntimeError:
        return False
    return True
