"""The problem as a (mixed-integer) linear program, built with arrays and solved by HiGHS through ortools' MathOpt.

One-hot s[c, k]. For every use u of a transfer, w[u, p, q] with the marginals of the producer's source layouts and of
the consumer's target layouts; where several uses share the transfer, z[p, q] >= w[u, p, q] carries the cost once
(docs/formulas.md#intra-op, the y and z variables in their tightest disaggregated form).
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from alpa_strategy.intra_op.problem import Problem

STARVED = 1.5  # wall seconds per CPU second above which a time-out is not the solver's own
TARGET_OBJECTIVE = 1e3  # the solver's tolerances (1e-7) are absolute: costs are scaled to about this sum


@dataclass(frozen=True)
class LinearProgram:
    """Columns with costs and bounds [0, 1], sparse rows with bounds; the first `first[-1]` columns are s."""

    cost: np.ndarray
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    first: np.ndarray
    seconds_per_unit: float


@dataclass(frozen=True)
class LpResult:
    """`feasible` False: proved that no assignment exists; otherwise a true `bound` (seconds) and the value of every s.

    `mass[c][k]` is s[c, k] of the solution found (None when none was found in time).
    """

    feasible: bool
    bound: float
    mass: tuple[np.ndarray, ...] | None


class _Rows:
    """Collects the non-zeros of the rows as arrays."""

    def __init__(self) -> None:
        self.num = 0
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []

    def reserve(self, num: int, lower: float, upper: float) -> np.ndarray:
        rows = np.arange(self.num, self.num + num)
        self.num += num
        self.lower.append(np.full(num, lower))
        self.upper.append(np.full(num, upper))
        return rows

    def put(self, rows: np.ndarray, columns: np.ndarray, values: float | np.ndarray) -> None:
        self.parts.append((rows, columns, np.broadcast_to(np.asarray(values, float), rows.shape)))


def formulate(problem: Problem) -> LinearProgram:
    """The relaxation's columns and rows. Forbidden strategies and transfers get no column."""
    sizes = np.array([len(choice.cost) for choice in problem.choices])
    first = np.concatenate([[0], np.cumsum(sizes)])
    num_columns = int(first[-1])
    costs = [np.concatenate([np.asarray(x.cost, float) for x in problem.choices])]
    weights = [np.concatenate([np.asarray(x.memory, float) for x in problem.choices])]
    rows = _Rows()
    # Every choice takes one strategy: sum_k x[c, k] = 1.
    one = rows.reserve(len(sizes), 1.0, 1.0)
    rows.put(np.repeat(one, sizes), np.arange(num_columns), 1.0)
    for transfer in problem.transfers:
        cost, memory = np.asarray(transfer.cost, float), np.asarray(transfer.memory, float)
        paid = (cost != 0) | (memory != 0)
        several = len(transfer.uses) > 1
        source = np.asarray(transfer.source)
        sources = first[transfer.producer] + np.arange(len(source))
        shared = np.full(cost.shape, -1)  # [source, target] column of z: whether this resharding is paid, -1: free
        if several:  # a target that several uses ask for is paid once
            z_p, z_q = np.nonzero(paid & np.isfinite(cost))
            shared[z_p, z_q] = num_columns + np.arange(len(z_p))
            num_columns += len(z_p)
            costs.append(cost[z_p, z_q])
            weights.append(memory[z_p, z_q])
        for use in transfer.uses:
            layout = np.asarray(use.layout)
            asked = np.zeros(cost.shape[1], dtype=bool)
            asked[layout] = True
            # w[p, q]: this use gets the value from source p in target q. Sums over q and over p are the ends' choices.
            p, q = np.nonzero(np.isfinite(cost) & asked[None, :])
            w = num_columns + np.arange(len(p))
            num_columns += len(p)
            costs.append(np.zeros(len(p)) if several else cost[p, q])
            weights.append(np.zeros(len(p)) if several else memory[p, q])
            out = rows.reserve(cost.shape[0], 0.0, 0.0)
            rows.put(out[p], w, 1.0)
            rows.put(out[source], sources, -1.0)
            into = np.full(cost.shape[1], -1)
            into[asked] = rows.reserve(int(asked.sum()), 0.0, 0.0)
            rows.put(into[q], w, 1.0)
            rows.put(into[layout], first[use.choice] + np.arange(len(layout)), -1.0)
            if several:  # z[p, q] >= w[p, q] of every use
                linked = shared[p, q] >= 0
                at_least = rows.reserve(int(linked.sum()), 0.0, np.inf)
                rows.put(at_least, shared[p, q][linked], 1.0)
                rows.put(at_least, w[linked], -1.0)
    if np.isfinite(problem.memory_limit):
        weight = np.concatenate(weights)
        # HiGHS takes 1e-7 for zero: bytes come in units that give the row the objective's size.
        scale = max(problem.memory_limit, float(weight.max()), 1.0) / TARGET_OBJECTIVE
        heavy = np.flatnonzero(weight)
        row = rows.reserve(1, -np.inf, problem.memory_limit / scale)
        rows.put(np.repeat(row, len(heavy)), heavy, weight[heavy] / scale)
    cost = np.concatenate(costs)
    unit = _unit(problem)
    row, column, value = (np.concatenate(part) for part in zip(*rows.parts, strict=True))
    # One choice can stand at both ends of a transfer: its entries in a row are added up.
    key, inverse = np.unique(row * num_columns + column, return_inverse=True)
    value = np.bincount(inverse, weights=value)
    lower, upper = np.concatenate(rows.lower), np.concatenate(rows.upper)
    return LinearProgram(cost / unit, key // num_columns, key % num_columns, value, lower, upper, first, unit)


def num_columns(problem: Problem) -> int:
    """About how many columns the program of a problem has, without building it."""
    transfers = sum(t.cost.size * (len(t.uses) + (len(t.uses) > 1)) for t in problem.transfers)
    return transfers + sum(len(choice.cost) for choice in problem.choices)


def solve_program(
    program: LinearProgram,
    *,
    integer: bool,
    time_limit: float,
    hint: Sequence[int] | None = None,
    tolerance: float = 1e-6,
) -> LpResult:
    """Solve the relaxation or, with `integer`, the program itself, for at most `time_limit` seconds of CPU time.

    `hint` is an assignment to start the integer search from, `tolerance` a relative gap at which it ends. Never prints;
    a time-out is a result without `mass`.
    """
    from ortools.math_opt.python import mathopt

    limit = max(time_limit, 0.1)
    parameters = mathopt.SolveParameters(relative_gap_tolerance=tolerance if integer else None)
    model = mathopt.Model.from_model_proto(_proto(program, integer))
    hints = mathopt.ModelSolveParameters()
    if integer and hint is not None:
        chosen = program.first[:-1] + np.asarray(hint)
        values = {model.get_variable(int(i)): 0.0 for i in range(int(program.first[-1]))}
        values.update({model.get_variable(int(i)): 1.0 for i in chosen})
        hints.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    with without_solver_lines() if integer else nullcontext():
        wall = limit
        for _ in range(2):  # HiGHS counts wall time: where others had the processor, once more with their time added
            started = time.process_time()
            parameters.time_limit = timedelta(seconds=wall)
            result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=hints)
            spent = time.process_time() - started
            if result.termination.limit != mathopt.Limit.TIME or spent > limit / STARVED:
                break
            wall = limit * limit / max(spent, 0.1 * limit)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return LpResult(False, np.inf, None)
    bound = result.termination.objective_bounds.dual_bound * program.seconds_per_unit
    bound = bound if np.isfinite(bound) else -np.inf
    if not result.has_primal_feasible_solution():
        return LpResult(True, bound, None)
    found = result.solutions[0].primal_solution.to_proto().variable_values
    dense = np.zeros(len(program.cost))
    dense[np.array(found.ids, dtype=int)] = found.values
    mass = tuple(dense[a:b] for a, b in zip(program.first[:-1], program.first[1:], strict=True))
    return LpResult(True, bound, mass)


def _unit(problem: Problem) -> float:
    """Seconds per unit of the scaled objective: a total of medians, the optimum's order of size."""
    least = sum(float(np.median(x.cost[np.isfinite(x.cost)])) for x in problem.choices if np.isfinite(x.cost).any())
    for transfer in problem.transfers:
        finite = transfer.cost[np.isfinite(transfer.cost)]
        least += float(np.median(finite)) if finite.size else 0.0
    return least / TARGET_OBJECTIVE if least > 0 else 1.0


def _proto(program: LinearProgram, integer: bool) -> Any:
    from ortools.math_opt import model_pb2, sparse_containers_pb2

    num_columns, num_rows = len(program.cost), len(program.row_lower)
    num_strategies = int(program.first[-1])
    is_integer = np.zeros(num_columns, dtype=bool)
    is_integer[:num_strategies] = integer
    columns = np.arange(num_columns)
    priced = np.flatnonzero(program.cost)
    return model_pb2.ModelProto(
        variables=model_pb2.VariablesProto(
            ids=columns.tolist(),
            lower_bounds=[0.0] * num_columns,
            upper_bounds=[1.0] * num_columns,
            integers=is_integer.tolist(),
        ),
        objective=model_pb2.ObjectiveProto(
            linear_coefficients=sparse_containers_pb2.SparseDoubleVectorProto(
                ids=priced.tolist(), values=program.cost[priced].tolist()
            )
        ),
        linear_constraints=model_pb2.LinearConstraintsProto(
            ids=list(range(num_rows)),
            lower_bounds=program.row_lower.tolist(),
            upper_bounds=program.row_upper.tolist(),
        ),
        linear_constraint_matrix=sparse_containers_pb2.SparseDoubleMatrixProto(
            row_ids=program.row.tolist(), column_ids=program.column.tolist(), coefficients=program.value.tolist()
        ),
    )


# --- Keeps lines that HiGHS prints by itself off the standard output: leftovers of its debugging, beyond its options.


PREFIX = b"Highs"  # HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();
ONE_AT_A_TIME = threading.Lock()  # the standard output is the process'


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Lines that begin like HiGHS's are dropped; what else is written meanwhile (by other threads) appears after it."""
    if os.name != "posix":  # the C library's buffer cannot be reached the same way
        yield
        return
    library = ctypes.CDLL(None)
    try:
        sys.stdout.flush()
        library.fflush(None)
        os.fstat(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output
        yield
        return
    with ONE_AT_A_TIME, tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            library.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            kept = b"".join(line for line in file if not line.startswith(PREFIX))
            while kept:
                kept = kept[os.write(1, kept) :]
