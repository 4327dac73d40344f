"""Measuring a cluster: every rank agrees, tables cover every mesh axis, and what was found is found
again.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from proofs.thread_mesh import run_on_threads

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.measure import (
    load_stored,
    measure_cluster,
    measure_collectives,
    measure_slowdown,
    stored_path,
)

KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
QUICK = {"sizes_bytes": (1024, 65536), "budget_seconds": 0.05}


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_every_rank_finds_the_same_times_for_every_axis(shape: tuple[int, ...]):
    per_rank = run_on_threads(shape, lambda mesh: measure_collectives(mesh, **QUICK))
    assert all(tables == per_rank[0] for tables in per_rank)
    strides = {(2,): [1], (3,): [1], (2, 2): [2, 1]}[shape]
    assert {(t.kind, t.size, t.stride) for t in per_rank[0]} == {
        (kind, size, stride) for kind in KINDS for size, stride in zip(shape, strides, strict=True)
    }
    for table in per_rank[0]:
        sizes = [num_bytes for num_bytes, _ in table.points]
        assert len(sizes) == 2
        assert sizes == sorted(sizes)
        assert all(
            abs(size - wanted) <= 0.05 * wanted
            for size, wanted in zip(sizes, (1024, 65536), strict=True)
        )
        assert all(seconds > 0 for _, seconds in table.points)


def test_an_axis_of_one_device_is_not_measured():
    assert run_on_threads((1,), lambda mesh: measure_collectives(mesh, **QUICK)) == [[]]


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)])
def test_every_rank_finds_the_same_slowdown(shape: tuple[int, ...]):
    """On threads that share this machine's cores: nothing is ever faster together."""
    per_rank = run_on_threads(shape, lambda mesh: measure_slowdown(mesh, seconds=0.02))
    assert all(slowdown == per_rank[0] for slowdown in per_rank)
    assert per_rank[0] >= 1
    assert shape != (1,) or per_rank[0] == 1


def test_the_budget_leaves_out_large_sizes():
    def run(mesh):
        return measure_collectives(
            mesh, sizes_bytes=[2**n for n in range(10, 24)], budget_seconds=0.02
        )

    started = time.perf_counter()
    (tables, _) = run_on_threads((2,), run)
    assert time.perf_counter() - started < 5
    assert all(2 <= len(table.points) < 14 for table in tables)


class Meshes:
    """Meshes among the threads of one `run_on_threads`: of each shape that measuring requests, this
    thread's.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.asked: list[tuple[int, ...]] = []

    def run(self, fn) -> list:
        """`fn(make_mesh)` on each thread; every shape has one mesh, handed out by rank."""
        built: dict[tuple[int, ...], list] = {}
        lock = threading.Lock()

        def make(rank: int):
            def make_mesh(shape: tuple[int, ...]):
                with lock:
                    if shape not in built:
                        built[shape] = run_on_threads(shape, lambda mesh: mesh)
                        self.asked.append(shape)
                return built[shape][rank]

            return make_mesh

        return run_on_threads((self.world,), lambda mesh: fn(make(mesh.axes[0].index)))


def measure(meshes: Meshes, folder: Path, nodes: int = 1) -> list[ClusterSpec]:
    per_node = meshes.world // nodes
    return meshes.run(
        lambda make: measure_cluster(nodes, per_node, make, folder, budget_seconds=0.02)
    )


def test_a_measured_cluster_is_equal_on_all_ranks_and_prices_every_logical_mesh(tmp_path):
    specs = measure(Meshes(4), tmp_path, nodes=2)
    assert all(spec == specs[0] for spec in specs)
    assert specs[0].measured
    assert specs[0].tables
    assert specs[0].inter_node.bandwidth > 0
    for shape in specs[0].logical_shapes():
        for axis in specs[0].logical_mesh(shape).axes:
            assert {table.kind for table in axis.tables} == KINDS
            assert axis.seconds("all_reduce", 2**20) > 0


def test_a_stored_cluster_is_not_measured_again(tmp_path):
    folder = tmp_path / "costs"
    first = measure(Meshes(2), folder)[0]
    again = Meshes(2)
    assert measure(again, folder) == [first, first]
    assert again.asked == [(2,)]  # only to agree that all ranks have it
    assert load_stored(stored_path(folder, first.device.name, 1, 2, "gloo")) is not None
    assert load_stored(stored_path(folder, first.device.name, 1, 4, "gloo")) is None
    assert load_stored(stored_path(folder, first.device.name, 1, 2, "nccl")) is None


def test_a_rank_without_the_file_makes_all_measure(tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    measure(Meshes(2), full)

    def run(make):
        mesh = make((2,))
        folder = full if mesh.axes[0].index == 0 else empty
        return measure_cluster(1, 2, make, folder, budget_seconds=0.02)

    one, other = Meshes(2).run(run)
    assert one == other
    assert list(empty.iterdir())


@pytest.mark.parametrize("text", ["", "{", '{"name": "x"}', "[]", "3"])
def test_a_broken_file_is_reported_and_measured_again(text: str, tmp_path, caplog):
    path = stored_path(tmp_path, "cpu", 1, 2, "gloo")
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_stored(path) is None
    assert str(path) in caplog.text


def test_one_device_needs_no_links(tmp_path):
    (spec,) = measure(Meshes(1), tmp_path)
    assert spec.tables == ()
    assert spec.logical_mesh((1,)).axes[0].seconds("all_reduce", 1e6) == 0


def test_sizes_are_whole_rows_on_any_axis():
    (tables, *_) = run_on_threads(
        (3,), lambda mesh: measure_collectives(mesh, ("all_to_all",), (1000,), 0.01)
    )
    assert tables[0].points[0][0] % 9 == 0
    assert torch.tensor(tables[0].points[0][1]) > 0
