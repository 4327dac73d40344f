"""Dim groups of views, and the shardings that follow from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proofs.prove import prove
from rule_data import aten, call_of, f

from alpa_strategy.sharding.rule_families import dim_groups
from alpa_strategy.sharding.strategies import axis_strategies, op_strategies


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equally many elements, both made by merging runs of the same factors; some dims
    of size 1.
    """
    factors = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def merged() -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(factors) - 1, max_size=len(factors) - 1))
        shape = [factors[0]]
        for factor, cut in zip(factors[1:], cuts, strict=True):
            if cut:
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape)

    return merged(), merged()


@given(shape_pairs())
def test_groups_hold_equally_many_elements_and_every_dim_once(
    pair: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    source, target = pair
    groups = dim_groups(source, target)
    for left, right in groups:
        left_sizes = [source[d] for d in left]
        right_sizes = [target[d] for d in right]
        assert math.prod(left_sizes) == math.prod(right_sizes)
    assert [d for left, _ in groups for d in left] == [
        d for d, size in enumerate(source) if size != 1
    ]
    assert [d for _, right in groups for d in right] == [
        d for d, size in enumerate(target) if size != 1
    ]


@settings(max_examples=40, deadline=None)
@given(shape_pairs(), st.integers(2, 4))
def test_every_view_is_right_on_every_axis(
    pair: tuple[tuple[int, ...], tuple[int, ...]], axis_size: int
) -> None:
    call, operands = call_of(aten.reshape.default, f(*pair[0]), pair[1])
    for strategy in axis_strategies(call, axis_size):
        prove(call, (strategy,), axis_size, operands)


@settings(max_examples=15, deadline=None)
@given(shape_pairs())
def test_every_view_is_right_on_a_mesh(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    call, operands = call_of(aten.view.default, f(*pair[0]), pair[1])
    for strategies in op_strategies(call, (2, 2)):
        prove(call, strategies, (2, 2), operands)


def test_heads_stay_whole() -> None:
    call, _ = call_of(aten.view.default, f(2, 5, 12), (2, 5, 3, 4))
    assert "S2->S2" not in map(str, axis_strategies(call, 2))  # 3 heads on 2 devices
    assert "S2->S2" in map(str, axis_strategies(call, 3))
    assert "S3->S2" not in map(str, axis_strategies(call, 2))


def test_shapes_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be viewed"):
        dim_groups((2, 3), (4,))
