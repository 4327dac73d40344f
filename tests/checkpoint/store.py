"""`store://`: a bucket for tests. It is a local folder, so that it survives its processes; it is
slow, fails, or kills the process in the middle of a transfer, as its environment variables say.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

# Seconds that each transfer takes longer.
SECONDS = "STORE_SECONDS"

# A regular expression: the transfer to such a path fails, or kills its process when half of the
# file has arrived.
FAILS = "STORE_FAILS"
KILLS = "STORE_KILLS"

# A file that gets one line for each downloaded file.
LOG = "STORE_LOG"


class Store(LocalFileSystem):
    protocol = "store"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("store://"))

    def put_file(self, source: str, target: str, *args: Any, **kwargs: Any) -> None:
        _transfer(source, target)

    def get_file(self, source: str, target: Any, *args: Any, **kwargs: Any) -> None:
        if LOG in os.environ:
            with open(os.environ[LOG], "a") as log:
                log.write(f"{source}\n")
        time.sleep(float(os.environ.get(SECONDS, "0")))
        shutil.copyfile(source, target)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            _check(path, lambda: None)
        return super()._open(path, mode, *args, **kwargs)


def _transfer(source: str, target: str) -> None:
    content = Path(source).read_bytes()

    def write_half() -> None:
        Path(target).write_bytes(content[: len(content) // 2])

    _check(target, write_half)
    Path(target).write_bytes(content)


def _check(path: str, write_half: Any) -> None:
    time.sleep(float(os.environ.get(SECONDS, "0")))
    if _matches(KILLS, path):
        write_half()
        os.kill(os.getpid(), signal.SIGKILL)
    if _matches(FAILS, path):
        raise PermissionError("the bucket is read-only")


def _matches(variable: str, path: str) -> bool:
    return variable in os.environ and bool(re.search(os.environ[variable], path))


fsspec.register_implementation("store", Store, clobber=True)
