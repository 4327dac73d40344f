"""Pictures of the pages of plans for the documentation, taken in Debian's Chromium.

    python scripts/page_pictures.py [FOLDER]

Plans GPT 1.3 B on 8 V100 in two ways, asks why one weight is stored as it is, and writes
page_top.png, page_parameter.png, page_timeline.png, page_narrow.png and page_diff.png.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from chromium import CHROMIUM, FLAGS
from playwright.sync_api import BrowserContext, Page, sync_playwright

from alpa_strategy.cli import main as alpa

ROOT = Path(__file__).parents[1]
PLAN = ["plan", "gpt_1_3b", "--cluster", "p3_16xlarge_x8", "cluster.num_nodes=1"]
NAME = "blocks.0.mlp.fc.weight"
ZOOM_STEPS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as name:
        plans = Path(name)
        make_pages(plans)
        with sync_playwright() as playwright:
            context = playwright.chromium.launch_persistent_context(
                plans / "profile", executable_path=CHROMIUM, args=FLAGS, headless=True
            )
            take_pictures(context, plans, folder)
            context.close()


def make_pages(folder: Path) -> None:
    """Write the pages of two plans, and of both side by side."""
    pipeline, other = str(folder / "plan.json"), str(folder / "other.json")
    run([*PLAN, "-o", pipeline])
    run(["why", pipeline, NAME])
    run([*PLAN, "plan.num_stages=4", "-o", other])
    run(["diff", pipeline, other, "--html", str(folder / "diff.html")])


def run(command: list[str]) -> None:
    if alpa(command) != 0:
        raise SystemExit(f"alpa {' '.join(command)} failed")


def take_pictures(context: BrowserContext, plans: Path, folder: Path) -> None:
    """Take one picture of each part of a page that the documentation shows."""
    shots: list[tuple[str, str, int, str, Callable[[Page], None]]] = [
        ("page_top", "plan", 1400, "light", at_top),
        ("page_parameter", "plan", 1400, "light", on_parameter),
        ("page_timeline", "plan", 1400, "dark", zoomed),
        ("page_narrow", "plan", 800, "light", at_top),
        ("page_diff", "diff", 1400, "light", at_top),
    ]
    for name, page_name, width, scheme, prepare in shots:
        tab = context.new_page()
        tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        tab.set_viewport_size({"width": width, "height": 900})
        tab.goto((plans / f"{page_name}.html").as_uri())
        tab.wait_for_selector('main[aria-busy="false"]')
        prepare(tab)
        tab.wait_for_timeout(500)
        tab.screenshot(path=folder / f"{name}.png")
        tab.close()


def at_top(tab: Page) -> None:
    tab.evaluate("scrollTo(0, 0)")


def on_parameter(tab: Page) -> None:
    tab.fill(".tree-card input", NAME)
    tab.locator('[data-key^="parameter"]').first.click()
    tab.evaluate("document.getElementById('explore').scrollIntoView()")
    tab.evaluate("document.querySelector('#details').scrollTop = 1e6")


def zoomed(tab: Page) -> None:
    tab.focus("canvas.timeline")
    for _ in range(ZOOM_STEPS):
        tab.keyboard.press("+")
    tab.wait_for_timeout(300)
    tab.evaluate("document.querySelector('canvas.timeline').closest('section').scrollIntoView()")


if __name__ == "__main__":
    main()
