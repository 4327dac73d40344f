"""Pipelines under the Trainer: the same training as on one device, whatever stages, schedule and micro-batches."""

from __future__ import annotations

import pytest
from equality.harness import assert_same, record

STEPS = 3
CASES = {
    "gpt": {"ignore_fraction": 0.4, "num_layers": 2, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "bert": {"num_layers": 1},
    "mlp": {},
}


@pytest.fixture(scope="session")
def plain(pool):
    """Runs of a plain single-process Trainer, computed once."""
    found = {}

    def get(model, optimizer, world_size, clip=None, accumulate=1):
        key = (model, optimizer, world_size, clip, accumulate)
        if key not in found:
            kwargs = {**CASES[model], "optimizer": optimizer}
            found[key] = pool.run(
                1, record, model, kwargs, None, STEPS, world_size, clip, accumulate, init_group=False
            )[0]
        return found[key]

    return get


def run_case(pool, plain, tmp_path, model, world_size, options, optimizer="adamw", clip=None, accumulate=1):
    kwargs = {**CASES[model], "optimizer": optimizer}
    options = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False, **options}
    runs = pool.run(world_size, record, model, kwargs, options, STEPS, world_size, clip, accumulate)
    for run in runs:
        assert_same(run, plain(model, optimizer, world_size, clip, accumulate))
    return runs[0]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("model", CASES)
def test_two_ranks(pool, plain, tmp_path, model, schedule):
    optimizer, clip = ("adamw", None) if schedule == "1F1B" else ("sgd", 0.1)
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": schedule}
    run_case(pool, plain, tmp_path, model, 2, options, optimizer, clip)
