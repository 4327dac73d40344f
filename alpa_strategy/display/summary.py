"""A plan on one screen: in words, its speed, its memory, and what limits its step."""

from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_strategy.display.console import plain
from alpa_strategy.display.figures import opening
from alpa_strategy.display.table import note_text, stage_overview
from alpa_strategy.ir.plan import Plan

# Rows of a screen of 40 lines.
MAX_STAGES = 6
MAX_NOTES = 2
MAX_FINDINGS = 3
MAX_NOTE_CHARACTERS = 160


def plan_summary(
    plan: Plan,
    memory_limit: float | None = None,
    process_bytes: int = 0,
    location: str = "PLAN.json",
) -> RenderableType:
    """Return the plan on one screen.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: that of the plan's figures.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
        location: of the plan's file, for the command that shows the rest.
    """
    sections = opening(plan, memory_limit, process_bytes, MAX_FINDINGS)
    if 1 < len(plan.stages) <= MAX_STAGES:
        sections += [Text(), stage_overview(plan)]
    sections += _notes(plan, location)
    return Group(*sections)


def _notes(plan: Plan, location: str) -> list[RenderableType]:
    """Return the first `MAX_NOTES` notes, equal ones in a row once and long ones cut, and a line on
    where the rest is shown.
    """
    notes = [note for note, _ in groupby(plan.notes)]
    shown: list[RenderableType] = []
    for note in notes[:MAX_NOTES]:
        if len(note) > MAX_NOTE_CHARACTERS:
            note = note[:MAX_NOTE_CHARACTERS].rsplit(" ", 1)[0] + " ..."
        shown.append(note_text(note))
    others = "layouts, collectives and memory by stage"
    if len(plan.stages) > MAX_STAGES:
        others = f"the table of the {len(plan.stages)} stages, {others}"
    if len(notes) > MAX_NOTES:
        others += f", {len(notes) - MAX_NOTES} more notes"
    shown.append(plain(f"{others}: alpa show {location}", "dim"))
    return shown
