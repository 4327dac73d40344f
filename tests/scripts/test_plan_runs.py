"""Random plans and edited ones in real trainings: a few always, many in the slow suite, with a seed
of the day.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from edited_plans import BASES, base_plans, edited_cases
from random_plans import random_cases, run_and_tell

TODAY = int(datetime.date.today().strftime("%Y%m%d"))


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 3), pytest.param(TODAY, 200, marks=pytest.mark.slow)],
    ids=["a few", "nightly"],
)
def test_random_plans_train_as_one_process_or_are_refused(pool, capsys, seed, count):
    with capsys.disabled():
        print(f"\nrandom plans: seed {seed}")
    assert run_and_tell(random_cases(count, seed), seed, pool) == 0
    assert " 0 equal" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seed", "bases", "count"),
    [
        (1, BASES[::5], len(BASES[::5])),
        pytest.param(TODAY, BASES, 300, marks=pytest.mark.slow),
    ],
    ids=["a few", "nightly"],
)
def test_edited_plans_train_as_one_process_or_are_refused(pool, capsys, seed, bases, count):
    with capsys.disabled():
        print(f"\nedited plans: seed {seed}")
    cases = edited_cases(base_plans(pool, bases), count, seed)
    assert run_and_tell(cases, seed, pool) == 0
