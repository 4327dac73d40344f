"""Refuse calls by which the step acts on the world outside of Python: text for a terminal, a log or
a file, clocks, the environment, processes, threads, queues.

A captured step would make such a call once, at capture, and never again. A step that is refused
runs eagerly and makes it at every step. The text of a tensor is refused as well: it reads the
tensor's value, which a captured step does not have.

Installed packages may warn or log once, and fill their caches.
"""

import builtins
import concurrent.futures
import datetime
import io
import logging
import multiprocessing.connection
import multiprocessing.queues
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.user_code import (
    asked_by_user,
    asking_frame,
    is_installed,
    is_user_file,
    own_line,
)

Patch = tuple[Any, str, Any]
"""(owner, name, value), as `patched` takes it."""


class Refusing(Protocol):
    """Records that a step was refused, and notes for the user."""

    def refuse(self, error: CaptureError) -> NoReturn:
        """Raise the error, also where the step's code swallows it."""

    def note(self, text: str) -> None:
        """Add a note that the plan shows to the user."""


_IN_HOOKS = (
    "do it in a hook such as on_train_batch_end (what the step returns arrives there as outputs),"
    " and log values "
    "with self.log"
)


def checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that does what `function` does, after `check` with the same arguments in
    this thread. Other threads (a loader's, a checkpoint's) just call it.

    Args:
        check: raises to refuse the call.
    """
    thread = get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def side_effects_refused(record: Refusing, files: Mapping[str, dict[str, Any]]) -> list[Patch]:
    """Return the patches under which this thread's calls that act outside of Python are refused,
    with the user's line.

    Args:
        record: is called to refuse.
        files: module name -> globals, of the code that the step reaches.
    """
    namespaces = list(files.values())
    return [
        *_texts_of_tensors(record),
        *_streams(record, namespaces),
        *_messages(record, namespaces),
        *_opened_files(record),
        *_calls(record, namespaces),
        *_methods(record),
        *_dates(record, namespaces),
    ]


def _is_own(frame: FrameType | None) -> bool:
    """Whether the user's own code asks, and not an installed package."""
    asking = asking_frame(frame)
    if asking is None or not is_user_file(asking.f_code.co_filename):
        return False
    return not is_installed(asking.f_code.co_filename)


def _is_torchs(frame: FrameType | None) -> bool:
    """Whether torch or this package asks, for itself."""
    asking = asking_frame(frame)
    return asking is None or asking.f_code.co_filename.startswith(_INTERNAL)


_INTERNAL = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (torch.__file__, os.path.dirname(__file__))
)


def _refuse_text(record: Refusing) -> NoReturn:
    """Refuse to make a text of a tensor in the captured step.

    Raises:
        CaptureError: always.
    """
    record.refuse(
        CaptureError(
            f"the step makes a text of a tensor ({own_line()}), which needs its value: print, str,"
            " format and "
            "messages do",
            _IN_HOOKS,
        )
    )


def _texts_of_tensors(record: Refusing) -> Iterator[Patch]:
    """Yield patches of Tensor that refuse to make a text of one: `print(loss)`, `f"{loss:.3f}"`,
    `repr([loss])`. Other threads and torch's own code may.
    """
    thread = get_ident()

    def asking(original: Callable[..., str]) -> Callable[..., str]:
        def text(tensor: Tensor, *args: Any, **kwargs: Any) -> str:
            if get_ident() == thread and not _is_torchs(_beyond_text(sys._getframe(1))):
                _refuse_text(record)
            return original(tensor, *args, **kwargs)

        return text

    yield Tensor, "__repr__", asking(Tensor.__repr__)
    yield Tensor, "__format__", asking(Tensor.__format__)


def _beyond_text(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from `frame` outwards, that is no method by which an object makes
    a text of itself; None if there is none.
    """
    while frame is not None and frame.f_code.co_name in ("__repr__", "__str__", "__format__"):
        frame = frame.f_back
    return frame


def _streams(record: Refusing, namespaces: Iterable[dict[str, Any]]) -> Iterator[Patch]:
    """Yield patches that refuse texts for the terminal, whoever writes them (`print`, `tqdm.write`,
    a console), and for open files that the code names. Texts of torch, `logging` and `warnings`
    pass to the terminal.

    Args:
        record: is called to refuse.
        namespaces: globals of the user's code.
    """

    def check_terminal(*_: Any) -> None:
        frame = sys._getframe(2)
        if not _is_said_elsewhere(frame) and not _is_torchs(frame):
            refuse_write("prints")

    def check_file(*_: Any) -> None:
        refuse_write("writes into an open file")

    def refuse_write(effect: str) -> NoReturn:
        record.refuse(
            CaptureError(
                f"the step {effect} ({own_line()}): captured, it would do so once and never again",
                _IN_HOOKS,
            )
        )

    terminal = {}
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "__dict__"):
            terminal[id(stream)] = stream
    held: dict[int, io.IOBase] = {}
    for namespace in namespaces:
        for value in namespace.values():
            if isinstance(value, io.IOBase):
                held[id(value)] = value
    for stream in terminal.values():
        yield stream, "write", checked(stream.write, check_terminal)
    for identity, stream in held.items():
        is_open = not stream.closed and hasattr(stream, "__dict__")
        if identity not in terminal and is_open and hasattr(stream, "write"):
            yield stream, "write", checked(stream.write, check_file)
            yield stream, "writelines", checked(stream.writelines, check_file)


def _is_said_elsewhere(frame: FrameType | None) -> bool:
    """Whether a text comes from `logging` or `warnings`, whose messages are checked separately."""
    asking = asking_frame(frame)
    while frame is not None and frame is not asking:
        path = frame.f_code.co_filename
        if path.startswith(_LOGGING) or path == warnings.__file__:
            return True
        frame = frame.f_back
    return False


_LOGGING = os.path.join(os.path.dirname(logging.__file__), "")


def _messages(record: Refusing, namespaces: Iterable[dict[str, Any]]) -> Iterator[Patch]:
    """Yield patches that refuse the user's messages to `logging` and warnings.

    Messages of libraries pass, unless a tensor is in them. So does a warning whose text is a
    constant, which an eager step shows once.

    Args:
        record: is called to refuse.
        namespaces: globals of the user's code.
    """
    handle = logging.Logger.handle
    warn = warnings.warn
    thread = get_ident()

    def refuse_message(effect: str) -> NoReturn:
        record.refuse(
            CaptureError(
                f"the step {effect} ({own_line()}): captured, it would do so once and never again",
                _IN_HOOKS,
            )
        )

    def handle_message(logger: logging.Logger, message: logging.LogRecord) -> None:
        if get_ident() != thread:
            handle(logger, message)
            return
        if _is_own(_beyond_rank_zero(sys._getframe(1))):
            refuse_message("tells something to logging")
        if is_user_file(message.pathname):
            record.note(
                f"messages to logging ({own_line()}) are left out: a captured step repeats tensor"
                " work only"
            )
        leaves = pytree.tree_leaves(message.args)
        # Tensors have no value that could be logged.
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            handle(logger, message)

    def say_warning(
        message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **rest: Any
    ) -> None:
        frame = _beyond_rank_zero(sys._getframe(1))
        is_users = get_ident() == thread and _is_own(frame)
        constants = () if frame is None else frame.f_code.co_consts
        # A constant text is shown once per line, by an eager step as well.
        is_constant = type(message) is str and message in constants
        kind = category
        if not kind:
            kind = type(message) if isinstance(message, Warning) else UserWarning
        if is_users and (not is_constant or _is_shown_always(kind)):
            refuse_message("warns")
        warn(message, category, stacklevel + 1, source, **rest)

    yield logging.Logger, "handle", handle_message
    for namespace in (vars(warnings), *namespaces):
        for name, function in list(namespace.items()):
            if function is warn:
                yield namespace, name, say_warning


def _beyond_rank_zero(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame above the functions that run on rank 0 only; None if all frames
    are those.
    """
    while (asking := asking_frame(frame)) is not None:
        if os.path.basename(asking.f_code.co_filename) != "rank_zero.py":
            return asking
        frame = asking.f_back
    return None


def _is_shown_always(kind: type) -> bool:
    """Whether every warning of a kind is shown, and not only the first of a line."""
    for action, text, category, module, line in warnings.filters:
        if issubclass(kind, category) and not text and not module and not line:
            return action in ("always", "all", "error")
    return False


def _opened_files(record: Refusing) -> Iterator[Patch]:
    """Yield patches of `open` that refuse files opened by the user's code, or by anyone for
    writing.
    """

    def check_open(file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        if not set("wax+").isdisjoint(mode) or asked_by_user(sys._getframe(2)):
            record.refuse(
                CaptureError(
                    f"open({str(file)!r}, {mode!r}) is used in the step ({own_line()}): a captured"
                    " step "
                    "cannot keep it",
                    "read and write files in hooks such as on_train_batch_start",
                )
            )

    for owner in (builtins, io):  # pathlib asks `io`
        yield owner, "open", checked(open, check_open)


# Functions that act outside, or tell what it is like there.
_CLOCKS = (
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "localtime",
    "gmtime",
    "ctime",
    "strftime",
    "sleep",
)
_SEEDS = ("manual_seed", "seed", "set_rng_state", "fork_rng")
_OF_THE_SYSTEM = (
    "chdir",
    "fork",
    "kill",
    "link",
    "makedirs",
    "mkdir",
    "open",
    "putenv",
    "remove",
    "removedirs",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "system",
    "truncate",
    "unlink",
    "unsetenv",
    "urandom",
    "write",
)
# Methods of classes that take something to another thread, process or machine.
_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (queue.Queue, ("put", "get")),
    (multiprocessing.queues.Queue, ("put", "get")),
    (multiprocessing.queues.SimpleQueue, ("put", "get")),
    (multiprocessing.connection._ConnectionBase, ("send", "send_bytes", "recv", "recv_bytes")),
    (threading.Thread, ("start",)),
    (threading.Event, ("set", "clear")),
    (concurrent.futures.ThreadPoolExecutor, ("submit",)),
    (concurrent.futures.ProcessPoolExecutor, ("submit",)),
    (subprocess.Popen, ("__init__",)),
    (socket.socket, ("connect", "send", "sendall", "sendto")),
)


def _refuse_call(record: Refusing, name: str, *_: Any, **__: Any) -> None:
    """Refuse the call of function `name` if the user's code makes it (`CaptureError`)."""
    # 0: here, 1: what `checked` gives, 2: who asks
    if asked_by_user(sys._getframe(2)):
        record.refuse(
            CaptureError(
                f"the step calls {name} ({own_line()}): captured, it would be called once",
                "take times in hooks such as on_train_batch_start and on_train_batch_end, draw with"
                " torch, seed "
                "before the training; what acts outside of the step belongs into hooks too",
            )
        )


def _calls(record: Refusing, namespaces: Iterable[dict[str, Any]]) -> Iterator[Patch]:
    """Yield patches that refuse calls to clocks, seeds, the environment and the system, under every
    name that the code has for them.

    Args:
        record: is called to refuse.
        namespaces: globals of the user's code.
    """

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        return checked(function, partial(_refuse_call, record, function.__name__))

    for name in ("__setitem__", "__delitem__"):
        yield type(os.environ), name, refusing(getattr(type(os.environ), name))
    outside = [torch.save]
    outside += [getattr(time, name) for name in _CLOCKS if hasattr(time, name)]
    outside += [getattr(os, name) for name in _OF_THE_SYSTEM if hasattr(os, name)]
    outside += [
        getattr(owner, name)
        for owner in (torch, torch.random)
        for name in _SEEDS
        if hasattr(owner, name)
    ]
    functions = {id(function): refusing(function) for function in outside}
    libraries = (time, timeit, os, random, torch, torch.random, torch.serialization)
    for values in (*map(vars, libraries), *namespaces):
        yield from (
            (values, name, functions[id(v)])
            for name, v in list(values.items())
            if id(v) in functions
        )


def _methods(record: Refusing) -> Iterator[Patch]:
    """Yield patches that refuse methods which pass something to another thread, process or
    machine.
    """
    for kind, names in _METHODS:
        for name in names:
            label = f"{kind.__name__}.{name}"
            check = partial(_refuse_call, record, label)
            yield kind, name, checked(getattr(kind, name), check)


def _dates(record: Refusing, namespaces: Iterable[dict[str, Any]]) -> Iterator[Patch]:
    """Yield patches that refuse `now()`, `utcnow()` and `today()` of `datetime`, and `today()` of
    `date`, to the user's code. The classes are C's, so names of them are replaced.

    Args:
        record: is called to refuse.
        namespaces: globals of the user's code.
    """
    clocks: dict[int, Any] = {}
    for kind, names in (
        (datetime.datetime, ("now", "utcnow", "today")),
        (datetime.date, ("today",)),
    ):
        members = {
            name: checked(getattr(kind, name), partial(_refuse_call, record, name))
            for name in names
        }
        fields = {"kind": kind, **{name: staticmethod(call) for name, call in members.items()}}
        clocks[id(kind)] = _Dates(kind.__name__, (), fields)
    for values in (vars(datetime), *namespaces):
        yield from (
            (values, name, clocks[id(v)]) for name, v in list(values.items()) if id(v) in clocks
        )


class _Dates(type):
    """Stands for `datetime.datetime` or `datetime.date` (`kind`): all members but the clocks are
    those of `kind`.
    """

    kind: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.kind(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)
