"""How parts of the GPU exam report rows, and how they start processes under a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from gpu_exam_models import (
    ROOT,
)

Row = dict[str, Any]

# add(item, verdict, text, **figures): reports one row of a part.
Add = Callable[..., None]


def verdict(good: bool) -> str:
    return "ok" if good else "failed"


# Name of the item that is being examined, in its only element.
_item: list[str] = [""]


@contextmanager
def each(add: Add, item: str) -> Iterator[None]:
    """Examine one item of a part: its rows have its name, an exception becomes a failed row."""
    _item[0] = item
    try:
        yield
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        add(item, "failed", f"{type(error).__name__}: {text[-400:]}")
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()


def rows_into(file: TextIO, part: str) -> Add:
    """Return the function that writes the rows of `part` to `file` as lines of JSON."""

    def add(item: str | None, outcome: str, text: str, **figures: Any) -> None:
        row = {
            "part": part,
            "item": item or _item[0],
            "verdict": outcome,
            "text": text,
            "figures": figures,
        }
        file.write(json.dumps(row) + "\n")
        file.flush()

    return add


def run_limited(
    command: list[str],
    seconds: float,
    folder: str,
    environment: dict[str, str] | None = None,
    own_session: bool = False,
) -> None:
    """Run a command of the exam in `folder`, and end it after `seconds`.

    Args:
        command: the program and its arguments.
        seconds: time limit.
        folder: working directory; the command's output goes to its file `log`.
        environment: variables to set in addition.
        own_session: end all processes that the command starts as well.

    Raises:
        RuntimeError: the command failed or did not end; the message has the end of its output.
    """
    variables = {
        "OMP_NUM_THREADS": "2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **os.environ,
        **(environment or {}),
    }
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if sys.platform == "linux":
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network has no other
    log = Path(folder) / "log"
    with log.open("w") as file:
        # A session of its own, so that all that it starts ends with it; torchrun ends its ranks
        # itself when asked.
        job = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
        code: int | None = None
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, number) if own_session else job.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    job.wait(10)
    if code != 0:
        why = f"no end after {seconds:.0f} s" if code is None else f"exit code {code}"
        raise RuntimeError(f"{why}: ...{log.read_text(errors='replace')[-1500:]}")
