"""Transfers over real messages: any dtype, any layouts, several at once; bytes are those of the
plan.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist

from alpa_strategy.comm.mesh import build_stage_meshes
from alpa_strategy.comm.messages import Outbox, Transfer, exchange
from alpa_strategy.ir.placement import Layout
from alpa_strategy.sharding.cross_mesh import MeshSide, plan_transfer

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)
CPU = torch.device("cpu")


def random_side(rng, num_dims):
    shape = rng.choice([(1,), (2,), (3,), (4,), (2, 2)])
    first = rng.randrange(4 - math.prod(shape) + 1)
    placements = ["R", *(f"S{d}" for d in range(num_dims))]
    layout = " ".join(rng.choice(placements) for _ in shape)
    return MeshSide(shape, tuple(range(first, first + math.prod(shape))), Layout.parse(layout))


def whole_tensor(shape, dtype, seed):
    values = torch.randint(
        0, 2 if dtype is torch.bool else 100, shape, generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype)


def local(whole, side, rank):
    if rank not in side.ranks:
        return None
    return whole[tuple(slice(a, b) for a, b in side.boxes(whole.shape)[rank])]


def random_bundles(seed):
    """[(source, target layouts per tensor, full tensors, local gather)], the same on all ranks."""
    rng = random.Random(seed)
    bundles = []
    for i in range(6):
        num_dims = rng.randint(1, 3)
        start, end = random_side(rng, num_dims), random_side(rng, num_dims)
        tensors = []
        for j in range(rng.randint(1, 3)):
            shape = tuple(rng.randint(1, 7) for _ in range(num_dims))
            tensors.append(whole_tensor(shape, rng.choice(DTYPES), 100 * i + j))
        bundles.append((start, end, tensors, rng.random() < 0.5))
    return bundles


def send_bundles(seed):
    rank = dist.get_rank()
    bundles = random_bundles(seed)
    meshes = build_stage_meshes([(end.shape, end.ranks) for _, end, _, _ in bundles])
    transfers = []
    for (start, end, tensors, gather), mesh in zip(bundles, meshes, strict=True):
        plans = [plan_transfer(t.shape, t.dtype, start, end, gather) for t in tensors]
        transfer = Transfer(plans, rank, CPU, mesh)
        transfers.append((transfer, [local(t, start, rank) for t in tensors]))
    check(bundles, exchange(transfers, tag=7), rank)
    # The same by early receives and an outbox, in another order than they are sent.
    outbox = Outbox()
    receipts = [
        transfer.receive(100 + i) for i, (transfer, _) in reversed(list(enumerate(transfers)))
    ][::-1]
    sizes = 0
    for i, (transfer, tensors) in enumerate(transfers):
        ops = transfer.send_ops(tensors, 100 + i)
        sizes += sum(op.tensor.numel() for op in ops)
        outbox.send(ops)
    check(bundles, [receipt.wait() for receipt in receipts], rank)
    outbox.drain()
    planned = sum(
        piece.num_elements * t.dtype.itemsize
        for start, end, tensors, gather in bundles
        for t in tensors
        for piece in plan_transfer(t.shape, t.dtype, start, end, gather).pieces
        if piece.source == rank != piece.target
    )
    count = sum(len(tensors) for _, _, tensors, _ in bundles)
    assert (
        planned <= sizes <= planned + 16 * 16 * count
    )  # what is between the parts of a message is alignment


def check(bundles, results, rank):
    for (_, end, tensors, _), found in zip(bundles, results, strict=True):
        if rank not in end.ranks:
            assert found == []
            continue
        for whole, tensor in zip(tensors, found, strict=True):
            assert tensor.dtype == whole.dtype
            assert torch.equal(tensor, local(whole, end, rank))


@pytest.mark.parametrize("seed", range(8))
def test_every_rank_gets_its_part(pool, seed):
    pool.run(4, send_bundles, seed)


def send_zeros_and_scalars():
    rank = dist.get_rank()
    start, end = (MeshSide((1,), (r,), Layout.parse("R")) for r in (0, 1))
    plans = [plan_transfer(shape, torch.float64, start, end) for shape in ((), (3,))]
    transfer = Transfer(plans, rank, CPU)
    found = exchange([(transfer, [torch.tensor(2.5, dtype=torch.float64), None])], tag=0)[0]
    if rank == 1:
        assert found[0].item() == 2.5
        assert torch.equal(found[1], torch.zeros(3, dtype=torch.float64))


def test_scalars_and_missing_gradients(pool):
    pool.run(2, send_zeros_and_scalars)
