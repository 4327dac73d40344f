"""Any assignment of strategies is right, not only the solver's: random plans equal the full step
and its gradients.
"""

from __future__ import annotations

import gc
import linecache
import random as python_random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from covering import in_tiers
from lowered_cases import (
    CASES,
    captured,
    problem_of,
    random_assignment,
    run_lowered_stage,
    stage_of,
)

from alpa_strategy.capture.products import product_of
from alpa_strategy.lower.lines import function_of


@pytest.mark.parametrize(("name", "mesh_shape"), in_tiers(product(CASES, ((2,), (4,), (2, 2)))))
def test_random_plans_equal_the_whole_step(name, mesh_shape):
    case = captured(name, int(np.prod(mesh_shape)))
    intra = problem_of(name, mesh_shape)
    for seed in range(6):
        rng = python_random.Random(f"{name}{mesh_shape}{seed}")
        stage = stage_of(intra, random_assignment(intra, rng), mesh_shape)
        num_chunks = {
            op.name: rng.choice([2, 3, 4])
            for op in case.step.ops
            if product_of(op.call) and rng.random() < 0.7
        }
        stage = replace(
            stage, prefetched_bytes=rng.choice([0, 2**12, 2**30]), num_chunks=num_chunks
        )
        run_lowered_stage(case, stage, mesh_shape)


def test_the_source_of_a_program_goes_with_it():
    step = function_of("def step():\n    return ()\n", "step", {})
    filename = step.__code__.co_filename
    assert linecache.getline(filename, 2) == "    return ()\n"
    del step
    gc.collect()
    assert filename not in linecache.cache
