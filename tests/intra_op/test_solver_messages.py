"""Messages that are filled from arrays hold the same as those that are filled number by number."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ortools.math_opt.model_pb2 import VariablesProto

from alpa_strategy.intra_op.solver.messages import filled

INTEGERS = st.integers(0, 2**40) | st.sampled_from([0, 127, 128, 2**14 - 1, 2**14, 2**21])
ROWS = st.tuples(INTEGERS, st.floats(allow_nan=False), st.booleans())


@given(st.lists(ROWS, max_size=20))
def test_every_number_arrives(rows):
    ids = np.array([row[0] for row in rows], dtype=int)
    bounds = np.array([row[1] for row in rows], dtype=float)
    integers = np.array([row[2] for row in rows], dtype=bool)
    expected = VariablesProto(
        ids=ids.tolist(), lower_bounds=bounds.tolist(), integers=integers.tolist()
    )

    assert filled(VariablesProto, ids=ids, lower_bounds=bounds, integers=integers) == expected
