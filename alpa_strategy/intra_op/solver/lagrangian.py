"""The memory limit as a price: min over x of seconds(x) + price * (bytes(x) - limit) is a lower
bound, price >= 0.

The best price is found by the secant method on the lower hull of (bytes, seconds) points (exact
after a few eliminations); the two assignments that meet there are spliced into one that fits the
limit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.intra_op.problem import Choice, Problem, Solution, Transfer, evaluate

HULL = (
    3e-5  # relative distance from the best possible bound at which the search for the price stops
)
MAX_PRICES = 25
MAX_SWEEPS = 20


@dataclass(frozen=True)
class Dual:
    """The best price (seconds per byte), its bound (seconds), and the hull's points on both sides
    of the limit.
    """

    price: float
    bound: float
    over: Solution
    under: Solution


def point(problem: Problem, assignment: Sequence[int]) -> Solution:
    """Return an assignment with its seconds and bytes; nothing is proved of it."""
    return Solution(tuple(assignment), *evaluate(problem, assignment), -np.inf, "lagrangian")


def price_memory(problem: Problem, price: float, seconds_weight: float = 1.0) -> Problem:
    """Return the problem without a memory limit whose objective is seconds_weight * seconds + price
    * bytes; equal arrays stay shared.
    """
    shared: dict[tuple[int, int], np.ndarray] = {}

    def priced(cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        key = (id(cost), id(memory))
        if key not in shared:
            base = np.where(
                np.isfinite(cost), seconds_weight * np.where(np.isfinite(cost), cost, 0.0), np.inf
            )
            shared[key] = base + price * memory
        return shared[key]

    def free(memory: np.ndarray) -> np.ndarray:
        return shared.setdefault((id(memory), 0), np.zeros(np.shape(memory)))

    choices = tuple(
        Choice(x.name, priced(x.cost, x.memory), free(x.memory)) for x in problem.choices
    )
    transfers = tuple(
        Transfer(t.name, t.producer, t.source, t.uses, priced(t.cost, t.memory), free(t.memory))
        for t in problem.transfers
    )
    return Problem(choices, transfers)


def best_price(
    problem: Problem,
    minimise: Callable[[float], tuple[Sequence[int] | None, float] | None],
    over: Solution,
    under: Solution,
    deadline: float,
) -> Dual:
    """Maximise the lower bound of the seconds over prices of memory.

    Args:
        problem: with a finite memory limit.
        minimise: price -> (assignment, lower bound of seconds + price * bytes); None if it cannot
            decide.
        over: the optimum at price 0 (above the limit).
        under: any assignment within the limit.
        deadline: time.process_time() at which to stop.
    """
    limit = problem.memory_limit
    best = Dual(0.0, over.seconds, over, under)
    for _ in range(MAX_PRICES):
        # The slope of the hull between the two points: at this price they cost the same.
        price = (under.seconds - over.seconds) / (over.num_bytes - under.num_bytes)
        if price <= 0 or time.process_time() > deadline:
            break
        minimum = minimise(price)
        if minimum is None:
            break
        assignment, value = minimum
        if assignment is None:
            break
        new = point(problem, assignment)
        line = over.seconds + price * over.num_bytes
        if value - price * limit > best.bound:
            best = Dual(price, value - price * limit, over, under)
        # Where the line meets the limit no price can do better.
        if value >= line - HULL * abs(line - price * limit):
            break
        if new.num_bytes > limit:
            over = new
        else:
            under = new
    return Dual(best.price, best.bound, over, under)


def splice(
    problem: Problem, over: Solution, under: Solution, near: "Neighbourhood"
) -> tuple[Solution, list[int]]:
    """Return the first choices (in the order of the graph) of one point and the last of the other,
    as many of `over` as fit, improved by single moves; never slower than `under`. Also return all
    choices, those next to the joint first.

    Args:
        over: a point above the memory limit.
        under: one within it.
        near: of the problem.

    In a deep model of equal layers the two points differ in every layer and are connected
    throughout, so that no group of choices can be exchanged alone. But a run of layers can, and
    pays for resharding once, at its end.
    """
    order = _graph_order(problem)
    best = under
    joint = len(order) // 2
    for first, last in ((under, over), (over, under)):
        taking_first_fits_more = first is under

        def at(count: int, first: Solution = first, last: Solution = last) -> Solution:
            assignment = list(last.assignment)
            for c in order[:count]:
                assignment[c] = first.assignment[c]
            return point(problem, assignment)

        # Bytes fall (or rise) with `count`, but for the joint: bisect.
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            if (at(middle).num_bytes <= problem.memory_limit) == taking_first_fits_more:
                high = middle
            else:
                low = middle
        for count in (low, high):
            spliced = at(count)
            if spliced.num_bytes <= problem.memory_limit and spliced.seconds < best.seconds:
                best = spliced
                joint = count
    places = sorted(range(len(order)), key=lambda place: abs(place - joint))
    by_distance = [order[place] for place in places]
    return point(problem, improve(problem, best.assignment, near)), by_distance


def _graph_order(problem: Problem) -> list[int]:
    """Return the choices by their position in the graph: consumers are in order already, inputs go
    with their first consumer.
    """
    consumes: set[int] = set()
    first_use: dict[int, int] = {}
    for transfer in problem.transfers:
        consumes.update(use.choice for use in transfer.uses)
        first = min(use.choice for use in transfer.uses)
        first_use[transfer.producer] = min(first, first_use.get(transfer.producer, first))
    place: dict[int, int] = {}
    for choice in range(len(problem.choices)):
        place[choice] = choice if choice in consumes else first_use.get(choice, choice)
    return sorted(place, key=place.__getitem__)


# --- Coordinate descent on an assignment: from a rounded relaxation to a good incumbent within the
# memory limit.


class Neighbourhood:
    """Seconds and bytes of every strategy of one choice while all others stay."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.incident: list[list[Transfer]] = [[] for _ in problem.choices]
        for transfer in problem.transfers:
            for c in {transfer.producer, *(use.choice for use in transfer.uses)}:
                self.incident[c].append(transfer)

    def totals(self, assignment: Sequence[int], c: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds [k], bytes [k]) of choice c and its transfers, with strategy k in place
        of the present one.
        """
        choice = self.problem.choices[c]
        seconds, num_bytes = np.array(choice.cost, float), np.array(choice.memory, float)
        strategies = np.arange(len(seconds))
        for transfer in self.incident[c]:
            of_producer = strategies if transfer.producer == c else assignment[transfer.producer]
            source = np.broadcast_to(transfer.source[of_producer], strategies.shape)
            used = np.zeros((len(strategies), transfer.cost.shape[1]), dtype=bool)
            for use in transfer.uses:
                used[
                    strategies,
                    use.layout if use.choice == c else use.layout[assignment[use.choice]],
                ] = True
            rows, columns = np.nonzero(used)
            seconds += np.bincount(
                rows, weights=transfer.cost[source[rows], columns], minlength=len(seconds)
            )
            num_bytes += np.bincount(
                rows, weights=transfer.memory[source[rows], columns], minlength=len(seconds)
            )
        return seconds, num_bytes


def repair(problem: Problem, assignment: Sequence[int], near: Neighbourhood) -> list[int] | None:
    """Bring an assignment under the memory limit by the cheapest moves per byte, and improve it
    within the limit. A move changes one choice.

    Args:
        near: of the problem.

    Returns:
        A new assignment; None if single moves do not suffice.
    """
    current = list(assignment)
    if not np.isfinite(evaluate(problem, current)[0]):
        current = improve(replace(problem, memory_limit=np.inf), current, near)
        if not np.isfinite(evaluate(problem, current)[0]):
            return None
    for _ in range(4 * len(current) + 1):
        excess = evaluate(problem, current)[1] - problem.memory_limit
        if excess <= 0:
            return improve(problem, current, near)
        moves = []
        for c, taken in enumerate(current):
            s, b = near.totals(current, c)
            useful = (b < b[taken]) & np.isfinite(s)
            # Seconds for each byte of the excess that a move takes away.
            rate = np.full(len(s), np.inf)
            rate[useful] = (s[useful] - s[taken]) / np.minimum(b[taken] - b[useful], excess)
            moves.append((float(rate.min()), c, int(rate.argmin())))
        least, c, k = min(moves)
        if least == np.inf:
            return None
        current[c] = k
    return None


def improve(problem: Problem, assignment: Sequence[int], near: Neighbourhood) -> list[int]:
    """Return an assignment after changing one choice at a time while the seconds fall, within the
    memory limit, in at most `MAX_SWEEPS` sweeps over all choices. A copy of `assignment` if the
    result does not fit. Forbidden transfers are expensive.
    """
    current = list(assignment)
    for _ in range(MAX_SWEEPS):
        moved = False
        headroom = problem.memory_limit - evaluate(problem, current)[1]
        for c in range(len(current)):
            if len(problem.choices[c].cost) == 1:
                continue
            s, b = near.totals(current, c)
            fits = np.where(b - b[current[c]] <= headroom, s, np.inf)
            k = int(fits.argmin())
            if fits[k] < s[current[c]]:
                headroom -= b[k] - b[current[c]]
                current[c] = k
                moved = True
        if not moved:
            break
    return current if evaluate(problem, current)[1] <= problem.memory_limit else list(assignment)
