"""The memory of a device by its parts: as words, and as a table with a row for each stage."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

from alpa_strategy.ir.plan import MEMORY_PARTS, Plan, memory_by_mesh, stages_by_devices
from alpa_strategy.units import format_bytes

# Parts whose names are too long for a screen of 80 columns.
_HEADINGS = {"gradients": "grads"}


def parts_text(parts: Mapping[str, int]) -> str:
    """Return the parts that are not 0 in words: `weights 1.00 GiB, gradients 1.00 GiB`; empty if
    all are 0.
    """
    words = []
    for name, num_bytes in parts.items():
        if num_bytes > 0:
            words.append(f"{name} {format_bytes(num_bytes)}")
    return ", ".join(words)


def memory_limit_of(plan: Plan, memory_limit: float | None) -> float | None:
    """Return the bytes per device that are given, else those of the plan's figures, if any."""
    if memory_limit is None and plan.figures is not None:
        return plan.figures.memory_limit
    return memory_limit


def memory_of_meshes(plan: Plan) -> dict[str, dict[str, int]]:
    """Return bytes by part for each mesh, by its stages: `0`, `1`, or `0,4`.

    Stages of one mesh share its memory.
    """
    of_meshes = {}
    for indices, parts in zip(stages_by_devices(plan), memory_by_mesh(plan).values(), strict=True):
        of_meshes[",".join(map(str, indices))] = dict(parts)
    return of_meshes


def memory_table(
    rows: Mapping[str, Mapping[str, int]],
    names: Sequence[str] = MEMORY_PARTS,
    max_rows: int | None = None,
    memory_limit: float | None = None,
) -> Table:
    """Return a table of memory by parts, a row for each run of stages with about the same bytes.

    Args:
        rows: bytes by part, by stage (`memory_of_meshes`).
        names: of the parts, in the order of the columns.
        max_rows: those that follow are left out; None: none are.
        memory_limit: bytes that a plan may use, for a column of what is left; None: no such column.
    """
    table = Table(box=None, padding=(0, 1), show_edge=False)
    table.add_column("stage", style="dim")
    for name in names:
        table.add_column(_HEADINGS.get(name, name), justify="right", no_wrap=True)
    table.add_column("sum", justify="right", no_wrap=True)
    if memory_limit is not None:
        table.add_column("left", justify="right", no_wrap=True)
    groups = []
    for _, members in groupby(rows.items(), key=lambda row: _rounded(row[1], names)):
        groups.append(list(members))
    num_shown = len(groups)
    if max_rows is not None and num_shown > max_rows:
        # The last row is that of the dots.
        num_shown = max_rows - 1
    for group in groups[:num_shown]:
        table.add_row(*_memory_row(group, names, memory_limit))
    if num_shown < len(groups):
        table.add_row("...")
    return table


def _memory_row(
    group: Sequence[tuple[str, Mapping[str, int]]],
    names: Sequence[str],
    memory_limit: float | None,
) -> list[str]:
    """Return the cells of a run of equal stages; a device's stages are joined by `+`."""
    first, last = (group[index][0].replace(",", "+") for index in (0, -1))
    label = first if len(group) == 1 else f"{first} to {last}"
    _, largest = max(group, key=lambda row: sum(row[1].values()))
    cells = [format_bytes(largest.get(name, 0)) for name in names]
    total = sum(largest.values())
    cells.append(format_bytes(total))
    if memory_limit is not None:
        cells.append(format_bytes(memory_limit - total) if total <= memory_limit else "none")
    return [label, *cells]


def _rounded(parts: Mapping[str, int], names: Sequence[str]) -> tuple[int, ...]:
    """Return a key that is the same for about equal memory."""
    return tuple(round(math.log(max(1, parts.get(name, 0)), 1.02)) for name in names)
