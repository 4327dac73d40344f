"""Measuring ops and the device: what is timed, what is skipped, what is stored."""

from __future__ import annotations

import json
import time

import pytest
import torch
from cost_op_calls import call, tensor

from alpa_strategy.capture.ops import cross_entropy_sum
from alpa_strategy.cost.measured import OpTable, device_name, measure_device, measure_ops
from alpa_strategy.cost.model import RooflineCosts

aten = torch.ops.aten
NAME = device_name("cpu")

CALLS = [
    call(aten.linear.default, tensor(32, 64), tensor(64, 64), tensor(64)),
    call(aten.gelu.default, tensor(32, 64)),
    call(aten.view.default, tensor(32, 64), [64, 32]),
    call(aten.embedding.default, tensor(100, 8), tensor(4, 4, dtype=torch.int64)),
    call(cross_entropy_sum, tensor(8, 10), tensor(8, dtype=torch.int64), None, -100, 0.0),
    call(aten.where.self, tensor(4, 4, dtype=torch.bool), tensor(4, 4), tensor(4, 4)),
    call(aten.argmax.default, tensor(8, 8), 1),
    call(aten.split.Tensor, tensor(8, 8), 4, 0),
]
TIMED = [
    made for made in CALLS if "view" not in made.target_name and "split" not in made.target_name
]


@pytest.fixture(scope="module")
def table() -> OpTable:
    return measure_ops(CALLS * 2, "cpu", 2.0, OpTable())


def test_distinct_ops_are_timed_and_views_are_not(table: OpTable):
    assert len(table) == len(TIMED)
    for made in TIMED:
        found = table.get(NAME, made)
        assert found is not None
        assert 0 < found.forward < 1
        assert (found.backward > 0) == made.results[0].requires_grad


def test_what_was_measured_is_not_measured_again(table: OpTable):
    before = {made: table.get(NAME, made) for made in TIMED}
    measure_ops(CALLS, "cpu", 2.0, table)
    assert {made: table.get(NAME, made) for made in TIMED} == before


def test_the_budget_ends_measuring_with_the_longest_ops_done():
    large = call(aten.mm.default, tensor(512, 512), tensor(512, 512))
    many = [call(aten.mul.Tensor, tensor(4, n), 2.0) for n in range(1, 400)]
    started = time.perf_counter()
    table = measure_ops([*many, large], "cpu", 0.5, OpTable())
    assert time.perf_counter() - started < 5.0
    assert table.get(NAME, large) is not None
    assert measure_ops([large], "cpu", 0.0, OpTable()).get(NAME, large) is None


def test_an_op_that_cannot_run_alone_is_left_out():
    made = call(aten.gelu.default, tensor(4))
    broken = type(made)(_raises, made.args, (), made.operands, made.results)
    assert len(measure_ops([broken, made], "cpu", 1.0, OpTable())) == 1


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("needs its neighbours")


def test_on_one_thread_what_others_take_of_its_core_does_not_count():
    made = call(aten.gelu.default, tensor(400, 400))
    kept_waiting = type(made)(_waits, made.args, (), made.operands, made.results)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_ops([kept_waiting], "cpu", 5.0, OpTable()).get(
            device_name("cpu"), kept_waiting
        )
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    assert 0 < found.forward < WAIT / 2


WAIT = 0.05  # seconds


def _waits(x: torch.Tensor) -> torch.Tensor:
    time.sleep(WAIT)
    return torch.nn.functional.gelu(x)


def test_device_figures_are_plausible_and_serve_the_roofline():
    spec = measure_device("cpu", local_ranks=2, budget_seconds=0.4)
    peaks = dict(spec.peak_flops)
    assert 1e8 < peaks["float32"] < 1e15
    assert 1e8 < spec.memory_bandwidth < 1e13
    assert 0 < spec.launch_seconds < 1e-2
    assert spec.memory_bytes > 0
    assert RooflineCosts(spec).op_seconds(CALLS[0])[0] > spec.launch_seconds


# The store


def test_a_table_survives_its_file(table: OpTable, tmp_path):
    path = tmp_path / "costs" / "ops.json"
    table.path = path
    table.save()
    again = OpTable.load(path)
    assert all(again.get(NAME, made) == table.get(NAME, made) for made in TIMED)
    families = json.loads(path.read_text())["devices"][NAME]
    assert "aten.gelu.default float32*" in families
    assert [file.name for file in path.parent.iterdir()] == ["ops.json"]


def test_two_jobs_add_to_one_file(tmp_path):
    path = tmp_path / "ops.json"
    one, other = OpTable.load(path), OpTable.load(path)
    one.put(NAME, CALLS[0], 1.0, 2.0)
    other.put(NAME, CALLS[1], 3.0, 4.0)
    one.save()
    other.save()
    assert len(OpTable.load(path)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 99, "devices": {}}',
        '{"version": 2, "devices": {"cpu": {"op": {"k": {}}}}}',
        "\x00",
    ],
)
def test_an_unreadable_table_is_reported_and_replaced(text: str, tmp_path, caplog):
    path = tmp_path / "ops.json"
    path.write_text(text)
    table = OpTable.load(path)
    assert len(table) == 0
    assert str(path) in caplog.text
    table.put(NAME, CALLS[0], 1.0, 2.0)
    table.save()
    assert len(OpTable.load(path)) == 1


def test_calls_that_differ_in_anything_are_kept_apart():
    made = [
        call(aten.softmax.int, tensor(4, 4), 0),
        call(aten.softmax.int, tensor(4, 4), 1),
        call(aten.softmax.int, tensor(4, 4, grad=False), 1),
        call(aten.softmax.int, tensor(4, 4, dtype=torch.float64), 1),
        call(aten.softmax.int, tensor(4, 5), 1),
    ]
    table = OpTable()
    for index, each in enumerate(made):
        table.put(NAME, each, float(index), 0.0)
    assert [table.get(NAME, each).forward for each in made] == [0.0, 1.0, 2.0, 3.0, 4.0]
