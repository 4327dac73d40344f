"""Elimination of problems that are too entangled for it, by a relaxation that is mostly exact.

Several ops may read one resharded value, which is paid once. Its costs are a table over all of
their strategies, and few such tables entangle a step: the cosines and sines of rotary embeddings
tie the queries and keys of all layers together. In the relaxation each use of such a value pays an
equal share of what its own layout costs. A layout that k of n uses need then costs k/n of what it
costs in the problem, so that the minimum is a lower bound. It is the problem's own minimum if the
assignment costs as much there: if all uses need the same layout, or one that costs nothing.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from alpa_strategy.intra_op.problem import Problem, Transfer
from alpa_strategy.intra_op.solver.elimination import (
    Network,
    Order,
    eliminate,
    network_of,
    plan_order,
)

# Most entries of one table, and of all of them without the sharing among identical layers: tenths
# of a second, and where these are too few seconds. Tables are added up in blocks, never stored.
LIMITS = ((40_000_000, 300_000_000), (300_000_000, 10_000_000_000))


def minima_in_shares(problem: Problem) -> Iterator[tuple[list[int] | None, float]]:
    """Yield relaxations: the assignment of each one's minimum, and a bound in seconds that no
    assignment of the problem is below. The memory limit is not seen.

    First all transfers with several uses are relaxed, which gives the smallest tables. The second
    relaxation has no more of them than tables of a moderate size require, those that cost least.
    (None, infinity) is yielded if every assignment is forbidden, and nothing if tables would be
    too large.
    """
    levels = _levels(problem)
    planned = _planned(problem, levels)
    if planned is None:
        return
    yield _minimum(problem, *planned)

    fewest, most = 0, len(levels)
    while fewest < most:
        middle = (fewest + most) // 2
        attempt = _planned(problem, levels[:middle])
        if attempt is None:
            fewest = middle + 1
        else:
            most, planned = middle, attempt
    if most < len(levels):
        yield _minimum(problem, *planned)


def _minimum(problem: Problem, network: Network, order: Order) -> tuple[list[int] | None, float]:
    """Return the assignment and the minimum of a relaxation; (None, infinity) if it has none."""
    minimum, values = eliminate(network, order.variables)
    bound = float(minimum[0])
    if not np.isfinite(bound):
        return None, np.inf
    return [int(value[0]) for value in values[: len(problem.choices)]], bound


def _levels(problem: Problem) -> list[list[int]]:
    """Return the indices of transfers with several uses, grouped by what they cost at most, the
    cheapest first. Transfers of equal layers are in one group.
    """
    groups: dict[float, list[int]] = {}
    for index, transfer in enumerate(problem.transfers):
        if len(transfer.uses) > 1:
            groups.setdefault(_largest_cost(transfer), []).append(index)
    return [groups[cost] for cost in sorted(groups)]


def _largest_cost(transfer: Transfer) -> float:
    """Return the most that a transfer costs, forbidden ones aside."""
    costs = np.asarray(transfer.cost, dtype=float)
    return float(np.max(costs, where=np.isfinite(costs), initial=0.0))


def _planned(problem: Problem, levels: Collection[list[int]]) -> tuple[Network, Order] | None:
    """Return the network of the problem with the transfers of `levels` relaxed, and the order of
    its elimination; None if its tables would be too large.
    """
    network = network_of(_in_shares(problem, {index for level in levels for index in level}))
    if network is None:
        return None
    for most_a_table, most_in_all in LIMITS:
        order = plan_order(network, most_a_table, most_in_all)
        if order is not None:
            return network, order
    return None


def _in_shares(problem: Problem, relaxed: Collection[int]) -> Problem:
    """Return the problem in which each use of the transfers `relaxed` pays an equal share."""
    transfers: list[Transfer] = []
    # By identity: transfers of equal layers share their tables.
    shares: dict[tuple[int, int], np.ndarray] = {}
    for index, transfer in enumerate(problem.transfers):
        if index not in relaxed:
            transfers.append(transfer)
            continue
        num_uses = len(transfer.uses)
        key = id(transfer.cost), num_uses
        if key not in shares:
            shares[key] = transfer.cost / num_uses
        for use in transfer.uses:
            transfers.append(replace(transfer, uses=(use,), cost=shares[key]))
    return replace(problem, transfers=tuple(transfers))
