"""What one device runs: local shapes, rewritten sizes, and which devices draw different random
numbers.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from rule_cases import CASES
from rule_data import Case, aten, call_of, f

from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import value_layout
from alpa_strategy.sharding.strategies import axis_strategies, localize, op_strategies


def _strategies(*texts: str) -> tuple[AxisStrategy, ...]:
    return tuple(AxisStrategy.parse(t) for t in texts)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_local_shapes_are_those_of_the_layouts(case: Case) -> None:
    mesh = (2, 2)
    for strategies in op_strategies(case.call, mesh)[::5]:
        for coordinate in itertools.product(range(2), range(2)):
            local = localize(case.call, strategies, mesh, coordinate)
            for i, meta in enumerate(case.call.operands):
                layout = value_layout(tuple(s.inputs[i] for s in strategies))
                assert local.call.operands[i].shape == layout.local_shape(
                    meta.shape, mesh, coordinate
                )
                assert all(size > 0 for size in local.call.operands[i].shape)
            assert local.call.returns_tuple == case.call.returns_tuple
            assert (local.implementation is None) == (not local.axes)


def test_nothing_changes_where_nothing_is_cut() -> None:
    call, _ = call_of(aten.view.default, f(4, 6), (4, 2, 3))
    assert localize(call, _strategies("R->R", "P->P"), (2, 2), (1, 1)).call is call


def test_views_ask_for_local_sizes() -> None:
    call, _ = call_of(aten.view.default, f(5, 6), (5, 2, 3))
    local = [localize(call, _strategies("S0->S0"), (2,), (r,)).call for r in range(2)]
    assert [c.args[1] for c in local] == [(3, 2, 3), (2, 2, 3)]


def test_factories_ask_for_local_sizes() -> None:
    call, _ = call_of(aten.full.default, (5, 4), 1.5, dtype=torch.float64)
    local = localize(call, _strategies("->S0", "->S1"), (2, 2), (1, 0)).call
    assert local.call().tolist() == [[1.5, 1.5]] * 2


def test_groups_are_divided_with_the_channels() -> None:
    call, _ = call_of(
        aten.conv2d.default, f(2, 8, 4, 4), f(8, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), 4
    )
    assert localize(call, _strategies("S1,S0->S1"), (2,), (0,)).call.args[-1] == 2
    call, _ = call_of(aten.group_norm.default, f(2, 8, 4), 4)
    assert localize(call, _strategies("S1->S1"), (4,), (0,)).call.args[1] == 1


def test_implementations_work_over_the_axes_that_ask_for_them() -> None:
    call = CASES["embedding"].call
    local = localize(call, _strategies("R*,S0->S0", "S0,R->P@vocab_embedding"), (2, 3), (1, 2))
    assert local.implementation == "vocab_embedding"
    assert local.axes == (1,)


def test_dropout_differs_on_shards_and_agrees_on_replicas() -> None:
    call, _ = call_of(aten.dropout.default, f(8, 6), 0.5, True)
    assert localize(call, _strategies("S0->S0", "R->R"), (2, 2), (0, 0)).random_axes == (0,)
    assert localize(call, _strategies("S0->S0", "S1->S1"), (2, 2), (0, 0)).random_axes == (0, 1)
    assert localize(call, _strategies("R->R", "R*->R*"), (2, 2), (0, 0)).random_axes == ()


def test_whole_features_are_dropped_row_by_row() -> None:
    for op in (aten.feature_dropout.default, aten.feature_alpha_dropout.default):
        call, _ = call_of(op, f(4, 6, 5), 0.5, True)
        assert [str(s) for s in axis_strategies(call, 2)] == ["R->R", "S0->S0", "S1->S1"]


def test_ops_that_draw_no_numbers_have_no_random_axes() -> None:
    for args in ((f(8, 6), 0.5, False), (f(8, 6), 0.0, True)):
        call, _ = call_of(aten.dropout.default, *args)
        assert localize(call, _strategies("S0->S0"), (2,), (0,)).random_axes is None
    assert localize(CASES["sdpa"].call, _strategies("S0,S0,S0->S0"), (2,), (0,)).random_axes is None


def test_attention_dropout_differs_where_queries_or_heads_are_cut() -> None:
    q = f(2, 4, 6, 8)
    call, _ = call_of(aten.scaled_dot_product_attention.default, q, q, q, None, 0.1)
    assert localize(
        call, _strategies("S2,R*,R*->S2", "S1,S1,S1->S1"), (2, 2), (0, 0)
    ).random_axes == (0, 1)
