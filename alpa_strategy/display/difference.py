"""Two plans side by side, as tables: their figures, and what they store differently."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import plain
from alpa_strategy.display.plan_words import batch_words
from alpa_strategy.display.table import mesh_text, step_parts
from alpa_strategy.ir.plan import Plan, TaskFigures, modes_text, stages_by_devices
from alpa_strategy.ir.value_names import collapse_indices
from alpa_strategy.units import format_bytes, format_seconds

# Ratios that differ from 1 by less are drawn as equal.
SAME = 5e-4
# Rows of parameters that a table has at most.
MAX_ROWS = 12
# Stages with other layers that a table lists at most.
MAX_STAGES = 8

Layouts = Mapping[str, tuple[str, str]]


def difference_table(names: Sequence[str], before: Plan, after: Plan) -> RenderableType:
    """Return tables of the differences between two plans: figures, decisions and parameters.

    Args:
        names: of the two, as column titles.
        before, after: the plans.
    """
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures.add_column("", style="dim")
    for name in names:
        figures.add_column(plain(name), justify="right")
    figures.add_column("change", justify="right")
    _add_seconds(figures, before, after)
    _add_texts(figures, before, after)
    return Group(figures, _parameters(names, before, after))


def _add_seconds(table: Table, before: Plan, after: Plan) -> None:
    """Add rows of predicted seconds, in total and by component, and of bytes, with their
    changes.
    """

    def add(name: str, old: float, new: float, write: Callable[[float], str]) -> None:
        table.add_row(name, write(old), write(new), change(old, new))

    add("step", before.predicted.step_seconds, after.predicted.step_seconds, format_seconds)
    old_parts, new_parts = step_parts(before), step_parts(after)
    for part in dict.fromkeys((*old_parts, *new_parts)):
        add(f"  {part}", old_parts.get(part, 0.0), new_parts.get(part, 0.0), format_seconds)
    old_bytes, new_bytes = before.predicted.peak_bytes, after.predicted.peak_bytes
    add("memory per device", old_bytes, new_bytes, format_bytes)


def _add_texts(table: Table, before: Plan, after: Plan) -> None:
    """Add rows of texts: devices, what the plans decide, batch, precision and optimizer."""
    facts: list[tuple[str, Callable[[Plan], str]]] = [
        ("devices", lambda plan: str(num_devices(plan))),
        ("stages", lambda plan: str(len(plan.stages))),
        ("micro-batches", lambda plan: str(plan.num_microbatches)),
        ("schedule", lambda plan: plan.schedule),
        ("meshes", meshes_of),
        ("recomputed", _recomputed),
        ("batch", lambda plan: batch_words(_figures(plan))),
        ("precision", lambda plan: _figures(plan).precision),
        ("optimizer", lambda plan: _figures(plan).optimizer_name),
    ]
    for name, text_of in facts:
        old, new = text_of(before), text_of(after)
        table.add_row(name, plain(old), plain(new), "" if old == new else "differs")
    for index, old, new in differing_layers(before, after)[:MAX_STAGES]:
        table.add_row(f"layers of stage {index}", plain(old), plain(new), "differs")


def differing_layers(before: Plan, after: Plan) -> list[tuple[int, str, str]]:
    """Return (index, layers in each plan) of the stages that have other layers; [] if the numbers
    of stages differ.
    """
    if len(before.stages) != len(after.stages):
        return []
    differing = []
    for index, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        if old.layers != new.layers:
            differing.append((index, old.layers, new.layers))
    return differing


def _figures(plan: Plan) -> TaskFigures:
    """Return the figures of a plan's task; those of an older plan file are not known."""
    return plan.figures or TaskFigures()


def change(old: float, new: float) -> Text:
    """Return how a number changes from `old` to `new`, in percent: green if it gets less, else red.
    `new` if there was nothing; empty if the two are about the same, or the ratio is not finite.
    """
    if old == new:
        return Text("")
    if old <= 0 or not math.isfinite(new / old):
        return Text("new" if old <= 0 else "")
    ratio = new / old
    if abs(ratio - 1) < SAME:
        return Text("")
    return Text(f"{ratio - 1:+.1%}", style="green" if ratio < 1 else "red")


def num_devices(plan: Plan) -> int:
    """Return the number of devices of a plan."""
    return max(stage.first_device + math.prod(stage.submesh) for stage in plan.stages)


def meshes_of(plan: Plan) -> str:
    """Return the logical meshes of a plan's stages in order as text: `2 x 4` if all are equal, else
    `2, 4, 1 (4 stages), 4`.
    """
    shapes = [mesh_text(stage.logical_mesh) for stage in plan.stages]
    if len(set(shapes)) == 1:
        return shapes[0]
    texts = []
    for shape, equal in groupby(shapes):
        count = len(list(equal))
        texts.append(shape if count == 1 else f"{shape} ({count} stages)")
    return ", ".join(texts)


def stages_text(plan: Plan) -> str:
    """Return number, devices and meshes of a plan's stages as text: `4 stages, each on mesh 2 x
    4`.
    """
    count = len(plan.stages)
    if count == 1:
        return f"one stage on mesh {meshes_of(plan)}"
    num_groups = len(stages_by_devices(plan))
    stages = f"{count} stages"
    if num_groups < count:
        groups = "one group" if num_groups == 1 else f"{num_groups} groups"
        stages += f" on {groups} of devices"
    are_equal = len({stage.logical_mesh for stage in plan.stages}) == 1
    return f"{stages}, {'each on mesh' if are_equal else 'on meshes'} {meshes_of(plan)}"


def _recomputed(plan: Plan) -> str:
    """Return a text with the numbers of stages and ops that a plan recomputes in the backward:
    `all`, `2 stages, 3 ops`, `nothing`.
    """
    num_stages = sum(stage.remat for stage in plan.stages)
    num_ops = sum(len(stage.recomputed) for stage in plan.stages)
    words = []
    if num_stages:
        words.append("all" if num_stages == len(plan.stages) else f"{num_stages} stages")
    if num_ops:
        words.append(f"{num_ops} ops")
    return ", ".join(words) or "nothing"


def _layouts(plan: Plan) -> Layouts:
    """Return parameter -> (storage, mesh) as text, of the first stage that has it."""
    layouts: dict[str, tuple[str, str]] = {}
    for stage in plan.stages:
        for name, parameter in stage.parameter_plans.items():
            text = modes_text(parameter.module_modes) + (" on host" if parameter.on_host else "")
            layouts.setdefault(name, (text, mesh_text(stage.logical_mesh)))
    return layouts


def _parameters(names: Sequence[str], before: Plan, after: Plan) -> RenderableType:
    """Return a table of the parameters that two plans store differently, equal ones in one row and
    at most `MAX_ROWS` rows; a line of text if there are none.

    Args:
        names: of the two plans, for the columns.
    """
    old, new = _layouts(before), _layouts(after)
    groups: dict[tuple, list[str]] = {}
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            key = collapse_indices(name), old.get(name), new.get(name)
            groups.setdefault(key, []).append(name)
    if not groups:
        in_stages = ", in other stages" if differing_layers(before, after) else ""
        return Text(f"both store every parameter alike{in_stages}", style="dim")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameters stored differently")
    table.add_column("", justify="right", style="dim")
    for name in names:
        table.add_column(plain(name))
    for (pattern, old_layout, new_layout), members in list(groups.items())[:MAX_ROWS]:
        shown = pattern if len(members) > 1 else members[0]
        count = f"x{len(members)}" if len(members) > 1 else ""
        table.add_row(plain(shown), count, _layout(old_layout), _layout(new_layout))
    hidden = len(groups) - MAX_ROWS
    if hidden > 0:
        return Group(table, Text(f"and {hidden} groups more", style="dim"))
    return table


def _layout(layout: tuple[str, str] | None) -> str:
    return "not there" if layout is None else f"{layout[0]} on {layout[1]}"
