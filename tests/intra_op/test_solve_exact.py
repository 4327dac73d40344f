"""solve() against brute force over all assignments, and the presolve's promise."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use, evaluate, presolve
from alpa_strategy.intra_op.solver.solve import solve


def random_problem(seed: int, forbid: float = 0.0, scale: float = 1e-4) -> Problem:
    """Up to 6 choices of up to 4 strategies; transfers with 1-3 uses, a choice possibly used twice
    or by itself.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, n)

    def seconds(shape: object) -> np.ndarray:
        values = rng.integers(0, 6, shape).astype(float) * scale
        return np.where(rng.random(shape) < forbid, np.inf, values)

    choices = tuple(
        Choice(f"c{i}", seconds(k), rng.integers(0, 8, k).astype(float) * 1e9)
        for i, k in enumerate(sizes)
    )
    transfers = []
    for t in range(int(rng.integers(0, 2 * n))):
        producer = int(rng.integers(n))
        p, q = rng.integers(1, 5, 2)
        uses = tuple(
            Use(c, rng.integers(0, q, sizes[c]))
            for c in rng.integers(0, n, int(rng.integers(1, 4))).tolist()
        )
        memory = rng.integers(0, 3, (p, q)).astype(float) * 1e9 * (rng.random() < 0.5)
        transfers.append(
            Transfer(
                f"t{t}",
                producer,
                rng.integers(0, p, sizes[producer]),
                uses,
                seconds((p, q)),
                memory,
            )
        )
    return Problem(choices, tuple(transfers))


def every(problem: Problem) -> list[tuple[float, float]]:
    return [
        evaluate(problem, a)
        for a in itertools.product(*[range(len(c.cost)) for c in problem.choices])
    ]


def limited(problem: Problem, fraction: float) -> Problem:
    finite = [b for s, b in every(problem) if np.isfinite(s)]
    if not finite:
        return problem
    limit = min(finite) + fraction * (max(finite) - min(finite))
    return Problem(problem.choices, problem.transfers, limit)


def check(problem: Problem) -> None:
    fitting = []
    for s, b in every(problem):
        if b <= problem.memory_limit and np.isfinite(s):
            fitting.append(s)
    if not fitting:
        with pytest.raises(PlanError):
            solve(problem)
        return
    solution = solve(problem)
    assert evaluate(problem, solution.assignment) == (solution.seconds, solution.num_bytes)
    assert solution.num_bytes <= problem.memory_limit
    assert solution.seconds == pytest.approx(min(fitting), rel=1e-6, abs=1e-15)
    assert solution.bound <= min(fitting) * (1 + 1e-6)
    assert solution.gap <= 1e-5


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.2]), st.sampled_from([1e-6, 1.0]))
def test_equals_brute_force_without_memory_limit(seed: int, forbid: float, scale: float) -> None:
    check(random_problem(seed, forbid, scale))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.2]), st.floats(0, 1))
def test_equals_brute_force_with_memory_limit(seed: int, forbid: float, fraction: float) -> None:
    check(limited(random_problem(seed, forbid), fraction))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.2]), st.sampled_from([0.1, 0.5, None]))
def test_presolve_keeps_the_optimum(seed: int, forbid: float, fraction: float | None) -> None:
    problem = random_problem(seed, forbid)
    problem = problem if fraction is None else limited(problem, fraction)

    def optimum(p: Problem) -> float:
        return min((s for s, b in every(p) if b <= p.memory_limit), default=np.inf)

    reduced = presolve(problem)
    assert optimum(reduced.problem) == pytest.approx(optimum(problem), rel=1e-12)
