"""The figures of a plan as rows for a terminal: the plan in words, its step and rates, memory, what
limits it, and the change that would help most.
"""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.answers import answers_of
from alpa_strategy.display.console import plain
from alpa_strategy.display.findings import busiest_text
from alpa_strategy.display.memory import memory_limit_of, parts_text
from alpa_strategy.display.plan_words import (
    assumed_rates_text,
    flops_text,
    peak_text,
    plan_words,
    rates_text,
    task_words,
)
from alpa_strategy.display.table import (
    baselines_text,
    headline,
    iteration_phases,
    seconds_bar,
    seconds_legend,
    step_parts,
)
from alpa_strategy.ir.plan import Plan, memory_by_mesh
from alpa_strategy.units import format_seconds


def opening(
    plan: Plan,
    memory_limit: float | None = None,
    process_bytes: int = 0,
    max_findings: int | None = None,
) -> list[RenderableType]:
    """Return the first sections of a plan's display: the phases of an iteration, the headline, and
    its figures.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: that of the plan's figures.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
        max_findings: sentences on what limits the step; None: all.
    """
    sections: list[RenderableType] = []
    if plan.phases:
        sections += [iteration_phases(plan, memory_limit), Text()]
    figures = figures_table(plan, memory_limit, process_bytes, max_findings)
    return [*sections, headline(plan), figures]


def labelled_rows() -> Table:
    """Return an empty table of rows with a label each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def add_warning(table: Table, plan: Plan) -> None:
    """Add a row with what is assumed of the devices' rates, if anything is."""
    warning = assumed_rates_text(plan)
    if warning:
        table.add_row(Text("warning", "yellow"), plain(warning))


def figures_table(
    plan: Plan,
    memory_limit: float | None = None,
    process_bytes: int = 0,
    max_findings: int | None = None,
) -> Table:
    """Return a row for each figure of a plan. An eager one has memory, baselines and a warning
    alone.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: that of the plan's figures.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
        max_findings: sentences on what limits the step; None: all.
    """
    memory_limit = memory_limit_of(plan, memory_limit)
    table = labelled_rows()
    # The seconds of an eager step are not known.
    if not plan.is_eager:
        table.add_row("plan", plan_words(plan))
        made_for = task_words(plan)
        if made_for:
            table.add_row("for", plain(made_for))
        _add_step(table, plan)
    table.add_row("memory", _memory(plan, memory_limit, process_bytes))
    if not plan.is_eager:
        _add_answers(table, plan, memory_limit, max_findings)
    if plan.baselines:
        table.add_row("instead", baselines_text(plan))
    add_warning(table, plan)
    return table


def _add_step(table: Table, plan: Plan) -> None:
    """Add rows with the seconds of a step, its rates, its FLOPs, and where the seconds go."""
    seconds = plan.predicted.step_seconds
    line = Text.assemble((format_seconds(seconds), "bold"))
    rates = rates_text(plan.figures, seconds)
    if rates:
        line.append(f", {rates}")
    table.add_row("step", line)
    flops = flops_text(plan.figures)
    if flops:
        table.add_row("", plain(flops, "dim"))
    parts = step_parts(plan)
    if parts:
        table.add_row("", seconds_bar(parts))
        of_devices = busiest_text(plan)
        legend = seconds_legend(parts)
        if of_devices:
            legend.append(f"  {of_devices}", "dim")
        table.add_row("", legend)


def _memory(plan: Plan, memory_limit: float | None, process_bytes: int) -> Text:
    """Return the bytes at the peak, by parts, of the devices that need most."""
    text = peak_text(plan, memory_limit, process_bytes)
    largest = max(memory_by_mesh(plan).values(), key=lambda parts: sum(parts.values()))
    words = parts_text(largest)
    if words:
        text.append(f"\n{words}", style="dim")
    return text


def _add_answers(
    table: Table, plan: Plan, memory_limit: float | None, max_findings: int | None
) -> None:
    """Add rows with what limits the step, and the change that would help most."""
    answers = answers_of(plan, memory_limit)
    lines = answers.findings[:max_findings]
    if lines:
        table.add_row("limit", plain("\n".join(lines), keeps_lines=True))
    if answers.change is not None:
        table.add_row("change", plain(answers.change))
