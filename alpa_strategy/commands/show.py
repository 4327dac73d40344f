"""`alpa show`: a stored plan as text, as a page and as a picture."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from alpa_strategy.commands.writing import writing
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.full_plan import plan_svg, plan_table
from alpa_strategy.display.measured import measured_table
from alpa_strategy.display.op_times import slowest_ops_table
from alpa_strategy.display.table import plan_timing
from alpa_strategy.ir.measured_steps import measured_of_file
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import details_of_file, details_path
from alpa_strategy.page.page import page_path, plan_page
from alpa_strategy.urls import download, is_url, parent_and_name


def add_arguments(show: argparse.ArgumentParser) -> None:
    """Add the options of `alpa show` to its parser."""
    show.add_argument(
        "--html",
        metavar="OUT.html",
        nargs="?",
        const="",
        help="write a self-contained page (beside the plan)",
    )
    show.add_argument("--svg", metavar="OUT.svg", help="write a picture")


def run(arguments: argparse.Namespace) -> int:
    """Print a stored plan, write its page and picture if these are requested, and return 0.

    Raises:
        AlpaError: the plan cannot be read, or the page or picture cannot be written.
        OSError: the details of a plan at a URL cannot be read.
    """
    plan = Plan.load(arguments.plan)
    console = make_console()
    console.print(plan_table(plan))
    with _with_details(arguments.plan) as plan_path:
        details = details_of_file(plan_path, plan)
    slowest = None if details is None else slowest_ops_table(plan, details)
    if slowest is not None:
        console.print(slowest)
    if plan.solver_seconds:
        console.print(plan_timing(plan))
    measured = measured_of_file(arguments.plan, plan)
    if measured is not None:
        console.print(measured_table(measured, plan))
    if arguments.html is not None:
        # A page of a plan at a URL is written to the current folder.
        _, name = parent_and_name(arguments.plan)
        beside = name if is_url(arguments.plan) else arguments.plan
        path = arguments.html or str(page_path(beside))
        page = plan_page(plan, details, name, measured)
        with writing(path) as target:
            target.write_text(page, encoding="utf-8")
        console.print(plain(f"page written to {path}"))
    if arguments.svg:
        with writing(arguments.svg) as target:
            target.write_text(plan_svg(plan), encoding="utf-8")
    return 0


@contextmanager
def _with_details(plan_path: str) -> Iterator[Path]:
    """Context with the path of a plan file, beside which its details are, if there are any. For a
    URL it is in a temporary folder, with the details alone; OSError if these cannot be read.
    """
    if not is_url(plan_path):
        yield Path(plan_path)
        return
    parent, name = parent_and_name(plan_path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / name
        details = details_path(copy)
        with suppress(FileNotFoundError):
            download(f"{parent}/{details.name}", details)
        yield copy
