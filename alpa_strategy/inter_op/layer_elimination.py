"""Elimination of a layer's choices, also where the layer is too entangled for exact tables.

Several ops may read one resharded value, which is paid once. Its costs are a table over all of
their strategies, and few such tables entangle a layer: the cosines and sines of rotary embeddings
tie the queries to the keys, for a resharding of a few kilobytes. Where tables would be too large,
transfers as small as that are paid by each op that reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer
from alpa_strategy.intra_op.solver.elimination import Network, Order, network_of, plan_order

MAX_TABLE_ENTRIES = 10_000_000
# Of all tables of one price: about a second.
MAX_ENTRIES = 200_000_000
# A small transfer costs at most this share of the layer's largest one.
SMALL_SHARE = 0.01


@dataclass(frozen=True)
class Elimination:
    """A layer's problem at several prices, and the order in which its choices are eliminated."""

    network: Network
    order: Order

    # [price] by how much the minimum may exceed that of the problem in which all is paid once.
    excess: np.ndarray


def plan_elimination(problem: Problem, outer: tuple[int, ...] = ()) -> Elimination | None:
    """Return how to eliminate a layer's choices; None if its tables would be too large. Before
    that, small transfers with several uses are paid by each use, one after the other
    (`Elimination.excess`).

    Args:
        problem: its costs have a leading axis for prices.
        outer: choices that are not eliminated.
    """
    exact = _elimination_of(problem, outer, split=())
    if exact is not None:
        return exact
    small = _small_shared_transfers(problem)
    for num_split in range(1, len(small) + 1):
        elimination = _elimination_of(problem, outer, small[:num_split])
        if elimination is not None:
            return elimination
    return None


def _elimination_of(
    problem: Problem, outer: tuple[int, ...], split: Sequence[int]
) -> Elimination | None:
    """Return how to eliminate the choices if each use of the transfers `split` pays by itself; None
    if tables would be too large.
    """
    network = network_of(_paid_by_each_use(problem, split))
    if network is None:
        return None
    order = plan_order(network, MAX_TABLE_ENTRIES, MAX_ENTRIES, outer)
    if order is None:
        return None
    return Elimination(network, order, _excess(problem, split))


def _largest_costs(transfer: Transfer) -> np.ndarray:
    """Return [price] the most that a transfer costs, forbidden ones aside."""
    costs = np.asarray(transfer.cost, dtype=float)
    return np.max(costs, axis=(-2, -1), where=np.isfinite(costs), initial=0.0)


def _small_shared_transfers(problem: Problem) -> list[int]:
    """Return the indices of the small transfers with several uses, the smallest first: none of
    their costs is more than `SMALL_SHARE` of the largest of all transfers.
    """
    largest = [_largest_costs(transfer) for transfer in problem.transfers]
    if not largest:
        return []
    limit = SMALL_SHARE * np.max(largest, axis=0)
    small = []
    for index, transfer in enumerate(problem.transfers):
        if len(transfer.uses) > 1 and (largest[index] <= limit).all():
            small.append(index)
    return sorted(small, key=lambda index: (float(largest[index].max()), index))


def _paid_by_each_use(problem: Problem, split: Sequence[int]) -> Problem:
    """Return the problem in which each use of the transfers `split` pays by itself."""
    if not split:
        return problem
    transfers: list[Transfer] = []
    for index, transfer in enumerate(problem.transfers):
        if index in split:
            transfers += [replace(transfer, uses=(use,)) for use in transfer.uses]
        else:
            transfers.append(transfer)
    return replace(problem, transfers=tuple(transfers))


def _excess(problem: Problem, split: Sequence[int]) -> np.ndarray:
    """Return [price] the most that is paid twice if each use of `split` pays by itself."""
    num_prices = len(problem.choices[0].cost)
    excess = np.zeros(num_prices)
    for index in split:
        transfer = problem.transfers[index]
        excess += (len(transfer.uses) - 1) * _largest_costs(transfer)
    return excess
