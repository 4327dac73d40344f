"""scripts/bench_fit.py: an answer that differs from the stored one is named."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_fit  # noqa: E402

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
