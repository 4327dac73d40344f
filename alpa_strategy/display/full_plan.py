"""The full plan for a terminal and as a picture: its figures, stages and memory, the layout of each
parameter, and collectives.
"""

import io
import re

from rich.console import Console, Group, RenderableType
from rich.text import Text

from alpa_strategy.display.communication import messages_table, sum_of_collectives_text
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.figures import opening
from alpa_strategy.display.memory import memory_limit_of, memory_of_meshes, memory_table
from alpa_strategy.display.table import (
    collectives_table,
    equal_stages,
    legend,
    note_text,
    parameters_table,
    stage_line,
    stage_overview,
)
from alpa_strategy.display.timeline import MAX_DRAWN, plan_timeline
from alpa_strategy.display.waits import waits_table
from alpa_strategy.ir.plan import Plan

# Columns of a picture.
PICTURE_WIDTH = 120

# Fonts that rich's pictures load from the web; the reader's own suffice.
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def plan_table(
    plan: Plan, memory_limit: float | None = None, process_bytes: int = 0
) -> RenderableType:
    """Return the full plan.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: that of the plan's figures.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
    """
    sections = opening(plan, memory_limit, process_bytes)
    if len(plan.stages) > 1:
        sections += [Text(), stage_overview(plan)]
        messages = messages_table(plan)
        if messages is not None:
            sections += [Text(), messages]
        waiting = waits_table(plan)
        if waiting is not None:
            sections += [Text(), plain("waiting", "dim"), waiting]
        sections += _memory_of_stages(plan, memory_limit_of(plan, memory_limit))
    schedule = plan_timeline(plan, MAX_DRAWN)
    if schedule is not None:
        sections += [Text(), schedule]

    for equal in equal_stages(plan):
        stage = plan.stages[equal[0]]
        if len(plan.stages) > 1:
            sections += [Text(), stage_line(equal, [plan.stages[index] for index in equal])]
        sections += [Text(), parameters_table(stage, len(equal) > 1)]
        if stage.collectives:
            sections += [Text(), collectives_table(stage)]
            sections.append(plain(sum_of_collectives_text(stage), "dim"))

    sections += [Text(), legend(plan)]
    sections += [note_text(note) for note in plan.notes]
    return Group(*sections)


def _memory_of_stages(plan: Plan, memory_limit: float | None) -> list[RenderableType]:
    """Return a table of the memory of each mesh by parts; nothing if the parts are not known."""
    rows = memory_of_meshes(plan)
    if not any(rows.values()):
        return []
    table = memory_table(rows, memory_limit=memory_limit)
    return [Text(), plain("memory of a device at the peak", "dim"), table]


def plan_svg(plan: Plan) -> str:
    """Return the table as an SVG picture, which loads nothing from the web."""
    return _WEB_FONTS.sub("", _printed(plan).export_svg(title="alpa"))


def _printed(plan: Plan) -> Console:
    """Return a console of `PICTURE_WIDTH` columns that recorded the plan's table."""
    console = make_console(record=True, file=io.StringIO(), width=PICTURE_WIDTH)
    console.print(plan_table(plan))
    return console
