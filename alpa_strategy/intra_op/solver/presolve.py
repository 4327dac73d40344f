"""A problem with fewer strategies, as many as it is worth to look at: without those that are forbidden, or too dear.

Layouts that nobody names any more go with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use


@dataclass(frozen=True)
class Presolved:
    """A smaller problem; `kept[c][k]` is the original strategy behind strategy k of choice c."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def expand(self, assignment: Sequence[int]) -> list[int]:
        """An assignment of the smaller problem in the original's strategy indices."""
        return [int(kept[k]) for kept, k in zip(self.kept, assignment, strict=True)]

    def contract(self, assignment: Sequence[int]) -> list[int] | None:
        """An assignment of the original in this problem's indices; None where it takes a strategy that was dropped."""
        places = [np.flatnonzero(kept == k) for kept, k in zip(self.kept, assignment, strict=True)]
        return [int(place[0]) for place in places] if all(map(len, places)) else None

    def restrict(self, live: Sequence[np.ndarray]) -> Presolved:
        """Keep only the strategies `live[c]` (sorted indices) of every choice."""
        kept = tuple(old[new] for old, new in zip(self.kept, live, strict=True))
        return Presolved(restrict(self.problem, live), kept)


def presolve(problem: Problem) -> Presolved:
    """Without forbidden strategies. A choice that is left with none means that no assignment has a finite cost.

    Fast where equal arrays are one object (`with_shared_arrays`).
    """
    finite = {id(x.cost): np.flatnonzero(np.isfinite(x.cost)) for x in problem.choices}
    live = tuple(finite[id(choice.cost)] for choice in problem.choices)
    return Presolved(restrict(problem, live), live)


def restrict(problem: Problem, live: Sequence[np.ndarray]) -> Problem:
    """The problem with only the strategies `live[c]`, and transfers with only the layouts that these still name.

    What shares its arrays shares them afterwards.
    """
    columns: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}  # by the arrays' ids
    tables: dict[tuple[int, ...], _Restricted | None] = {}
    choices, transfers = [], []
    for x, k in zip(problem.choices, live, strict=True):
        key = id(x.cost), id(x.memory), id(k)
        if key not in columns:
            columns[key] = np.asarray(x.cost, float)[k], np.asarray(x.memory, float)[k]
        choices.append(Choice(x.name, *columns[key]))
    for t in problem.transfers:
        ends = (t.source, live[t.producer], *(array for use in t.uses for array in (use.layout, live[use.choice])))
        ids = id(t.cost), id(t.memory), *map(id, ends)
        if ids not in tables:
            tables[ids] = _restrict_transfer(t, live)
        if (table := tables[ids]) is not None:
            source, layouts, cost, memory = table
            uses = tuple(Use(use.choice, layout) for use, layout in zip(t.uses, layouts, strict=True))
            transfers.append(Transfer(t.name, t.producer, source, uses, cost, memory))
    return replace(problem, choices=tuple(choices), transfers=tuple(transfers))


_Restricted = tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]


def _restrict_transfer(transfer: Transfer, live: Sequence[np.ndarray]) -> _Restricted | None:
    """Its (source, layouts of the uses, cost, memory); None where nothing is paid any more."""
    sources, source = np.unique(np.asarray(transfer.source)[live[transfer.producer]], return_inverse=True)
    asked = [np.asarray(use.layout)[live[use.choice]] for use in transfer.uses]
    targets = np.unique(np.concatenate(asked)) if asked else np.zeros(0, dtype=int)
    cost = np.asarray(transfer.cost, float)[np.ix_(sources, targets)]
    memory = np.asarray(transfer.memory, float)[np.ix_(sources, targets)]
    if not cost.any() and not memory.any():
        return None
    return source, [np.searchsorted(targets, layout) for layout in asked], cost, memory
