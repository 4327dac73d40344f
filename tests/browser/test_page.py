"""The page in a real browser: what users click, type and see."""

from __future__ import annotations

import re
import time

import pytest
from browser.conftest import NUM_LARGE_STAGES, opened

from alpa_strategy.page.page import models_of

# Of a machine that others use as well; the page's own script takes a quarter of it.
MOST_SECONDS = 2.0


def details_of(tab) -> str:
    return tab.inner_text("#details")


def test_a_click_on_a_parameter_shows_its_layout_bytes_and_next_choices(browser_page, pages):
    tab = opened(browser_page, pages["one"])
    tab.fill(".tree-card input", "weight")
    row = tab.locator('[data-key^="parameter"]').first
    row.click()
    text = details_of(tab)
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
    text = details_of(tab)
    assert "the plan's" in text
    assert "Memory does not bind" in text


def test_a_click_on_an_op_shows_its_line_operands_and_seconds(browser_page, pages):
    tab = opened(browser_page, pages["one"])
    tab.fill(".tree-card input", "linear")
    tab.locator('[data-key^="op"]').first.click()
    text = details_of(tab)
    for expected in ("call", "forward", "backward", "reads", "gives", "models.py"):
        assert expected in text
    # From the op to the parameter that it reads.
    tab.locator("#details .link").first.click()
    assert details_of(tab) != text


def test_a_click_on_a_device_shows_what_it_stores(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    tab.click('[data-rank="3"]')
    text = details_of(tab)
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
    assert "forward of micro-batch 0" in details_of(tab)


def test_everything_is_reached_by_keyboard(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    tab.focus(".tree [tabindex='0']")
    for _ in range(40):
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowRight")
        if tab.evaluate("document.activeElement.dataset.key || ''").startswith("parameter"):
            break
    tab.keyboard.press("Enter")
    assert "parameter of Stage 0" in details_of(tab)

    tab.focus('[data-rank="0"]')
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert "Device 1" in details_of(tab)

    tab.focus("canvas.timeline")
    tab.keyboard.press("+")
    tab.keyboard.press("]")
    tab.keyboard.press("]")
    assert "of micro-batch" in details_of(tab)


def test_memory_is_drawn_for_every_mesh(browser_page, pages):
    tab = opened(browser_page, pages["two"])
    layers = tab.locator(".memory-chart svg g path")
    assert layers.count() > 3
    before = tab.inner_html(".memory-chart")
    choose = tab.get_by_label("stage", exact=True)
    other = "1" if choose.input_value() == "0" else "0"
    choose.select_option(other)
    assert tab.inner_html(".memory-chart") != before


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
    assert "layout" in details_of(tab)


def test_a_large_plan_is_small_and_opens_fast(browser_page, pages):
    assert pages["large"].stat().st_size < 3 * 2**20
    started = time.perf_counter()
    tab = opened(browser_page, pages["large"])
    assert time.perf_counter() - started < MOST_SECONDS
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
