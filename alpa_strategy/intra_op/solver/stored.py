"""`solve`, whose results are stored while planning: see `partial_results.py`.

The key is the full problem, so a stored solution is right whatever graph, cluster and costs the
problem was made from. It is evaluated again when it is read.
"""

import math

import numpy as np

from alpa_strategy.files import BadFileError
from alpa_strategy.intra_op.problem import Problem, Solution, evaluate
from alpa_strategy.intra_op.solver.solve import PROVED, NoCheaperSolution, solve
from alpa_strategy.partial_results import Key, PartialResults, Record

# Equal up to the order of a sum: the stored numbers are those of the same assignment.
SAME = 1e-9

Outcome = Solution | NoCheaperSolution


def solve_stored(
    results: PartialResults,
    problem: Problem,
    time_limit: float = 60.0,
    cutoff: float = math.inf,
    unlimited: Solution | None = None,
    tolerance: float = PROVED,
) -> Solution:
    """Return the result of `solve`, or the one that an interrupted planning stored for equal
    arguments.

    Args:
        results: of the planning, which stores the result. The others are those of `solve`.

    Raises:
        NoCheaperSolution, PlanError: as `solve`.
    """

    def key() -> Key:
        return problem_key(problem, time_limit, cutoff, unlimited, tolerance)

    def compute() -> Outcome:
        try:
            return solve(problem, time_limit, cutoff, unlimited, tolerance)
        except NoCheaperSolution as error:
            # Its frames hold tables.
            return error.with_traceback(None)

    def decode(record: Record) -> Outcome:
        return _outcome(problem, record)

    outcome = results.get("solution", key, compute, _record, decode)
    if isinstance(outcome, Solution):
        return outcome
    raise outcome


def problem_key(problem: Problem, *arguments: object) -> Key:
    """Return the hash of a problem and of all else that a result depends on."""
    key = Key(problem.memory_limit, *arguments)
    for choice in problem.choices:
        key.add(choice.name)
        key.add_array(choice.cost)
        key.add_array(choice.memory)
    for transfer in problem.transfers:
        key.add(transfer.name, transfer.producer, [use.choice for use in transfer.uses])
        key.add_array(transfer.source)
        key.add_array(transfer.cost)
        key.add_array(transfer.memory)
        for use in transfer.uses:
            key.add_array(use.layout)
    return key


def _record(outcome: Outcome) -> Record:
    """Return an outcome of the solver as numbers and arrays that can be stored."""
    if isinstance(outcome, NoCheaperSolution):
        return {"is_cheaper": False}
    return {
        "assignment": np.array(outcome.assignment, dtype=int),
        "numbers": np.array([outcome.seconds, outcome.num_bytes, outcome.bound], dtype=float),
        "method": outcome.method,
    }


def _outcome(problem: Problem, record: Record) -> Outcome:
    """Return the outcome that a record describes; the inverse of `_record`.

    Raises:
        BadFileError, KeyError, TypeError, ValueError: it is no outcome of this problem.
    """
    if "is_cheaper" in record:
        return NoCheaperSolution()

    assignment = tuple(record["assignment"].tolist())
    sizes = [len(choice.cost) for choice in problem.choices]
    if len(assignment) != len(sizes):
        raise BadFileError(f"it assigns {len(assignment)} strategies to {len(sizes)} choices")
    if not all(0 <= taken < size for taken, size in zip(assignment, sizes, strict=True)):
        raise BadFileError("it names a strategy that there is not")

    seconds, num_bytes, bound = record["numbers"].tolist()
    for stored, actual in zip((seconds, num_bytes), evaluate(problem, assignment), strict=True):
        if not math.isclose(stored, actual, rel_tol=SAME, abs_tol=SAME):
            raise BadFileError(f"its assignment gives {actual:g}, not {stored:g}")
    if num_bytes > problem.memory_limit or not bound <= seconds:
        raise BadFileError("it does not fit, or is below its own bound")
    return Solution(assignment, seconds, num_bytes, bound, str(record["method"]))
