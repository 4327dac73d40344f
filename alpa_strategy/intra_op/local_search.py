"""Coordinate descent on an assignment: from a rounded relaxation to a good incumbent, memory as a price or a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer, evaluate


class Neighbourhood:
    """Seconds and bytes of every strategy of one choice while all others stay."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.incident: list[list[Transfer]] = [[] for _ in problem.choices]
        for transfer in problem.transfers:
            for c in {transfer.producer, *(use.choice for use in transfer.uses)}:
                self.incident[c].append(transfer)

    def totals(self, assignment: Sequence[int], c: int) -> tuple[np.ndarray, np.ndarray]:
        """(seconds [k], bytes [k]) of choice c and its transfers, with strategy k in place of the present one."""
        choice = self.problem.choices[c]
        seconds, num_bytes = np.array(choice.cost, float), np.array(choice.memory, float)
        strategies = np.arange(len(seconds))
        for transfer in self.incident[c]:
            at_producer = transfer.producer == c
            source = (
                transfer.source
                if at_producer
                else np.full(len(strategies), transfer.source[assignment[transfer.producer]])
            )
            used = np.zeros((len(strategies), transfer.cost.shape[1]), dtype=bool)
            for use in transfer.uses:
                used[strategies, use.layout if use.choice == c else use.layout[assignment[use.choice]]] = True
            rows, columns = np.nonzero(used)
            seconds += np.bincount(rows, weights=transfer.cost[source[rows], columns], minlength=len(seconds))
            num_bytes += np.bincount(rows, weights=transfer.memory[source[rows], columns], minlength=len(seconds))
        return seconds, num_bytes


def descend(
    problem: Problem,
    assignment: Sequence[int],
    price: float = 0.0,
    max_sweeps: int = 20,
    near: Neighbourhood | None = None,
) -> list[int]:
    """Change one choice at a time while seconds + price * bytes falls (forbidden transfers count as very dear)."""
    near = near or Neighbourhood(problem)
    current = list(assignment)
    for _ in range(max_sweeps):
        moved = False
        for c in range(len(current)):
            if len(problem.choices[c].cost) == 1:
                continue
            seconds, num_bytes = near.totals(current, c)
            total = seconds + price * num_bytes
            best = int(total.argmin())
            if total[best] < total[current[c]]:
                current[c] = best
                moved = True
        if not moved:
            break
    return current


def repair(problem: Problem, assignment: Sequence[int], near: Neighbourhood | None = None) -> list[int] | None:
    """Bring an assignment under the memory limit by the cheapest moves per byte, then improve it within the limit.

    Returns None when single moves do not get there.
    """
    near = near or Neighbourhood(problem)
    current = list(assignment)
    limit = problem.memory_limit
    seconds, num_bytes = evaluate(problem, current)
    if not np.isfinite(seconds):
        current = descend(problem, current, near=near)
        seconds, num_bytes = evaluate(problem, current)
        if not np.isfinite(seconds):
            return None
    for _ in range(4 * len(current)):
        if num_bytes <= limit:
            break
        best: tuple[float, int, int] | None = None
        for c in range(len(current)):
            s, b = near.totals(current, c)
            less = b[current[c]] - b
            useful = (less > 0) & np.isfinite(s)
            if not useful.any():
                continue
            rate = np.where(
                useful, (s - s[current[c]]) / np.where(useful, np.minimum(less, num_bytes - limit), 1.0), np.inf
            )
            k = int(rate.argmin())
            if best is None or rate[k] < best[0]:
                best = (float(rate[k]), c, k)
        if best is None:
            return None
        current[best[1]] = best[2]
        seconds, num_bytes = evaluate(problem, current)
    if num_bytes > limit:
        return None
    return improve(problem, current, near)


def improve(
    problem: Problem, assignment: Sequence[int], near: Neighbourhood | None = None, max_sweeps: int = 20
) -> list[int]:
    """Coordinate descent that never leaves the memory limit (the start must be within it)."""
    near = near or Neighbourhood(problem)
    current = list(assignment)
    for _ in range(max_sweeps):
        moved = False
        room = problem.memory_limit - evaluate(problem, current)[1]
        for c in range(len(current)):
            s, b = near.totals(current, c)
            fits = np.where(b - b[current[c]] <= room, s, np.inf)
            k = int(fits.argmin())
            if fits[k] < s[current[c]]:
                room -= b[k] - b[current[c]]
                current[c] = k
                moved = True
        if not moved:
            break
    return current if evaluate(problem, current)[1] <= problem.memory_limit else list(assignment)
