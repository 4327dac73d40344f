"""Collectives on process groups give what `AxisComm` promises: every dim, uneven chunks, every
dtype, both backends.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from alpa_strategy.comm.collectives import all_gather_object, broadcast_object
from alpa_strategy.comm.mesh import build_mesh, build_stage_meshes
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.ir.placement import chunk_range

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
SHAPES = ((4, 8), (5, 3), (1, 7), (3, 2, 5), (2,))


def make(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 9, shape, generator=generator).to(dtype)


def chunk(tensor, dim, size, index):
    start, stop = chunk_range(tensor.shape[dim], size, index)
    return tensor.narrow(dim, start, stop - start)


def check_axis(axis, dtypes=DTYPES):
    """Compare all collectives of one axis with the full tensors, which every rank can make."""
    num = 0
    for shape, dtype in itertools.product(SHAPES, dtypes):
        parts = [make(shape, dtype, seed) for seed in range(axis.size)]
        whole, mine = parts[0], parts[axis.index]
        before = mine.clone()
        total = torch.stack(parts).sum(0).to(dtype)
        torch.testing.assert_close(axis.all_reduce(mine), total)
        torch.testing.assert_close(axis.all_reduce(mine, "max"), torch.stack(parts).amax(0))
        for dim in range(len(shape)):
            own = chunk(whole, dim, axis.size, axis.index)
            torch.testing.assert_close(axis.all_gather(own, dim, shape[dim]), whole)
            if dtype != torch.bool:
                summed = axis.reduce_scatter(mine, dim)
                torch.testing.assert_close(summed, chunk(total, dim, axis.size, axis.index))
            for split in range(len(shape)):
                if split != dim:
                    moved = axis.all_to_all(own, dim, shape[dim], split)
                    torch.testing.assert_close(moved, chunk(whole, split, axis.size, axis.index))
            num += 1
        assert torch.equal(mine, before)
    return num


def check_mesh(shape, backend="torch"):
    mesh = build_mesh(shape, backend=backend)
    world = dist.get_world_size()
    assert mesh.all_devices.size == world
    assert mesh.all_devices.index == dist.get_rank()
    torch.testing.assert_close(
        mesh.all_devices.all_reduce(torch.ones(2)), torch.full((2,), float(world))
    )
    for axis, size, index in zip(mesh.axes, mesh.shape, mesh.coordinate, strict=True):
        assert (axis.size, axis.index) == (size, index)
    dtypes = DTYPES if backend == "torch" else (torch.float32, torch.bool)
    counts = [check_axis(axis, dtypes) for axis in mesh.axes]
    pending = mesh.all_devices.start_all_reduce(torch.full((3,), 1.0))
    scattered = mesh.all_devices.start_reduce_scatter(torch.arange(float(world * 2)).view(world, 2))
    torch.testing.assert_close(pending.wait(), torch.full((3,), float(world)))
    torch.testing.assert_close(
        scattered.wait(), world * torch.arange(2.0) + 2 * world * mesh.all_devices.index
    )
    return sum(counts)


def check_strides():
    """Tensors that do not lie row by row in memory are summed and moved as others are."""
    axis = build_mesh((2,)).axes[0]
    plain = make((4, 2, 6, 8), torch.float32, axis.index)
    pairs = [(plain, plain.contiguous(memory_format=torch.channels_last))]
    pairs += [
        (each, each.transpose(0, -1).contiguous().transpose(0, -1)) for each in (plain, plain[0])
    ]
    for same, apart in pairs:
        assert not apart.is_contiguous()
        for dim in range(same.dim()):
            torch.testing.assert_close(
                axis.reduce_scatter(apart, dim), axis.reduce_scatter(same, dim)
            )
            total = 2 * same.shape[dim]
            torch.testing.assert_close(
                axis.all_gather(apart, dim, total), axis.all_gather(same, dim, total)
            )
            moved = (axis.all_to_all(x, dim, total, (dim + 1) % same.dim()) for x in (apart, same))
            torch.testing.assert_close(*moved)
    return True


def check_two_meshes():
    (mesh,) = (
        mesh for mesh in build_stage_meshes([((1,), (0,)), ((2,), (1, 2))]) if mesh is not None
    )
    return [mesh.ranks, mesh.axes[0].all_reduce(torch.tensor(1.0)).item()]


def check_objects():
    rank = dist.get_rank()
    return broadcast_object({"rank": rank}), all_gather_object(rank), all_gather_object("same")


def profiled_sums(times):
    axis = build_mesh((2,)).axes[0]
    total = 0.0

    def unchanged(tensor):
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), hooks:
        for _ in range(times):
            total += axis.all_reduce(torch.ones(64)).mean().item()
    return total


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (1, 2)], ids=str)
def test_collectives(pool, shape):
    assert min(pool.run(torch.tensor(shape).prod().item(), check_mesh, shape)) > 0


def test_collectives_of_tensors_with_other_strides(pool):
    assert pool.run(2, check_strides) == [True, True]


def test_collectives_through_deepspeed(pool):
    pytest.importorskip("deepspeed", reason="an extra of its own: [deepspeed]")
    assert min(pool.run(2, check_mesh, (2,), "deepspeed")) > 0


def test_waiting_under_the_profiler_ends(pool):
    # gloo's thread wants the GIL (for the hooks) while it holds the lock of what is waited for.
    assert pool.run(2, profiled_sums, 500) == [1000.0] * 2


def test_meshes_side_by_side(pool):
    assert pool.run(3, check_two_meshes) == [[(0,), 1.0], [(1, 2), 2.0], [(1, 2), 2.0]]


def test_objects(pool):
    assert pool.run(2, check_objects) == [({"rank": 0}, [0, 1], ["same"] * 2)] * 2


def test_one_process_needs_no_group():
    mesh = build_mesh((1, 1))
    assert mesh.coordinate == (0, 0)
    assert check_axis(mesh.axes[0]) > 0
    with pytest.raises(RuntimeMismatchError, match="holds 2 rows of dim 0"):
        mesh.axes[0].all_gather(torch.ones(2), 0, 3)
