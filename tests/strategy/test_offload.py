"""State that does not fit on the devices lies in host memory: the same training, within the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equality.harness import assert_same, record
from models import MODELS

from alpa_strategy import ClusterSpec, Plan

SIZES = {"vocab_size": 64, "d_model": 64, "d_hidden": 128, "num_layers": 6, "seq_len": 2}
HOST = {"link_bandwidth": 25e9, "memory_bytes": 1e12, "memory_bandwidth": 100e9}


def cluster_file(folder: Path, num_devices: int, **host: float) -> str:
    """A node of so many devices with a way to host memory."""
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": num_devices}).to_dict()
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({**spec, "host": {**HOST, **host}}))
    return str(path)


def state_bytes() -> int:
    """Parameters, gradients and Adam's moments in float64, whole."""
    return sum(p.numel() for p in MODELS["llama"](**SIZES).parameters()) * 8 * 4


LIMIT = state_bytes() / 4


def on_host(plan: Plan) -> set[str]:
    return {name for stage in plan.stages for name, how in stage.parameter_plans.items() if how.on_host}


def train(strategy: dict[str, Any] | None, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return record("llama", SIZES, strategy, 4, world_size, **arguments)


def assert_trains_as_one_device(
    pool, folder: Path, world_size: int, options: dict[str, Any], arguments: dict[str, Any]
) -> list[Plan]:
    strategy = {"cluster": cluster_file(folder, world_size), "plan_dir": str(folder), **options}
    runs = pool.run(world_size, train, strategy, world_size, arguments)
    (reference,) = pool.run(1, train, None, world_size, arguments, init_group=False)
    for run in runs:
        assert_same(run, reference)
    return [Plan.from_dict(run["plan"]) for run in runs]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("arguments", [{}, {"clip": 0.1}, {"accumulate": 2}], ids=["plain", "clipped", "accumulated"])
def test_state_of_four_times_the_limit_trains(pool, tmp_path: Path, world_size: int, arguments: dict[str, Any]) -> None:
    for plan in assert_trains_as_one_device(pool, tmp_path, world_size, {"memory_limit": LIMIT}, arguments):
        assert on_host(plan)
        assert plan.predicted.peak_bytes <= LIMIT


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (1, {"remat": True}),
        (2, {"parallel": "data"}),
        (2, {"parallel": "zero2", "check_gradients": True}),
        (2, {"parallel": "zero3", "check_gradients": True}),
        (2, {"parallel": "tensor"}),
        (2, {"num_stages": 2, "num_microbatches": 2}),
        (2, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    ],
    ids=["one", "remat", "data", "zero2", "zero3", "tensor", "stages", "zero bubble"],
)
def test_every_parameter_in_host_memory(pool, tmp_path: Path, world_size: int, options: dict[str, Any]) -> None:
    arguments = {"accumulate": 2, "clip": 0.1}
    for plan in assert_trains_as_one_device(pool, tmp_path, world_size, {"offload": True, **options}, arguments):
        assert on_host(plan) == {name for stage in plan.stages for name in stage.parameter_plans}
