"""Solves linear and integer programs by OR-tools' MathOpt.

GLOP solves small relaxations, HiGHS large ones and the integer programs: docs/formulas.md#solvers
has the figures. Models and results pass as MathOpt's protocol buffers, filled from arrays: an
object for each variable takes longer than solving does.
"""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from alpa_strategy.intra_op.solver.messages import filled
from alpa_strategy.intra_op.solver.milp import LinearProgram
from alpa_strategy.intra_op.solver.quiet import without_solver_lines

if TYPE_CHECKING:
    from ortools.math_opt.model_parameters_pb2 import ModelSolveParametersProto
    from ortools.math_opt.model_pb2 import ModelProto
    from ortools.math_opt.parameters_pb2 import SolveParametersProto
    from ortools.math_opt.result_pb2 import SolveResultProto

logger = logging.getLogger(__name__)

# Wall seconds per CPU second above which a time-out is not the solver's own.
STARVED = 1.5
# Columns up to which GLOP solves a relaxation: it is faster there and falls behind from here on.
GLOP_COLUMNS = 20_000

# [c][k]: s[c, k] of a solution
Mass = tuple[np.ndarray, ...]


def solve_program(
    program: LinearProgram,
    *,
    integer: bool,
    time_limit: float,
    hint: Sequence[int] | None = None,
    tolerance: float = 1e-6,
) -> tuple[float, Mass | None]:
    """Solve the relaxation or, with `integer`, the program itself, for at most `time_limit` seconds
    of CPU time.

    `hint` is an assignment to start the integer search from, `tolerance` a relative gap at which it
    ends. Never prints. Returns a true bound in seconds (inf: proved that no assignment exists;
    -inf: nothing is proved), and the solution (None: not in time).
    """
    from ortools.math_opt import parameters_pb2, result_pb2, solution_pb2
    from pybind11_abseil.status import StatusNotOk

    glop = not integer and len(program.cost) <= GLOP_COLUMNS
    solver = parameters_pb2.SOLVER_TYPE_GLOP if glop else parameters_pb2.SOLVER_TYPE_HIGHS
    parameters = _parameters(tolerance if integer else None)
    result_filter = _result_filter(program, hint if integer else None)
    model, limit = _model(program, integer), max(time_limit, 0.1)
    try:
        with without_solver_lines():
            result = _solve_within(limit, solver, model, parameters, result_filter)
    except StatusNotOk as error:
        # An error inside the solver proves nothing: planning goes on with what it has.
        logger.debug("the solver failed: %s", error)
        return -np.inf, None

    reason = result.termination.reason
    impossible = (
        result_pb2.TERMINATION_REASON_INFEASIBLE,
        result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,
    )
    # No program is unbounded: costs and rows bound every column.
    if reason in impossible:
        return np.inf, None
    # What a simplex method stopped at proves nothing.
    proved = integer or reason == result_pb2.TERMINATION_REASON_OPTIMAL
    bound = result.termination.objective_bounds.dual_bound if proved else -np.inf
    bound *= program.seconds_per_unit

    if not result.solutions:
        return bound, None
    primal = result.solutions[0].primal_solution
    if primal.feasibility_status != solution_pb2.SOLUTION_STATUS_FEASIBLE:
        return bound, None
    strategies = np.zeros(program.num_strategies)
    strategies[np.asarray(primal.variable_values.ids, int)] = primal.variable_values.values
    return bound, tuple(np.split(strategies, program.first[1:-1]))


def _solve_within(
    limit: float,
    solver: int,
    model: "ModelProto",
    parameters: "SolveParametersProto",
    result_filter: "ModelSolveParametersProto",
) -> "SolveResultProto":
    """Solve for at most about `limit` seconds of CPU time.

    Solvers count wall time: where others had the processor and time ran out, the program is solved
    once more with their time added, so that a plan does not depend on how busy the machine is.

    Args:
        solver: number of the solver in MathOpt.
        model, parameters, result_filter: MathOpt's messages; the time limit of `parameters` is set.
    """
    from ortools.math_opt import callback_pb2, parameters_pb2, result_pb2
    from ortools.math_opt.core.python import solver as core

    registration = callback_pb2.CallbackRegistrationProto()
    initializer = parameters_pb2.SolverInitializerProto()
    wall = limit
    for _ in range(2):
        parameters.time_limit.FromTimedelta(timedelta(seconds=wall))
        started = time.process_time()
        result = core.solve(
            model, solver, initializer, parameters, result_filter, None, registration, None, None
        )
        spent = time.process_time() - started
        in_time = result.termination.limit != result_pb2.LIMIT_TIME
        if in_time or spent > limit / STARVED:
            break
        wall = limit * limit / max(spent, 0.1 * limit)
    return result


def _model(program: LinearProgram, integer: bool) -> "ModelProto":
    """Return the program as MathOpt's message: its relaxation, unless `integer`."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.sparse_containers_pb2 import (
        SparseDoubleMatrixProto,
        SparseDoubleVectorProto,
    )

    num_columns = len(program.cost)
    num_rows = len(program.row_lower)
    priced = np.flatnonzero(program.cost)
    # Relaxations are solved faster with all bounds, integer programs without those that follow.
    upper = program.upper if integer else np.ones(num_columns)
    integers = np.zeros(num_columns, dtype=bool)
    integers[: program.num_strategies] = integer
    return model_pb2.ModelProto(
        variables=filled(
            model_pb2.VariablesProto,
            ids=np.arange(num_columns),
            lower_bounds=np.zeros(num_columns),
            upper_bounds=upper,
            integers=integers,
        ),
        objective=model_pb2.ObjectiveProto(
            linear_coefficients=filled(
                SparseDoubleVectorProto, ids=priced, values=program.cost[priced]
            )
        ),
        linear_constraints=filled(
            model_pb2.LinearConstraintsProto,
            ids=np.arange(num_rows),
            lower_bounds=program.row_lower,
            upper_bounds=program.row_upper,
        ),
        linear_constraint_matrix=filled(
            SparseDoubleMatrixProto,
            row_ids=program.row,
            column_ids=program.column,
            coefficients=program.value,
        ),
    )


def _parameters(tolerance: float | None) -> "SolveParametersProto":
    """Return the parameters of a solve: one thread, no output, and the relative gap at which an
    integer search ends.
    """
    from ortools.math_opt import parameters_pb2

    parameters = parameters_pb2.SolveParametersProto(enable_output=False)
    # MathOpt refuses `threads` for HiGHS.
    parameters.highs.string_options["parallel"] = "off"
    if tolerance is not None:
        parameters.relative_gap_tolerance = tolerance
    return parameters


def _result_filter(
    program: LinearProgram, hint: Sequence[int] | None
) -> "ModelSolveParametersProto":
    """Return which values a result contains (of the strategies), and the hint from which the search
    starts.
    """
    from ortools.math_opt.model_parameters_pb2 import ModelSolveParametersProto

    result_filter = ModelSolveParametersProto()
    values = result_filter.variable_values_filter
    values.skip_zero_values, values.filter_by_ids = True, True
    values.filtered_ids.extend(range(program.num_strategies))
    for left_out in (result_filter.dual_values_filter, result_filter.reduced_costs_filter):
        # Of no ids
        left_out.filter_by_ids = True
    if hint is not None:
        taken = np.zeros(program.num_strategies)
        taken[program.first[:-1] + np.asarray(hint)] = 1.0
        start = result_filter.solution_hints.add().variable_values
        start.ids.extend(range(len(taken)))
        start.values.extend(taken.tolist())
    return result_filter
