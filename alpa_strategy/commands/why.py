"""`alpa why`: the next best layouts of a parameter or op of a stored plan, and what binds it."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.progress import Progress
from alpa_strategy.ir.measured_steps import measured_of_file
from alpa_strategy.ir.plan_details import Explanation, LayoutChoice, PlanDetails, details_path
from alpa_strategy.page.page import page_path, plan_page
from alpa_strategy.units import format_bytes, format_seconds

# Rows of the table, unless all are requested.
MAX_ROWS = 6


def add_arguments(why: argparse.ArgumentParser) -> None:
    """Add the options of `alpa why` to its parser."""
    why.add_argument("plan", metavar="PLAN.json", help="as `alpa plan -o` stores it")
    why.add_argument("name", metavar="NAME", help="of a parameter or an op of the plan")
    why.add_argument("--all", action="store_true", help=f"print more than {MAX_ROWS} layouts")


def run(arguments: argparse.Namespace) -> int:
    """Explain a layout for `alpa why`, print the answer, add it to the details beside the plan, and
    to its page if there is one, and return 0.

    Raises:
        AlpaError: the plan cannot be read, or has nothing of this name.
    """
    from alpa_strategy.commands.origin import stored_plan
    from alpa_strategy.loading import rare_collections
    from alpa_strategy.planner.explain import explain

    progress = Progress()
    stored = stored_plan(arguments.plan, progress)
    with progress("solve with other layouts (a minute where memory binds)"), rare_collections():
        most = None if arguments.all else MAX_ROWS
        answer = explain(stored.task, stored.plan, arguments.name, most)
    make_console().print(explanation_table(answer, arguments.all))

    details = with_explanation(stored.details, answer)
    details.save(details_path(arguments.plan))
    page = page_path(arguments.plan)
    if page.exists():
        name = Path(arguments.plan).name
        measured = measured_of_file(arguments.plan, stored.plan)
        page.write_text(plan_page(stored.plan, details, name, measured), encoding="utf-8")
    return 0


def with_explanation(details: PlanDetails, answer: Explanation) -> PlanDetails:
    """Return the details with an answer, in the place of an earlier one about the same name."""
    others = [known for known in details.explanations if known.name != answer.name]
    return replace(details, explanations=(*others, answer))


def explanation_table(answer: Explanation, show_all: bool = False) -> RenderableType:
    """Return an answer as a table of layouts, with its reasons below.

    Args:
        show_all: show all layouts, not only the `MAX_ROWS` best.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layout")
    for column in (
        "step",
        "more",
        "memory",
        "compute",
        "collectives",
        "changes",
    ):
        table.add_column(column, justify="right")
    _add_row(table, answer.chosen, answer.chosen, "bold")
    shown = answer.choices if show_all else answer.choices[:MAX_ROWS]
    for choice in shown:
        _add_row(table, choice, answer.chosen, "")

    title = Text.assemble(plain(answer.name, "bold"), f"  {answer.kind} of stage {answer.stage}")
    parts: list[RenderableType] = [title, table]
    hidden = len(answer.choices) - len(shown) + answer.num_slower
    if hidden:
        parts.append(plain(f"and {hidden} more that are no faster, with --all", "dim"))
    parts += [plain(f"- {reason}", keeps_lines=True) for reason in answer.reasons]
    return Group(*parts)


def _add_row(table: Table, choice: LayoutChoice, chosen: LayoutChoice, style: str) -> None:
    """Add the row of `choice`: its seconds, bytes and difference from the chosen layout, or that it
    does not fit (seconds None).
    """
    layout = plain(choice.layout + (" (plan)" if choice is chosen else ""))
    if choice.seconds is None:
        table.add_row(layout, Text("does not fit", style="red"), style=style)
        return
    more = choice.seconds - (chosen.seconds or 0.0)
    table.add_row(
        layout,
        format_seconds(choice.seconds),
        "" if choice is chosen else _signed(more),
        format_bytes(choice.num_bytes),
        format_seconds(choice.compute_seconds),
        format_seconds(choice.communication_seconds),
        "" if choice is chosen else str(choice.num_changes),
        style=style,
    )


def _signed(seconds: float) -> str:
    """Return a difference of seconds as text with its sign."""
    sign = "+" if seconds >= 0 else "-"
    return f"{sign}{format_seconds(abs(seconds))}"
