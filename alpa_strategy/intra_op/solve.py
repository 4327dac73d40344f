"""The intra-op solver: presolve, then the cheapest method that proves its answer.

Without a binding memory limit: exact elimination, else the LP relaxation (usually integral), else the MIP. With one:
the LP with the memory row, rounding and local search for an incumbent, then the MIP for what is left of the gap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.elimination import eliminate, network_of, plan_order
from alpa_strategy.intra_op.linear_program import formulate, solve_program
from alpa_strategy.intra_op.local_search import Neighbourhood, descend, repair
from alpa_strategy.intra_op.presolve import Presolved, presolve
from alpa_strategy.intra_op.problem import Choice, Problem, Solution, Transfer, evaluate

PROVED = 1e-6  # relative gap below which an incumbent counts as optimal


@dataclass(frozen=True)
class _Found:
    """A solution of a presolved problem: assignment in its own indices (None: none found), bound in seconds."""

    assignment: list[int] | None
    bound: float
    method: str


def solve(problem: Problem, time_limit: float = 60.0) -> Solution:
    """The cheapest assignment whose bytes are within `problem.memory_limit`.

    Args:
        problem: choices and transfers, seconds and bytes.
        time_limit: seconds after which the best assignment found is returned, with the bound proved so far.

    Raises:
        PlanError: when no assignment has a finite cost, or none fits into the memory limit (the message says the least
            number of bytes that one can reach).
    """
    deadline = time.monotonic() + time_limit
    if not problem.choices:
        return Solution((), 0.0, 0.0, 0.0, "elimination")
    free, found = _solve_free(problem, deadline)
    _, num_bytes = evaluate(problem, free.expand(found.assignment))
    if num_bytes <= problem.memory_limit:
        return _solution(problem, free, found)
    reduced = presolve(problem)
    limited = _solve_limited(reduced.problem, found.bound, deadline)
    if limited.assignment is None:
        raise _too_big(problem, deadline)
    return _solution(problem, reduced, limited)


def _solve_free(problem: Problem, deadline: float) -> tuple[Presolved, _Found]:
    """The optimum without the memory limit."""
    reduced = presolve(replace(problem, memory_limit=float("inf")))
    if any(len(choice.cost) == 0 for choice in reduced.problem.choices):
        raise _forbidden(problem)
    found = _by_elimination(reduced.problem) or _by_program(reduced.problem, deadline)
    if found.assignment is None:
        raise _forbidden(problem)
    return reduced, found


def _by_elimination(problem: Problem) -> _Found | None:
    network = network_of(problem)
    order = plan_order(network) if network else None
    if network is None or order is None:
        return None
    assignment, minimum = eliminate(network, order)
    if not np.isfinite(minimum):
        return _Found(None, minimum, "elimination")
    return _Found(assignment, minimum, "elimination")


def _by_program(problem: Problem, deadline: float) -> _Found:
    """LP relaxation, then the MIP if the relaxation is fractional."""
    program = formulate(problem)
    relaxed = solve_program(program, integer=False, time_limit=deadline - time.monotonic())
    if not relaxed.feasible:
        return _Found(None, np.inf, "lp")
    near = Neighbourhood(problem)
    incumbent = _round(problem, relaxed.mass, near)
    if incumbent is not None and _gap(problem, incumbent, relaxed.bound) <= PROVED:
        return _Found(incumbent, relaxed.bound, "lp")
    left = deadline - time.monotonic()
    if left <= 0.2 and incumbent is not None:
        return _Found(incumbent, relaxed.bound, "lp")
    exact = solve_program(program, integer=True, time_limit=left, hint=incumbent)
    if not exact.feasible:
        return _Found(None, np.inf, "mip")
    candidates = [c for c in (incumbent, _round(problem, exact.mass, near)) if c is not None]
    best = min(candidates, key=lambda c: evaluate(problem, c)[0], default=None)
    return _Found(best, max(relaxed.bound, exact.bound), "mip")


def _solve_limited(problem: Problem, free_bound: float, deadline: float) -> _Found:
    """With the memory limit binding; assignment None when nothing that fits was found."""
    found = _by_program(problem, deadline)
    return replace(found, bound=max(found.bound, free_bound))


def _round(problem: Problem, mass: tuple[np.ndarray, ...] | None, near: Neighbourhood) -> list[int] | None:
    """The best assignment near a (fractional) solution that is finite and within the memory limit."""
    start = [int(m.argmax()) for m in mass] if mass is not None else [int(x.cost.argmin()) for x in problem.choices]
    if not np.isfinite(problem.memory_limit):
        result = descend(problem, start, near=near)
        return result if np.isfinite(evaluate(problem, result)[0]) else None
    return repair(problem, start, near)


def _gap(problem: Problem, assignment: list[int], bound: float) -> float:
    seconds = evaluate(problem, assignment)[0]
    return (seconds - bound) / seconds if seconds > 0 else 0.0


def _solution(problem: Problem, reduced: Presolved, found: _Found) -> Solution:
    assert found.assignment is not None
    assignment = reduced.expand(found.assignment)
    seconds, num_bytes = evaluate(problem, assignment)
    bound = min(found.bound, seconds)
    return Solution(tuple(assignment), seconds, num_bytes, bound, found.method)


def _forbidden(problem: Problem) -> PlanError:
    empty = [choice.name for choice in problem.choices if not np.isfinite(choice.cost).any()]
    which = f" ({', '.join(empty[:5])} has no allowed strategy)" if empty else ""
    return PlanError(
        f"No finite-cost assignment of strategies exists{which}.",
        "Loosen the pinned placements, or allow more layouts for the ops between them.",
    )


def _too_big(problem: Problem, deadline: float) -> PlanError:
    least, exact = least_bytes(problem, max(5.0, deadline - time.monotonic()))
    return PlanError(
        f"The memory limit cannot be met: the least is {'' if exact else 'about '}{_size(least)}"
        f" ({least:.0f} bytes) per device, the limit is {_size(problem.memory_limit)}.",
        "Use more devices, a smaller (micro-)batch, activation checkpointing, or raise the memory limit.",
    )


def least_bytes(problem: Problem, time_limit: float = 60.0) -> tuple[float, bool]:
    """(fewest bytes of any finite-cost assignment, whether that is proved)."""
    choices = tuple(
        Choice(x.name, np.where(np.isfinite(x.cost), x.memory, np.inf), np.zeros(len(x.cost))) for x in problem.choices
    )
    transfers = tuple(
        Transfer(t.name, t.producer, t.source, t.uses, np.where(np.isfinite(t.cost), t.memory, np.inf), 0.0 * t.memory)
        for t in problem.transfers
    )
    swapped = Problem(choices, transfers)
    reduced, found = _solve_free(swapped, time.monotonic() + time_limit)
    least = evaluate(swapped, reduced.expand(found.assignment))[0]
    return least, found.bound >= least * (1 - PROVED)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
