"""Agreement between the ranks of a job before anything is sharded: an error on one rank is raised
on all of them.

A `group` says among which ranks: those of a replica, or None, all of the job. At the end: jobs
beside the main thread.
"""

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from alpa_strategy.comm.failure import job_store
from alpa_strategy.comm.shared_memory import AGREEMENT_BYTES, shared_memory_group
from alpa_strategy.errors import AlpaError, RuntimeMismatchError

T = TypeVar("T")


def world_size(group: Any = None) -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_in(group: Any) -> int:
    """This process's place among the ranks; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def broadcast_object(value: Any) -> Any:
    """`value` of rank 0, on every rank of the job (pickled)."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def on_all_ranks(
    work: Callable[[], T], summary: Callable[[T], Any], group: Any = None
) -> tuple[T, list[Any]]:
    """Run `work` on every rank; an AlpaError on any rank is raised on all. Collective.

    Returns this rank's result, and `summary(result)` (small, picklable) of every rank.
    """
    result: T | None = None
    report: Any
    try:
        result = work()
        report = summary(result), None
    except AlpaError as error:
        report = None, error
    reports = all_gather_object(report, group)
    for _, first in reports:
        if first is not None:
            # The lowest rank's error for all: equal texts are how FailureWatch knows that nobody is
            # left behind.
            raise first from (report[1] if report[1] is not first else None)
    return cast("T", result), [value for value, _ in reports]


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, by rank (pickled). Collective."""
    if world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def host_group(group: Any = None) -> Any:
    """The group in which hosts agree without waiting for what their GPUs still have to do, as
    NCCL's collectives would.

    `group` itself unless that is NCCL's. Collective at its first call.
    """
    if dist.get_backend(group) != "nccl":
        return group
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return lasting_group(
        "hosts", ranks, backend="gloo", use_local_synchronization=len(ranks) < world_size()
    )


class RankZero:
    """Lets rank 0 work alone while the others wait in the job's store: no collective, so no
    collective timeout.
    """

    def __init__(self, timeout_seconds: float, group: Any = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._size, self._rank = world_size(group), rank_in(group)
        self._alone = self._size == 1
        if not self._alone:
            # A connection of its own: who waits in it holds up nobody else's calls.
            self._store = job_store().clone()
            number = self._store.add(f"alpa/rank_zero/runs/{dist.get_rank()}", 1)
            self._run = (
                f"{dist.get_rank() - self._rank}/{number}"  # a replica's ranks are neighbours
            )
            self._count = 0

    def result_of(self, work: Callable[[], Any], what: str) -> Any:
        """`work()` of rank 0 (to be pickled) on every rank; its AlpaError is raised on every rank.

        Args:
            what: for the error when rank 0 takes longer than the timeout.
        """
        if self._alone:
            return work()
        self._count += 1
        key = f"alpa/rank_zero/{self._run}/{self._count}"
        if self._rank == 0:
            try:
                result = work()
                self._store.set(key, pickle.dumps((result, None)))
            except AlpaError as error:
                self._store.set(key, pickle.dumps((None, error)))
                raise
            return result
        # In a thread: who waits in the store hears no SIGTERM of a launcher that lost a rank, who
        # joins a thread does.
        waiting = Background("alpa-rank-zero")
        waiting.run(lambda: self._store.wait([key], timedelta(seconds=self._timeout_seconds)))
        try:
            waiting.wait()
        except RuntimeError as error:
            raise RuntimeMismatchError(
                f"rank 0 has not finished {what} within {self._timeout_seconds:g} s",
                "raise plan_timeout_seconds",
            ) from error
        result, failure = pickle.loads(self._store.get(key))
        if failure is not None:
            raise failure
        return result

    def meet(self, name: str, text: str, timeout_seconds: float) -> dict[int, str]:
        """Leave `text` under `name` and wait for the other ranks to do the same; what came, by
        rank.
        """
        if self._alone:
            return {0: text}
        keys = [f"alpa/meet/{self._run}/{name}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        with suppress(RuntimeError):  # some ranks do not come: the caller sees which
            self._store.wait(keys, timedelta(seconds=timeout_seconds))
        return {
            rank: self._store.get(key).decode()
            for rank, key in enumerate(keys)
            if self._store.check([key])
        }


_groups: dict[Any, Any] = {}  # of `_job`, the process may have another later
_job: Any = None


def lasting_group(use: Any, ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """A process group of these ranks of the job (None: all) for one use: the same for everything
    that trains one after another in this process, as a group keeps its connections and threads
    until that ends. Collective at its first call.

    Args:
        options: of `torch.distributed.new_group`.
    """
    _forget_groups_of_other_jobs()
    if (key := (use, ranks and tuple(ranks))) not in _groups:
        _groups[key] = dist.new_group(ranks and list(ranks), **options)
    return _groups[key]


def _forget_groups_of_other_jobs() -> None:
    """Drop the lasting groups of a job that this process has left."""
    global _job
    if _job is not dist.group.WORLD:
        _groups.clear()
        _job = dist.group.WORLD


def check_groups() -> None:
    """Before a training: groups in which one that failed has left ranks apart are made anew.
    Collective.
    """
    found = [
        (key, group) for key, group in _groups.items() if group != dist.GroupMember.NON_GROUP_MEMBER
    ]
    begun = all_gather_object(
        [(key, group._get_sequence_number_for_group()) for key, group in found]
    )
    numbers = {each for of_rank in begun for each in of_rank}
    if len(numbers) > len(dict(numbers)):
        _groups.clear()


def cpu_group(use: str) -> dist.ProcessGroup | None:
    """The group of all ranks with a CPU backend for one use; None for one process. Collective."""
    return lasting_group(use, backend="gloo") if world_size() > 1 else None


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Which flags are set on at least one rank. Collective."""
    return [bool(largest) for largest in all_reduce_max(flags)]


def all_reduce_max(numbers: Sequence[int], group: Any = None) -> list[int]:
    """The largest of each over all ranks. Collective, over the hosts."""
    own = torch.tensor(numbers, dtype=torch.int64)
    if world_size(group) > 1:
        dist.all_reduce(own, dist.ReduceOp.MAX, _agreement_group(group))
    return own.tolist()


def _agreement_group(group: Any) -> Any:
    """The quickest group in which the hosts of `group` agree on a few numbers.

    Every training step agrees several times. Through the shared memory of one host that takes a
    tenth of gloo's time, whose threads wait for a core. Collective at its first call.
    """
    hosts: Any = host_group(group) or dist.group.WORLD
    key = ("agreement", hosts.group_name)
    _forget_groups_of_other_jobs()
    if key not in _groups:
        rank, size = dist.get_rank(hosts), dist.get_world_size(hosts)
        _groups[key] = shared_memory_group(hosts, rank, size, AGREEMENT_BYTES) or hosts
    return _groups[key]


def broadcast_tensors(tensors: Iterable[torch.Tensor], source: int = 0, group: Any = None) -> None:
    """Rank `source`'s values for every rank's tensors that have memory, a message a dtype, as DDP
    does. Collective.
    """
    held = [tensor.detach() for tensor in tensors if not tensor.is_meta]
    if world_size(group) > 1 and held:
        group = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, held, 250 * 2**20, source)


# --- Jobs beside the main thread, one after the other.


class Background:
    """Each job has a thread that waits for the one before and keeps no process alive: nothing has
    to be closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running, or has failed and `wait` has not raised its error yet."""
        is_running = self._last is not None and self._last.is_alive()
        return is_running or self._error is not None

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job; it is dropped when one before it has failed."""
        before = self._last

        def work() -> None:
            try:
                if before is not None:
                    before.join()
                if self._error is None:
                    job()
            except BaseException as error:  # raised in the main thread, by `wait`
                self._error = error

        self._last = threading.Thread(target=work, daemon=True, name=self._name)
        self._last.start()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when nothing is under way (or at the timeout); raise what failed."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        error, self._error = self._error, None
        if error is not None:
            raise error
