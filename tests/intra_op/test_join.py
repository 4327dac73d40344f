"""The sum of factors as one table, in whatever order they are added up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.intra_op.solver.elimination import Factor, join

SIZES = (2, 3, 1, 4, 2)


@given(st.lists(st.sets(st.integers(0, 4), max_size=4), max_size=6), st.permutations(range(5)))
def test_every_entry_is_the_sum_of_its_factors(scopes, scope):
    draw = np.random.default_rng(0)
    factors = [
        Factor(tuple(s), draw.integers(0, 9, [SIZES[v] for v in s]).astype(float)) for s in scopes
    ]
    table = join(factors, tuple(scope), SIZES)
    assert table.shape == tuple(SIZES[v] for v in scope)
    for index in np.ndindex(table.shape):
        at = dict(zip(scope, index, strict=True))
        expected = 0
        for factor in factors:
            expected += factor.table[tuple(at[v] for v in factor.scope)]
        assert table[index] == expected
