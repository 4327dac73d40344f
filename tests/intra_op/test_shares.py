"""Elimination of entangled problems by a relaxation (`solver/shares.py`)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intra_op.test_solve_exact import every, random_problem

from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use, evaluate
from alpa_strategy.intra_op.solver import shares
from alpa_strategy.intra_op.solver.elimination import network_of, plan_order
from alpa_strategy.intra_op.solver.solve import solve


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), forbid=st.sampled_from([0.0, 0.2]))
def test_the_bound_is_below_every_assignment(seed: int, forbid: float) -> None:
    problem = random_problem(seed, forbid)
    with pytest.MonkeyPatch.context() as patch:
        # Small enough that some transfers are relaxed.
        patch.setattr(shares, "LIMITS", ((16, 10**6),))
        relaxations = list(shares.minima_in_shares(problem))
    least = min(seconds for seconds, _ in every(problem))
    for assignment, bound in relaxations:
        assert bound <= least * (1 + 1e-12) + 1e-15
        if assignment is not None:
            assert evaluate(problem, assignment)[0] >= least * (1 - 1e-12)


def entangled_problem(num_readers: int, num_shared: int) -> Problem:
    """Readers of the same values, as the queries and keys of all layers read cosines and sines:
    each value has another layout in which most readers are fastest.
    """
    rng = np.random.default_rng(0)
    num_layouts = 8
    layouts = np.arange(num_layouts)
    choices = [Choice(f"maker{i}", np.zeros(num_layouts), layouts * 0.0) for i in range(num_shared)]
    for i in range(num_readers):
        seconds = 1.0 + rng.random(num_layouts)
        seconds[3] = 0.5
        choices.append(Choice(f"reader{i}", seconds, layouts * 0.0))
    cost = 0.01 * (layouts[:, None] != layouts)
    readers = range(num_shared, num_shared + num_readers)
    transfers = []
    for i in range(num_shared):
        uses = tuple(Use(reader, layouts) for reader in readers)
        transfers.append(Transfer(f"v{i}", i, layouts, uses, cost, cost * 0.0))
    return Problem(tuple(choices), tuple(transfers))


def test_values_that_many_ops_read_are_solved_to_proof_without_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = entangled_problem(num_readers=9, num_shared=2)
    network = network_of(problem)
    assert network is None or plan_order(network) is None

    def no_program(*arguments: object, **settings: object) -> None:
        raise AssertionError("a program was solved")

    monkeypatch.setattr("alpa_strategy.intra_op.solver.solve.solve_program", no_program)
    solution = solve(problem)
    # All in layout 3, which nothing has to be resharded for.
    assert solution.seconds == pytest.approx(9 * 0.5)
    assert solution.gap <= 1e-6
