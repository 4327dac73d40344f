"""The sum of factors as one table, in whatever order they are added up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.intra_op.solver import elimination
from alpa_strategy.intra_op.solver.elimination import Factor, join, least_of_sum

SIZES = (2, 3, 1, 4, 2)


NUM_PROBLEMS = 3


@given(st.lists(st.sets(st.integers(0, 4), max_size=4), max_size=6), st.permutations(range(5)))
def test_every_entry_is_the_sum_of_its_factors(scopes, scope):
    draw = np.random.default_rng(0)
    factors = []
    for number, variables in enumerate(scopes):
        # Every other table holds for all problems.
        num_tables = 1 if number % 2 else NUM_PROBLEMS
        shape = [num_tables, *(SIZES[v] for v in variables)]
        factors.append(Factor(tuple(variables), draw.integers(0, 9, shape).astype(float)))
    table = join(factors, tuple(scope), SIZES)

    assert table.shape[1:] == tuple(SIZES[v] for v in scope)
    for problem, *index in np.ndindex(table.shape):
        at = dict(zip(scope, index, strict=True))
        expected = 0.0
        for factor in factors:
            row = problem if len(factor.table) > 1 else 0
            expected += factor.table[(row, *(at[v] for v in factor.scope))]
        assert table[(problem, *index)] == expected


def test_the_least_of_a_sum_is_the_same_to_the_last_bit_block_by_block(monkeypatch):
    draw = np.random.default_rng(0)
    for case in range(40):
        scope = tuple(int(v) for v in draw.permutation(5))
        # The last variables are in some factor, as in an elimination.
        scopes = [(v,) for v in scope]
        for _ in range(4):
            chosen = draw.choice(5, size=3, replace=False)
            scopes.append(tuple(int(v) for v in chosen))
        factors = []
        for number, variables in enumerate(scopes):
            num_tables = 1 if number % 2 else NUM_PROBLEMS
            shape = [num_tables, *(SIZES[v] for v in variables)]
            factors.append(Factor(variables, draw.random(shape)))
        expected = join(factors, scope, SIZES).min(axis=1)

        monkeypatch.setattr(elimination, "BLOCK_ENTRIES", int(draw.integers(1, 30)))
        assert np.array_equal(least_of_sum(factors, scope, SIZES), expected), case
