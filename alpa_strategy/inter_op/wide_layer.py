"""Layers too entangled for tables (a scan over time: every step reads the same few values), priced by assignments.

The ILP's solver gives an assignment with both ends free (one for every layout at an end takes it half a minute); from
the best of them each pair of ends is reached by changing one choice at a time. As elsewhere, a run is never priced
below its optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.many_assignments import ManyAssignments
from alpa_strategy.intra_op.problem import Problem
from alpa_strategy.intra_op.solve import solve

SECONDS_PER_SOLVE = 5.0

Pairs = tuple[np.ndarray, list[np.ndarray]]  # [p, q] objective, per choice [p, q] what it takes


def price_pairs(problems: Sequence[Problem], ends: tuple[int, int]) -> list[Pairs]:
    """For every problem, an assignment for each pair of values of the two choices `ends`, and its objective.

    The problems are one problem at several prices of memory; `inf` where nothing was found.
    """
    starts = _starts(problems)
    return [_pairs(problem, ends, starts) for problem in problems]


def _starts(problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """Good assignments at the lowest and the highest price of memory, both ends free."""
    found: dict[tuple[int, ...], None] = {}
    for problem in (problems[0], problems[-1])[: len(problems)]:
        try:
            found.setdefault(solve(problem, SECONDS_PER_SOLVE).assignment)
        except PlanError:  # impossible whatever the ends
            continue
    return list(found)


def _pairs(problem: Problem, ends: tuple[int, int], starts: Sequence[tuple[int, ...]]) -> Pairs:
    shape = tuple(len(problem.choices[end].cost) for end in ends)
    if not starts:
        return np.full(shape, np.inf), [np.zeros(shape, dtype=int) for _ in problem.choices]
    at = [index.ravel() for index in np.indices(shape)]
    many = ManyAssignments(problem)
    moved = np.tile(np.array(starts)[:, None], (1, len(at[0]), 1))  # [start, pair, choice]
    for end, index in zip(ends, at, strict=True):
        moved[:, :, end] = index
    best = np.stack([many.seconds(each) for each in moved]).argmin(axis=0)
    found = many.descend(moved[best, np.arange(len(best))], fixed=ends)
    return many.seconds(found).reshape(shape), [column.reshape(shape) for column in found.T]
