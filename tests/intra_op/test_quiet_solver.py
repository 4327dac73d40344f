"""The solver prints nothing, and the best assignment that is handed to it is where it starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from proofs.synthetic import gpt_like, least_bytes

from alpa_strategy.intra_op.problem import evaluate
from alpa_strategy.intra_op.solver.milp import formulate, solve_program
from alpa_strategy.intra_op.solver.solve import solve


def test_nothing_is_printed(capfd):
    problem = gpt_like(1)
    free = solve(problem)
    limit = (free.num_bytes + least_bytes(problem)) / 2
    program = formulate(replace(problem, memory_limit=limit))
    relaxed, _ = solve_program(program, integer=False, time_limit=30.0)
    exact, masses = solve_program(
        program, integer=True, time_limit=30.0, hint=free.assignment
    )  # which does not fit
    assert capfd.readouterr() == ("", "")
    assert relaxed <= exact * (1 + 1e-9)
    assignment = [int(mass.argmax()) for mass in masses]
    seconds, num_bytes = evaluate(problem, assignment)
    assert num_bytes <= limit * (1 + 1e-6)
    np.testing.assert_allclose(seconds, exact, rtol=1e-5)
