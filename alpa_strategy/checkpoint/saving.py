"""CheckpointWriter: the one that a job's sharded checkpoints go through, at once or in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alpa_strategy.checkpoint.dcp import write_directory
from alpa_strategy.checkpoint.directory import remove
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards
from alpa_strategy.checkpoint.tree import take_shards, to_bytes
from alpa_strategy.errors import CheckpointError


class CheckpointWriter:
    """Writes and removes sharded checkpoints, in the order in which it is asked to.

    Args:
        group: process group of the whole job with a CPU backend, used by nothing else; None for one process.
        is_rank_zero: whether this process removes checkpoints.
    """

    def __init__(self, group: Any, is_rank_zero: bool) -> None:
        self._group, self._is_rank_zero = group, is_rank_zero
        self._background = _Background()

    def save(self, checkpoint: Mapping[str, Any], path: str | Path, in_background: bool = False) -> None:
        """Write `checkpoint` to the directory `path`. Collective; all ranks write their `LocalShards` in it.

        Args:
            in_background: return when this rank's tensors are copied; waits for the save before this one.

        Raises:
            CheckpointError: on every rank; in the background, from the next call of a method.
        """
        self.wait()
        target = local_path(path)
        rest, places, shards = take_shards(checkpoint)
        content = to_bytes(rest, places) if self._is_rank_zero else b""
        if not in_background:
            write_directory(target, shards, content, self._group)
            return
        copies = {key: _copied(held) for key, held in shards.items()}
        self._background.run(lambda: write_directory(target, copies, content, self._group))

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint; after the save that is under way, and not if that fails (it may be the last one)."""
        if not self._is_rank_zero:
            return
        target = local_path(path)
        if self._background.is_busy:
            self._background.run(lambda: remove(target))
        else:
            remove(target)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when nothing is under way (or at the timeout); raise what failed."""
        self._background.wait(timeout_seconds)


def local_path(path: str | Path) -> Path:
    """The path as an absolute one of a local (or mounted) file system; CheckpointError for URLs."""
    if "://" in str(path):
        raise CheckpointError(
            f"sharded checkpoints are written to local or mounted folders, not to {path}",
            'give a path, or use AlpaStrategy(checkpoint="single")',
        )
    return Path(path).absolute()


def _copied(held: LocalShards) -> LocalShards:
    chunks = [Chunk(c.offsets, c.tensor.detach().to("cpu", copy=True).contiguous()) for c in held.chunks]
    return LocalShards(held.shape, held.dtype, chunks)


class _Background:
    """Runs jobs one after the other in a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job; it is dropped when one before it has failed."""
        with self._lock:
            self._num_waiting += 1
            self._idle.clear()
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="alpa-checkpoint")
            self._thread.start()

    def wait(self, timeout_seconds: float | None) -> None:
        self._idle.wait(timeout_seconds)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # raised in the main thread, by `wait`
                self._error = error
            with self._lock:
                self._num_waiting -= 1
                if self._num_waiting == 0:
                    self._idle.set()
