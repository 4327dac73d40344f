"""Consensus between the ranks of a job: an error on one rank is raised on all of them.

A `group` is that of a replica's ranks; None stands for all ranks of the job. At the end: jobs in
background threads.
"""

import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from alpa_strategy.comm.job_store import job_store
from alpa_strategy.errors import AlpaError, RuntimeMismatchError
from alpa_strategy.hook_points import HOST_GROUPS

T = TypeVar("T")

# Memory of a group of one host that exchanges a few numbers.
CONSENSUS_BYTES = 2**18


def world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_in(group: Any) -> int:
    """Return the index of this process among the ranks; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank of the job (pickled). Collective."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def on_all_ranks(
    work: Callable[[], T], summary: Callable[[T], Any], group: Any = None
) -> tuple[T, list[Any]]:
    """Run `work` on every rank; an AlpaError on any rank is raised on all (the lowest rank's), any
    other error only where it occurs. Collective.

    Args:
        group: of the ranks; None: all.

    Returns:
        This rank's result, and `summary(result)` (small, picklable) of every rank.
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
            # The lowest rank's error on all ranks: by equal texts the failure watch knows that
            # every rank has failed.
            local_error = report[1]
            raise first from (local_error if local_error is not first else None)
    return cast("T", result), [value for value, _ in reports]


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return `value` of every rank, by rank (pickled). Collective."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def host_group(group: Any = None) -> Any:
    """Return a group whose collectives do not wait for work that is queued on GPUs.

    `group` itself unless its backend is NCCL. Collective at its first call.
    """
    if dist.get_backend(group) != "nccl":
        return group
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return lasting_group(
        "hosts", ranks, backend="gloo", use_local_synchronization=len(ranks) < world_size()
    )


class RankZero:
    """Lets rank 0 work alone while the others wait in the job's store.

    That is no collective, so it has no collective timeout.
    """

    def __init__(self, timeout_seconds: float, group: Any = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._size = world_size(group)
        self._rank = rank_in(group)
        self._alone = self._size == 1
        if not self._alone:
            # A separate connection: waiting in it does not block other calls.
            self._store = job_store().clone()
            number = self._store.add(f"alpa/rank_zero/runs/{dist.get_rank()}", 1)
            # A replica's ranks are consecutive.
            first_rank = dist.get_rank() - self._rank
            self._run = f"{first_rank}/{number}"
            self._count = 0

    def result_of(self, work: Callable[[], Any], work_name: str) -> Any:
        """Run `work` on rank 0; return its result (pickled) on every rank.

        An AlpaError of `work` is raised on every rank, another error on rank 0 alone: the others
        wait until the timeout.

        Args:
            work_name: name of the work in the error below.

        Raises:
            RuntimeMismatchError: rank 0 takes longer than the timeout.
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
        # In a thread: waiting in the store blocks signal handlers, such as that of the SIGTERM by
        # which a launcher ends the job. Joining a thread does not.
        waiting = Background("alpa-rank-zero")
        waiting.run(lambda: self._store.wait([key], timedelta(seconds=self._timeout_seconds)))
        try:
            waiting.wait()
        except RuntimeError as error:
            raise RuntimeMismatchError(
                f"rank 0 has not finished {work_name} within {self._timeout_seconds:g} s",
                "raise plan_timeout_seconds",
            ) from error
        result, failure = pickle.loads(self._store.get(key))
        if failure is not None:
            raise failure
        return result

    def meet(self, name: str, text: str, timeout_seconds: float) -> dict[int, str]:
        """Exchange a text under `name`; return rank in the group -> text of those in time.

        It waits until all ranks have sent one, or `timeout_seconds`.
        """
        if self._alone:
            return {0: text}
        keys = [f"alpa/meet/{self._run}/{name}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        # Some ranks may be late: the caller sees which.
        with suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=timeout_seconds))
        texts = {}
        for rank, key in enumerate(keys):
            if self._store.check([key]):
                texts[rank] = self._store.get(key).decode()
        return texts


# The lasting groups of the job `_job`; this process may be in another job later.
_groups: dict[Any, Any] = {}
_job: Any = None


def lasting_group(use: Any, ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Return the process group of some ranks for one use. Collective at its first call.

    All trainings of this process share it, as a group keeps its connections and threads until the
    process ends.

    Args:
        use: name of the use.
        ranks: of the job; None: all. Other ranks get no group: `NON_GROUP_MEMBER` or None.
        options: of `torch.distributed.new_group`.
    """
    _forget_groups_of_other_jobs()
    key = (use, ranks and tuple(ranks))
    if key not in _groups:
        _groups[key] = dist.new_group(ranks and list(ranks), **options)
    return _groups[key]


def _forget_groups_of_other_jobs() -> None:
    """Drop the lasting groups of a job that this process has left."""
    global _job
    if _job is not dist.group.WORLD:
        _groups.clear()
        _job = dist.group.WORLD


def check_groups() -> None:
    """Drop all lasting groups if ranks have run different numbers of collectives in one.

    To be called before a training: one that failed may have left its groups so. Collective.
    """
    local_numbers = []
    for key, group in _groups.items():
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            local_numbers.append((key, group._get_sequence_number_for_group()))
    numbers = set(itertools.chain.from_iterable(all_gather_object(local_numbers)))
    # A group with two numbers is in it twice.
    if len(numbers) > len(dict(numbers)):
        _groups.clear()


def cpu_group(use: str) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for one use; None for one process. Collective."""
    return lasting_group(use, backend="gloo") if world_size() > 1 else None


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set on at least one rank. Collective."""
    return [bool(largest) for largest in all_reduce_max(flags)]


def all_reduce_max(numbers: Sequence[int], group: Any = None) -> list[int]:
    """Return the largest of each number over the ranks of `group` (None: all). Collective, between
    hosts.
    """
    tensor = torch.tensor(numbers, dtype=torch.int64)
    if world_size(group) > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, _consensus_group(group))
    return tensor.tolist()


def _consensus_group(group: Any) -> Any:
    """Return the fastest group in which the hosts of `group` reach consensus on a few numbers.

    Every training step does so several times. Collective at its first call.
    """
    hosts: Any = host_group(group) or dist.group.WORLD
    key = ("agreement", hosts.group_name)
    _forget_groups_of_other_jobs()
    if key not in _groups:
        rank = dist.get_rank(hosts)
        size = dist.get_world_size(hosts)
        _groups[key] = group_of_host(hosts, rank, size, CONSENSUS_BYTES) or hosts
    return _groups[key]


def group_of_host(group: Any, rank: int, size: int, num_bytes: int | None = None) -> Any:
    """Return a faster group of the ranks of `group`, if all are on one host; else None. Collective.

    Args:
        group: a group whose collectives are on CPU tensors.
        rank: of this process in the group.
        size: number of its ranks.
        num_bytes: memory that the new group may take; None: as is good for large tensors.
    """
    extra = HOST_GROUPS.extra
    return None if extra is None else extra.shared_memory_group(group, rank, size, num_bytes)


def broadcast_tensors(tensors: Iterable[torch.Tensor], source: int = 0, group: Any = None) -> None:
    """Copy rank `source`'s values to every rank's tensors in place, as DDP does. Collective.

    Meta tensors are left out.

    Args:
        source: rank within `group`.
        group: of the ranks; None: all.
    """
    with_memory = [tensor.detach() for tensor in tensors if not tensor.is_meta]
    if world_size(group) > 1 and with_memory:
        group = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, with_memory, 250 * 2**20, source)


# --- Jobs in background threads, one after the other.


class Background:
    """Runs jobs one after the other.

    Each job has a daemon thread that waits for the one before: nothing has to be closed.
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

    @property
    def has_failed(self) -> bool:
        """Whether a job has failed, and `wait` has not raised its error yet."""
        return self._error is not None

    def run(self, job: Callable[[], None]) -> threading.Thread:
        """Queue a job, and return its thread. The job is dropped if one before it has failed, whose
        error `wait` has not raised yet.
        """
        before = self._last

        def work() -> None:
            try:
                if before is not None:
                    before.join()
                if self._error is None:
                    job()
            except BaseException as error:
                # `wait` raises it in the main thread.
                self._error = error

        self._last = threading.Thread(target=work, daemon=True, name=self._name)
        self._last.start()
        return self._last

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when no job is running, or at the timeout; raise a failed job's error, once."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        error = self._error
        self._error = None
        if error is not None:
            raise error
