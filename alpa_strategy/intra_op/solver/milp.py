"""The problem as a (mixed-integer) linear program, in arrays; `mathopt.py` solves it.

One-hot s[c, k]. For every use u of a transfer, w[u, p, q] with the marginals of the producer's
source layouts and of the consumer's target layouts; where several uses share the transfer, z[p, q]
>= w[u, p, q] carries the cost once (docs/formulas.md#intra-op, the y and z variables in their
tightest disaggregated form).
"""

from dataclasses import dataclass

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer

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


def formulate(problem: Problem) -> LinearProgram:
    """Return the columns and rows of the problem's relaxation. Forbidden strategies and transfers
    get no column.

    Fast if equal arrays are one object (`with_shared_arrays`).
    """
    sizes = np.array([len(choice.cost) for choice in problem.choices])
    first = np.concatenate([[0], np.cumsum(sizes)])
    num_columns, num_rows = int(first[-1]), len(sizes)
    seconds = [np.asarray(choice.cost, float) for choice in problem.choices]
    num_bytes = [np.asarray(choice.memory, float) for choice in problem.choices]
    upper = [np.ones(num_columns)]
    # Every choice takes one strategy: sum_k s[c, k] = 1.
    entries = [
        (np.repeat(np.arange(num_rows), sizes), np.arange(num_columns), np.ones(num_columns))
    ]
    lower_rows, upper_rows = [np.ones(num_rows)], [np.ones(num_rows)]

    known: dict[tuple[int, ...], _Block] = {}
    for transfer in filter(lambda candidate: candidate.uses, problem.transfers):
        arrays = transfer.cost, transfer.memory, transfer.source
        key = tuple(map(id, (*arrays, *[use.layout for use in transfer.uses])))
        if key not in known:
            known[key] = _block_of(transfer)
        block = known[key]

        ends = [transfer.producer, *[use.choice for use in transfer.uses]]
        starts = np.array([num_columns, *first[ends]])
        entries.append((block.row + num_rows, block.column + starts[block.start], block.value))
        seconds.append(block.seconds)
        num_bytes.append(block.num_bytes)
        upper.append(block.upper)
        lower_rows.append(block.row_lower)
        upper_rows.append(block.row_upper)
        num_columns += len(block.seconds)
        num_rows += len(block.row_lower)

    every_byte = np.concatenate(num_bytes)
    if np.isfinite(problem.memory_limit):
        # HiGHS takes 1e-7 for zero: bytes come in units that give the row the objective's size.
        scale = max(problem.memory_limit, float(every_byte.max()), 1.0) / TARGET_OBJECTIVE
        heavy = np.flatnonzero(every_byte)
        entries.append((np.full(len(heavy), num_rows), heavy, every_byte[heavy] / scale))
        lower_rows.append(np.array([-np.inf]))
        upper_rows.append(np.array([problem.memory_limit / scale]))

    row, column, value = _in_order(entries, num_columns)
    unit = _unit(problem)
    return LinearProgram(
        cost=np.concatenate(seconds) / unit,
        upper=np.concatenate(upper),
        row=row,
        column=column,
        value=value,
        row_lower=np.concatenate(lower_rows),
        row_upper=np.concatenate(upper_rows),
        first=first,
        seconds_per_unit=unit,
    )


@dataclass(frozen=True)
class _Block:
    """The columns, rows and non-zero entries of a transfer, at any position in a program."""

    # [column] of the block: z of what several uses share, then w of each use.
    seconds: np.ndarray
    num_bytes: np.ndarray
    upper: np.ndarray

    # [entry] index of the row in the block.
    row: np.ndarray

    # [row]
    row_lower: np.ndarray
    row_upper: np.ndarray

    # [entry] what `column` counts from: the block's columns (0), the producer's strategies (1), or
    # those of use i (2 + i).
    start: np.ndarray

    # [entry]
    column: np.ndarray

    # [entry]
    value: np.ndarray


class _Entries:
    """Collects a block's rows and their non-zeros."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.row_upper: list[np.ndarray] = []
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def reserve(self, num: int, upper: float) -> np.ndarray:
        """Return the numbers of `num` new rows between 0 and `upper`."""
        rows = np.arange(self.num_rows, self.num_rows + num)
        self.num_rows += num
        self.row_upper.append(np.full(num, upper))
        return rows

    def put(self, rows: np.ndarray, start: int, columns: np.ndarray, value: float) -> None:
        """Add non-zeros of one value."""
        starts = np.full(len(rows), start)
        self.parts.append((rows, starts, columns, np.full(len(rows), value)))


class _Columns:
    """Collects a block's columns."""

    def __init__(self) -> None:
        self.num = 0
        self.seconds: list[np.ndarray] = []
        self.num_bytes: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []

    def add(self, seconds: np.ndarray, num_bytes: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """Add columns between 0 and `upper`, and return their numbers. All arrays: [column]."""
        columns = np.arange(self.num, self.num + len(seconds))
        self.num += len(seconds)
        self.seconds.append(seconds)
        self.num_bytes.append(num_bytes)
        self.upper.append(upper)
        return columns


def _block_of(transfer: Transfer) -> _Block:
    """Return the columns w of each use and z of what several uses share, and the rows between
    them.
    """
    columns = _Columns()
    entries = _Entries()
    is_shared = len(transfer.uses) > 1
    # [source, target]: the column of z, -1 if that resharding is free or forbidden.
    shared = np.full(np.shape(transfer.cost), -1)
    if is_shared:
        _add_shared_columns(columns, transfer, shared)
    for number in range(len(transfer.uses)):
        _add_use(columns, entries, transfer, number, shared if is_shared else None)

    row, start, column, value = (np.concatenate(x) for x in zip(*entries.parts, strict=True))
    return _Block(
        seconds=np.concatenate(columns.seconds),
        num_bytes=np.concatenate(columns.num_bytes),
        upper=np.concatenate(columns.upper),
        row=row,
        row_lower=np.zeros(entries.num_rows),
        row_upper=np.concatenate(entries.row_upper),
        start=start,
        column=column,
        value=value,
    )


def _add_shared_columns(columns: _Columns, transfer: Transfer, shared: np.ndarray) -> None:
    """Add z[p, q] of every resharding that costs something: it is paid once for all uses.

    Args:
        shared: [source, target], gets the numbers of the columns.
    """
    cost = np.asarray(transfer.cost, float)
    memory = np.asarray(transfer.memory, float)
    p, q = np.nonzero(((cost != 0) | (memory != 0)) & np.isfinite(cost))
    seconds = cost[p, q]
    num_bytes = memory[p, q]
    # No solution takes a column with a cost more than once. It would take a credit.
    is_cost = (seconds >= 0) & (num_bytes >= 0)
    shared[p, q] = columns.add(seconds, num_bytes, np.where(is_cost, np.inf, 1.0))


def _add_use(
    columns: _Columns,
    entries: _Entries,
    transfer: Transfer,
    number: int,
    shared: np.ndarray | None,
) -> None:
    """Add w[p, q]: use `number` of a transfer gets the value from source p in target q.

    Args:
        columns, entries: get the block's columns and rows.
        shared: [source, target] columns of z, which have the cost; None if no other use shares it.
    """
    cost = np.asarray(transfer.cost, float)
    memory = np.asarray(transfer.memory, float)
    source = np.asarray(transfer.source)
    layout = np.asarray(transfer.uses[number].layout)
    is_target = np.zeros(cost.shape[1], dtype=bool)
    is_target[layout] = True
    p, q = np.nonzero(np.isfinite(cost) & is_target)

    # The sums below bound w.
    unbounded = np.full(len(p), np.inf)
    if shared is None:
        w = columns.add(cost[p, q], memory[p, q], unbounded)
    else:
        w = columns.add(np.zeros(len(p)), np.zeros(len(p)), unbounded)

    # Sums of w over q are the producer's choice, sums over p the consumer's.
    out = entries.reserve(cost.shape[0], 0.0)
    entries.put(out[p], 0, w, 1.0)
    entries.put(out[source], 1, np.arange(len(source)), -1.0)
    into = np.full(cost.shape[1], -1)
    into[is_target] = entries.reserve(int(is_target.sum()), 0.0)
    entries.put(into[q], 0, w, 1.0)
    entries.put(into[layout], 2 + number, np.arange(len(layout)), -1.0)

    if shared is not None:
        # z[p, q] >= w[p, q] of every use.
        is_linked = shared[p, q] >= 0
        at_least = entries.reserve(int(is_linked.sum()), np.inf)
        entries.put(at_least, 0, shared[p, q][is_linked], 1.0)
        entries.put(at_least, 0, w[is_linked], -1.0)


def _in_order(
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]], num_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and values of all non-zeros, row by row and in each row by column.
    Several for one place are added up.

    Args:
        entries: (rows, columns, values) of blocks.
        num_columns: of the program.
    """
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    place = row * num_columns + column
    order = place.argsort(kind="stable")
    place, value = place[order], value[order]
    is_new = np.concatenate([[True], place[1:] != place[:-1]])
    if not is_new.all():
        # One choice can stand at both ends of a transfer: its entries in a row are added up.
        value = np.add.reduceat(value, np.flatnonzero(is_new))
        place = place[is_new]
    return place // num_columns, place % num_columns, value


def num_columns(problem: Problem) -> int:
    """Return about how many columns the program of a problem has, without building it."""
    transfers = sum(t.cost.size * (len(t.uses) + (len(t.uses) > 1)) for t in problem.transfers)
    return transfers + sum(len(choice.cost) for choice in problem.choices)


def _unit(problem: Problem) -> float:
    """Return the seconds per unit of the scaled objective: a total of medians, of the optimum's
    order of size.
    """
    medians: dict[int, float] = {}

    def median(cost: np.ndarray) -> float:
        """Return the median of the finite costs, computed once for arrays that are one object."""
        if id(cost) not in medians:
            finite = np.sort(cost[np.isfinite(cost)], axis=None)
            middle = finite[(len(finite) - 1) // 2 : len(finite) // 2 + 1]
            medians[id(cost)] = float(middle.sum()) / max(len(middle), 1)
        return medians[id(cost)]

    total = sum(median(choice.cost) for choice in problem.choices)
    total += sum(median(transfer.cost) for transfer in problem.transfers)
    return total / TARGET_OBJECTIVE if total > 0 else 1.0
