"""What solved the integer programs before OR-tools: HiGHS by its own package, highspy.

As it was in `alpa_strategy/intra_op/solver/milp.py` before commit d555ada6, so that
`bench_solver.py` compares with what there was: its formulation, its solver's options, and its
second try where others had the processor.

One-hot s[c, k]. For every use u of a transfer, w[u, p, q] with the marginals of the producer's
source layouts and of the consumer's target layouts; where several uses share the transfer, z[p, q]
>= w[u, p, q] carries the cost once (docs/formulas.md#intra-op, the y and z variables in their
tightest disaggregated form).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from highspy import Highs, HighsLp, HighsModelStatus, HighsVarType, MatrixFormat, SolutionStatus

from alpa_strategy.intra_op.problem import Problem, Transfer

# Wall seconds per CPU second above which a time-out is not the solver's own.
STARVED = 1.5
# The solver's tolerances (1e-7) are absolute: costs are scaled to about this sum.
TARGET_OBJECTIVE = 1e3


@dataclass(frozen=True)
class LinearProgram:
    """The relaxation, in units of `seconds_per_unit`: columns within [0, 1].

    first: the strategies' columns come first, s[c, k] in column `first[c]` + k.
    """

    model: HighsLp
    first: np.ndarray
    seconds_per_unit: float


Mass = tuple[np.ndarray, ...]  # [c][k]: s[c, k] of a solution


class _Rows:
    """Collects the non-zeros of the rows as arrays."""

    def __init__(self) -> None:
        self.num = 0
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []

    def reserve(self, num: int, lower: float, upper: float) -> np.ndarray:
        """The numbers of new rows between `lower` and `upper`."""
        rows = np.arange(self.num, self.num + num)
        self.num += num
        self.lower.append(np.full(num, lower))
        self.upper.append(np.full(num, upper))
        return rows

    def put(self, rows: np.ndarray, columns: np.ndarray, values: float | np.ndarray) -> None:
        """Add non-zeros; those of the same place are added up in the end."""
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
        num_columns = _add_transfer(transfer, first, num_columns, costs, weights, rows)
    if np.isfinite(problem.memory_limit):
        weight = np.concatenate(weights)
        # HiGHS takes 1e-7 for zero: bytes come in units that give the row the objective's size.
        scale = max(problem.memory_limit, float(weight.max()), 1.0) / TARGET_OBJECTIVE
        heavy = np.flatnonzero(weight)
        row = rows.reserve(1, -np.inf, problem.memory_limit / scale)
        rows.put(np.repeat(row, len(heavy)), heavy, weight[heavy] / scale)
    unit = _unit(problem)
    row, column, value = (np.concatenate(part) for part in zip(*rows.parts, strict=True))
    # One choice can stand at both ends of a transfer: its entries in a row are added up.
    key, inverse = np.unique(row * num_columns + column, return_inverse=True)
    value = np.bincount(inverse, weights=value).astype(float)
    model = HighsLp()
    model.num_col_, model.num_row_ = num_columns, rows.num
    model.col_cost_ = np.concatenate(costs) / unit
    model.col_lower_, model.col_upper_ = np.zeros(num_columns), np.ones(num_columns)
    model.row_lower_, model.row_upper_ = np.concatenate(rows.lower), np.concatenate(rows.upper)
    model.a_matrix_.format_ = MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.searchsorted(key, num_columns * np.arange(rows.num + 1))
    model.a_matrix_.index_, model.a_matrix_.value_ = key % num_columns, value
    return LinearProgram(model, first, unit)


def _add_transfer(
    transfer: Transfer,
    first: np.ndarray,
    num_columns: int,
    costs: list[np.ndarray],
    weights: list[np.ndarray],
    rows: _Rows,
) -> int:
    """The columns and rows of one transfer; the number of columns that there are then."""
    cost, memory = np.asarray(transfer.cost, float), np.asarray(transfer.memory, float)
    paid = (cost != 0) | (memory != 0)
    several = len(transfer.uses) > 1
    source = np.asarray(transfer.source)
    sources = first[transfer.producer] + np.arange(len(source))
    shared = np.full(
        cost.shape, -1
    )  # [source, target] column of z: whether this resharding is paid, -1: free
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
        # w[p, q]: this use gets the value from source p in target q. Sums over q and over p are
        # the ends' choices.
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
    return num_columns


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
    ends. Never prints. Returns a true bound in seconds (inf: proved that no assignment exists), and
    the solution (None: not in time).
    """
    limit = wall = max(time_limit, 0.1)
    num_strategies = int(program.first[-1])
    columns = np.arange(num_strategies, dtype=np.int32)
    # HiGHS counts wall time: where others had the processor, once more with their time added.
    for _ in range(2):
        started = time.process_time()
        highs = Highs()
        highs.silent()
        highs.setOptionValue("time_limit", wall)
        highs.setOptionValue("mip_rel_gap", tolerance)
        highs.passModel(program.model)
        if integer:
            kinds = np.full(num_strategies, HighsVarType.kInteger, dtype=np.uint8)
            highs.changeColsIntegrality(num_strategies, columns, kinds)
        if hint is not None:
            taken = np.isin(columns, program.first[:-1] + np.asarray(hint))
            highs.setSolution(num_strategies, columns, taken.astype(float))
        highs.run()
        spent, status = time.process_time() - started, highs.getModelStatus()
        if status != HighsModelStatus.kTimeLimit or spent > limit / STARVED:
            break
        wall = limit * limit / max(spent, 0.1 * limit)
    if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
        return np.inf, None
    info = highs.getInfo()
    solved = info.objective_function_value if status == HighsModelStatus.kOptimal else -np.inf
    bound = float(info.mip_dual_bound if integer else solved) * program.seconds_per_unit
    if info.primal_solution_status != SolutionStatus.kSolutionStatusFeasible:
        return bound, None
    strategies = np.array(highs.getSolution().col_value)[:num_strategies]
    return bound, tuple(np.split(strategies, program.first[1:-1]))


def _unit(problem: Problem) -> float:
    """Seconds per unit of the scaled objective: a total of medians, the optimum's order of size."""
    least = sum(
        float(np.median(x.cost[np.isfinite(x.cost)]))
        for x in problem.choices
        if np.isfinite(x.cost).any()
    )
    for transfer in problem.transfers:
        finite = transfer.cost[np.isfinite(transfer.cost)]
        least += float(np.median(finite)) if finite.size else 0.0
    return least / TARGET_OBJECTIVE if least > 0 else 1.0
