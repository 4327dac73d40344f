"""The paper's other families and CLIP keep the contract: a mixture of experts, a Wide-ResNet and
contrasted pairs equal one process, any plan.
"""

from __future__ import annotations

import pytest
import recipe_models  # registers the models
from equality.harness import assert_same, record

EXPERT_PARALLEL = {"placements": {"blocks.*.mlp.fc": "S0", "blocks.*.mlp.proj": "S0"}}
STEPS = 3


def run_recipe_model(*args, **kwargs):
    """`record` on a worker, which must know the models too."""
    assert recipe_models.MODELS
    return record(*args, **kwargs)


@pytest.fixture(scope="session")
def reference(pool):
    """A plain single-process Trainer's runs, computed once."""
    results = {}

    def get(model, kwargs, world_size):
        key = (model, tuple(kwargs.items()), world_size)
        if key not in results:
            args = (run_recipe_model, model, kwargs, None, STEPS, world_size)
            results[key] = pool.run(1, *args, init_group=False)[0]
        return results[key]

    return get


# Each of their parts is in a case that runs by default.
SLOW_CASES = [
    # Layouts that other rows, and optimizers/test_owners.py, have as well.
    ("recipe_moe", {}, 2, {"parallel": "zero3"}),
    ("recipe_wide_resnet", {}, 2, {"parallel": "tensor"}),
    ("recipe_moe", {}, 2, {}),
    ("recipe_moe", {"dropless": True}, 2, {}),
    ("recipe_moe", {}, 4, {**EXPERT_PARALLEL, "logical_mesh": (4,)}),
    ("recipe_moe", {}, 2, {"num_stages": 2, "num_microbatches": 2}),
    ("recipe_moe", {"num_layers": 4}, 4, {"num_stages": 2, "num_microbatches": 2}),
    ("recipe_wide_resnet", {}, 2, {}),
    ("recipe_clip", {}, 2, {"parallel": "zero3"}),
    ("recipe_clip", {}, 2, {"num_stages": 2, "num_microbatches": 2}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "world_size", "options"),
    [
        ("recipe_moe", {}, 2, EXPERT_PARALLEL),
        ("recipe_moe", {"dropless": True}, 2, {"num_stages": 2, "num_microbatches": 2}),
        ("recipe_wide_resnet", {}, 4, {"logical_mesh": (2, 2)}),
        # All pairs of all ranks: one step sees them, or ranks gather features as under DDP.
        ("recipe_clip", {}, 2, {"parallel": "tensor"}),
        ("recipe_clip", {"gather": True}, 2, {"batch_scope": "auto"}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
)
def test_equals_one_process(pool, reference, tmp_path, model, kwargs, world_size, options):
    options = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False, **options}
    runs = pool.run(world_size, run_recipe_model, model, kwargs, options, STEPS, world_size)
    for run in runs:
        assert_same(run, reference(model, kwargs, world_size))
    pinned = options.get("placements")
    if pinned:
        assert runs[0]["modes"]["blocks.0.mlp.fc"] == pinned["blocks.*.mlp.fc"]
    if options.get("num_microbatches"):
        assert runs[0]["pipeline"][:2] == (2, 2)
