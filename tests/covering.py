"""Which rows of a cross product run by default: a few that cover all values. The rest is slow.

    @pytest.mark.parametrize(("model", "plan"), in_tiers(product(MODELS, PLANS), times=2))

runs every model and every plan at least twice by default, and the whole product in the slow tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Row = Sequence[Hashable]


def covering(rows: Iterable[Row], strength: int = 1, times: int = 1) -> list[Row]:
    """Choose rows that cover all of them; values are chosen equally often, as far as they can be.

    Args:
        rows: of the product, those that are preferred first.
        strength: 1: every value of every axis is covered; 2: all pairs of values that some row has.
        times: in how many of the chosen rows each is, if there are as many.

    Returns:
        The rows, in the order of `rows`.
    """
    remaining = [tuple(row) for row in rows]
    available = Counter(part for row in remaining for part in _parts(row, strength))
    missing = Counter({part: min(times, count) for part, count in available.items()})
    order = {row: index for index, row in enumerate(remaining)}

    chosen: list[Row] = []
    uses = Counter[Any]()

    def gain(row: Row) -> tuple[int, int]:
        is_missing = sum(missing[part] for part in _parts(row, strength))
        return is_missing, -sum(uses[value] for value in _parts(row, 1))

    while any(missing.values()):
        best = max(remaining, key=gain)
        remaining.remove(best)
        chosen.append(best)
        uses.update(_parts(best, 1))
        for part in _parts(best, strength):
            missing[part] = max(0, missing[part] - 1)
    return sorted(chosen, key=order.__getitem__)


def _parts(row: Row, strength: int) -> list[Any]:
    """Return the values of a row, or its pairs of values, with their axes."""
    return list(combinations(enumerate(row), strength))


def in_tiers(rows: Iterable[Row], strength: int = 1, times: int = 1) -> list[Any]:
    """Return all rows as parameters of a test; those that `covering` does not choose are slow."""
    rows = [tuple(row) for row in rows]
    return slow_but(rows, covering(rows, strength, times))


def slow_but(rows: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Return all rows, or values, as parameters of a test; those that are not in `default` are
    slow.
    """
    rows = list(rows)
    default = list(default)
    unknown = [row for row in default if row not in rows]
    if unknown:
        raise ValueError(f"{unknown} are none of the rows")
    parameters = []
    for row in rows:
        marks = () if row in default else pytest.mark.slow
        values = row if isinstance(row, tuple) else (row,)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
