"""A problem's network at any price of memory. The parts that do not depend on the price are
computed once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa_strategy.intra_op.problem import Choice, Presolved, Problem, Transfer, presolve
from alpa_strategy.intra_op.solver.elimination import Network, eliminate, network_of, plan_order


@dataclass(frozen=True)
class PricedProblem:
    """A problem without its memory limit, whose bytes get a price.

    Its arrays are shared among equal layers (`with_shared_arrays`).
    """

    problem: Problem

    @cached_property
    def reduced(self) -> Presolved:
        """Without forbidden strategies; no price forbids or allows any."""
        return presolve(self.problem)

    @cached_property
    def _tables(self) -> tuple[Network, list[int]] | None:
        """The network of seconds and of bytes, as two problems, and the order of elimination for
        both; None if tables would be too large.
        """
        network = network_of(_seconds_and_bytes(self.reduced.problem))
        order = None if network is None else plan_order(network)
        if network is None or order is None:
            return None
        return network, order.variables

    def network(
        self, price: float, seconds_weight: float = 1.0
    ) -> tuple[Network, list[int]] | None:
        """Return the factors of seconds_weight * seconds + price * bytes of `reduced`, and the
        order of elimination; None if tables would be too large.
        """
        if self._tables is None:
            return None

        def priced(table: np.ndarray) -> np.ndarray:
            # Ties variables together, at any price.
            if len(table) == 1:
                return table
            return seconds_weight * table[:1] + price * table[1:]

        network, order = self._tables
        return network.with_tables(priced), order

    def minimise(
        self, price: float, seconds_weight: float = 1.0
    ) -> tuple[list[int] | None, float] | None:
        """Return (the assignment with the least seconds_weight * seconds + price * bytes, that
        minimum); None if tables would be too large.

        The assignment is None if all are forbidden.
        """
        planned = self.network(price, seconds_weight)
        if planned is None:
            return None
        minimum, values = eliminate(*planned)
        if not np.isfinite(minimum[0]):
            return None, float("inf")
        num_choices = len(self.problem.choices)
        assignment = [int(value[0]) for value in values[:num_choices]]
        return self.reduced.expand(assignment), float(minimum[0])


def _seconds_and_bytes(problem: Problem) -> Problem:
    """Return the problem whose costs are [seconds, bytes]; equal arrays stay shared."""
    shared: dict[tuple[int, int], np.ndarray] = {}

    def both(cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        key = (id(cost), id(memory))
        if key not in shared:
            shared[key] = np.stack([cost, memory])
        return shared[key]

    choices = []
    for choice in problem.choices:
        costs = both(choice.cost, choice.memory)
        choices.append(Choice(choice.name, costs, costs))

    transfers = []
    for t in problem.transfers:
        costs = both(t.cost, t.memory)
        transfers.append(Transfer(t.name, t.producer, t.source, t.uses, costs, costs))
    return Problem(tuple(choices), tuple(transfers))
