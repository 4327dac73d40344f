"""Coordinate descent on many assignments of one problem side by side: `local_search.descend`, row by row, in numpy.

No memory limit and no price of memory: the caller has put them into the seconds.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer

DEAR = 1e6  # a forbidden transfer, in sums of all others


class ManyAssignments:
    """A problem's tables, read for arrays of assignments [row, choice]."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        costs = [*(x.cost for x in problem.choices), *(t.cost for t in problem.transfers)]
        finite = [cost[np.isfinite(cost)] for cost in costs]
        dear = DEAR * (sum(float(each.max(initial=0.0)) for each in finite) or 1.0)
        self._cost = [np.where(np.isfinite(t.cost), t.cost, dear) for t in problem.transfers]
        self._incident: list[list[int]] = [[] for _ in problem.choices]
        around: list[set[int]] = [set() for _ in problem.choices]
        for index, transfer in enumerate(problem.transfers):
            members = {transfer.producer, *(use.choice for use in transfer.uses)}
            for c in members:
                self._incident[c].append(index)
                around[c] |= members - {c}
        self._around = [sorted(others) for others in around]

    def seconds(self, assignments: np.ndarray) -> np.ndarray:
        """[row]: the objective, as `problem.evaluate` defines it."""
        rows = np.arange(len(assignments))
        total = np.zeros(len(assignments))
        for c, choice in enumerate(self._problem.choices):
            total += choice.cost[assignments[:, c]]
        for transfer in self._problem.transfers:
            source = transfer.source[assignments[:, transfer.producer]]
            asked = np.zeros((len(rows), transfer.cost.shape[1]), dtype=bool)
            for use in transfer.uses:
                asked[rows, use.layout[assignments[:, use.choice]]] = True
            total += np.where(asked, transfer.cost[source], 0.0).sum(axis=1)
        return total

    def descend(self, assignments: np.ndarray, fixed: Collection[int] = (), max_sweeps: int = 20) -> np.ndarray:
        """Change one choice at a time while the seconds fall; those of `fixed` stay."""
        current = assignments.copy()
        free = [c for c, choice in enumerate(self._problem.choices) if c not in fixed and len(choice.cost) > 1]
        stale = np.ones(current.shape, dtype=bool)  # something beside this choice has changed since it was looked at
        for _ in range(max_sweeps):
            for c in free:
                rows = np.flatnonzero(stale[:, c])
                if not rows.size:
                    continue
                stale[rows, c] = False
                total = self._totals(current[rows], c)
                best, each = total.argmin(axis=1), np.arange(len(rows))
                better = total[each, best] < total[each, current[rows, c]]
                current[rows[better], c] = best[better]
                stale[np.ix_(rows[better], self._around[c])] = True
            if not stale[:, free].any():
                break
        return current

    def _totals(self, assignments: np.ndarray, c: int) -> np.ndarray:
        """[row, strategy of c]: seconds of choice c and of its transfers, up to what is the same for all strategies."""
        choice = self._problem.choices[c]
        total = np.tile(np.asarray(choice.cost, dtype=float), (len(assignments), 1))
        for index in self._incident[c]:
            total += self._transfer_totals(assignments, c, self._problem.transfers[index], self._cost[index])
        return total

    def _transfer_totals(self, assignments: np.ndarray, c: int, transfer: Transfer, cost: np.ndarray) -> np.ndarray:
        rows = np.arange(len(assignments))
        asked = np.zeros((len(rows), cost.shape[1]), dtype=bool)  # by the other choices
        for use in transfer.uses:
            if use.choice != c:
                asked[rows, use.layout[assignments[:, use.choice]]] = True
        own = [use.layout for use in transfer.uses if use.choice == c]
        if transfer.producer == c:
            total = (asked @ cost.T)[:, transfer.source]
            source = transfer.source[None, :]
        else:
            total = np.zeros((len(rows), 1))
            source = transfer.source[assignments[:, transfer.producer]][:, None]
        for position, layout in enumerate(own):
            paid = asked[:, layout]
            for earlier in own[:position]:
                paid = paid | (layout == earlier)
            total = total + np.where(paid, 0.0, cost[source, layout])
        return total
