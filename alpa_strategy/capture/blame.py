"""Which line of the user's code something happened on: from a traceback or from the running stack."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import cache
from types import CodeType, FrameType, TracebackType

import lightning
import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FRAMEWORKS = (os.path.dirname(os.path.abspath(torch.__file__)), os.path.dirname(os.path.abspath(lightning.__file__)))
_NOT_USER = ("<", *(os.path.join(folder, "") for folder in (*_FRAMEWORKS, _PACKAGE)))
_NOT_USER_NAMES = tuple(f"{os.sep}{n}{os.sep}" for n in ("torchmetrics", "lightning_fabric", "pytorch_lightning"))
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_SITE = f"{os.sep}site-packages{os.sep}"


@cache
def is_user_file(path: str) -> bool:
    """True for code that is neither torch, Lightning, torchmetrics, the standard library nor this package."""
    if path.startswith(_NOT_USER) or any(name in path for name in _NOT_USER_NAMES):
        return False
    return not (path.startswith(_STDLIB) and _SITE not in path)


def _describe(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}: {text}" if text else f"{code.co_filename}:{line}"


def user_position(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost user frame at or above `frame`."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def user_frame() -> str:
    """`file:line: code` of the innermost user frame of the running stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _describe(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return "line unknown"


def user_line(traceback: TracebackType | None) -> str:
    """`file:line: code` of the innermost user frame of an exception's traceback."""
    found = "line unknown"
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _describe(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
