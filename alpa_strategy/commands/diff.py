"""`alpa diff`: two stored plans side by side."""

import argparse
from pathlib import Path

from alpa_strategy.commands.writing import writing
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.difference import difference_table
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import details_of_file
from alpa_strategy.page.model import page_model
from alpa_strategy.page.page import page_of


def add_arguments(diff: argparse.ArgumentParser) -> None:
    """Add the options of `alpa diff` to its parser."""
    diff.add_argument("before", metavar="A.json")
    diff.add_argument("after", metavar="B.json")
    diff.add_argument("--html", metavar="OUT.html", help="write both side by side as a page")


def run(arguments: argparse.Namespace) -> int:
    """Print what differs between two plans, write their page if it is requested, and return 0.

    Raises:
        AlpaError: a plan cannot be read, or the page cannot be written.
    """
    paths = arguments.before, arguments.after
    plans = [Plan.load(path) for path in paths]
    names = _names(*paths)
    console = make_console()
    console.print(difference_table(names, *plans))
    if arguments.html:
        models = []
        for path, plan, name in zip(paths, plans, names, strict=True):
            models.append(page_model(plan, details_of_file(path, plan), name))
        with writing(arguments.html) as target:
            target.write_text(page_of(models), encoding="utf-8")
        console.print(plain(f"page written to {arguments.html}"))
    return 0


def _names(before: str, after: str) -> list[str]:
    """Return short names that differ: those of the files if they do."""
    short = [Path(before).name, Path(after).name]
    return short if short[0] != short[1] else [before, after]
