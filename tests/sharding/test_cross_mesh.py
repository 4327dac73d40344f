"""Laws of cross-mesh resharding: right values, no byte twice to one rank, as few bytes as possible,
shared fairly.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.placement import Layout
from alpa_strategy.sharding.cross_mesh import (
    MeshSide,
    best_transfer,
    boundary_link,
    plan_transfer,
    transfer_seconds,
)

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (6,), (2, 3), (3, 2), (8,), (2, 4), (4, 2)]


@st.composite
def sides(draw, num_dims, first_ranks=(0, 2, 5, 8, 16)):
    shape = draw(st.sampled_from(MESHES))
    first = draw(st.sampled_from(first_ranks))
    placements = ["R", *(f"S{d}" for d in range(num_dims))]
    layout = Layout.parse(" ".join(draw(st.sampled_from(placements)) for _ in shape))
    return MeshSide(shape, tuple(range(first, first + math.prod(shape))), layout)


@st.composite
def transfers(draw):
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    return shape, draw(sides(len(shape), (0,))), draw(sides(len(shape)))


def cut(whole, box):
    return whole[tuple(slice(a, b) for a, b in box)]


def simulate(plan, whole):
    """rank -> local tensor after the messages; every element that is written twice or never is
    NaN.
    """
    sources = {rank: cut(whole, box) for rank, box in plan.source_boxes.items()}
    results = {}
    for rank, box in plan.received_boxes.items():
        local = torch.full([b - a for a, b in box], math.nan)
        seen = torch.zeros_like(local)
        for piece in plan.pieces:
            if piece.target != rank:
                continue
            own = plan.source_boxes[piece.source]
            part = cut(
                sources[piece.source],
                [(a - o[0], b - o[0]) for (a, b), o in zip(piece.box, own, strict=True)],
            )
            place = tuple(
                slice(a - o[0], b - o[0]) for (a, b), o in zip(piece.box, box, strict=True)
            )
            local[place] = part
            seen[place] += 1
        assert (seen == 1).all()
        results[rank] = local
    return results


def num_bytes(plan):
    """Bytes that go from device to device, gathers on the target's mesh not counted."""
    return sum(p.num_elements for p in plan.pieces if p.source != p.target) * plan.dtype.itemsize


def elements(box):
    return math.prod(b - a for a, b in box)


def overlap(a, b):
    return math.prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in zip(a, b, strict=True))


@settings(deadline=None, max_examples=300)
@given(transfers())
def test_every_device_gets_its_box_once_and_no_more(case):
    shape, source, target = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    plan = plan_transfer(shape, torch.float32, source, target)
    for rank, local in simulate(plan, whole).items():
        assert torch.equal(local, cut(whole, target.boxes(shape)[rank]))
    held = source.boxes(shape)
    bound = 0
    for rank, box in target.boxes(shape).items():
        bound += elements(box)
        if rank in held:
            bound -= overlap(box, held[rank])
    assert num_bytes(plan) == 4 * bound
    assert plan == plan_transfer(shape, torch.float32, source, target)


@settings(deadline=None, max_examples=300)
@given(transfers())
def test_senders_share_the_load(case):
    shape, source, target = case
    plan = plan_transfer(shape, torch.uint8, source, target)
    sent = {}
    for piece in plan.pieces:
        if piece.source != piece.target:
            sent[piece.source] = sent.get(piece.source, 0) + piece.num_elements
    holders = {}
    for rank, box in plan.source_boxes.items():
        holders.setdefault(box, []).append(rank)
    for ranks in holders.values():
        pieces = []
        for p in plan.pieces:
            if p.source in ranks and p.target != p.source:
                pieces.append(p.num_elements)
        if pieces:
            loads = [sent.get(rank, 0) for rank in ranks]
            assert max(loads) <= sum(pieces) / len(ranks) + max(pieces) * (1 - 1 / len(ranks))
            assert max(loads) - min(loads) <= max(pieces)


@settings(deadline=None, max_examples=300)
@given(transfers())
def test_local_gather_sends_every_byte_once(case):
    shape, source, target = case
    target = replace(target, ranks=tuple(rank + 100 for rank in target.ranks))
    plan = plan_transfer(shape, torch.float32, source, target, local_gather=True)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    received = simulate(plan, whole)
    # What the devices of one replica group have received makes up the box that they all need.
    groups = {}
    for rank, box in target.boxes(shape).items():
        groups.setdefault(box, []).append(rank)
    for box, ranks in groups.items():
        values = torch.cat([received[rank].flatten() for rank in ranks])
        assert set(values.tolist()) == set(cut(whole, box).flatten().tolist())
    direct = plan_transfer(shape, torch.float32, source, target)
    assert num_bytes(plan) <= num_bytes(direct)
    replicated = math.prod(
        n for n, p in zip(target.shape, target.layout, strict=True) if not isinstance(p, Shard)
    )
    if len(shape) == 1 and len(target.shape) == 1 and shape[0] >= replicated:
        assert num_bytes(plan) == 4 * math.prod(shape)


def test_slow_links_receive_once_and_gather_inside_the_node():
    cluster = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2})
    source = MeshSide((8,), tuple(range(8)), Layout.parse("S0"))
    target = MeshSide((2, 4), tuple(range(8, 16)), Layout.parse("S0 R"))
    shape = (1024, 4096)
    plan = best_transfer(shape, torch.bfloat16, source, target, cluster)
    assert plan.gathers
    assert num_bytes(plan) == 2 * math.prod(shape)
    direct = plan_transfer(shape, torch.bfloat16, source, target)
    assert num_bytes(direct) == 4 * num_bytes(plan)
    assert transfer_seconds(plan, cluster) < transfer_seconds(direct, cluster) / 2


def test_seconds_follow_the_links():
    cluster = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2})
    near = plan_transfer(
        (1000,),
        torch.float32,
        MeshSide((1,), (0,), Layout.parse("R")),
        MeshSide((1,), (1,), Layout.parse("R")),
    )
    far = plan_transfer(
        (1000,),
        torch.float32,
        MeshSide((1,), (0,), Layout.parse("R")),
        MeshSide((1,), (9,), Layout.parse("R")),
    )
    assert transfer_seconds(near, cluster) == pytest.approx(
        cluster.intra_node.latency + 4000 / cluster.intra_node.bandwidth
    )
    assert transfer_seconds(far, cluster) == pytest.approx(
        cluster.inter_node.latency + 4000 / cluster.inter_node.bandwidth
    )
    same = plan_transfer(
        (1000,),
        torch.float32,
        MeshSide((1,), (0,), Layout.parse("R")),
        MeshSide((1,), (0,), Layout.parse("R")),
    )
    assert transfer_seconds(same, cluster) == 0.0
    across, inside = (boundary_link((1, n), (1, n), cluster, crosses_nodes=n == 8) for n in (8, 4))
    assert (across, inside.bandwidth) == (cluster.inter_node, 4 * cluster.intra_node.bandwidth)
    # A node's link is shared by its devices.
    sources = MeshSide((8,), tuple(range(8)), Layout.parse("S0"))
    targets = MeshSide((8,), tuple(range(8, 16)), Layout.parse("S0"))
    together = plan_transfer((8000,), torch.float32, sources, targets)
    assert transfer_seconds(together, cluster) == pytest.approx(
        cluster.inter_node.latency + 32000 / cluster.inter_node.bandwidth
    )


def test_summands_cannot_cross():
    side = MeshSide((2,), (0, 1), Layout.parse("P"))
    with pytest.raises(PlanError, match="layout P"):
        plan_transfer((4,), torch.float32, side, MeshSide((1,), (2,), Layout.parse("R")))
