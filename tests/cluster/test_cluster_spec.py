"""Cluster descriptions: what files may say, and what collectives cost on the axes of logical
meshes.
"""

from __future__ import annotations

import copy
import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.cluster.devices import Link
from alpa_strategy.cluster.logical_mesh import (
    CommTable,
    MeshAxis,
    interpolate_seconds,
    without_outliers,
)
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cluster.topology import Topology
from alpa_strategy.errors import ClusterError
from alpa_strategy.files import CLUSTERS, shipped_folder, shipped_names

DATA = {
    "name": "two by four",
    "num_nodes": 2,
    "devices_per_node": 4,
    "device": {
        "name": "toy",
        "memory_bytes": 1_000_000,
        "memory_bandwidth": 1e9,
        "peak_flops": {"float32": 1e12},
        "launch_seconds": 0.0,
        "efficiency": 0.5,
    },
    "intra_node": {"latency": 1e-6, "bandwidth": 8e9},
    "inter_node": {"latency": 1e-5, "bandwidth": 1e9},
}
FILES = shipped_names(CLUSTERS)


def cluster(**changes) -> ClusterSpec:
    return ClusterSpec.from_dict({**copy.deepcopy(DATA), **changes})


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 16),
        ("p2p", 1),
    ],
)
def test_time_is_alpha_plus_beta_times_volume(kind: str, factor: float):
    axis = MeshAxis(4, 1, Link(latency=1e-3, bandwidth=1e6))
    assert axis.seconds(kind, 8e6) == pytest.approx(1e-3 + factor * 8.0)


def test_an_axis_of_one_device_costs_nothing():
    assert MeshAxis(1, 1, Link(1.0, 1.0)).seconds("all_reduce", 1e9) == 0.0


def test_all_reduce_costs_what_reduce_scatter_and_all_gather_move():
    axis = MeshAxis(8, 1, Link(0.0, 1e9))
    parts = axis.seconds("reduce_scatter", 1e6) + axis.seconds("all_gather", 1e6)
    assert axis.seconds("all_reduce", 1e6) == pytest.approx(parts)


def test_axis_inside_a_node_uses_the_intra_node_link():
    mesh = cluster().logical_mesh((2, 4))
    assert mesh.axes[1].link == Link(1e-6, 8e9)
    assert mesh.num_devices == 8


@pytest.mark.parametrize(
    ("shape", "axis", "bandwidth"),
    [
        ((8,), 0, 1e9),  # one ring through both nodes
        ((2, 4), 0, 1e9 / 4),  # four groups of one device a node share the node's link
        ((4, 2), 0, 1e9 / 2),  # two groups, two devices of each in a node
    ],
)
def test_groups_that_cross_share_the_nodes_link(
    shape: tuple[int, ...], axis: int, bandwidth: float
):
    link = cluster().logical_mesh(shape).axes[axis].link
    assert link.bandwidth == pytest.approx(bandwidth)
    assert link.latency == 1e-5


def test_a_ring_across_nodes_is_not_faster_than_inside_a_node():
    fast_network = cluster(inter_node={"latency": 0.0, "bandwidth": 100e9})
    assert fast_network.logical_mesh((8,)).axes[0].link.bandwidth == 8e9
    assert fast_network.logical_mesh((2, 4)).axes[0].link.bandwidth == 25e9


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    stride_power=st.integers(0, 3),
    data=st.data(),
)
def test_groups_share_the_way_out_that_they_cross_together(
    nodes: int, per_node: int, stride_power: int, data
):
    count = nodes * per_node
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    size = data.draw(st.sampled_from(divisors))
    stride = data.draw(st.sampled_from([d for d in divisors if (count // size) % d == 0]))
    groups = {
        frozenset(r + i * stride for i in range(size))
        for r in range(count)
        if (r // stride) % size == 0
    }
    per_node_counts = [
        sum(
            1
            for g in groups
            if any(r // per_node == n for r in g) and any(r // per_node != n for r in g)
        )
        for n in range(nodes)
    ]
    topology = Topology(nodes, per_node, (0.0, math.inf), (0.0, 1.0), (), ())
    share = topology.way([tuple(sorted(group)) for group in groups]).bandwidth
    assert share == (1 / max(per_node_counts) if any(per_node_counts) else math.inf)


def test_logical_shapes_are_all_factorisations():
    assert cluster().logical_shapes() == [(8,), (2, 4), (4, 2)]
    assert cluster().logical_shapes((1, 4)) == [(4,), (2, 2)]
    assert cluster().logical_shapes((1, 1)) == [(1,)]


def test_submesh_has_its_own_links():
    assert cluster().logical_mesh((4,), (1, 4)).axes[0].link == Link(1e-6, 8e9)
    assert cluster().logical_mesh((2, 2), (2, 2)).axes[0].link.bandwidth == pytest.approx(0.5e9)


@pytest.mark.parametrize(
    ("shape", "submesh"), [((3,), None), ((2, 2), None), ((4,), (3, 4)), ((0,), None)]
)
def test_a_shape_that_does_not_fit_is_an_error(shape, submesh):
    with pytest.raises(ClusterError):
        cluster().logical_mesh(shape, submesh)


def test_a_part_uses_only_the_tables_that_describe_it():
    tables = [
        {"kind": "all_reduce", "size": 4, "stride": 1, "points": [[1024, 1e-3]]},
        {"kind": "all_reduce", "size": 2, "stride": 4, "points": [[1024, 2e-3]]},
    ]
    whole = cluster(tables=tables)
    assert whole.logical_mesh((2, 4)).axes[0].seconds("all_reduce", 1024) == 2e-3
    assert whole.logical_mesh((4,), (1, 4)).axes[0].seconds("all_reduce", 1024) == 1e-3


# Measured tables


def test_interpolation_meets_the_points_and_goes_on_linearly():
    points = ((1000, 1e-3), (2000, 3e-3), (4000, 4e-3))
    axis = MeshAxis(2, 1, Link(9.0, 9.0), (CommTable("all_gather", 2, 1, points),))
    for num_bytes, seconds in points:
        assert axis.seconds("all_gather", num_bytes) == pytest.approx(seconds)
    assert axis.seconds("all_gather", 1500) == pytest.approx(2e-3)
    assert axis.seconds("all_gather", 8000) == pytest.approx(6e-3)
    assert axis.seconds("all_gather", 1) == pytest.approx(1e-3)
    assert axis.seconds("all_reduce", 9) == pytest.approx(10.0)  # not measured: the formula


@given(
    points=st.dictionaries(st.integers(1, 10**8), st.floats(1e-9, 10), min_size=1, max_size=8),
    a=st.floats(0, 1e9),
    b=st.floats(0, 1e9),
)
def test_a_larger_message_is_never_cheaper(points: dict[int, float], a: float, b: float):
    table = sorted(points.items())
    low, high = (interpolate_seconds(table, x) for x in sorted((a, b)))
    assert 0 < low <= high * (1 + 1e-9)
    assert math.isfinite(high)


@given(points=st.dictionaries(st.integers(1, 10**8), st.floats(1e-9, 10), min_size=1, max_size=8))
def test_outliers_are_lowered_and_never_raised(points: dict[int, float]):
    table = sorted(points.items())
    clean = without_outliers(table)
    for (size, before), (clean_size, after) in zip(table, clean, strict=True):
        assert clean_size == size
        assert 0 < after <= before


def test_a_burst_of_noise_at_one_size_leaves_the_others_alone():
    line = [(4**k, 1e-4 + 4**k * 1e-9) for k in range(5, 13)]
    assert without_outliers(line) == tuple(line)
    for spoilt in range(len(line)):
        noisy = []
        for i, (size, seconds) in enumerate(line):
            noisy.append((size, seconds * (100 if i == spoilt else 1)))
        for i, ((_, seconds), (_, found)) in enumerate(
            zip(line, without_outliers(noisy), strict=True)
        ):
            assert found == seconds if i != spoilt else found <= 8 * seconds


# Files


@pytest.mark.parametrize("name", FILES)
def test_every_shipped_cluster_loads_and_round_trips(name: str):
    loaded = ClusterSpec.load(name)
    assert loaded.name == name
    assert ClusterSpec.load(f"{name}.yaml") == loaded
    assert ClusterSpec.load(shipped_folder(CLUSTERS) / f"{name}.yaml") == loaded
    assert ClusterSpec.from_dict(json.loads(json.dumps(loaded.to_dict()))) == loaded
    for shape in loaded.logical_shapes():
        assert all(
            axis.seconds("all_reduce", 2**20) > 0
            for axis in loaded.logical_mesh(shape).axes
            if axis.size > 1
        )


def test_the_papers_cluster():
    p3 = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2})
    assert p3.num_devices == 16
    assert dict(p3.device.peak_flops)["float16"] == 125e12
    assert p3.device.memory_bytes == 16 * 2**30
    assert (
        p3.logical_mesh((16,)).axes[0].link.bandwidth == 25e9 / 8 / 2
    )  # half of 25 Gbit/s is reached


def test_overrides_reach_inside_and_read_numbers_as_files_do():
    spec = ClusterSpec.load(
        "p3_16xlarge_x8", {"inter_node.bandwidth": "1e9", "device.efficiency": 0.25}
    )
    assert spec.inter_node.bandwidth == 1e9
    assert spec.device.efficiency == 0.25
    with pytest.raises(ClusterError, match=r"inter_node\.bandwith"):
        ClusterSpec.load("p3_16xlarge_x8", {"inter_node.bandwith": 1})


def test_localhost_only_counts_devices():
    spec = ClusterSpec.load("localhost")
    assert spec.measured
    assert spec.tables == ()
    assert not cluster().measured


def leaves(data: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in data.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += leaves(value, (*prefix, key))
    return found


def changed(path: tuple[str, ...], value=None) -> dict:
    data = copy.deepcopy(DATA)
    node = data
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "path", [p for p in leaves(DATA) if p[-1] not in ("efficiency", "float32")], ids=".".join
)
def test_a_missing_field_is_named_with_the_file(path: tuple[str, ...], tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(changed(path)))
    with pytest.raises(ClusterError, match="missing") as caught:
        ClusterSpec.load(file)
    assert ".".join(path) in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "path", [p for p in leaves(DATA) if p != ("name",) and p != ("device", "name")], ids=".".join
)
@pytest.mark.parametrize("value", [-1, "many", [1], True, float("nan")], ids=str)
def test_a_wrong_value_is_named(path: tuple[str, ...], value):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(changed(path, value), "mine.yaml")
    assert ".".join(path) in str(caught.value)
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (("num_node",), "num_nodes"),
        (("device", "memory_byte"), "device.memory_bytes"),
        (("inter_node", "bandwith"), "inter_node.bandwidth"),
        (("device", "peak_flops", "float23"), "device.peak_flops.float32"),
        (("device", "eficiencies"), "device.efficiencies"),
    ],
)
def test_an_unknown_field_is_named_with_the_closest(path: tuple[str, ...], hint: str):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(changed(path, 1), "mine.yaml")
    assert ".".join(path) in str(caught.value)
    assert f"did you mean {hint}?" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "- 1\n- 2\n", "name: [unclosed", "just text", "name: ${nothing}"],
    ids=["empty", "list", "yaml", "text", "ref"],
)
def test_a_file_that_is_no_description(text: str, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ClusterError, match=r"mine\.yaml"):
        ClusterSpec.load(file)


def test_a_name_that_does_not_exist_lists_those_that_do():
    with pytest.raises(ClusterError, match="p3_16xlarge_x8"):
        ClusterSpec.load("p4d")
    with pytest.raises(ClusterError, match="nowhere"):
        ClusterSpec.load("/nowhere/at/all.yaml")


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "all_reduce", "size": 2, "stride": 1, "points": []},
        {"kind": "gossip", "size": 2, "stride": 1, "points": [[1, 1.0]]},
        {"kind": "all_reduce", "size": 2, "stride": 1, "points": [[2, 1.0], [1, 1.0]]},
        {"kind": "all_reduce", "size": 0, "stride": 1, "points": [[2, 1.0]]},
        {"kind": "all_reduce", "size": 2, "points": [[2, 1.0]]},
    ],
)
def test_a_broken_table_is_an_error(table: dict):
    with pytest.raises(ClusterError, match=r"tables\.0"):
        cluster(tables=[table])


# Digest


def test_digest_follows_every_declared_figure():
    digests = {cluster().digest()}
    for path in leaves(DATA):
        value = DATA
        for key in path:
            value = value[key]
        if isinstance(value, int | float):
            other = 0.25 if path[-1] == "efficiency" else value + 1
            digests.add(ClusterSpec.from_dict(changed(path, other)).digest())
    assert len(digests) == 1 + sum(not isinstance(_at(p), dict | str) for p in leaves(DATA))


def _at(path: tuple[str, ...]):
    value = DATA
    for key in path:
        value = value[key]
    return value


def test_digest_of_a_measured_cluster_does_not_follow_its_times():
    times = [{"kind": "all_reduce", "size": 8, "stride": 1, "points": [[1024, 1e-3]]}]
    one, other = (
        cluster(measured=True, tables=times),
        cluster(measured=True, intra_node={"latency": 1, "bandwidth": 1}),
    )
    assert one.digest() == other.digest()
    assert one.digest() != cluster(measured=True, num_nodes=3).digest()
    assert one.digest() != cluster(tables=times).digest()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_nodes",), 10**18),
        (("devices_per_node",), 10**18),
        (("devices_per_node",), 600_000),  # of two nodes
        (("intra_node", "bandwidth"), 1e-320),
        (("intra_node", "bandwidth"), -1.0),
        (("device", "memory_bandwidth"), float("nan")),
        (("device", "peak_flops", "float32"), 1e-320),
        (("device", "peak_flops", "float32"), 1e200),
        (("intra_node", "latency"), 1e300),
    ],
)
def test_what_no_cluster_can_have_is_named(path: tuple[str, ...], value: float):
    """Planning on these ended in errors of numpy and torch, or in no time."""
    data = copy.deepcopy(ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2}).to_dict())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ClusterError, match=r"\.".join(path)):
        ClusterSpec.from_dict(data)
