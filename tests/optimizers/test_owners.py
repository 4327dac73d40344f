"""Optimizers that need full tensors train under any plan as on one device: fp64, 5 steps, 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
from equality.harness import assert_same, record_model
from models import MODELS
from optimizers.matrix_optimizers import OPTIMIZERS, with_optimizer

PLANS = {
    "data": {"parallel": "data"},
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
}


def train(
    model: str, optimizer: str, strategy: dict[str, Any] | None, world_size: int
) -> dict[str, Any]:
    """`record_model` of a model with an optimizer."""
    model_class = with_optimizer(MODELS[model], optimizer)
    return record_model(model_class, {}, strategy, 5, world_size)


@pytest.fixture(scope="session")
def one_device(pool):
    """Runs of one device by (model, optimizer, number of ranks whose samples it has)."""
    results: dict[Any, Any] = {}

    def get(model: str, optimizer: str, world_size: int) -> Any:
        key = (model, optimizer, world_size)
        if key not in results:
            (results[key],) = pool.run(
                1, train, model, optimizer, None, world_size, init_group=False
            )
        return results[key]

    return get


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    strategy = {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    for run in pool.run(2, train, "gpt", optimizer, strategy, 2):
        assert_same(run, one_device("gpt", optimizer, 2))
        if plan == "zero3":
            assert any(modes.startswith("S") for modes in run["modes"].values())
