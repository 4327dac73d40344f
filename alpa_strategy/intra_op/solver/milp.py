"""The problem as a (mixed-integer) linear program, in arrays; `mathopt.py` solves it.

One-hot s[c, k]. For every use u of a transfer, w[u, p, q] with the marginals of the producer's
source layouts and of the consumer's target layouts; where several uses share the transfer, z[p, q]
>= w[u, p, q] carries the cost once (docs/formulas.md#intra-op, the y and z variables in their
tightest disaggregated form).
"""

from dataclasses import dataclass

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer, Use

# The solvers' tolerances (1e-7) are absolute: costs are scaled to about this sum.
TARGET_OBJECTIVE = 1e3


@dataclass(frozen=True)
class LinearProgram:
    """Minimise `cost` @ x with `row_lower` <= A x <= `row_upper` and 0 <= x <= `upper`.

    No column exceeds 1 in an optimum. `upper` says so only where the rows and costs do not: bounds
    that follow from others cost an integer search a third of its time.

    Attributes:
        cost, upper: [column], the cost in units of `seconds_per_unit`.
        row, column, value: the non-zeros of A, row by row and in each row by column.
        row_lower, row_upper: [row], infinite where a side is free.
        first: the strategies' columns come first, s[c, k] in column `first[c]` + k; the last entry
            is their number. They alone are integers in the mixed-integer program.
    """

    cost: np.ndarray
    upper: np.ndarray
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    first: np.ndarray
    seconds_per_unit: float

    @property
    def num_strategies(self) -> int:
        """The number of columns that stand for strategies."""
        return int(self.first[-1])


class _Columns:
    """Collects seconds and bytes of the columns as arrays."""

    def __init__(self) -> None:
        self.num = 0
        self.seconds: list[np.ndarray] = []
        self.num_bytes: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []

    def add(self, seconds: np.ndarray, num_bytes: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """The numbers of new columns with these seconds, bytes and upper bounds."""
        columns = np.arange(self.num, self.num + len(seconds))
        self.num += len(seconds)
        self.seconds.append(seconds)
        self.num_bytes.append(num_bytes)
        self.upper.append(upper)
        return columns


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
    columns, rows = _Columns(), _Rows()

    strategies = columns.add(
        np.concatenate([np.asarray(choice.cost, float) for choice in problem.choices]),
        np.concatenate([np.asarray(choice.memory, float) for choice in problem.choices]),
        np.ones(int(first[-1])),
    )
    # Every choice takes one strategy: sum_k s[c, k] = 1.
    one = rows.reserve(len(sizes), 1.0, 1.0)
    rows.put(np.repeat(one, sizes), strategies, 1.0)

    for transfer in problem.transfers:
        _add_transfer(transfer, first, columns, rows)
    if np.isfinite(problem.memory_limit):
        _add_memory_row(problem.memory_limit, columns, rows)
    return _assemble(columns, rows, first, _unit(problem))


def _add_transfer(transfer: Transfer, first: np.ndarray, columns: _Columns, rows: _Rows) -> None:
    """The columns w of each use and z of what several uses share, and the rows between them."""
    cost, memory = np.asarray(transfer.cost, float), np.asarray(transfer.memory, float)
    several = len(transfer.uses) > 1
    # [source, target]: the column of z, -1 where that resharding is free or forbidden.
    shared = np.full(cost.shape, -1)

    if several:  # a target that several uses ask for is paid once
        paid = (cost != 0) | (memory != 0)
        z_p, z_q = np.nonzero(paid & np.isfinite(cost))
        seconds, num_bytes = cost[z_p, z_q], memory[z_p, z_q]
        # What costs anything is not taken more than once. A credit would be.
        upper = np.where((seconds >= 0) & (num_bytes >= 0), np.inf, 1.0)
        shared[z_p, z_q] = columns.add(seconds, num_bytes, upper)

    for use in transfer.uses:
        p, q, w = _add_use(transfer, use, first, columns, rows)
        if several:  # z[p, q] >= w[p, q] of every use
            linked = shared[p, q] >= 0
            at_least = rows.reserve(int(linked.sum()), 0.0, np.inf)
            rows.put(at_least, shared[p, q][linked], 1.0)
            rows.put(at_least, w[linked], -1.0)


def _add_use(
    transfer: Transfer, use: Use, first: np.ndarray, columns: _Columns, rows: _Rows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns w[p, q] of one use: it gets the value from source p in target q.

    Returns p, q and the column of each. Its columns carry the cost where no other use shares it.
    """
    cost, memory = np.asarray(transfer.cost, float), np.asarray(transfer.memory, float)
    source, layout = np.asarray(transfer.source), np.asarray(use.layout)
    asked = np.zeros(cost.shape[1], dtype=bool)
    asked[layout] = True
    p, q = np.nonzero(np.isfinite(cost) & asked[None, :])
    # The sums below bound w.
    unbounded = np.full(len(p), np.inf)
    if len(transfer.uses) > 1:
        w = columns.add(np.zeros(len(p)), np.zeros(len(p)), unbounded)
    else:
        w = columns.add(cost[p, q], memory[p, q], unbounded)

    # Sums of w over q are the producer's choice, sums over p the consumer's.
    out = rows.reserve(cost.shape[0], 0.0, 0.0)
    rows.put(out[p], w, 1.0)
    rows.put(out[source], first[transfer.producer] + np.arange(len(source)), -1.0)
    into = np.full(cost.shape[1], -1)
    into[asked] = rows.reserve(int(asked.sum()), 0.0, 0.0)
    rows.put(into[q], w, 1.0)
    rows.put(into[layout], first[use.choice] + np.arange(len(layout)), -1.0)
    return p, q, w


def _add_memory_row(limit: float, columns: _Columns, rows: _Rows) -> None:
    """All bytes within the limit."""
    num_bytes = np.concatenate(columns.num_bytes)
    # HiGHS takes 1e-7 for zero: bytes come in units that give the row the objective's size.
    scale = max(limit, float(num_bytes.max()), 1.0) / TARGET_OBJECTIVE
    heavy = np.flatnonzero(num_bytes)
    row = rows.reserve(1, -np.inf, limit / scale)
    rows.put(np.repeat(row, len(heavy)), heavy, num_bytes[heavy] / scale)


def _assemble(columns: _Columns, rows: _Rows, first: np.ndarray, unit: float) -> LinearProgram:
    """The program of what was collected, its non-zeros in order."""
    row, column, value = (np.concatenate(part) for part in zip(*rows.parts, strict=True))
    # One choice can stand at both ends of a transfer: its entries in a row are added up.
    place, inverse = np.unique(row * columns.num + column, return_inverse=True)
    return LinearProgram(
        cost=np.concatenate(columns.seconds) / unit,
        upper=np.concatenate(columns.upper),
        row=place // columns.num,
        column=place % columns.num,
        value=np.bincount(inverse, weights=value).astype(float),
        row_lower=np.concatenate(rows.lower),
        row_upper=np.concatenate(rows.upper),
        first=first,
        seconds_per_unit=unit,
    )


def num_columns(problem: Problem) -> int:
    """About how many columns the program of a problem has, without building it."""
    transfers = sum(t.cost.size * (len(t.uses) + (len(t.uses) > 1)) for t in problem.transfers)
    return transfers + sum(len(choice.cost) for choice in problem.choices)


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
