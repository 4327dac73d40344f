"""Optimizers as people write them train under any plan as on one device: fp64, 5 steps, 1e-9."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from covering import covering
from equality.harness import assert_same, record_model
from optimizers.matrix_optimizers import PLANS, runs_of_one_device, with_optimizer
from optimizers.peoples_optimizers import PEOPLES_OPTIMIZERS
from recipe_models import MODELS

# Each with one of these plans, in turn; the others are slow.
QUICK_PLANS = ("zero3", "stages")
# "lookahead of a chain" is one of these and the other.
COMBINED = {"lookahead", "chained"}
QUICK = [
    row for row in covering(product(PEOPLES_OPTIMIZERS, QUICK_PLANS)) if row[0] not in COMBINED
]
CASES = []
for case in product(PEOPLES_OPTIMIZERS, PLANS):
    marks = () if case in QUICK else (pytest.mark.slow,)
    CASES.append(pytest.param(*case, marks=marks, id="-".join(case)))


def train(optimizer: str, strategy: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    """`record_model` of GPT with an optimizer."""
    model_class = with_optimizer(MODELS["gpt"], PEOPLES_OPTIMIZERS[optimizer])
    return record_model(model_class, {}, strategy, 5, world_size)


@pytest.fixture(scope="module")
def one_device(pool):
    """Runs of one device by optimizer."""
    return runs_of_one_device(pool, train)


@pytest.mark.parametrize(("optimizer", "plan"), CASES)
def test_two_ranks(pool, one_device, tmp_path, optimizer: str, plan: str) -> None:
    strategy = {**PLANS[plan], "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    for run in pool.run(2, train, optimizer, strategy, 2):
        assert_same(run, one_device(optimizer))
        if plan in ("zero3", "tensor"):
            assert any(modes.startswith("S") for modes in run["modes"].values())
