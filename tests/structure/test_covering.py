"""Rows that are chosen from a product cover it."""

from __future__ import annotations

from itertools import product

import pytest
from covering import covering, in_tiers

ROWS = [*product("abcde", "uvw", "xy"), ("f", "u", "x")]


@pytest.mark.parametrize("times", [1, 2])
def test_every_value_is_chosen_as_often_as_it_can_be(times: int) -> None:
    chosen = covering(ROWS, times=times)
    for axis in range(3):
        values = [row[axis] for row in chosen]
        assert all(values.count(row[axis]) >= times for row in ROWS if row[0] != "f")
    assert chosen.count(("f", "u", "x")) == 1
    assert len(chosen) <= 5 * times + 1


def test_every_pair_is_chosen() -> None:
    chosen = covering(ROWS, strength=2)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = {(row[first], row[second]) for row in chosen}
        assert pairs == {(row[first], row[second]) for row in ROWS}
    assert len(chosen) < 0.6 * len(ROWS)


def test_rows_that_are_not_chosen_are_slow() -> None:
    parameters = in_tiers(ROWS, times=2)
    assert [parameter.values for parameter in parameters] == ROWS
    default = [parameter.values for parameter in parameters if not parameter.marks]
    assert default == covering(ROWS, times=2)
