"""Names are data: whatever a parameter, a folder or a note is called, it is drawn character by
character, in a terminal, a page and a picture, and reads back from a file as it was.
"""

from __future__ import annotations

import ast
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import alpa_strategy
from alpa_strategy.cli import main
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.full_plan import plan_svg, plan_table
from alpa_strategy.display.progress import Progress
from alpa_strategy.display.table import plan_timing, tune_table
from alpa_strategy.errors import UNPRINTABLE, AlpaError
from alpa_strategy.ir.plan import (
    Collective,
    Fingerprint,
    ParameterPlan,
    PhaseCost,
    Plan,
    Predicted,
    StagePlan,
    TaskFigures,
)
from alpa_strategy.page.page import models_of, plan_page

# Each would end, recolour, replace or hide something where it was not drawn as it is.
NAMES = [
    "[/nope]",
    "[/]",
    "[red]",
    "[bold red]x[/bold red]",
    "[link=http://a.b]x[/link]",
    "[@click=app.quit]x[/]",
    "\\[red]",
    "[[",
    ":smile:",
    ":warning-emoji:",
    "\x1b[31mred",
    "\x1b]8;;http://a.b\x1b\\",
    "\r\b\x07\x00",
    "two\nlines",
    "a\ttab",
    "<script>alert(1)</script>",
    "&amp;&#x41;",
    "]]>",
    "</text>",
    "שלום",
    "\u202eabc",
    "\u200fabc",
    "\ud800",
    "\uffff",
    "\u2028",
    "%s{0}{name}",
    "blocks.²",
    "blocks." + "9" * 5000,
    "x" * 20_000,
    "a.b-" * 5_000,
    "名前",
    "👩‍👩‍👧",
    "",
    " ",
    "'\"`",
]


def plan_of(name: str) -> Plan:
    """A plan in which everything that has a name has this one."""
    predicted = Predicted(0.8, 11 * 2**30, 0.6, 0.15, 0.05)
    stage = StagePlan(
        submesh=(1, 2),
        first_device=0,
        logical_mesh=(2,),
        ops=(0, 10),
        parameter_plans={name: ParameterPlan.parse("S0"), f"b.0.{name}": ParameterPlan.parse("R")},
        strategies={},
        collectives=(Collective(name, 0, name, 48, 3 * 2**29, 0.05, name),),
        predicted=predicted,
        layers=name,
        forward_seconds=0.1,
        backward_seconds=0.2,
        shapes={name: (4, 4)},
    )
    return Plan(
        fingerprint=Fingerprint("g", "p", "b", "c", "o", "1"),
        stages=(stage, replace(stage, first_device=2)),
        predicted=predicted,
        num_microbatches=4,
        schedule=name,
        baselines={name: None, name + "2": 1.2},
        notes=(name,),
        solver_seconds={name: 3.0},
        cluster_name=name,
        figures=TaskFigures(
            1,
            1,
            name,
            peak_seconds=0.1,
            half_precision=name,
            half_share=0.05,
            assumed_rates={name: name},
        ),
        phases=(PhaseCost(name, 1, name, 2**30, 0.1, None, None),),
    )


def drawn(name: str) -> str:
    """How a name looks, without what wrapping may add."""
    return "".join(str(plain(name)).split())


def shown(renderable: object, console: Console) -> str:
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


CONSOLES = {
    "ours": lambda: make_console(width=120),
    "anybody's": lambda: Console(width=120),
    "narrow": lambda: Console(width=20),
}


@pytest.mark.parametrize("make", CONSOLES.values(), ids=CONSOLES)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_is_drawn_as_it_is(name, make):
    plan = plan_of(name)
    timing, tuned = plan_timing(plan), tune_table({8: plan, 4: AlpaError(name)}, 8, 2)
    for renderable in (plan_table(plan), timing, tuned):
        text = shown(renderable, make())
        assert not UNPRINTABLE.search(text)
        assert ":smile:" not in name or "😄" not in text
    if len(name) < 100:
        # A line of its own holds it all, folded.
        assert drawn(name) in "".join(shown(plan_table(plan), make()).split())


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_is_displayed(name, tmp_path, capsys):
    file, html, svg = (tmp_path / f"plan.{kind}" for kind in ("json", "html", "svg"))
    plan_of(name).save(file)
    assert Plan.load(file) == plan_of(name)
    assert main(["show", str(file), "--html", str(html), "--svg", str(svg)]) == 0
    printed = capsys.readouterr().out
    assert not UNPRINTABLE.search(printed)

    page, picture = html.read_text(), svg.read_text()
    # Names are in the packed data alone: they cannot be tags.
    assert tags_of(page) == PAGE_TAGS
    assert name in {
        of["name"] for stage in models_of(page)[0]["stages"] for of in stage["parameters"]
    }
    root = ET.fromstring(picture)
    assert all(element.tag.rsplit("}")[-1] in SVG_TAGS for element in root.iter())
    if len(name) < 100:
        assert drawn(name) in "".join(printed.split())
        text = "".join("".join(root.itertext()).split())
        assert drawn(name) in text


PAGE_TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "a",
    "main",
    "p",
    "div",
    "noscript",
    "code",
    "script",
}
SVG_TAGS = {"svg", "style", "defs", "clipPath", "rect", "text", "g", "circle"}


def tags_of(page: str) -> set[str]:
    tags: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    return tags


ANY = st.text(st.characters() | st.sampled_from("[]/:\\<>&;\x1b\n.0"), max_size=60)


@settings(deadline=None, max_examples=30)
@given(ANY)
def test_random_names(name):
    plan = plan_of(name)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for console in (make_console(width=80), Console(width=80)):
        assert not UNPRINTABLE.search(shown(plan_table(plan), console))
    ET.fromstring(plan_svg(plan))
    assert tags_of(plan_page(plan)) == PAGE_TAGS


@settings(deadline=None, max_examples=25)
@given(ANY)
def test_random_names_in_progress_and_errors(name):
    file = io.StringIO()
    progress = Progress(console=make_console(file=file, width=10_000))
    with progress(name):
        pass
    progress.say(f"plan {name}")
    text = file.getvalue()
    assert not UNPRINTABLE.search(text)
    assert text.count(str(plain(name))) >= 1
    error = AlpaError(name, name)
    assert not UNPRINTABLE.search(str(error))


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_error_of_the_command_line_shows_any_name(name, tmp_path, capsys):
    file = tmp_path / "plan.json"
    data = plan_of("w").to_dict()
    data["stages"][0]["parameters"] = {name: "nonsense"}
    file.write_text(json.dumps(data))
    assert main(["show", str(file)]) == 2
    error = capsys.readouterr().err
    assert "what to do" in error
    assert not UNPRINTABLE.search(error)
    assert ascii(name)[1:40] in error or repr(name)[1:40] in error


@pytest.mark.parametrize("name", ["[/nope]", "[red]", ":smile:", "<b>", "名前", "%s"])
def test_files_that_are_called_so(name, tmp_path, capsys):
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    file = folder / "[red]plan.json"
    plan_of("w").save(file)
    assert main(["show", str(file), "--html", str(folder / "[x].html")]) == 0
    assert main(["show", str(folder / "[gone].json")]) == 2
    assert "[gone].json" in capsys.readouterr().err


def test_every_console_of_the_package_is_made_in_one_place():
    """One made elsewhere would read markup and emoji codes in names."""
    package = Path(alpa_strategy.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_console = isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "Console",
                "Text.from_markup",
                "rich.print",
                "get_console",
            )
            if is_console and file.name != "console.py":
                raise AssertionError(f"{file}:{node.lineno}: {ast.unparse(node.func)}")
