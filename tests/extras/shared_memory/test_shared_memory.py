"""Collectives through shared memory: gloo's results at every size, nothing left behind, and no wait
for a lost rank.
"""

from __future__ import annotations

import os
import random
import time
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from alpa_strategy.comm import collectives
from alpa_strategy.comm.collectives import all_reduce_max, any_rank, check_groups
from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.errors import LostRankError
from alpa_strategy.extras import shared_memory
from alpa_strategy.extras.shared_memory import FOLDER, TOTAL_BYTES, SharedMemoryGroup

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)
pytestmark = pytest.mark.skipif(shared_memory._host() is None, reason="shared memory of x86 alone")


def files_of(process_id: int) -> list[str]:
    """Names of the files that a process has made: those of other tests at the same time are not
    among them.
    """
    return [path.name for path in FOLDER.glob(f"alpa-{process_id}-*")]


def same_as_gloo(seed: int) -> tuple[int, int]:
    """Collectives of any kind, dtype and size, in one order, with ranks that come late.

    Returns:
        The number of calls, and this process's id.
    """
    axis = build_mesh((dist.get_world_size(),), own_group="test").all_devices
    assert axis._shared is not None
    size, rank = axis.size, axis.index
    common, local = random.Random(seed), random.Random(1000 * seed + rank)
    calls = 60
    for call in range(calls):
        most = (
            3 * axis._shared.group.piece_bytes
            if call % 20 == 0
            else common.choice([1, 10, 5000, 200_000])
        )
        dtype = common.choice(DTYPES)
        rows = max(1, common.randint(1, most) // dtype.itemsize // size)
        parts = [
            torch.randint(0, 9, (size * rows,), generator=_seeded(call, number)).to(dtype)
            for number in range(size)
        ]
        mine, total = parts[rank].clone(), torch.stack(parts).double().sum(0).to(dtype)
        if local.random() < 0.2:
            time.sleep(local.random() * 0.01)
        match common.choice(["sum", "max", "gather", "scatter", "exchange"]):
            case "sum":
                assert torch.equal(axis.all_reduce(mine), total)
            case "max":
                assert torch.equal(axis.all_reduce(mine, "max"), torch.stack(parts).amax(0))
            case "gather":
                assert torch.equal(axis.all_gather(mine, 0, size * len(mine)), torch.cat(parts))
            case "scatter":
                assert torch.equal(axis.reduce_scatter(mine, 0), total.view(size, rows)[rank])
            case "exchange":
                chunks = [part.view(1, -1) for part in parts]
                received = axis.all_to_all(chunks[rank], 0, size, 1)
                assert torch.equal(received, torch.cat(chunks).view(size, size, rows)[:, rank])
        assert torch.equal(mine, parts[rank])
    return calls, os.getpid()


def _seeded(call: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * call + rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_are_the_sums_and_copies_that_gloo_makes(pool, ranks):
    results = pool.run(ranks, same_as_gloo, ranks)
    assert [calls for calls, _ in results] == [60] * ranks
    for _, process_id in results:
        assert files_of(process_id) == []


def made_in_vain(late_rank: int) -> tuple[str, int]:
    """Make a group while the barrier fails, as where another rank ends: the error and rank 0's
    process.

    Args:
        late_rank: maps the file only when the other has long failed.
    """
    rank = dist.get_rank()
    process_ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())
    group_class = shared_memory.SharedMemoryGroup

    def late_group(*arguments: Any) -> SharedMemoryGroup:
        time.sleep(0.5 if rank == late_rank else 0)
        return group_class(*arguments)

    barrier = patch.object(shared_memory.dist, "barrier", side_effect=RuntimeError("a lost rank"))
    group = patch.object(shared_memory, "SharedMemoryGroup", late_group)
    with barrier, group, pytest.raises((RuntimeError, LostRankError)) as error:
        shared_memory.shared_memory_group(None, rank, dist.get_world_size())
    return str(error.value), process_ids[0]


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_group_that_fails_leaves_no_file(pool, late_rank):
    (error, process_id), (other_error, _) = pool.run(2, made_in_vain, late_rank)
    assert error == "a lost rank"
    assert ("has failed" in other_error) if late_rank == 1 else (other_error == "a lost rank")
    assert files_of(process_id) == []


def begun_together(seed: int) -> int:
    """Sums that are begun, many times what shared memory holds, and waited for in an order of each
    rank's own, while
    others are made at once; every rank has the same bits."""
    axis = build_mesh((dist.get_world_size(),), own_group="test").all_devices
    size, rank = axis.size, axis.index
    common, local = random.Random(seed), random.Random(1000 * seed + rank)
    for call in range(5):
        lengths = [size * common.choice([1, 1000, 400_000]) for _ in range(12)]
        parts = [
            [torch.randn(n, generator=_seeded(call, number)) for n in lengths]
            for number in range(size)
        ]
        total = [reduce(torch.add, one) for one in zip(*parts, strict=True)]
        begun = []
        for i, part in enumerate(parts[rank]):
            scatter = i % 3 == 0
            begun.append(
                axis.start_reduce_scatter(part.view(size, -1))
                if scatter
                else axis.start_all_reduce(part)
            )
            if local.random() < 0.2:
                time.sleep(local.random() * 0.01)
            if common.random() < 0.3:
                assert axis.all_reduce(torch.ones(3)).tolist() == [size] * 3
        for i in local.sample(range(12), 12):
            wanted = total[i] if i % 3 else total[i].view(size, -1)[rank]
            assert (
                torch.equal(begun[i].wait(), wanted)
                if i % 3
                else torch.allclose(begun[i].wait(), wanted, atol=1e-5)
            )
    return axis._shared_sums.group.piece_bytes


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_that_are_begun(pool, ranks):
    assert min(pool.run(ranks, begun_together, ranks)) > 0


def without_room() -> tuple[bool, float]:
    with patch.object(shared_memory, "TOTAL_BYTES", 2**60):
        axis = build_mesh((dist.get_world_size(),), own_group="test").all_devices
    return axis._shared is None, float(axis.all_reduce(torch.ones(3)).sum())


def test_where_the_memory_is_not_to_be_had_gloo_is_used(pool):
    assert pool.run(2, without_room) == [(True, 6.0)] * 2


def waits_in_vain(path: str, ends: bool) -> str:
    """Rank 0 waits for a collective that rank 1 does not begin: why that ends."""
    rank = dist.get_rank()
    if rank == 1 and ends:
        child = os.fork()
        if child == 0:  # rank 1's part is played by a process that is gone soon
            group = SharedMemoryGroup(path, 1, 2, 60.0)
            Path(path + ".here").touch()
            time.sleep(1.0)
            group.rank()
            os._exit(0)
        os.waitpid(child, 0)
        return ""
    group = SharedMemoryGroup(path, rank, 2, 1.5)
    dist.barrier() if not ends else None
    while ends and not Path(path + ".here").exists():
        time.sleep(0.01)
    if rank == 0:
        with pytest.raises(LostRankError) as error:
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        Path(path + ".done").touch()
        return str(error.value)
    while not Path(path + ".done").exists():
        time.sleep(0.05)
    return ""


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "late"])
def test_a_lost_rank_is_named_and_a_late_one_times_out(pool, tmp_path, ends):
    path = tmp_path / "shared"
    path.write_bytes(b"\0" * TOTAL_BYTES)
    said = pool.run(2, waits_in_vain, str(path), ends)[0]
    assert ("rank 1 of 2 on this host has ended" if ends else "has not ended within 1.5 s") in said


def agrees() -> tuple[list[int], list[bool], bool]:
    """Numbers and flags that ranks agree on, first within an evaluation; through shared memory?"""
    rank = dist.get_rank()
    with torch.inference_mode():
        assert any_rank([rank == 1])[0]
    largest = all_reduce_max([rank, -rank, 7, 2**62 + rank])
    flags = any_rank([rank == 0, rank == 1, False])
    group = collectives._consensus_group(None)
    return largest, flags, isinstance(group, SharedMemoryGroup)


@pytest.mark.parametrize("ranks", [2, 3])
def test_hosts_agree_through_shared_memory(pool, ranks):
    wanted = [ranks - 1, 0, 7, 2**62 + ranks - 1], [True, True, False], True
    assert pool.run(ranks, agrees) == [wanted] * ranks


def agrees_after_a_failure() -> list[int]:
    """Rank 0 begins to agree on something and gives up: the next training's ranks agree again."""
    any_rank([False])
    group = collectives._consensus_group(None)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, dtype=torch.int64), group=group, async_op=True)
    check_groups()
    assert collectives._consensus_group(None) is not group
    return all_reduce_max([dist.get_rank()])


def test_ranks_that_a_failure_left_apart_agree_again(pool):
    assert pool.run(2, agrees_after_a_failure) == [[1], [1]]


def test_the_file_has_room_for_every_rank(tmp_path):
    for size in (2, 64, 200):
        total = shared_memory.file_bytes(size, collectives.CONSENSUS_BYTES)
        path = tmp_path / f"shared{size}"
        path.write_bytes(b"\0" * total)
        assert SharedMemoryGroup(str(path), 0, size, 1.0, total).piece_bytes >= 64
