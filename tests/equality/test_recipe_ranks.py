"""The recipes' models have DDP's numbers on every rank, whatever the plan: fp64, to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
from equality import test_ranks
from equality.test_ranks import PLANS, assert_same
from recipe_models import RECIPE_PROGRAMS

# One plan each in the default tier, all in the slow tier.
# Models of the same kinds are in hugging_face/ as well.
QUICK = {
    ("lora", "zero3"),
    ("deepseek", "microbatches"),
    ("vit", "data"),
    ("clip", "tensor"),
    ("ddpm", "zero3"),
}


def train(name: str, strategy: dict[str, Any] | None, root: str) -> dict[str, Any]:
    """`test_ranks.train` of a recipe's model."""
    test_ranks.ALL.update(RECIPE_PROGRAMS)
    return test_ranks.train(name, strategy, root)


@pytest.fixture(scope="session")
def under_ddp(pool, tmp_path_factory):
    runs: dict[str, list[dict[str, Any]]] = {}

    def get(name: str) -> list[dict[str, Any]]:
        if name not in runs:
            runs[name] = pool.run(2, train, name, None, str(tmp_path_factory.mktemp("ddp")))
        return runs[name]

    return get


def cases() -> list[Any]:
    """Every recipe under every plan."""
    pairs = []
    for name in RECIPE_PROGRAMS:
        for plan in PLANS:
            marks = () if (name, plan) in QUICK else pytest.mark.slow
            pairs.append(pytest.param(name, plan, marks=marks))
    return pairs


@pytest.mark.parametrize(("name", "plan"), cases())
def test_two_ranks(pool, under_ddp, tmp_path, name, plan):
    strategy = {
        **PLANS[plan],
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
        "verbose": False,
    }
    runs = pool.run(2, train, name, strategy, str(tmp_path))
    for rank, (run, reference) in enumerate(zip(runs, under_ddp(name), strict=True)):
        assert not run["is_eager"]
        assert_same(run, reference, rank)
