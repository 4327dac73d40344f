"""Running ops that nobody vouches for: in a forked child, where one that crashes or hangs ends the child only.

Where no child can do it (not Linux, or autograd has threads for a GPU, which a child does not get), only ops that need
no such care are tried.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO, Any, NoReturn, TypeVar

import torch

from alpa_strategy.ir.op import OpCall

T = TypeVar("T")

SECONDS = 120.0  # of some hundred runs on tiny operands, which take a second or two

_DONE, _FAILED, _NO_BACKWARD = 101, 102, 103  # exit codes of a child; of an op that exits itself rather 0 or 1
_log = logging.getLogger(__name__)


def tried(call: OpCall, experiment: Callable[[], T], seconds: float = SECONDS) -> T | None:
    """What `experiment()`, which runs the call's op, returns; None where the op crashes, hangs or may not be tried.

    Where no child can be forked, the experiment runs in this process if it is certain to leave it alive: PyTorch's own
    ops check shapes, but some take integers for granted (positions, counts), and ops of others promise nothing.

    Args:
        experiment: what it returns can be pickled.

    Raises:
        RuntimeError: the experiment itself failed; with the child's traceback.
    """
    if sys.platform.startswith("linux"):
        with tempfile.TemporaryFile() as answer:
            code = _exit_code_of_child(experiment, answer, seconds)
            answer.seek(0)
            if code == _DONE:  # an op that calls exit() itself gives 0 or 1
                return pickle.load(answer)
            if code == _FAILED:
                raise RuntimeError(f"trials of {call.target_name} failed:\n{answer.read().decode()}")
        if code not in (None, _NO_BACKWARD):
            _log.info("%s hangs or ends its process in a trial (exit code %s)", call.target_name, code)
            return None
    return experiment() if _is_harmless(call) else None


def _is_harmless(call: OpCall) -> bool:
    if not isinstance(call.target, torch._ops.OpOverload):
        return True  # a function of ours
    floating = all(m.dtype.is_floating_point or m.dtype.is_complex or m.dtype == torch.bool for m in call.operands)
    return call.target.namespace in ("aten", "prims", "alpa") and floating


def _exit_code_of_child(work: Callable[[], Any], answer: IO[bytes], seconds: float) -> int | None:
    """Fork, let the child pickle what `work` returns into `answer`, and wait for it: minus the signal that ended it.

    None: there is no memory or no process left.
    """
    try:
        child = os.fork()
    except OSError:
        return None
    # The child never comes back from this call.
    if child == 0:
        _run_as_child(work, answer, seconds)
    status = None
    try:
        _, status = os.waitpid(child, 0)
    finally:
        if status is None:  # interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run_as_child(work: Callable[[], Any], answer: IO[bytes], seconds: float) -> NoReturn:
    code = _FAILED
    try:
        _detach_from_parent(seconds)
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


def _detach_from_parent(seconds: float) -> None:
    """No output, no core file, no life after the parent's or beyond its time; threads of pools are not here."""
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # unhandled, it ends this process
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
