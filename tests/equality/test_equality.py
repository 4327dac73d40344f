"""With `batch_scope="global"` any plan gives the result of a single device: fp64, 5 steps, losses,
gradients, metrics and weights to 1e-9.
"""

from __future__ import annotations

from itertools import product

import pytest
from covering import in_tiers, slow_but
from equality.harness import assert_same, record

PLANS = {
    "solved": {},
    "data": {"parallel": "data"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
}
PLANS_2D = {
    "data x tensor": {"parallel": ("data", "tensor"), "logical_mesh": (2, 2)},
    "zero3 x tensor": {"parallel": ("zero3", "tensor"), "logical_mesh": (2, 2)},
    "auto 2d": {"logical_mesh": (2, 2)},
}
MODELS = {
    "mlp": {},
    "gpt": {"ignore_fraction": 0.4},
    "llama": {},
    "bert": {},
    "convnet": {},
}


@pytest.fixture(scope="session")
def reference(pool, tmp_path_factory):
    """Reference runs by (model, optimizer, world size), computed once."""
    results = {}

    def get(model: str, optimizer: str, world_size: int, **kwargs):
        key = (model, optimizer, world_size, tuple(sorted(kwargs.items())))
        if key not in results:
            model_kwargs = {**MODELS[model], "optimizer": optimizer}
            results[key] = pool.run(
                1,
                record,
                model,
                model_kwargs,
                None,
                5,
                world_size,
                *kwargs.values(),
                init_group=False,
            )[0]
        return results[key]

    return get


def run_case(pool, reference, tmp_path, model, optimizer, world_size, strategy):
    model_kwargs = {**MODELS[model], "optimizer": optimizer}
    strategy = {**strategy, "cluster": "pcie_8gpu", "plan_dir": str(tmp_path)}
    runs = pool.run(world_size, record, model, model_kwargs, strategy, 5, world_size)
    for run in runs:
        assert_same(run, reference(model, optimizer, world_size))
    return runs[0]


def cases():
    """Another optimizer's state lies as the parameter does: SGD is tried on two ranks. Meshes of
    two axes need four.
    """
    yield from product(MODELS, PLANS, ("adamw", "sgd"), (2,))
    yield from product(MODELS, (*PLANS_2D, *PLANS), ("adamw",), (4,))


@pytest.mark.parametrize(("model", "plan", "optimizer", "world_size"), in_tiers(cases()))
def test_several_ranks(pool, reference, tmp_path, model, plan, optimizer, world_size):
    strategy = {**PLANS, **PLANS_2D}[plan]
    run = run_case(pool, reference, tmp_path, model, optimizer, world_size, strategy)
    if world_size == 2 and plan == "zero3":
        assert any(m[0].startswith("S") for m in run["modes"].values())
    if world_size == 2 and plan == "zero2":
        assert any(m[0].startswith("G") for m in run["modes"].values())


@pytest.mark.parametrize("model", slow_but(MODELS, ("gpt", "convnet")))
def test_one_rank(pool, reference, tmp_path, model):
    run_case(pool, reference, tmp_path, model, "adamw", 1, {})
