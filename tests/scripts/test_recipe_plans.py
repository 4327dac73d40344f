"""scripts/recipe_plans.py: the table of docs/recipes.md is that of the stored plans, which `alpa
plan` makes.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import recipe_plans  # noqa: E402

STORED = recipe_plans.read_stored()


def test_the_table_of_the_page_is_that_of_the_stored_plans():
    assert recipe_plans.page_table(STORED) in recipe_plans.PAGE.read_text(encoding="utf-8")


def test_stored_recipes_are_those_of_the_table_on_8_and_64_gpus():
    assert set(STORED) <= set(recipe_plans.RECIPES)
    for of_nodes in STORED.values():
        assert list(of_nodes) == ["1", "8"]


ROW = recipe_plans.Row("8-way data parallel", 1.0, 2.0**30, "40.0%", 5.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"step_seconds": 1.0005, "cpu_seconds": 50.0}, None),
        ({"step_seconds": 1.002}, "1.002000 s, stored are 1.000000 s"),
        ({"words": "8-way tensor parallel"}, "8-way tensor parallel, stored is 8-way data"),
        ({"words": "", "error": "PlanError: no plan fits"}, "PlanError: no plan fits"),
    ],
)
def test_another_plan_is_named(change, text):
    problems = recipe_plans.differences(ROW, replace(ROW, **change))
    assert bool(problems) == (text is not None)
    if text is not None:
        assert text in problems[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_nodes", recipe_plans.NODES)
@pytest.mark.parametrize("recipe", STORED)
def test_alpa_plan_makes_the_stored_plan(recipe, num_nodes):
    now = recipe_plans.plan_row(recipe, num_nodes)
    assert recipe_plans.differences(STORED[recipe][str(num_nodes)], now) == []
