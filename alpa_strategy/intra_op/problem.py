"""The intra-op problem as the solver sees it: choices, transfers, seconds and bytes. No tensors, no
torch.

    minimise    sum_c cost[c][s_c]  +  sum_t sum_{q used} cost[t][p_t, q]
    subject to  sum_c memory[c][s_c] + sum_t sum_{q used} memory[t][p_t, q] <= memory_limit

where s_c is the strategy taken by choice c, p_t the source layout that the producer of transfer t
gives, and q runs over the *distinct* target layouts that the consumers of t require: a value that
three consumers require in one layout is paid for once (docs/formulas.md#intra-op, the y and z
variables).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Choice:
    """One decision: `cost[k]` seconds and `memory[k]` bytes of strategy k. `inf` cost forbids a
    strategy.
    """

    name: str
    cost: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True)
class Use:
    """A consumer of a transferred value: its strategy k requires the target layout with the index
    `layout[k]`.
    """

    choice: int
    layout: np.ndarray


@dataclass(frozen=True)
class Transfer:
    """One value from its producer to its consumers."""

    name: str

    # Index of the producing choice.
    producer: int

    # `source[k]` is the source layout index that the producer's strategy k gives
    source: np.ndarray
    uses: tuple[Use, ...]

    # Seconds, [num_source_layouts, num_target_layouts]; `inf` if it is impossible.
    cost: np.ndarray

    # Bytes stored for the copy in the target layout, same shape.
    memory: np.ndarray


@dataclass(frozen=True)
class Problem:
    """A problem instance. `memory_limit` is in bytes (inf: none)."""

    choices: tuple[Choice, ...]
    transfers: tuple[Transfer, ...]
    memory_limit: float = float("inf")


@dataclass(frozen=True)
class Solution:
    """An assignment (strategy index per choice) with its objective, and the proved bound."""

    assignment: tuple[int, ...]
    seconds: float
    num_bytes: float

    # A proved lower bound on the objective.
    bound: float

    # How it was found.
    method: str

    @property
    def gap(self) -> float:
        """How much cheaper the optimum may be, as a share of `seconds`."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def with_shared_arrays(problem: Problem) -> Problem:
    """Return the same problem with equal arrays as one object: results for one layer serve all
    equal layers.
    """
    known: dict[tuple, np.ndarray] = {}

    def of(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        return known.setdefault((array.shape, array.dtype.str, array.tobytes()), array)

    choices = tuple(Choice(x.name, of(x.cost), of(x.memory)) for x in problem.choices)
    transfers = []
    for t in problem.transfers:
        uses = tuple(Use(u.choice, of(u.layout)) for u in t.uses)
        transfers.append(Transfer(t.name, t.producer, of(t.source), uses, of(t.cost), of(t.memory)))
    return replace(problem, choices=choices, transfers=tuple(transfers))


def duplicate_strategies(
    problem: Problem,
    again: Mapping[int, np.ndarray],
    seconds: Mapping[int, np.ndarray],
    num_bytes: Mapping[int, np.ndarray] | None = None,
    only: bool = False,
) -> Problem:
    """Return the problem with some strategies of choices repeated after the others.

    Args:
        again: choice -> the strategies that are repeated.
        seconds: choice -> seconds that each of them costs more the second time.
        num_bytes: choice -> bytes of each the second time; None: the same.
        only: repeated strategies are forbidden the first time.
    """

    def longer(index: int, array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, array[again[index]]]) if index in again else array

    choices = list(problem.choices)
    for index, which in again.items():
        choice = choices[index]
        cost = np.concatenate([choice.cost, choice.cost[which] + seconds[index]])
        if only:
            cost[which] = np.inf
        memory = choice.memory[which] if num_bytes is None else num_bytes[index]
        choices[index] = replace(choice, cost=cost, memory=np.concatenate([choice.memory, memory]))
    transfers = []
    for t in problem.transfers:
        uses = tuple(Use(use.choice, longer(use.choice, use.layout)) for use in t.uses)
        transfers.append(replace(t, source=longer(t.producer, t.source), uses=uses))
    return replace(problem, choices=tuple(choices), transfers=tuple(transfers))


def evaluate(problem: Problem, assignment: Sequence[int]) -> tuple[float, float]:
    """Return (seconds, bytes) of an assignment: the objective's definition, independent of any
    solver.
    """
    seconds = num_bytes = 0.0
    for choice, strategy in zip(problem.choices, assignment, strict=True):
        seconds += float(choice.cost[strategy])
        num_bytes += float(choice.memory[strategy])
    for transfer in problem.transfers:
        source = transfer.source[assignment[transfer.producer]]
        for target in {int(use.layout[assignment[use.choice]]) for use in transfer.uses}:
            seconds += float(transfer.cost[source, target])
            num_bytes += float(transfer.memory[source, target])
    return seconds, num_bytes


# --- A problem with fewer strategies, as many as it is worth to look at: without those that are
# forbidden, or too dear.


@dataclass(frozen=True)
class Presolved:
    """A smaller problem; strategy k of choice c is `original[c][k]` of the original."""

    problem: Problem
    original: tuple[np.ndarray, ...]

    def expand(self, assignment: Sequence[int]) -> list[int]:
        """Return an assignment of the smaller problem in the original's strategy indices."""
        pairs = zip(self.original, assignment, strict=True)
        return [int(strategies[k]) for strategies, k in pairs]

    def contract(self, assignment: Sequence[int]) -> list[int] | None:
        """Return an assignment of the original in this problem's indices; None if it has a strategy
        that was dropped.
        """
        pairs = zip(self.original, assignment, strict=True)
        places = [np.flatnonzero(strategies == k) for strategies, k in pairs]
        if not all(map(len, places)):
            return None
        return [int(place[0]) for place in places]

    def restrict(self, live: Sequence[np.ndarray]) -> "Presolved":
        """Keep only the strategies `live[c]` (sorted indices) of every choice."""
        original = tuple(old[new] for old, new in zip(self.original, live, strict=True))
        return Presolved(restrict_strategies(self.problem, live), original)


def presolve(problem: Problem) -> Presolved:
    """Return the problem without forbidden strategies. If a choice is left with none, no assignment
    has a finite cost.

    Fast if equal arrays are one object (`with_shared_arrays`).
    """
    finite = {id(x.cost): np.flatnonzero(np.isfinite(x.cost)) for x in problem.choices}
    live = tuple(finite[id(choice.cost)] for choice in problem.choices)
    return Presolved(restrict_strategies(problem, live), live)


def restrict_strategies(problem: Problem, live: Sequence[np.ndarray]) -> Problem:
    """Return the problem with only the strategies `live[c]` of each choice c, and transfers with
    only the layouts that these still have. Transfers that cost no seconds and no bytes any more are
    left out.

    Costs may have a leading axis for several problems. Choices and transfers that share arrays
    share them in the result.
    """
    # By the arrays' ids.
    columns: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    tables: dict[tuple[int, ...], _Restricted | None] = {}
    choices, transfers = [], []
    for x, k in zip(problem.choices, live, strict=True):
        key = id(x.cost), id(x.memory), id(k)
        if key not in columns:
            columns[key] = np.asarray(x.cost, float)[..., k], np.asarray(x.memory, float)[..., k]
        choices.append(Choice(x.name, *columns[key]))
    for t in problem.transfers:
        ends = (
            t.source,
            live[t.producer],
            *(array for use in t.uses for array in (use.layout, live[use.choice])),
        )
        ids = id(t.cost), id(t.memory), *map(id, ends)
        if ids not in tables:
            tables[ids] = _restrict_transfer(t, live)
        if (table := tables[ids]) is not None:
            source, layouts, cost, memory = table
            uses = tuple(
                Use(use.choice, layout) for use, layout in zip(t.uses, layouts, strict=True)
            )
            transfers.append(Transfer(t.name, t.producer, source, uses, cost, memory))
    return replace(problem, choices=tuple(choices), transfers=tuple(transfers))


_Restricted = tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]


def _restrict_transfer(transfer: Transfer, live: Sequence[np.ndarray]) -> _Restricted | None:
    """Return a transfer's (source, layouts of the uses, cost, memory); None if nothing is paid any
    more.
    """
    sources, source = np.unique(
        np.asarray(transfer.source)[live[transfer.producer]], return_inverse=True
    )
    layouts = [np.asarray(use.layout)[live[use.choice]] for use in transfer.uses]
    targets = np.unique(np.concatenate(layouts)) if layouts else np.zeros(0, dtype=int)
    named = (..., sources[:, None], targets)
    cost = np.asarray(transfer.cost, float)[named]
    memory = np.asarray(transfer.memory, float)[named]
    if not cost.any() and not memory.any():
        return None
    return source, [np.searchsorted(targets, layout) for layout in layouts], cost, memory
