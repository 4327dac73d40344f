"""Results that wait in host memory for their backward: where that is cheaper than making them
again, and exact.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.harness import assert_same, record
from models import MODELS
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from alpa_strategy import ClusterSpec, Plan, PlanOptions, make_plan
from alpa_strategy.capture.capture import capture_step
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.errors import PlanError
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.runtime.host_link import StoredTensors

SIZES = {"vocab_size": 64, "d_model": 64, "d_hidden": 128, "num_layers": 4, "seq_len": 64}
HOST = {"link_bandwidth": 25e9, "memory_bytes": 1e12, "memory_bandwidth": 100e9}
SLOW = {
    "float32": 20e9,
    "float64": 10e9,
    "bfloat16": 40e9,
    "float16": 40e9,
}  # FLOP/s: products are dear to make again
ROWS = 16


def cluster(num_devices: int, host: dict[str, float] | None = HOST) -> dict[str, Any]:
    """A node of slow devices, with or without a way to host memory."""
    spec = ClusterSpec.load(
        "pcie_8gpu", {"num_nodes": 1, "devices_per_node": num_devices}
    ).to_dict()
    spec["device"]["peak_flops"] = SLOW
    return (
        {**spec, "host": host}
        if host
        else {key: value for key, value in spec.items() if key != "host"}
    )


def planned(limit: float, num_devices: int = 1, host: dict[str, float] | None = HOST) -> Plan:
    model, batch = inputs()
    options = PlanOptions(
        memory_limit=limit, num_stages=1, num_microbatches=1, batch_scope="global"
    )
    return make_plan(model, batch, ClusterSpec.from_dict(cluster(num_devices, host)), options)


def inputs() -> tuple[Any, dict[str, Tensor]]:
    """A model on the meta device and a batch for it."""
    with torch.device("meta"):
        names = "input_ids", "labels"
        batch = {name: torch.empty(ROWS, SIZES["seq_len"], dtype=torch.long) for name in names}
        return MODELS["llama"](**SIZES).double(), batch


@cache
def needed(num_devices: int = 1) -> float:
    return planned(float("inf"), num_devices).predicted.peak_bytes


@cache
def planned_tightly() -> Plan:
    """On one device with less than half of the memory that is needed."""
    return planned(0.45 * needed())


def test_they_go_where_that_is_faster_than_to_make_them_again() -> None:
    limit = 0.45 * needed()
    plan, without = planned_tightly(), planned(limit, host=None)
    assert plan.stages[0].stored
    assert plan.predicted.step_seconds < 0.97 * without.predicted.step_seconds
    assert plan.predicted.peak_bytes <= limit
    slow_link = planned(limit, host={**HOST, "link_bandwidth": 10e6})
    assert not slow_link.stages[0].stored
    assert slow_link.predicted.step_seconds >= plan.predicted.step_seconds


def test_host_memory_bounds_them() -> None:
    limit = 0.45 * needed()
    small = planned(limit, host={**HOST, "memory_bytes": 1e6})
    assert len(small.stages[0].stored) < len(planned_tightly().stages[0].stored)


def test_a_plan_that_stores_what_is_no_memory_of_its_own_is_refused() -> None:
    plan, graph = planned_tightly(), capture_step(*inputs(), batch_scope="global")
    check_plan(plan, graph, 1)
    stage = plan.stages[0]
    view = next(op.name for op in graph.ops if op.call.target_name.startswith("aten.view"))
    for stored in ((view,), stage.recomputed[:1], ("no_such_op",)):
        with pytest.raises(PlanError, match="stored"):
            check_plan(replace(plan, stages=(replace(stage, stored=stored),)), graph, 1)


def train(
    strategy: dict[str, Any] | None, world_size: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return record("llama", SIZES, strategy, 3, world_size, samples=ROWS, **arguments)


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(2, {"accumulate": 2, "clip": 0.1}, id="accumulated-2"),
        pytest.param(1, {"accumulate": 2, "clip": 0.1}, id="accumulated-1", marks=pytest.mark.slow),
        pytest.param(2, {}, id="plain-2", marks=pytest.mark.slow),
        pytest.param(1, {}, id="plain-1", marks=pytest.mark.slow),
    ],
)
def test_training_with_them_is_one_devices(
    pool, tmp_path: Path, world_size: int, arguments: dict[str, Any]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(cluster(world_size)))
    strategy = {
        "cluster": str(path),
        "plan_dir": str(tmp_path),
        "memory_limit": 0.45 * needed(world_size),
        "num_stages": 1,
        "num_microbatches": 1,
    }
    runs = pool.run(world_size, train, strategy, world_size, arguments)
    (reference,) = pool.run(1, train, None, world_size, arguments, init_group=False)
    for run in runs:
        assert_same(run, reference)
        assert Plan.from_dict(run["plan"]).stages[0].stored


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x * 2,
        lambda x: (x * 2).to(memory_format=torch.channels_last),
        lambda x: torch.nn.functional.conv2d(
            x.to(memory_format=torch.channels_last), torch.ones(4, 3, 2, 2).double()
        ),
    ],
    ids=["contiguous", "channels last", "convolution"],
)
def test_what_is_saved_comes_back_as_it_lay(result) -> None:
    """Several readers, views among them; nothing of it stays where it was computed."""
    given = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)

    def loss(made: Tensor) -> Tensor:
        return (made.sin() * made.transpose(2, 3).exp().transpose(2, 3)).sum() + (
            made[:, 1:] ** 2
        ).sum()

    (expected,) = torch.autograd.grad(loss(result(given)), given)
    regather = SavedTensorHooks((), StoredTensors().store)
    with regather:
        made = result(given)
        storage = StorageWeakRef(made.untyped_storage())
        regather.note_stored(made)
        value = loss(made)
        del made
    assert storage.expired()
    (found,) = torch.autograd.grad(value, given)
    assert torch.equal(found, expected)
