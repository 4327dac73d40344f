"""Layers too entangled for tables (a scan over time: every step reads the same few values), priced by assignments.

The ILP's solver gives an assignment with both ends free (one for every layout at an end takes it half a minute); from
the best of them each pair of ends is reached by changing one choice at a time. As elsewhere, a run is never priced
below its optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.local_search import descend
from alpa_strategy.intra_op.problem import Problem, evaluate
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
    objective = np.full(shape, np.inf)
    values = [np.zeros(shape, dtype=int) for _ in problem.choices]
    for pair in itertools.product(*map(range, shape)):
        at = dict(zip(ends, pair, strict=True))
        fixed = _fixed(problem, at)
        moved = [[at.get(c, value) for c, value in enumerate(start)] for start in starts]
        if not moved:
            continue
        best = descend(fixed, min(moved, key=lambda a: evaluate(fixed, a)[0]))
        objective[pair] = evaluate(fixed, best)[0]
        for c, value in enumerate(best):
            values[c][pair] = value
    return objective, values


def _fixed(problem: Problem, values: dict[int, int]) -> Problem:
    """The problem with some choices made."""
    choices = list(problem.choices)
    for c, value in values.items():
        cost = np.full(len(choices[c].cost), np.inf)
        cost[value] = choices[c].cost[value]
        choices[c] = replace(choices[c], cost=cost)
    return replace(problem, choices=tuple(choices))
