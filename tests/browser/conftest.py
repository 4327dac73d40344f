"""A real Chromium without a screen, and pages of plans as files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from page.test_details import PIPELINE, planned

from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import PlanDetails
from alpa_strategy.page.model import page_model
from alpa_strategy.page.page import page_of, plan_page
from alpa_strategy.planner.details import details_of
from alpa_strategy.planner.explain import explain

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NUM_LARGE_STAGES = 64


@pytest.fixture(scope="session")
def browser_context(tmp_path_factory) -> Iterator[object]:
    """A browser with a new profile. Skips where there is none, unless ALPA_BROWSER=required."""
    is_required = os.environ.get("ALPA_BROWSER") == "required"
    if not is_required and shutil.which(CHROMIUM) is None:
        pytest.skip("Debian's chromium is not installed")
    if not is_required:
        pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            args=FLAGS,
            headless=True,
            viewport={"width": 1400, "height": 900},
        )
        yield context
        context.close()


@pytest.fixture
def browser_page(browser_context):
    """A new tab; the test fails on errors of the page's script."""
    tab = browser_context.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    yield tab
    tab.close()
    assert not errors
    # The page itself, or an image that its script has made: nothing else is loaded.
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)


def opened(tab, path: Path):
    """Open a page and wait until it is drawn."""
    tab.goto(path.as_uri())
    tab.wait_for_selector('main[aria-busy="false"]')
    return tab


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Pages of a plan of one stage, of a pipeline, of both side by side, and of a large plan."""
    folder = tmp_path_factory.mktemp("pages")
    one, one_task = planned("gpt", (("logical_mesh", (2, 2)),))
    one_details = details_of(one_task, one)
    assert one_details is not None
    name = next(iter(one.stages[0].parameter_plans))
    answer = explain(one_task, one, name)
    one_details = replace(one_details, explanations=(answer,))
    two, two_task = planned("gpt", PIPELINE)
    two_details = details_of(two_task, two)
    assert two_details is not None
    large, large_details = many_stages(two, two_details)
    texts = {
        "one": plan_page(one, one_details, "one.json"),
        "two": plan_page(two, two_details, "two.json"),
        "alone": plan_page(two, None, "alone.json"),
        "large": plan_page(large, large_details, "large.json"),
        "pair": page_of(
            [page_model(one, one_details, "one.json"), page_model(two, two_details, "two.json")]
        ),
    }
    paths = {}
    for key, text in texts.items():
        paths[key] = folder / f"{key}.html"
        paths[key].write_text(text, encoding="utf-8")
    return paths


def many_stages(plan: Plan, details: PlanDetails) -> tuple[Plan, PlanDetails]:
    """A plan of 64 stages, each with the ops and parameters of the first of `plan`."""
    stage, of_stage = plan.stages[0], details.stages[0]
    stages = []
    of_stages = []
    for index in range(NUM_LARGE_STAGES):
        prefix = f"part.{index}."
        stages.append(
            replace(
                stage,
                first_device=16 * index,
                submesh=(2, 8),
                logical_mesh=(16,),
                parameter_plans={prefix + n: p for n, p in stage.parameter_plans.items()},
                shapes={prefix + n: shape for n, shape in stage.shapes.items()},
            )
        )
        parameters = []
        for parameter in of_stage.parameters:
            parameters.append(replace(parameter, name=prefix + parameter.name))
        of_stages.append(replace(of_stage, parameters=tuple(parameters)))
    large = replace(plan, stages=tuple(stages), num_microbatches=256, schedule="1F1B")
    return large, replace(details, stages=tuple(of_stages), devices_per_node=8)
