"""scripts/compare_plans.py: the documentation's figures of planning are the reference's, and
planning keeps it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compare_plans  # noqa: E402


def test_the_figures_of_the_page_are_those_of_the_reference():
    figures = compare_plans.page_figures(compare_plans.read_reference())
    assert figures in compare_plans.PAGE.read_text(encoding="utf-8")


def test_the_reference_is_of_large_pairs():
    assert set(compare_plans.read_reference()) <= set(compare_plans.LARGE_PAIRS)


STORED = compare_plans.LargePlan(step_seconds=10.0, gap=0.05, cpu_units=100.0, cpu_seconds=30.0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step_seconds": 10.02}, "predicted 1.0020 x the stored seconds"),
        ({"gap": 0.06}, "6.00% from its bound, 5.00% stored"),
        ({"cpu_units": 130.0}, "planning takes 1.30 x the stored CPU work"),
        ({"step_seconds": 10.005, "gap": 0.054, "cpu_units": 120.0}, None),
        ({"cpu_seconds": 300.0}, None),
    ],
)
def test_what_is_worse_than_the_reference_is_named(change, problem):
    expected = [] if problem is None else [problem]
    assert compare_plans.worse_than(STORED, replace(STORED, **change)) == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", compare_plans.read_reference())
def test_large_plans_are_as_good_and_made_as_quickly_as_the_reference(pair):
    reference = compare_plans.read_reference()[pair]
    assert compare_plans.worse_than(reference, compare_plans.large_plan(pair)) == []
