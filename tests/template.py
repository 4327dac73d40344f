"""A process that has imported torch and Lightning once, and forks the processes of tests: the
workers of `worker_pool.py`, and scripts that a test runs in a process of their own.

`run_script` does what `subprocess.run([sys.executable, script, *arguments])` does, without the
seconds of those imports. This package is imported by the forked process itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

# torch.optim imports Dynamo at the first optimizer.
IMPORTED = (
    "lightning.pytorch",
    "torch._dynamo",
    "torch.fx.experimental.proxy_tensor",
    "torch.distributed.checkpoint",
    "torchmetrics",
)
TESTS = Path(__file__).resolve().parent
MOST_BYTES = 1 << 17


class Template:
    """The process, started when it is first needed. It ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def fork(self, request: Mapping[str, object], descriptors: Sequence[int]) -> None:
        """Fork a process that does what `_serve` says of the request, with these descriptors."""
        message = json.dumps(request).encode()
        if len(message) > MOST_BYTES:
            raise ValueError(f"a request of {len(message)} bytes is too long")
        socket.send_fds(self._control, [message], descriptors)


_template: Template | None = None


def template() -> Template:
    """The template of this process's tests."""
    global _template
    if _template is None:
        _template = Template()
    return _template


def run_script(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a forked process; return its exit code and what it printed.

    Args:
        command: what stands behind `python`: a path, `-m` and a module, or `-c` and code; then
            arguments.
        folder: where it runs.
        environment: its environment; None: this process's.
        timeout: seconds until it is killed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    request = {
        "command": list(command),
        "folder": str(folder),
        "environment": dict(os.environ if environment is None else environment),
    }
    pipes = [os.pipe() for _ in range(3)]
    template().fork(request, [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)

    output, errors, status = (os.fdopen(read, errors="replace") for read, _ in pipes)
    with output, errors, status, ThreadPoolExecutor(2) as threads:
        texts = [threads.submit(stream.read) for stream in (output, errors)]
        pid = int(status.readline())
        is_late = not select.select([status], [], [], timeout)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        code = int(status.readline())
        stdout, stderr = (text.result() for text in texts)
    if is_late:
        raise subprocess.TimeoutExpired(list(command), timeout, stdout, stderr)
    return subprocess.CompletedProcess(list(command), code, stdout, stderr)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux only


# In the template


def _serve(control: socket.socket) -> Callable[[], None]:
    """Fork for every request until there are no more; return, in a forked process, its work."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
        if not message:
            sys.exit()
        child = os.fork()
        if child == 0:
            control.close()
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request = json.loads(message)
            if "workers" in request:
                return lambda: _serve_workers(descriptors[0])
            return _in_child_of_its_own(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve_workers(descriptor: int) -> None:
    """Be the process that forks the workers of a pool."""
    sys.path.insert(0, str(TESTS))
    worker_pool = importlib.import_module("worker_pool")
    worker_pool.serve(descriptor)


def _in_child_of_its_own(
    request: Mapping[str, object], output: int, errors: int, status: int
) -> Callable[[], None]:
    """Fork once more and tell the id and the exit code of that process, whose work is returned."""
    child = os.fork()
    if child:
        os.close(output)
        os.close(errors)
        os.write(status, f"{child}\n".encode())
        _, result = os.waitpid(child, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(result)}\n".encode())
        os._exit(0)

    os.close(status)
    die_with_parent()
    for descriptor, target in ((output, 1), (errors, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    return lambda: _run(**request)  # type: ignore[arg-type]


def _run(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> NoReturn:
    """Be the process of `python *command`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *_BASE_PATH]

    _leave(_exit_code(list(command)))


def _exit_code(command: list[str]) -> int:
    """Run a command line; return what the interpreter's exit code would be."""
    try:
        _run_main(command)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # without the frames of this file
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """End the process as the interpreter does, but for the objects of all that is imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_main(command: list[str]) -> None:
    """Run the module `__main__` of a command line."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return

    module = types.ModuleType("__main__")
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        code = compile(command[1], "<string>", "exec")
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        module.__file__ = command[0]
        code = compile(Path(command[0]).read_bytes(), command[0], "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _main(descriptor: int) -> None:
    die_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    # A collection that looks at all of these objects would copy their memory.
    gc.freeze()
    # No process waits for those that are forked.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    work = _serve(socket.socket(fileno=descriptor))
    work()


if __name__ == "__main__":
    # The first is the folder of this file.
    _BASE_PATH = sys.path[1:]
    _THIS = sys.modules["__main__"]
    _main(int(sys.argv[1]))
