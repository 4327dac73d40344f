"""The sum of factors as one table, in whatever order they are added up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.intra_op.solver.elimination import Factor, join

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
