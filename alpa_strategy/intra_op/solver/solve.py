"""The intra-op solver: presolve, then the cheapest method that proves its answer.

Without a binding memory limit: exact elimination, else that of a relaxation (`shares.py`, mostly
exact), else the LP relaxation (usually integral), else the MIP. With one: the LP with the memory
row, rounding and local search for an incumbent, then the MIP for what is left of the gap.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.intra_op.problem import (
    Presolved,
    Problem,
    Solution,
    evaluate,
    presolve,
    with_shared_arrays,
)
from alpa_strategy.intra_op.solver import lagrangian
from alpa_strategy.intra_op.solver.elimination import (
    eliminate,
    min_marginals,
    network_of,
    plan_order,
)
from alpa_strategy.intra_op.solver.lagrangian import Dual
from alpa_strategy.intra_op.solver.mathopt import Mass, solve_program
from alpa_strategy.intra_op.solver.milp import formulate, num_columns
from alpa_strategy.intra_op.solver.priced import PricedProblem
from alpa_strategy.intra_op.solver.shares import minima_in_shares
from alpa_strategy.options import PROPAGATION
from alpa_strategy.units import format_bytes

# Relative gap below which an incumbent counts as optimal.
PROVED = 1e-6
# Below this gap it is not worth the time to search a large program.
GOOD = 1e-3
# Above this gap even a large program is tried.
POOR = 0.05
# Parts of the gap by which a strategy may exceed the priced minimum to be in the program.
CORES = (
    0.1,
    0.4,
    1.0,
)
# Seconds for one program while the gap is not poor.
PATIENCE = 4.0
# Choices around a splice's joint that are solved together, and the relative gap at which that ends.
WINDOW_CHOICES = 60
WINDOW_GAP = 1e-4
# With less time left, a program of all choices is not begun.
LEAST_SECONDS = 1.0
# A program that is solved to proof in a second or so.
SMALL_COLUMNS = 20_000
# The relaxation of a program of this size takes a few seconds.
MAX_COLUMNS = 150_000


@dataclass(frozen=True)
class Incumbent:
    """A solution of a presolved problem: the assignment in its indices (None: there is none), and a
    bound in seconds.
    """

    assignment: list[int] | None
    bound: float
    method: str


class NoCheaperSolution(Exception):
    """Every assignment costs at least the cutoff that was given."""


def solve(
    problem: Problem,
    time_limit: float = 60.0,
    cutoff: float = float("inf"),
    unlimited: Solution | None = None,
    tolerance: float = PROVED,
) -> Solution:
    """Return the cheapest assignment whose bytes are within `problem.memory_limit`.

    Args:
        time_limit: CPU seconds of this process (so that a busy machine changes no plan) after which
            the best assignment so far is returned, with the bound proved so far.
        cutoff: seconds of an alternative that will be taken unless this is cheaper.
        unlimited: the result of this function for the problem without its memory limit.
        tolerance: the relative gap at which the search ends if memory binds.

    Raises:
        NoCheaperSolution: as soon as it is proved that no assignment is cheaper than `cutoff`.
        PlanError: no assignment has a finite cost, none was found in time, or none fits into the
            memory limit (DoesNotFitError, with the least bytes).
    """
    deadline = time.process_time() + time_limit
    problem = with_shared_arrays(problem)
    if not problem.choices:
        return Solution((), 0.0, 0.0, 0.0, "elimination")
    known = unlimited and Incumbent(list(unlimited.assignment), unlimited.bound, unlimited.method)
    free = known or _minimise(problem, deadline)
    if free.assignment is None:
        raise _forbidden(problem) if np.isposinf(free.bound) else _out_of_time(time_limit)
    if free.bound >= cutoff:
        raise NoCheaperSolution
    if evaluate(problem, free.assignment)[1] <= problem.memory_limit:
        return _solution(problem, free)
    priced = PricedProblem(problem)
    smallest = _least(problem, priced, deadline)
    if smallest.assignment is None:
        raise _out_of_time(time_limit)
    least = lagrangian.point(problem, smallest.assignment)
    if least.num_bytes > problem.memory_limit:
        about = "" if smallest.bound >= least.num_bytes * (1 - PROVED) else "about "
        error = DoesNotFitError(
            f"The memory limit cannot be met: the least is {about}{format_bytes(least.num_bytes)}"
            f" ({least.num_bytes:.0f} bytes) per device, the limit is"
            f" {format_bytes(problem.memory_limit)}.",
            "Use more devices, a smaller (micro-)batch, activation checkpointing, or raise the"
            " memory limit.",
        )
        error.least_bytes = least.num_bytes
        raise error
    solved = _solve_limited(problem, priced, free, least, deadline, cutoff, tolerance)
    return replace(solved, bound=min(solved.bound, solved.seconds))


def propagate(problem: Problem) -> Solution:
    """Return the layouts that follow from op to op, with nothing optimised and no memory limit.

    Each op takes its cheapest strategy for the present layouts of its operands, resharding
    included. A choice that consumes nothing (a parameter, a received value) takes the strategy that
    is cheapest for its first consumer.

    Raises:
        PlanError: an op has no strategy for the layouts of its operands.
    """
    # choice -> transfer -> [k] the layouts that its uses require
    reads_of: dict[int, dict[int, list[np.ndarray]]] = {}
    for index, transfer in enumerate(problem.transfers):
        for use in transfer.uses:
            reads_of.setdefault(use.choice, {}).setdefault(index, []).append(use.layout)

    # 0 for targets that are there already.
    costs = [np.array(transfer.cost) for transfer in problem.transfers]
    taken: dict[int, int] = {}
    for c, reads in sorted(reads_of.items()):
        operands = _operand_costs(problem, c, reads, costs, taken)
        seconds = problem.choices[c].cost + sum(table.min(axis=0) for table in operands.values())
        strategy = int(seconds.argmin())
        taken[c] = strategy
        if np.isinf(seconds[strategy]):
            raise PlanError(
                f"layouts cannot be propagated to {problem.choices[c].name}: it takes none of its"
                " operands as they lie",
                'pin fewer layouts, or use solver="ilp"',
            )
        for producer, table in operands.items():
            taken.setdefault(producer, int(table[:, strategy].argmin()))
        for index, layouts in reads.items():
            targets = [layout[strategy] for layout in layouts]
            costs[index][:, targets] = 0.0

    assignment = []
    for c, choice in enumerate(problem.choices):
        assignment.append(taken.get(c, int(choice.cost.argmin())))
    return Solution(tuple(assignment), *evaluate(problem, assignment), 0.0, PROPAGATION)


def _operand_costs(
    problem: Problem,
    c: int,
    reads: Mapping[int, Sequence[np.ndarray]],
    costs: Sequence[np.ndarray],
    taken: Mapping[int, int],
) -> dict[int, np.ndarray]:
    """Return, per producer of a choice's operands, [producer's strategy, k] the seconds of the
    producer and of resharding.

    A producer that has taken a strategy has one row, without its own seconds.

    Args:
        reads: transfer -> [k] the layouts that the choice's uses require.
        costs: [source, target] of each transfer.
        taken: choice -> strategy.
    """
    strategies = np.arange(len(problem.choices[c].cost))
    operands: dict[int, np.ndarray] = {}
    for index, layouts in reads.items():
        # [k, target]
        is_required = np.zeros((len(strategies), costs[index].shape[1]), dtype=bool)
        for layout in layouts:
            is_required[strategies, layout] = True

        producer = problem.transfers[index].producer
        sources = problem.transfers[index].source
        own_seconds = problem.choices[producer].cost
        if producer in taken:
            sources = sources[[taken[producer]]]
            own_seconds = np.zeros(1)
        # [source, k, target]
        resharding = np.where(is_required, costs[index][sources][:, None], 0.0)
        before = operands.get(producer, own_seconds[:, None])
        operands[producer] = before + resharding.sum(axis=2)
    return operands


def _minimise(problem: Problem, deadline: float) -> Incumbent:
    """Return the optimum without the memory limit. Its assignment is None if every one is forbidden
    (the bound is then inf), or if `deadline`, as of `time.process_time()`, has come.
    """
    reduced = presolve(replace(problem, memory_limit=float("inf")))
    if any(len(choice.cost) == 0 for choice in reduced.problem.choices):
        return Incumbent(None, np.inf, "presolve")
    incumbent = _eliminated(reduced.problem) or _relaxed(reduced.problem, deadline)
    if incumbent.assignment is None:
        return incumbent
    return replace(incumbent, assignment=reduced.expand(incumbent.assignment))


def _eliminated(problem: Problem) -> Incumbent | None:
    """Return the optimum of a problem without a memory limit; None if tables would be too large.
    Its assignment is None if all are forbidden.
    """
    network = network_of(problem)
    order = None if network is None else plan_order(network)
    if network is None or order is None:
        return None
    minimum, values = eliminate(network, order.variables)
    assignment = [int(value[0]) for value in values[: len(problem.choices)]]
    is_possible = bool(np.isfinite(minimum[0]))
    return Incumbent(assignment if is_possible else None, float(minimum[0]), "elimination")


def _relaxed(problem: Problem, deadline: float) -> Incumbent:
    """Return the best assignment that is found until `deadline`, and a lower bound, of a problem
    that is too entangled for exact elimination.

    The assignment is None if none is found, with an infinite bound if all are forbidden.

    Args:
        deadline: as of `time.process_time`.
    """
    best: list[int] | None = None
    best_bound = -np.inf
    for assignment, bound in minima_in_shares(problem):
        if assignment is None:
            return Incumbent(None, np.inf, "elimination")
        best = _best(problem, best, assignment)
        best_bound = max(best_bound, bound)
        incumbent = Incumbent(best, best_bound, "elimination")
        if best is not None and _solution(problem, incumbent).gap <= PROVED:
            return incumbent
    incumbent = Incumbent(best, best_bound, "elimination")
    is_large = num_columns(problem) > MAX_COLUMNS
    if is_large and best is not None and _solution(problem, incumbent).gap <= POOR:
        # The program alone takes a minute to write.
        return incumbent
    solved = _by_program(problem, deadline, best)
    return replace(solved, bound=max(best_bound, solved.bound))


def _or_one(value: float) -> float:
    return value if value else 1.0


def _least(problem: Problem, priced: PricedProblem, deadline: float) -> Incumbent:
    """Return the assignment with the fewest bytes among those of finite cost (ties: fewest
    seconds). Its bound is one of the bytes.

    Args:
        priced: of the problem.
        deadline: time.process_time() at which to stop; the assignment may then be None.
    """
    most_bytes = 0.0
    most_seconds = 0.0
    for choice in problem.choices:
        most_bytes += float(np.max(choice.memory))
        is_allowed = np.isfinite(choice.cost)
        most_seconds += float(np.max(choice.cost, where=is_allowed, initial=0.0))
    # Decides among equals only.
    weight = 1e-9 * _or_one(most_bytes) / _or_one(most_seconds)

    solution = priced.minimise(1.0, weight)
    if solution is not None:
        return Incumbent(*solution, "elimination")
    return _minimise(lagrangian.price_memory(problem, 1.0, seconds_weight=weight), deadline)


def _solve_limited(
    problem: Problem,
    priced: PricedProblem,
    free: Incumbent,
    least: Solution,
    deadline: float,
    cutoff: float,
    tolerance: float,
) -> Solution:
    """Solve a problem whose memory limit binds: price, splice, prune by reduced cost, then solve
    the rest as a MIP.

    Args:
        free: the optimum without the limit, which does not fit.
        least: the assignment with the fewest bytes, which fits.
        deadline: time.process_time() at which the best so far is returned.
        cutoff, tolerance: as of `solve`, which also says when NoCheaperSolution is raised.
    """
    assert free.assignment is not None

    over = lagrangian.point(problem, free.assignment)
    dual = lagrangian.best_price(problem, priced.minimise, over, least, deadline)
    if dual.bound >= cutoff:
        raise NoCheaperSolution
    near = lagrangian.Neighbourhood(problem)
    spliced, by_distance = lagrangian.splice(problem, dual.over, dual.under, near)
    solution = _faster(_faster(least, dual.under), spliced)
    solution = replace(solution, bound=max(free.bound, dual.bound))
    if solution.gap <= tolerance or np.isinf(solution.bound) or time.process_time() > deadline:
        return solution
    solution = _improved_in_window(problem, priced, solution, dual.price, by_distance, deadline)
    if solution.gap <= tolerance or deadline - time.process_time() < LEAST_SECONDS:
        return solution
    if solution.gap <= GOOD and num_columns(priced.reduced.problem) > MAX_COLUMNS:
        return solution
    return _proved_in_cores(problem, priced, solution, dual, deadline, tolerance)


def _proved_in_cores(
    problem: Problem,
    priced: PricedProblem,
    solution: Solution,
    dual: Dual,
    deadline: float,
    tolerance: float,
) -> Solution:
    """Return a solution, improved and with a better bound by programs of the strategies near the
    priced minimum, of more and more of them.

    Args:
        solution: the best so far.
        dual: the best price of memory.
        deadline: time.process_time() at which the best so far is returned.
        tolerance: the relative gap at which to stop.
    """
    reduced = priced.reduced
    excess = _excess(priced, dual)
    for fraction in CORES if excess is not None else (1.0,):
        reach = (solution.seconds - dual.bound) * fraction
        core = reduced
        if excess is not None:
            core = reduced.restrict(
                [np.flatnonzero(e <= max(reach, e.min()) * (1 + PROVED)) for e in excess]
            )
        if num_columns(core.problem) > MAX_COLUMNS:
            break
        seconds_left = deadline - time.process_time()
        is_good_enough = solution.gap <= GOOD and num_columns(core.problem) > SMALL_COLUMNS
        if seconds_left <= 0 or is_good_enough:
            break
        patience = PATIENCE if solution.gap <= POOR else seconds_left
        until = time.process_time() + min(seconds_left, patience)
        exact = _by_program(core.problem, until, core.contract(solution.assignment), tolerance)
        # Outside the core every assignment exceeds the priced minimum by at least `reach`.
        bound = exact.bound if excess is None else min(exact.bound, dual.bound + reach)
        best = solution
        if exact.assignment is not None:
            best = _faster(best, lagrangian.point(problem, core.expand(exact.assignment)))
        bound = max(solution.bound, min(bound, best.seconds))
        solution = replace(best, bound=bound, method=exact.method)
        if solution.gap <= tolerance:
            break
    return solution


def _improved_in_window(
    problem: Problem,
    priced: PricedProblem,
    solution: Solution,
    price: float,
    by_distance: Sequence[int],
    deadline: float,
) -> Solution:
    """Return a solution after the choices next to a splice's joint were solved together, while all
    others stay; the solution itself if none is faster.

    A splice of equal layers can use memory by the layer only: of the last layer's share, much is
    left. The choices around the joint use it.

    Args:
        price: of memory.
        by_distance: choices, those next to the joint first.
        deadline: time.process_time() at which to stop.
    """
    taken = priced.reduced.contract(solution.assignment)
    num_open = WINDOW_CHOICES
    while taken is not None and num_open >= 1:
        window = _window(priced.reduced, taken, by_distance[:num_open], price, solution.seconds)
        if window is None:
            break
        if num_columns(window.problem) > SMALL_COLUMNS:
            num_open //= 2
            continue
        until = min(deadline, time.process_time() + PATIENCE)
        start = window.contract(solution.assignment)
        inside = _by_program(window.problem, until, start, WINDOW_GAP)
        if inside.assignment is None:
            break
        best = lagrangian.point(problem, window.expand(inside.assignment))
        return replace(_faster(solution, best), bound=solution.bound)
    return solution


def _window(
    reduced: Presolved,
    taken: Sequence[int],
    is_open: Sequence[int],
    price: float,
    seconds: float,
) -> Presolved | None:
    """Return a problem in which some choices are open and the others are taken, without strategies
    that cannot be in a faster solution; None if tables would be too large to find these.

    Args:
        reduced: the problem of all choices.
        taken: strategy of each choice.
        is_open: the choices that are open.
        price: of memory.
        seconds: of the solution `taken`.
    """
    live = [np.array([strategy]) for strategy in taken]
    for choice in is_open:
        live[choice] = np.arange(len(reduced.problem.choices[choice].cost))
    window = reduced.restrict(live)
    planned = PricedProblem(window.problem).network(price)
    if planned is None:
        return None
    most = (seconds + price * window.problem.memory_limit) * (1 + PROVED)
    return window.restrict([np.flatnonzero(least <= most) for least in min_marginals(*planned)])


def _faster(one: Solution, other: Solution) -> Solution:
    """Return the solution with fewer seconds; `one` if they are equal."""
    return other if other.seconds < one.seconds else one


def _excess(priced: PricedProblem, dual: Dual) -> list[np.ndarray] | None:
    """Return [c][k] by how many seconds at least every assignment with strategy k of c exceeds the
    priced minimum; None if unknown.
    """
    planned = priced.network(dual.price)
    base = dual.bound + dual.price * priced.problem.memory_limit
    if planned is None:
        return None
    return [marginal - base for marginal in min_marginals(*planned)]


def _by_program(
    problem: Problem, deadline: float, incumbent: list[int] | None = None, tolerance: float = PROVED
) -> Incumbent:
    """Solve the LP relaxation, then the MIP if the relaxation is fractional.

    Args:
        deadline: time.process_time() at which to stop.
        incumbent: an assignment that is known.
        tolerance: the relative gap at which to stop.

    Returns:
        The best assignment, None if there is none, with a lower bound of all in seconds.
    """
    program = formulate(problem)
    relaxed, mass = solve_program(program, integer=False, time_limit=deadline - time.process_time())
    if np.isposinf(relaxed):
        return Incumbent(None, np.inf, "lp")
    near = lagrangian.Neighbourhood(problem)
    incumbent = _best(problem, incumbent, _round(problem, mass, near))
    start = Incumbent(incumbent, relaxed, "lp")
    seconds_left = deadline - time.process_time()
    if incumbent is not None and (
        seconds_left <= 0.2 or _solution(problem, start).gap <= tolerance
    ):
        return start
    exact, mass = solve_program(
        program, integer=True, time_limit=seconds_left, hint=incumbent, tolerance=tolerance
    )
    if np.isposinf(exact):
        return Incumbent(None, np.inf, "mip")
    return Incumbent(
        _best(problem, incumbent, _round(problem, mass, near)), max(relaxed, exact), "mip"
    )


def _round(problem: Problem, mass: Mass | None, near: lagrangian.Neighbourhood) -> list[int] | None:
    """Return the best assignment near a (fractional) solution, or near the cheapest strategies if
    `mass` is None, that is finite and within the memory limit; None if there is none.
    """
    start = (
        [int(m.argmax()) for m in mass]
        if mass is not None
        else [int(x.cost.argmin()) for x in problem.choices]
    )
    if not np.isfinite(problem.memory_limit):
        result = lagrangian.improve(problem, start, near)
        return result if np.isfinite(evaluate(problem, result)[0]) else None
    return lagrangian.repair(problem, start, near)


def _best(problem: Problem, *candidates: list[int] | None) -> list[int] | None:
    """Return the cheapest candidate that is finite and fits the limit; None if there is none."""
    measured = [(*evaluate(problem, c), c) for c in candidates if c is not None]
    fitting = []
    for seconds, num_bytes, candidate in measured:
        if np.isfinite(seconds) and num_bytes <= problem.memory_limit:
            fitting.append((seconds, num_bytes, candidate))
    return min(fitting, default=(0.0, 0.0, None))[2]


def _solution(problem: Problem, incumbent: Incumbent) -> Solution:
    """Return the incumbent as a solution, with its costs and bound."""
    assert incumbent.assignment is not None
    priced = lagrangian.point(problem, incumbent.assignment)
    return replace(priced, bound=min(incumbent.bound, priced.seconds), method=incumbent.method)


def _forbidden(problem: Problem) -> PlanError:
    """Return the error if every assignment costs inf, with choices that have no allowed
    strategy.
    """
    empty = [choice.name for choice in problem.choices if not np.isfinite(choice.cost).any()]
    which = f" ({', '.join(empty[:5])} has no allowed strategy)" if empty else ""
    return PlanError(
        f"No finite-cost assignment of strategies exists{which}.",
        "Loosen the pinned placements, or allow more layouts for the ops between them.",
    )


def _out_of_time(time_limit: float) -> PlanError:
    """Return the error if no assignment was found in time."""
    return PlanError(
        f"No assignment of strategies was found within the solver's {time_limit:g} s.",
        "Raise the solver's time limit.",
    )
