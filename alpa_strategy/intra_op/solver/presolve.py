"""Makes a problem smaller without losing its optimum: forbidden strategies, dominated strategies, unused layouts.

A strategy a is dominated by b when switching from a to b can never cost more seconds (nor, under a memory limit, more
bytes), whatever the other choices do: the switch is bounded transfer by transfer (Goldstein's dead-end elimination).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def presolve(problem: Problem, max_rounds: int = 3, untouched: Collection[int] = ()) -> Presolved:
    """Drop what no optimal assignment needs, whatever the choices `untouched` take, which keep all their strategies.

    Fast where equal arrays are one object (`with_shared_arrays`). With `memory_limit` inf, bytes only break ties. A
    choice that is left with no strategy means that no assignment has a finite cost.
    """
    finite = {id(x.cost): np.flatnonzero(np.isfinite(x.cost)) for x in problem.choices}
    live = [finite[id(choice.cost)] for choice in problem.choices]
    if any(len(strategies) == 0 for strategies in live):
        return Presolved(restrict(problem, live), tuple(live))
    incident: list[list[int]] = [[] for _ in problem.choices]
    for t, transfer in enumerate(problem.transfers):
        for c in set() if not transfer.uses else {transfer.producer, *(use.choice for use in transfer.uses)}:
            incident[c].append(t)
    known: dict[tuple, np.ndarray] = {}  # by what a choice and its neighbours look like: equal layers share it
    touched = set(range(len(live)))
    for _ in range(max_rounds):
        changed: set[int] = set()
        for c in sorted(touched):
            if len(live[c]) <= 1 or c in untouched:
                continue
            key = _signature(problem, c, incident[c], live)
            if key not in known:
                known[key] = _undominated(problem, c, incident[c], live)
            keep = known[key]
            if len(keep) < len(live[c]):
                live[c] = keep
                changed.add(c)
        # Fewer strategies around a choice can make more of its own dominated.
        touched = {
            v
            for c in changed
            for t in incident[c]
            for v in (problem.transfers[t].producer, *(use.choice for use in problem.transfers[t].uses))
        }
        if not touched:
            break
    return Presolved(restrict(problem, live), tuple(live))


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


def _signature(problem: Problem, c: int, incident: Sequence[int], live: Sequence[np.ndarray]) -> tuple:
    """Equal for choices that share the tables around them: identical layers are then worked out once."""
    parts: list[object] = [id(problem.choices[c].cost), id(problem.choices[c].memory), live[c].tobytes()]
    for t in incident:
        transfer = problem.transfers[t]
        parts += [id(transfer.cost), id(transfer.memory), id(transfer.source)]
        parts += [transfer.producer == c, live[transfer.producer].tobytes()]
        for use in transfer.uses:
            parts += [id(use.layout), use.choice == c, live[use.choice].tobytes()]
        parts.append(None)
    return tuple(parts)


def _undominated(problem: Problem, c: int, incident: Sequence[int], live: Sequence[np.ndarray]) -> np.ndarray:
    """The strategies of choice c that no other one dominates. `worse[a, b]`: most that switching a -> b can add."""
    mine = live[c]
    choice = problem.choices[c]
    with np.errstate(invalid="ignore"):
        seconds = _differences(np.asarray(choice.cost, float)[mine])
        num_bytes = _differences(np.asarray(choice.memory, float)[mine])
        for t in incident:
            transfer = problem.transfers[t]
            seconds += _switch(transfer, np.asarray(transfer.cost, float), c, live)
            if transfer.memory.any():
                num_bytes += _switch(transfer, np.asarray(transfer.memory, float), c, live)
    # nan: a -> b leaves one forbidden transfer for another; nothing is known.
    if np.isfinite(problem.memory_limit):
        at_most = (seconds <= 0) & (num_bytes <= 0)
    else:
        at_most = (seconds < 0) | ((seconds <= 0) & (num_bytes <= 0))
        # Strict cycles are impossible; equal seconds with incomparable bytes are kept (harmless).
    earlier = np.arange(len(mine))[None, :] < np.arange(len(mine))[:, None]
    removed = at_most & (~at_most.T | earlier)
    np.fill_diagonal(removed, False)
    return mine[~removed.any(axis=1)]


def _differences(values: np.ndarray) -> np.ndarray:
    return values[None, :] - values[:, None]


def _switch(transfer: Transfer, table: np.ndarray, c: int, live: Sequence[np.ndarray]) -> np.ndarray:
    """Upper bound of what the transfer adds when c switches a -> b, [a, b] over the live strategies of c."""
    total = np.zeros((len(live[c]), len(live[c])))
    sources = np.unique(np.asarray(transfer.source)[live[transfer.producer]])
    if transfer.producer == c:
        targets = np.unique(np.concatenate([np.asarray(u.layout)[live[u.choice]] for u in transfer.uses]))
        rows = table[np.ix_(sources, targets)]
        change = _safe_difference(rows[None, :, :], rows[:, None, :])
        most = min(len(transfer.uses), len(targets))
        top = -np.sort(-change, axis=2)[:, :, :most]
        bound = np.where(top[:, :, 0] <= 0, top[:, :, 0], np.maximum(top, 0).sum(axis=2))
        index = np.searchsorted(sources, np.asarray(transfer.source)[live[c]])
        total += bound[np.ix_(index, index)]
    for use in transfer.uses:
        if use.choice != c:
            continue
        targets, index = np.unique(np.asarray(use.layout)[live[c]], return_inverse=True)
        columns = table[np.ix_(sources, targets)].T
        if len(transfer.uses) == 1:
            bound = _safe_difference(columns[None, :, :], columns[:, None, :]).max(axis=2)
        else:
            # The layout left behind may stay in use by another consumer; the new one may be all new.
            bound = np.broadcast_to(columns.max(axis=1)[None, :], (len(targets), len(targets))).copy()
        np.fill_diagonal(bound, 0.0)
        total += bound[np.ix_(index, index)]
    return total


def _safe_difference(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """new - old where leaving a forbidden transfer is worth -inf, and staying on one changes nothing."""
    difference = new - old
    return np.where(np.isinf(old), np.where(np.isinf(new), 0.0, -np.inf), difference)
