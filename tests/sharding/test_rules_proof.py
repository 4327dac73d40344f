"""Every rule is proved by experiment: shards in, combine, equal to the unsharded op, forward and
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from covering import slow_but
from proofs.prove import prove
from rule_cases import CASES
from rule_data import Case

from alpa_strategy.sharding.rule_table import rule_of
from alpa_strategy.sharding.strategies import axis_strategies, op_strategies, rule_origin


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_has_the_sharded_strategies_that_it_must_have(case: Case) -> None:
    results = [str(s) for s in axis_strategies(case.call, 2)]
    assert rule_of(case.call.target) is not None
    assert rule_origin(case.call) in ("notation", "view", "pointwise", "reduction")
    assert set(case.sharded) <= set(results), results
    assert len(results) == len(set(results))
    assert set(results[0].replace("->", ",").split(",")) <= {"R", ""}


@pytest.mark.parametrize("axis_size", slow_but((2, 3, 4), (2, 3)))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_strategy_is_right_on_one_axis(case: Case, axis_size: int) -> None:
    for strategy in axis_strategies(case.call, axis_size):
        prove(case.call, (strategy,), axis_size, case.operands)


MESHES = ((2, 2), (3, 2))


def on_meshes() -> Iterator[Any]:
    """Yield all cases on both meshes. By default each is on one of them, in turn."""
    for number, (name, case) in enumerate(CASES.items()):
        default = MESHES[number % len(MESHES)]
        for shape in MESHES:
            marks = () if shape == default else pytest.mark.slow
            yield pytest.param(case, shape, id=f"{name}-{shape}", marks=marks)


@pytest.mark.parametrize(("case", "mesh_shape"), on_meshes())
def test_every_combination_is_right_on_a_mesh(case: Case, mesh_shape: tuple[int, int]) -> None:
    for strategies in op_strategies(case.call, mesh_shape):
        prove(case.call, strategies, mesh_shape, case.operands)
