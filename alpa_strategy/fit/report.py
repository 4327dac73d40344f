"""The answer on one screen: fits or not, speed, memory by parts, and the plan in words."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import plain
from alpa_strategy.display.figures import add_warning, labelled_rows
from alpa_strategy.display.memory import memory_of_meshes, memory_table
from alpa_strategy.display.plan_words import (
    flops_text,
    peak_names_unusable,
    peak_text,
    plan_words,
    rates_text,
)
from alpa_strategy.errors import PlanError
from alpa_strategy.fit.changes import FitCase, PlannedChange, change_line
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.plan import Plan
from alpa_strategy.units import format_bytes, format_count, format_seconds

# Rows of the table of memory, for a screen of 40 lines.
_MAX_ROWS = 8


def headline(
    request: FitRequest, cluster: ClusterSpec, num_parameters: int, num_trained: int
) -> Text:
    """Return a heading of two lines: model and devices, then batch, optimizer and precision."""
    nodes = f"{cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}"
    model = f"{request.name}, {format_count(num_parameters)} parameters"
    if num_trained < num_parameters:
        model += f" ({format_count(num_trained)} trained)"
    step = f"{request.batch_size} sequences of {request.sequence_length} tokens"
    step += f", {request.optimizer}, {request.precision}"
    return Text.assemble((model, "bold"), f" on {nodes}\n", (step, "dim"))


def verdict(plan: Plan, cluster: ClusterSpec, usable_bytes: float) -> Table:
    """Return the lines fits, speed and plan, with the memory limit, FLOP/s if known, and warnings.

    Args:
        plan: that fits.
        cluster: that it is for.
        usable_bytes: of a device, what a plan may use.
    """
    seconds = plan.predicted.step_seconds
    table = labelled_rows()
    peak = peak_text(plan, usable_bytes, 0)
    table.add_row("fits", Text.assemble(("yes", "bold green"), "  ", peak))
    table.add_row("", plain(_limit_text(plan, cluster, usable_bytes), "dim"))
    rates = rates_text(plan.figures, seconds)
    table.add_row("speed", f"a step {format_seconds(seconds)}, {rates}")
    flops = flops_text(plan.figures)
    if flops:
        table.add_row("", plain(flops, "dim"))
    table.add_row("plan", plan_words(plan))
    add_warning(table, plan)
    return table


def _limit_text(plan: Plan, cluster: ClusterSpec, usable_bytes: float) -> str:
    """Return a text with the size of a device's memory, and with the part of it that is left to the
    allocator, if there is one that `peak_text` does not name.

    Args:
        usable_bytes: that a plan may use.
    """
    device_bytes = cluster.device.memory_bytes
    if usable_bytes >= device_bytes or peak_names_unusable(plan, usable_bytes):
        return f"of a device of {format_bytes(device_bytes)}"
    left = format_bytes(device_bytes - usable_bytes)
    return f"{left} of a device's {format_bytes(device_bytes)} are left to the allocator"


def memory_by_stage(plan: Plan) -> Table:
    """Return a table of the peak by parts, a row for each run of equal stages."""
    return memory_table(memory_of_meshes(plan), max_rows=_MAX_ROWS)


def report(sections: list[RenderableType]) -> Group:
    """Return sections with an empty line between them."""
    spaced: list[RenderableType] = []
    for index, section in enumerate(sections):
        if index:
            spaced.append(plain(""))
        spaced.append(section)
    return Group(*spaced)


def does_not_fit(error: PlanError) -> Table:
    """Return the line fits, with the least memory that any configuration needs.

    Args:
        error: its first line has it behind a colon; else the second line is shown, or the only one.
    """
    table = labelled_rows()
    first, *reasons = error.problem.strip().splitlines()
    _, _, least = first.removesuffix(":").partition(": ")
    if not least:
        least = reasons[0].strip() if reasons else first
    table.add_row("fits", Text.assemble(("no", "bold red"), f"  {least}"))
    return table


def changes_table(
    changes: Sequence[PlannedChange], case: FitCase, plan: Plan | None
) -> RenderableType:
    """Return a line for each of the nearest changes: its flags, and what the plan with it gains. A
    single line if there are no changes.

    Args:
        changes: the changes that were planned and help.
        case: the case as requested.
        plan: its plan; None if nothing fits.
    """
    aim = "make it fit" if plan is None else "make it at least 10 % faster"
    if not changes:
        return plain(f"none of the changes that were planned would {aim}", "dim")
    table = Table(box=None, padding=(0, 1), show_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for planned in changes:
        flags, text = change_line(planned, case, plan)
        table.add_row(Text(flags, style="bold"), text)
    return Group(plain(f"changes that {aim}, each one planned:", "dim"), table)
