"""The solver prints nothing, and the best assignment that is handed to it is where it starts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from proofs.synthetic import gpt_like, least_bytes
from template import run_script

from alpa_strategy.intra_op.problem import evaluate
from alpa_strategy.intra_op.solver import mathopt
from alpa_strategy.intra_op.solver.mathopt import solve_program
from alpa_strategy.intra_op.solver.milp import formulate
from alpa_strategy.intra_op.solver.quiet import without_solver_lines
from alpa_strategy.intra_op.solver.solve import solve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tight():
    """A problem whose memory limit binds, and its optimum without the limit."""
    problem = gpt_like(1)
    free = solve(problem)
    limit = (free.num_bytes + least_bytes(problem)) / 2
    return replace(problem, memory_limit=limit), free


def test_nothing_is_printed(tight, capfd):
    problem, free = tight
    program = formulate(problem)
    relaxed, _ = solve_program(program, integer=False, time_limit=30.0)
    # The hint does not fit into the limit.
    exact, masses = solve_program(program, integer=True, time_limit=30.0, hint=free.assignment)
    # What the C library buffers would appear at the end of the process.
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")
    assert relaxed <= exact * (1 + 1e-9)
    assignment = [int(mass.argmax()) for mass in masses]
    seconds, num_bytes = evaluate(problem, assignment)
    assert num_bytes <= problem.memory_limit * (1 + 1e-6)
    np.testing.assert_allclose(seconds, exact, rtol=1e-5)


def test_only_the_solvers_lines_are_dropped(capfd):
    library = ctypes.CDLL(None)
    for _ in range(2):
        with without_solver_lines():
            library.puts(
                b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"
            )
            library.puts(b"of another library")
            print("of Python", flush=True)
            assert capfd.readouterr().out == "of Python\n"
        library.fflush(None)
        assert capfd.readouterr().out == "of another library\n"
    library.puts(b"Highs, later")
    library.fflush(None)
    assert capfd.readouterr().out == "Highs, later\n"


def test_both_solvers_of_relaxations_find_the_same_bound(tight, monkeypatch):
    program = formulate(tight[0])
    by_glop, _ = solve_program(program, integer=False, time_limit=30.0)
    monkeypatch.setattr(mathopt, "GLOP_COLUMNS", 0)
    by_highs, _ = solve_program(program, integer=False, time_limit=30.0)
    np.testing.assert_allclose(by_glop, by_highs, rtol=1e-7)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("glop_columns", [0, mathopt.GLOP_COLUMNS])
def test_a_limit_that_nothing_meets_is_proved(tight, monkeypatch, integer, glop_columns):
    monkeypatch.setattr(mathopt, "GLOP_COLUMNS", glop_columns)
    problem = replace(tight[0], memory_limit=0.9 * least_bytes(tight[0]))
    bound, masses = solve_program(formulate(problem), integer=integer, time_limit=30.0)
    assert bound == np.inf
    assert masses is None


@pytest.mark.parametrize("glop_columns", [0, 10**9])
def test_out_of_time_proves_nothing_of_a_relaxation(monkeypatch, glop_columns):
    monkeypatch.setattr(mathopt, "GLOP_COLUMNS", glop_columns)
    problem = gpt_like(8, noise=0.1)
    bound, _ = solve_program(formulate(problem), integer=False, time_limit=0.0)
    assert bound == -np.inf


def test_an_integer_program_that_runs_out_of_time_keeps_a_true_bound():
    problem = gpt_like(3, noise=0.1)
    free = solve(problem)
    least = least_bytes(problem)
    problem = replace(problem, memory_limit=least + 0.1 * (free.num_bytes - least))
    program = formulate(problem)
    bound, _ = solve_program(program, integer=True, time_limit=0.3)
    assert bound <= solve(problem).seconds * (1 + 1e-6)


def test_the_same_program_has_the_same_solution(tight):
    program = formulate(tight[0])
    first, again = (solve_program(program, integer=True, time_limit=30.0) for _ in range(2))
    assert first[0] == again[0]
    for mass, mass_again in zip(first[1], again[1], strict=True):
        np.testing.assert_array_equal(mass, mass_again)


def test_solvers_are_loaded_where_a_program_is_solved():
    code = (
        "import sys, alpa_strategy, alpa_strategy.planner.planner;"
        "print([name for name in ('ortools', 'highspy', 'pandas') if name in sys.modules])"
    )
    done = run_script(["-c", code], ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
