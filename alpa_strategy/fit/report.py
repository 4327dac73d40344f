"""The answer on one screen: fits or not, speed, memory by parts, and the plan in words."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import plain
from alpa_strategy.display.plan_words import plan_words
from alpa_strategy.errors import PlanError
from alpa_strategy.fit.changes import FitCase, PlannedChange, change_line
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.fit.summary import (
    FRAGMENTATION,
    PARTS,
    memory_of_meshes,
    mfu,
)
from alpa_strategy.ir.plan import Plan
from alpa_strategy.units import format_bytes, format_count, format_seconds

# Parts of memory whose names are too long for a screen of 80 columns.
_HEADINGS = {FRAGMENTATION: "fragments", "gradients": "grads"}

# Rows of the table of memory, for a screen of 40 lines.
_MAX_ROWS = 8


def headline(
    request: FitRequest, cluster: ClusterSpec, num_parameters: int, num_trained: int
) -> Text:
    """Return what was asked: model, devices and step."""
    nodes = f"{cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}"
    model = f"{request.name}, {format_count(num_parameters)} parameters"
    if num_trained < num_parameters:
        model += f" ({format_count(num_trained)} trained)"
    step = f"{request.batch_size} sequences of {request.sequence_length} tokens"
    step += f", {request.optimizer}, {request.precision}"
    return Text.assemble((model, "bold"), f" on {nodes}\n", (step, "dim"))


def verdict(plan: Plan, request: FitRequest, cluster: ClusterSpec, flops: float) -> Table:
    """Return the lines fits, speed and plan."""
    seconds = plan.predicted.step_seconds
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    peak = format_bytes(plan.predicted.peak_bytes)
    table.add_row("fits", Text.assemble(("yes", "bold green"), f"  {peak} a device at the peak"))
    speed = f"{format_count(request.tokens / seconds)} tokens/s"
    speed += f", a step {format_seconds(seconds)}"
    share = mfu(plan, flops, cluster, request)
    if share is not None:
        speed += f", MFU {share:.1%}"
    table.add_row("speed", speed)
    table.add_row("plan", plan_words(plan))
    return table


def memory_table(plan: Plan, cluster: ClusterSpec, usable_bytes: float) -> Table:
    """Return a table of memory by parts, a row for each run of equal stages."""
    table = Table(box=None, padding=(0, 1), show_edge=False)
    table.add_column("stage", style="dim")
    for part in PARTS:
        table.add_column(_HEADINGS.get(part, part), justify="right", no_wrap=True)
    table.add_column("sum", justify="right")
    rows = list(memory_of_meshes(plan, cluster, usable_bytes).items())
    groups = []
    for _, members in groupby(rows, key=lambda row: _rounded(row[1])):
        groups.append(list(members))
    is_cut = len(groups) > _MAX_ROWS
    num_shown = _MAX_ROWS - 1 if is_cut else _MAX_ROWS
    for group in groups[:num_shown]:
        table.add_row(*_memory_row(group))
    if is_cut:
        table.add_row("...")
    device = format_bytes(cluster.device.memory_bytes)
    table.caption = f"of {device} a device; fragments: what a plan leaves to the allocator"
    table.caption_justify = "left"
    return table


def _memory_row(group: Sequence[tuple[str, Mapping[str, int]]]) -> list[str]:
    """Return the cells of a run of equal stages."""
    label = group[0][0] if len(group) == 1 else f"{group[0][0]}-{group[-1][0]}"
    _, largest = max(group, key=lambda row: sum(row[1].values()))
    cells = [format_bytes(largest.get(part, 0)) for part in PARTS]
    return [label, *cells, format_bytes(sum(largest.values()))]


def _rounded(parts: Mapping[str, int]) -> tuple[int, ...]:
    """Return a key that is the same for about equal memory."""
    return tuple(round(math.log(max(1, parts.get(part, 0)), 1.02)) for part in PARTS)


def report(sections: list[RenderableType]) -> Group:
    """Return sections with an empty line between them."""
    spaced: list[RenderableType] = []
    for index, section in enumerate(sections):
        if index:
            spaced.append(plain(""))
        spaced.append(section)
    return Group(*spaced)


def does_not_fit(error: PlanError) -> Table:
    """Return the line fits, with the least memory that any configuration needs."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    reason = error.problem.strip().splitlines()[-1].strip()
    table.add_row("fits", Text.assemble(("no", "bold red"), f"  {reason}"))
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
    aim = "make it fit" if plan is None else "make it 10 % faster"
    if not changes:
        return plain(f"none of the changes that were planned would {aim}", "dim")
    table = Table(box=None, padding=(0, 1), show_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for planned in changes:
        flags, text = change_line(planned, case, plan)
        table.add_row(Text(flags, style="bold"), text)
    return Group(plain(f"changes that {aim}, each one planned:", "dim"), table)
