"""Problems that differ in costs alone are solved together as each would be by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from proofs.synthetic import gpt_like

from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use, evaluate, presolve
from alpa_strategy.intra_op.solver.elimination import eliminate, network_of, plan_order
from alpa_strategy.intra_op.solver.lagrangian import price_memory
from alpa_strategy.intra_op.solver.priced import PricedProblem
from alpa_strategy.intra_op.solver.solve import solve

PRICES = (0.0, 1e-12, 1e-9)


@pytest.mark.parametrize("price", PRICES)
def test_a_price_of_memory_gives_the_optimum_of_the_priced_problem(price):
    problem = gpt_like(2, noise=0.1)
    found = PricedProblem(problem).minimise(price)
    assert found is not None
    assignment, value = found
    seconds, num_bytes = evaluate(problem, assignment)

    assert value == pytest.approx(seconds + price * num_bytes)
    assert value == pytest.approx(solve(price_memory(problem, price)).seconds)


def test_problems_together_have_the_optima_that_each_has_alone():
    one = presolve(replace(gpt_like(1), memory_limit=np.inf)).problem
    every = [price_memory(one, price) for price in PRICES]
    choices, transfers = [], []
    for same in zip(*(problem.choices for problem in every), strict=True):
        costs = np.stack([choice.cost for choice in same])
        choices.append(Choice(same[0].name, costs, costs))
    for same in zip(*(problem.transfers for problem in every), strict=True):
        costs = np.stack([transfer.cost for transfer in same])
        transfers.append(replace(same[0], cost=costs, memory=costs))
    kept = (0, len(choices) - 1)
    network = network_of(Problem(tuple(choices), tuple(transfers)))
    order = plan_order(network, outer=kept)
    minimum, values = eliminate(network, order.variables, kept)

    for number, problem in enumerate(every):
        network = network_of(problem)
        order = plan_order(network, outer=kept)
        (alone,), _ = eliminate(network, order.variables, kept)
        assert np.allclose(minimum[number], alone)
        for pair in np.ndindex(alone.shape):
            assignment = [int(v[(number, *pair)]) for v in values[: len(problem.choices)]]
            assert evaluate(problem, assignment)[0] == pytest.approx(alone[pair])


def test_what_nothing_decides_takes_its_first_value_in_every_problem():
    free = Choice("free", np.zeros((2, 3)), np.zeros((2, 3)))
    other = Choice("other", np.array([[1.0, 2.0], [2.0, 1.0]]), np.zeros((2, 2)))
    layout = np.array([0, 0])
    nothing = np.zeros((2, 1, 1))
    use = Use(1, layout)
    transfer = Transfer("v", 0, np.zeros(3, dtype=int), (use,), nothing, nothing)
    network = network_of(Problem((free, other), (transfer,)))
    minimum, values = eliminate(network, plan_order(network).variables)

    assert minimum.tolist() == [1.0, 1.0]
    assert values[1].tolist() == [0, 1]
