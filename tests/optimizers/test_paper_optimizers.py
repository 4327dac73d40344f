"""Optimizers after their papers, and torch's: any plan trains as one device, fp64, 5 steps, 1e-9;
or one error that says what to do.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from covering import slow_but
from equality.harness import assert_same, record_model
from optimizers.matrix_optimizers import PLANS, runs_of_one_device, with_optimizer
from optimizers.paper_optimizers import JOINT_OPTIMIZERS, PAPER_OPTIMIZERS, TORCH_OPTIMIZERS
from optimizers.test_owners import WithoutKeyBias
from worker_pool import WorkerError

OPTIMIZERS = {**PAPER_OPTIMIZERS, **TORCH_OPTIMIZERS, **JOINT_OPTIMIZERS}
TRIED_PLANS = ("data", "zero3", "tensor", "stages")
ALONE = [*PAPER_OPTIMIZERS, *TORCH_OPTIMIZERS]


def train(optimizer: str, strategy: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    """`record_model` of GPT with an optimizer."""
    model_class = with_optimizer(WithoutKeyBias, OPTIMIZERS[optimizer])
    return record_model(model_class, {}, strategy, 5, world_size)


def options_of(plan: str, folder: Any) -> dict[str, Any]:
    return {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(folder)}


@pytest.fixture(scope="module")
def one_device(pool):
    """Runs of one device by optimizer."""
    return runs_of_one_device(pool, train)


BY_DEFAULT = [
    ("adam-mini", "tensor"),
    ("muon per head", "zero3"),
    ("centralized", "stages"),
]


@pytest.mark.parametrize(("optimizer", "plan"), slow_but(product(ALONE, TRIED_PLANS), BY_DEFAULT))
def test_any_plan(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    for run in pool.run(2, train, optimizer, options_of(plan, tmp_path), 2):
        assert_same(run, one_device(optimizer))
        if plan in ("zero3", "tensor"):
            assert any(modes.startswith("S") for modes in run["modes"].values())


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    slow_but(product(JOINT_OPTIMIZERS, ("data", "tensor")), [("prodigy", "data")]),
)
def test_full_parameters(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    """Tensor parallelism computes with shards of what is stored in full."""
    for run in pool.run(2, train, optimizer, options_of(plan, tmp_path), 2):
        assert_same(run, one_device(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    slow_but(product(JOINT_OPTIMIZERS, ("zero3", "stages")), [("prodigy", "zero3")]),
)
def test_refused_in_shards(pool, tmp_path, optimizer: str, plan: str) -> None:
    with pytest.raises(WorkerError, match=r"use an optimizer that updates one parameter at a time"):
        pool.run(2, train, optimizer, options_of(plan, tmp_path), 2)
