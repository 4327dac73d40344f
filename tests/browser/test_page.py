"""The page in a real browser: what users click, type and see."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from page.test_details import PIPELINE, planned
from page.test_measured import measured_twice_as_long

from alpa_strategy.display.memory import parts_text
from alpa_strategy.ir.plan import Plan, memory_by_mesh
from alpa_strategy.ir.plan_details import PlanDetails
from alpa_strategy.page.model import page_model
from alpa_strategy.page.page import models_of, page_of, plan_page
from alpa_strategy.planner.details import details_of
from alpa_strategy.planner.explain import explain
from alpa_strategy.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from chromium import CHROMIUM, FLAGS

# Processor time of the page's thread: what others do on the machine does not count.
MOST_SECONDS = 2.0
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
        "measured": plan_page(two, two_details, "two.json", measured_twice_as_long(two)),
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


def shown_details(tab) -> str:
    return tab.inner_text("#details")


def test_a_click_on_a_parameter_shows_its_layout_bytes_and_next_choices(browser_page, pages):
    tab = opened(browser_page, pages["one"])
    tab.fill(".tree-card input", "weight")
    row = tab.locator('[data-key^="parameter"]').first
    row.click()
    text = shown_details(tab)
    assert row.get_attribute("aria-selected") == "true"
    for expected in ("shape", "on a device", "layout", "Bytes of a device", "next best choices"):
        assert expected in text
    # A stored answer, or the command that gives it.
    assert "the plan's" in text or "alpa why one.json" in text


def test_stored_answers_are_shown(browser_page, pages):
    tab = opened(browser_page, pages["one"])
    (name,) = models_of(pages["one"].read_text())[0]["explanations"]
    tab.fill(".tree-card input", name)
    tab.locator('[data-key^="parameter"]').first.click()
    text = shown_details(tab)
    assert "the plan's" in text
    assert "Memory does not bind" in text


def test_a_click_on_an_op_shows_its_line_operands_and_seconds(browser_page, pages):
    tab = opened(browser_page, pages["one"])
    tab.fill(".tree-card input", "linear")
    tab.locator('[data-key^="op"]').first.click()
    text = shown_details(tab)
    for expected in ("call", "forward", "backward", "reads", "gives", "models.py"):
        assert expected in text
    # From the op to the parameter that it reads.
    tab.locator("#details .link").first.click()
    assert shown_details(tab) != text


def test_a_click_on_a_device_shows_what_it_stores(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    tab.click('[data-rank="3"]')
    text = shown_details(tab)
    assert "Device 3" in text
    assert re.search(r"Stores shards of \d+ parameters", text)
    assert "It waits for" in text


def test_the_timeline_zooms_and_shows_ops(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    canvas = tab.locator("canvas.timeline")
    canvas.scroll_into_view_if_needed()
    before = canvas.screenshot()
    tab.get_by_role("button", name="zoom in").click()
    tab.get_by_role("button", name="zoom in").click()
    tab.wait_for_timeout(600)
    assert float(canvas.get_attribute("data-zoom")) == pytest.approx(4.0)
    assert canvas.screenshot() != before
    tab.get_by_role("button", name="show the whole step").click()
    tab.wait_for_timeout(600)
    assert float(canvas.get_attribute("data-zoom")) == pytest.approx(1.0)

    box = canvas.bounding_box()
    tab.mouse.click(box["x"] + 121, box["y"] + 12)
    assert "forward of micro-batch 0" in shown_details(tab)


def test_everything_is_reached_by_keyboard(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    tab.focus(".tree [tabindex='0']")
    for _ in range(40):
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowRight")
        if tab.evaluate("document.activeElement.dataset.key || ''").startswith("parameter"):
            break
    tab.keyboard.press("Enter")
    assert "parameter of Stage 0" in shown_details(tab)

    tab.focus('[data-rank="0"]')
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert "Device 1" in shown_details(tab)

    tab.focus("canvas.timeline")
    tab.keyboard.press("+")
    tab.keyboard.press("]")
    tab.keyboard.press("]")
    assert "of micro-batch" in shown_details(tab)


def test_memory_is_drawn_for_every_mesh(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    layers = tab.locator(".memory-chart svg g path")
    assert layers.count() > 3
    before = tab.inner_html(".memory-chart")
    choose = tab.get_by_label("stage", exact=True)
    other = "1" if choose.input_value() == "0" else "0"
    choose.select_option(other)
    assert tab.inner_html(".memory-chart") != before


def test_memory_has_the_parts_that_the_terminal_prints(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    plan, _ = planned("gpt", PIPELINE)
    parts = max(memory_by_mesh(plan).values(), key=lambda parts: sum(parts.values()))
    assert parts_text(parts) in tab.inner_text(".figures")
    chart = " ".join(tab.inner_text('section[aria-label="memory"]').split())
    for name, num_bytes in parts.items():
        assert num_bytes == 0 or f"{name} {format_bytes(num_bytes)}" in chart
    assert f"peak {format_bytes(plan.predicted.peak_bytes)}" in chart


def test_two_plans_side_by_side(browser_page, pages):
    tab = opened(browser_page, pages["pair"])
    text = tab.inner_text("#compare")
    for expected in ("What differs", "A: one.json", "B: two.json", "memory per device", "stages"):
        assert expected in text
    assert tab.locator("#compare canvas.timeline").count() == 2
    tab.get_by_role("button", name="B: two.json").click()
    assert "Stage 0" in tab.inner_text(".tree")


def test_a_plan_file_alone_has_a_page(browser_page, pages):
    tab = opened(browser_page, pages["alone"])
    assert "the plan file alone" in tab.inner_text("main")
    tab.fill(".tree-card input", "wte")
    tab.locator('[data-key^="parameter"]').first.click()
    assert "layout" in shown_details(tab)


def test_a_large_plan_is_small_and_opens_fast(browser_page, pages):
    assert pages["large"].stat().st_size < 3 * 2**20
    tab = browser_page
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    opened(tab, pages["large"])
    metrics = {of["name"]: of["value"] for of in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < metrics["TaskDuration"] < MOST_SECONDS
    assert f"{NUM_LARGE_STAGES} equal" in tab.inner_text(".tree")
    assert tab.locator(".device").count() == 16 * NUM_LARGE_STAGES


@pytest.mark.parametrize("width", [1400, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_nothing_is_cut(browser_page, pages, width, scheme):
    browser_page.emulate_media(color_scheme=scheme)
    browser_page.set_viewport_size({"width": width, "height": 900})
    tab = opened(browser_page, pages["two"])
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(_LEAST_CONTRAST) >= 4.5
    assert tab.evaluate(_SMALLEST_TEXT) >= 11


# The least contrast of any text with its background, as WCAG defines it.
_LEAST_CONTRAST = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0.5) return color;
    }
    return [255, 255, 255];
  };
  let least = 99;
  for (const node of document.querySelectorAll("main *")) {
    const hasText = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!hasText || node.closest("svg, select, .dim")) continue;
    const pair = [parse(getComputedStyle(node).color), behind(node)].map(light);
    least = Math.min(least, (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05));
  }
  return least;
}"""
_SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll("main *")]
  .filter((node) => [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim()))
  .map((node) => parseFloat(getComputedStyle(node).fontSize)))"""


def test_a_measured_step_is_drawn_under_the_predicted_one(browser_page, pages) -> None:
    tab = opened(browser_page, pages["measured"])
    table = tab.get_by_role("region", name="measured", exact=True)
    assert "2.00 \u00d7" in table.inner_text()
    assert "steps 10 to 12" in table.inner_text()
    lanes = tab.get_by_role("region", name="measured schedule")
    assert "as measured" in lanes.inner_text()
    assert "not drawn" not in lanes.inner_text()
    lanes.locator("canvas").press("+")
    assert float(lanes.locator("canvas").get_attribute("data-zoom") or 0) > 1
    assert "\u00d7 the prediction" in tab.locator(".figures").inner_text()
