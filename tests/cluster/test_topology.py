"""Clusters whose links differ: what groups of devices reach, and the order in which devices are in
meshes.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec, _as_good
from alpa_strategy.errors import ClusterError
from alpa_strategy.inter_op.subgraph import boundary_bytes
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan

CUBE = ClusterSpec.load("p3_16xlarge_cube", {"num_nodes": 1})
ONE, TWO = 21.7e9, 43.4e9  # bytes/s of one NVLink and of two
BASE = ClusterSpec.load("a100_40gb", {"num_nodes": 4, "devices_per_node": 4}).to_dict()


def two_racks(**changes) -> ClusterSpec:
    up = {"name": "rack", "nodes": [[0, 2], [1, 3]], "latency": 2e-5, "bandwidth": 140e9}
    return ClusterSpec.from_dict({**copy.deepcopy(BASE), "levels": [{**up, **changes}]})


def bandwidths(
    cluster: ClusterSpec, shape: tuple[int, ...], submesh: tuple[int, int] | None = None
) -> list[float]:
    return [axis.link.bandwidth for axis in cluster.logical_mesh(shape, submesh).axes]


def meshes_of(cluster: ClusterSpec) -> dict:
    """What an order offers meshes, messages between them left out."""
    return {submesh: offers for submesh, offers in cluster._offers().items() if submesh[0]}


def test_on_the_cube_mesh_neighbours_are_joined_by_two_links():
    """By hand, on `nvidia-smi topo -m`: pairs 0-3, 1-2, 4-7, 5-6 have two links, 0-1, 2-3 (as
    numbered) one and two.
    """
    best_order, *others = CUBE.orders()
    assert best_order.ranks_of(0, 8) == (0, 3, 1, 2, 4, 7, 5, 6)
    assert not any(
        _as_good(meshes_of(best_order), meshes_of(other)) for other in others
    )  # these have faster messages
    numbered = replace(CUBE, order="numbered")
    assert bandwidths(best_order, (2,), (1, 2)) == [TWO]
    assert bandwidths(numbered, (2,), (1, 2)) == [ONE]
    # Of 0, 1, 4, 5 (links 1, 2, 1, 2 around) each device has three links to the others; of 0, 2, 4,
    # 6 device 2 has two.
    assert bandwidths(best_order, (4, 2)) == pytest.approx([3 * ONE, TWO])
    assert bandwidths(numbered, (4, 2)) == pytest.approx([2 * ONE, ONE])
    assert bandwidths(best_order, (8,)) == pytest.approx(
        [6 * ONE]
    )  # three rings over all, in both directions


@pytest.mark.parametrize(
    "every", [11, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_order_of_the_cube_mesh_has_a_mesh_that_is_better_off(every):
    best, *_ = CUBE.orders()
    offers = meshes_of(best)
    for order in [*permutations(range(1, 8))][
        ::every
    ]:  # links are the same both ways round: 0 may stay first
        reordered = replace(CUBE, order=(0, *order))
        reordered.__dict__["topology"] = (
            CUBE.topology
        )  # what groups reach is looked up, not counted again
        assert _as_good(meshes_of(reordered), offers)


def test_all_to_alls_go_through_the_host_where_there_is_no_link():
    """Device 0 of the cube mesh has links to 1, 2, 3 and 4: a 64th of the bytes for each of the
    others takes PCIe.
    """
    axis = CUBE.logical_mesh((8,)).axes[0]
    assert axis.seconds("all_to_all", 64e9) == pytest.approx(axis.link.latency + 3 * 1e9 / 8e9)


def test_nodes_of_a_rack_lie_next_to_each_other():
    cluster = two_racks()
    numbered, by_rack = cluster.orders()
    assert by_rack.ranks_of(0, 16) == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
    assert numbered.ranks_of(0, 16) == ()
    # Groups of eight are two nodes. Two such groups as numbered leave each rack, which shares its
    # way out.
    assert bandwidths(by_rack, (2, 8)) == [140e9 / 8, 140e9]
    assert bandwidths(numbered, (2, 8)) == [140e9 / 4, 140e9 / 2]
    assert bandwidths(by_rack, (8,), (2, 4)) == [140e9]
    assert (
        by_rack.logical_mesh((8,), (2, 4)).axes[0].link.latency
        < numbered.logical_mesh((8,), (2, 4)).axes[0].link.latency
    )


def test_equal_links_are_the_same_as_no_topology():
    plain = ClusterSpec.from_dict(BASE)
    racks = two_racks(nodes=2, bandwidth=1e15, latency=0.0)
    assert plain.orders() == [plain]
    assert [order.ranks_of(0, 16) for order in racks.orders()] == [()]
    for submesh in [(1, 2), (1, 4), (2, 4), (4, 4)]:
        for shape in plain.logical_shapes(submesh):
            for kind, num_bytes in product(("all_reduce", "all_gather", "all_to_all"), (1e3, 1e9)):
                seconds = [
                    axis.seconds(kind, num_bytes)
                    for axis in plain.logical_mesh(shape, submesh).axes
                ]
                results = [
                    axis.seconds(kind, num_bytes)
                    for axis in racks.logical_mesh(shape, submesh).axes
                ]
                assert results == pytest.approx(seconds, rel=1e-9)


def test_messages_take_the_links_between_their_devices():
    """By hand: twelve nodes of two, 25 GB/s out of a node, in three racks with 25 GB/s out of each
    (4 : 1).
    """
    inside, node = {"latency": 5e-6, "bandwidth": 200e9}, {"latency": 1e-5, "bandwidth": 25e9}
    racks = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    up = {"name": "rack", "nodes": racks, "latency": 3e-5, "bandwidth": 25e9}
    changes = {
        "num_nodes": 12,
        "devices_per_node": 2,
        "intra_node": inside,
        "inter_node": node,
        "levels": [up],
    }
    cluster = ClusterSpec.from_dict({**copy.deepcopy(BASE), **changes})
    numbered, by_switch = cluster.orders()
    assert [number // 2 for number in by_switch.ranks_of(0, 24)[::2]] == [
        *racks[0],
        *racks[1],
        *racks[2],
    ]
    # From node to node, both of a rack's and two of them on both sides; eight devices are a rack of
    # `by_switch`, which sends all of it through one way out. As numbered, half of the messages of
    # eight leave a rack 0 of their own.
    for size, near, far in [(2, 25e9, 25e9), (4, 50e9, 50e9), (8, 25e9, 50e9)]:
        assert by_switch.between((0, size), (size, size)).bandwidth == pytest.approx(near)
        assert numbered.between((0, size), (size, size)).bandwidth == pytest.approx(far)
    assert [by_switch.between((0, n), (n, n)).latency for n in (1, 2, 8)] == [5e-6, 1e-5, 3e-5]
    assert numbered.between((0, 2), (2, 2)).latency == 3e-5
    # One device to the four of two nodes: what it sends is half for the other node of its rack,
    # half for the third.
    assert by_switch.between((1, 1), (2, 4)).bandwidth == pytest.approx(25e9)
    assert by_switch.between((6, 1), (7, 1)).bandwidth == pytest.approx(200e9)


def test_messages_between_linked_devices_have_their_links():
    """By hand, on the cube mesh: 0-4 and 1-5 (two links), 3-7 and 2-6 (one link) side by side; 0-5
    has none.
    """
    best_order, *_ = CUBE.orders()
    assert best_order.between((0, 4), (4, 4)).bandwidth == pytest.approx(4 * ONE)
    assert best_order.between((0, 1), (1, 1)).bandwidth == pytest.approx(TWO)
    assert replace(CUBE, order="numbered").between((3, 1), (4, 1)).bandwidth == pytest.approx(8e9)
    assert best_order.between((2, 2), (2, 2)).bandwidth == math.inf


def test_a_pipeline_is_planned_in_the_order_whose_messages_are_fast():
    """Two PCIe switches with devices by turns: stages that are a switch each meet on the one link
    between these, stages
    over both do not. By hand: four pairs of 24 GB/s, or 16 GB/s for all."""
    switch = {
        "name": "switch",
        "devices": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "latency": 1.2e-5,
        "bandwidth": 16e9,
    }
    inside = {"latency": 8e-6, "bandwidth": 24e9}
    node = {"num_nodes": 1, "devices_per_node": 8, "intra_node": inside, "levels": [switch]}
    cluster = ClusterSpec.from_dict({**copy.deepcopy(BASE), **node})
    numbered, by_switch = cluster.orders()
    assert by_switch.ranks_of(0, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    model = MODELS["gpt"](num_layers=2, d_model=64, vocab_size=32)
    batch = model.example_batch(32, torch.Generator().manual_seed(0))
    options = PlanOptions(batch_scope="global", num_stages=2, num_microbatches=4, schedule="1F1B")
    pinned = [
        replace(cluster, order=order.ranks_of(0, 8) or "numbered")
        for order in (numbered, by_switch)
    ]
    plans = [
        make_plan(model, batch, pinned_cluster, options) for pinned_cluster in (cluster, *pinned)
    ]
    assert plans[0].predicted.step_seconds == min(plan.predicted.step_seconds for plan in plans[1:])
    assert [plan.stages[0].submesh for plan in plans[1:]] == [(1, 4), (1, 4)]
    step = capture_step(model, batch, world_size=8, batch_scope="global")
    passed = boundary_bytes(microbatch(step, 4, 8).graph)[plans[1].stages[0].ops[1]]
    seconds = [
        2 * (latency + passed / rate) for latency, rate in ((8e-6, 4 * 24e9), (1.2e-5, 16e9))
    ]
    assert [plan.stages[0].boundary_seconds for plan in plans[1:]] == pytest.approx(seconds)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), per_node=st.sampled_from([2, 4, 6, 8]))
def test_the_orders_hold_one_that_is_as_good_as_the_numbers(data, per_node):
    """Whatever the links are; and no pair reaches less than through the host."""
    half = data.draw(
        st.lists(st.sampled_from([0, 1e9, 2e9, 5e9]), min_size=per_node**2, max_size=per_node**2)
    )
    rows = [
        [half[min(i, j) * per_node + max(i, j)] * (i != j) for j in range(per_node)]
        for i in range(per_node)
    ]
    link = {"latency": 1e-5, "bandwidth": 1e9, "links": rows}
    cluster = ClusterSpec.from_dict(
        {**BASE, "num_nodes": 1, "devices_per_node": per_node, "intra_node": link}
    )
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
    numbered = meshes_of(replace(cluster, order="numbered"))
    best = [reordered._offers() for reordered in cluster.orders()]
    for submesh, meshes in numbered.items():
        for mesh in meshes:
            assert any(_as_good({submesh: [mesh]}, offers) for offers in best)
            assert min(rate for _, rate, *_ in mesh) >= 1e9


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"levels": [{"name": "rack", "nodes": [[0, 1], [1, 2]], "latency": 0, "bandwidth": 1}]},
            "each of 4 nodes",
        ),
        (
            {"levels": [{"name": "rack", "nodes": [[0, "1"]], "latency": 0, "bandwidth": 1}]},
            "levels.0.nodes",
        ),
        ({"levels": [{"name": "rack", "nodes": 2, "latency": 0}]}, "levels.0.bandwidth"),
        ({"levels": 3}, "levels"),
        (
            {"intra_node": {"latency": 0, "bandwidth": 1, "links": [[0, 1], [2, 0]]}},
            "intra_node.links",
        ),
        (
            {"intra_node": {"latency": 0, "bandwidth": 1, "links": [[0, float("nan")]] * 2}},
            "intra_node.links",
        ),
        (
            {"intra_node": {"latency": 0, "bandwidth": 1, "links": [[0, 1], [1, 0]]}},
            "joins 2 devices",
        ),
        ({"order": "by hand"}, "order"),
        ({"order": [0, 1, 2]}, "ranks 0 to 15"),
    ],
)
def test_what_a_file_says_wrong_is_named(changes, text):
    with pytest.raises(ClusterError, match=text):
        ClusterSpec.from_dict({**copy.deepcopy(BASE), **changes})
