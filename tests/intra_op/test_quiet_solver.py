"""The solver's own lines do not reach the standard output; everything else does."""

from __future__ import annotations

import ctypes
import os

from alpa_strategy.intra_op.solver.milp import without_solver_lines


def test_only_the_solvers_lines_are_dropped(capfd):
    library = ctypes.CDLL(None)
    print("before")
    with without_solver_lines():
        library.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n")
        os.write(1, b"meanwhile\n")
    print("after")
    assert capfd.readouterr().out.split() == ["before", "meanwhile", "after"]
