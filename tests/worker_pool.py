"""Persistent worker processes that play the ranks of a job: imports are paid for once in a whole
test session.

`pool.run(world_size, fn, *args)` runs a top-level function of a test module on the first
`world_size` workers, each with the environment that torchrun would give and, unless
`init_group=False`, a fresh gloo process group.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from template import die_with_parent, template

MAX_WORKERS = 4
GRACE_SECONDS = 1.0
# What jobs import, once for all workers, besides what their template has: this package imports its
# planner at the first step.
IMPORTED = (
    "alpa_strategy",
    "alpa_strategy.capture.capture",
    "alpa_strategy.planner.planner",
    "alpa_strategy.lightning.run",
    "alpa_strategy.lightning.eager_run",
    "alpa_strategy.extras.activation_checkpoint",
    "alpa_strategy.extras.deferred_init",
    "alpa_strategy.extras.eager_sharding.hook",
    "alpa_strategy.extras.failure_watch.job_watch",
    "alpa_strategy.extras.host_allocator.tuning",
    "alpa_strategy.extras.planned_submodules.hook",
    "alpa_strategy.extras.planned_submodules.run",
    "alpa_strategy.extras.shared_memory",
    "alpa_strategy.page.stored",
    "alpa_strategy.recording.recorder",
    "omegaconf",
    "torch.distributed.algorithms.ddp_comm_hooks",
)


class WorkerError(AssertionError):
    """A worker raised (its traceback is the message), died, or did not answer in time."""


class WorkerPool:
    """Up to `MAX_WORKERS` worker processes, forked when first needed from a process that has done
    the imports.

    A worker that hangs is killed with all others; new ones are there in milliseconds.
    """

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._workers: list[Connection] = []

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 120,
        init_group: bool = True,
    ) -> list[Any]:
        """Result of `fn(*args)` per rank.

        Args:
            world_size: how many ranks, at most `MAX_WORKERS`.
            fn: a top-level function of a file (a test module); it is sent by file path and name.
            args: picklable, the same for every rank.
            timeout: seconds until all workers are killed (they start again at the next call).
            init_group: False leaves process-group creation to `fn` (a Lightning Trainer, for
                example).

        Raises:
            WorkerError: with the traceback of the rank that failed first.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size {world_size} is not between 1 and {MAX_WORKERS}")
        for rank in range(len(self._workers), world_size):
            self._workers.append(self._start_worker(rank))
        job = (sys.modules[fn.__module__].__file__, fn.__module__, fn.__qualname__, args)
        environment = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        message = pickle.dumps((job, environment, init_group, timeout))
        connections = self._workers[:world_size]
        try:
            for connection in connections:
                connection.send_bytes(message)
            return self._collect(connections, timeout)
        except BaseException:
            # A rank that failed leaves others inside a collective: only new workers are sure to be
            # clean.
            self._kill_workers()
            raise

    def _collect(self, connections: list[Connection], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []  # when, which rank, its traceback
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(connections):
            answered = {*results, *(rank for _, rank, _ in failures)}
            waiting = [
                connection for rank, connection in enumerate(connections) if rank not in answered
            ]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                missing = [rank for rank in range(len(connections)) if rank not in answered]
                raise WorkerError(f"ranks {missing} did not answer within {timeout} s")
            if not ready:
                break
            for connection in ready:
                rank = connections.index(connection)
                try:
                    succeeded, value, when = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    succeeded = False
                    value = "(the process died)"
                    when = time.monotonic()
                if succeeded:
                    results[rank] = value
                    continue
                failures.append((when, rank, value))
                # The others are likely to fail because of it: the first failure in time is the
                # cause.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            _, rank, text = min(failures)
            raise WorkerError(f"rank {rank} raised\n{text}")
        return [results[rank] for rank in range(len(connections))]

    def close(self) -> None:
        """Kill all processes."""
        for connection in self._workers:
            connection.close()
        self._workers.clear()
        if self._control is not None:
            # The process that forks them ends, and they with it.
            self._control.close()
            self._control = None

    def _start_worker(self, rank: int) -> Connection:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            template().fork({"workers": True}, [theirs.fileno()])
            theirs.close()
        ours, theirs = Pipe(duplex=True)
        socket.send_fds(self._control, [str(rank).encode()], [theirs.fileno()])
        theirs.close()
        self._expect_done()
        return ours

    def _kill_workers(self) -> None:
        for connection in self._workers:
            connection.close()
        self._workers.clear()
        assert self._control is not None
        self._control.send(b"kill")
        self._expect_done()

    def _expect_done(self) -> None:
        assert self._control is not None
        if self._control.recv(4) != b"done":
            raise WorkerError("the process that forks workers died")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _load_function(path: str, module_name: str, qualname: str) -> Callable[..., Any]:
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(
            0, folder
        )  # helpers beside the test file, and classes that arguments were pickled with
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def _run_job(message: bytes) -> Any:
    import torch
    import torch.distributed as dist

    job, environment, init_group, timeout = pickle.loads(message)
    path, module_name, qualname, args = job
    before, folder = dict(os.environ), Path.cwd()
    rank = os.environ["RANK"]
    os.environ.update(environment)
    os.environ.update(TORCHELASTIC_RUN_ID="worker_pool", GROUP_RANK="0", ROLE_RANK=rank)
    torch.manual_seed(0)
    # Where a rank hangs is known only now: the pool kills it at `timeout`.
    faulthandler.dump_traceback_later(max(1.0, timeout - 5), file=sys.__stderr__)
    try:
        function = _load_function(path, module_name, qualname)
        if init_group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        return function(*args)
    except BaseException as error:
        # set before the group is destroyed, which makes the other ranks fail as well
        error.failed_at = time.monotonic()  # type: ignore[attr-defined]
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)


def _worker_main(rank: int, file_descriptor: int) -> None:
    die_with_parent()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    rank_zero = sys.modules["lightning.fabric.utilities.rank_zero"]
    rank_zero.rank_zero_only.rank = rank  # Lightning reads RANK at import, which the template did
    connection = Connection(file_descriptor)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            answer = pickle.dumps((True, _run_job(message), time.monotonic()))
        except BaseException as error:
            failed_at = getattr(error, "failed_at", time.monotonic())
            answer = pickle.dumps((False, traceback.format_exc(), failed_at))
        try:
            connection.send_bytes(answer)
        except ConnectionError:  # the pool has given up on this job
            return


def _capture_once() -> None:
    """Capture a step: all workers have then what torch makes at the first one, in half a second."""
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    from alpa_strategy.capture.capture import capture_step

    capture_step(BoringModel(), torch.ones(2, 32))


def serve(file_descriptor: int) -> None:
    """Import once, then fork a worker per message (its rank, with a pipe's descriptor) until the
    pool goes away.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    _capture_once()
    gc.freeze()  # what is imported is no garbage
    with sys.modules["alpa_strategy.loading"].rare_collections():
        pass  # what is frozen is counted once for all workers
    children: list[int] = []
    with socket.socket(fileno=file_descriptor) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                os._exit(0)
            if message == b"kill":
                for child in children:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                children.clear()
            else:
                child = os.fork()
                if child == 0:
                    control.close()
                    try:
                        _worker_main(int(message), descriptors[0])
                    finally:
                        os._exit(0)
                os.close(descriptors[0])
                children.append(child)
            control.send(b"done")
