"""Any assignment of strategies is right, not only the solver's: random plans equal the whole step and its gradients."""

from __future__ import annotations

import random as python_random

import numpy as np
import pytest
from lowered_cases import CASES, captured, problem_of, random_assignment, run_lowered_stage, stage_of


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_random_plans_equal_the_whole_step(name, mesh_shape):
    case = captured(name, int(np.prod(mesh_shape)))
    intra = problem_of(name, mesh_shape)
    for seed in range(6):
        assignment = random_assignment(intra, python_random.Random(f"{name}{mesh_shape}{seed}"))
        run_lowered_stage(case, stage_of(intra, assignment, mesh_shape), mesh_shape)
