"""scripts/bench_fit.py: the documentation's figures of answers by name are the reference's, and
answers keep it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_fit  # noqa: E402


def test_the_figures_of_the_page_are_those_of_the_reference():
    table = bench_fit.page_table(bench_fit.read_reference())
    assert table in bench_fit.PAGE.read_text(encoding="utf-8")


def test_the_reference_has_all_cases():
    assert list(bench_fit.read_reference()) == list(bench_fit.CASES)


STORED = bench_fit.Answer(
    step="4.99 s",
    speed="52.6 k tokens/s, MFU 34.9%",
    plan="1 stage",
    changes=("plan.compile=true: 1.12x the tokens/s",),
    cpu_units=100.0,
    cpu_seconds=30.0,
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": "5.01 s"}, "step is '5.01 s', '4.99 s' stored"),
        ({"plan": "2 stages"}, "plan is '2 stages', '1 stage' stored"),
        ({"cpu_units": 130.0}, "it takes 1.30 x the stored CPU work"),
        ({"cpu_units": 120.0, "cpu_seconds": 300.0}, None),
    ],
)
def test_what_differs_from_the_reference_is_named(change, problem):
    expected = [] if problem is None else [problem]
    assert bench_fit.differs_from(STORED, replace(STORED, **change)) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gemma-2-9b", "llama-3-70b"])
def test_answers_are_those_of_the_reference_and_as_quick(name):
    reference = bench_fit.read_reference()[name]
    assert bench_fit.differs_from(reference, bench_fit.measured(name)) == []
