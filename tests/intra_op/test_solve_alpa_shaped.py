"""solve() on GPT-shaped instances: proved without a memory limit, a small gap with one, clear
errors, time kept.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from proofs.synthetic import gpt_like, least_bytes

from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use, evaluate
from alpa_strategy.intra_op.solver.lagrangian import Neighbourhood, improve
from alpa_strategy.intra_op.solver.solve import solve

GIB = 2.0**30


def tight(problem: Problem, fraction: float) -> Problem:
    """A limit at `fraction` of the way from the least bytes to those of the fastest assignment."""
    least, most = least_bytes(problem), solve(problem).num_bytes
    return replace(problem, memory_limit=least + fraction * (most - least))


@pytest.mark.parametrize("num_layers", [11, 53])  # about 200 and 1000 choices
def test_proved_without_memory_limit(num_layers: int) -> None:
    problem = gpt_like(num_layers)
    start = time.process_time()
    solution = solve(problem)
    assert solution.gap <= 1e-6
    assert time.process_time() - start < 10
    rng = np.random.default_rng(0)
    for _ in range(3):
        other = improve(
            problem,
            [int(rng.integers(len(c.cost))) for c in problem.choices],
            Neighbourhood(problem),
        )
        assert evaluate(problem, other)[0] >= solution.seconds * (1 - 1e-9)


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_small_gap_with_tight_memory(fraction: float) -> None:
    problem = tight(gpt_like(11), fraction)
    solution = solve(problem, time_limit=10)
    assert solution.num_bytes <= problem.memory_limit
    assert solution.gap <= 0.02
    assert solution.seconds > solve(replace(problem, memory_limit=np.inf)).seconds


def test_layers_that_all_differ() -> None:
    problem = tight(gpt_like(4, noise=0.3), 0.3)
    assert solve(problem, time_limit=10).gap <= 0.02


@pytest.mark.slow
def test_large_with_tight_memory() -> None:
    problem = tight(gpt_like(53), 0.3)
    solution = solve(problem, time_limit=30)
    assert solution.num_bytes <= problem.memory_limit
    assert solution.gap <= 0.02


def test_costs_of_any_unit_give_the_same_assignment_value() -> None:
    problem = tight(gpt_like(2), 0.4)
    small = replace(
        problem,
        choices=tuple(replace(c, cost=c.cost * 1e-6) for c in problem.choices),
        transfers=tuple(replace(t, cost=t.cost * 1e-6) for t in problem.transfers),
    )
    assert solve(small).seconds * 1e6 == pytest.approx(solve(problem).seconds, rel=1e-6)


def test_a_value_used_by_every_layer() -> None:
    """A mask or a rotary table: one transfer with many uses, paid once per distinct layout."""
    problem = gpt_like(8)
    users = [i for i, c in enumerate(problem.choices) if c.name.endswith("attention")]
    cost = np.full((1, 3), 1e-4)
    uses = tuple(Use(c, np.arange(len(problem.choices[c].cost)) % 3) for c in users)
    producer = Choice("rotary", np.zeros(1), np.zeros(1))
    shared = Transfer(
        "rotary", len(problem.choices), np.zeros(1, dtype=int), uses, cost, np.zeros((1, 3))
    )
    problem = Problem((*problem.choices, producer), (*problem.transfers, shared))
    solution = solve(problem, time_limit=20)
    assert solution.gap <= 1e-5


def test_no_finite_assignment_is_said() -> None:
    one = Choice("a", np.zeros(1), np.zeros(1))
    never = Choice("b", np.full(2, np.inf), np.zeros(2))
    with pytest.raises(PlanError, match=r"finite-cost.*b has no allowed strategy"):
        solve(Problem((one, never), ()))
    blocked = Transfer(
        "t",
        0,
        np.zeros(1, dtype=int),
        (Use(1, np.zeros(1, dtype=int)),),
        np.full((1, 1), np.inf),
        np.zeros((1, 1)),
    )
    with pytest.raises(PlanError, match="finite-cost"):
        solve(Problem((one, one), (blocked,)))


def test_memory_limit_that_cannot_be_met_names_the_least() -> None:
    choices = tuple(
        Choice(f"c{i}", np.array([1.0, 2.0]), np.array([3.0, 2.0]) * GIB) for i in range(4)
    )
    with pytest.raises(PlanError, match=r"least is 8\.00 GiB.*limit is 7\.00 GiB") as error:
        solve(Problem(choices, (), 7 * GIB))
    assert "micro-" in error.value.fix
    assert solve(Problem(choices, (), 8 * GIB)).seconds == 8.0
    assert solve(Problem(choices, (), 10 * GIB)).seconds == 6.0


def test_empty_problem() -> None:
    assert solve(Problem((), ())).seconds == 0.0
