"""A plan on one screen: in words, its speed, its memory, and what limits its step."""

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import plain
from alpa_strategy.display.findings import findings
from alpa_strategy.display.plan_words import peak_text, plan_words
from alpa_strategy.display.table import (
    baselines_text,
    headline,
    iteration_phases,
    note_text,
    seconds_bar,
    seconds_legend,
    stage_overview,
    step_parts,
)
from alpa_strategy.ir.plan import Plan, memory_by_mesh
from alpa_strategy.units import format_bytes, format_count, format_seconds

# Rows of a screen of 40 lines.
MAX_STAGES = 6
MAX_NOTES = 2
MAX_FINDINGS = 2
MAX_NOTE_CHARACTERS = 160


def plan_summary(
    plan: Plan,
    memory_limit: float | None = None,
    process_bytes: int = 0,
    num_samples: int | None = None,
    seconds_at_peak: float | None = None,
) -> RenderableType:
    """Return the plan on one screen.

    Args:
        plan: to show.
        memory_limit: bytes per device; None: not known.
        process_bytes: of host memory that the process takes in addition to the plan's tensors.
        num_samples: of a step of all devices; None: not known.
        seconds_at_peak: that the step's products take if all devices are at their peak; None: not
            known.
    """
    sections: list[RenderableType] = []
    if plan.phases:
        sections += [iteration_phases(plan, memory_limit), Text()]
    sections.append(headline(plan))

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if not plan.is_eager:
        table.add_row("plan", plan_words(plan))
        _add_step(table, plan, num_samples, seconds_at_peak)
    table.add_row("memory", _memory(plan, memory_limit, process_bytes))
    lines = findings(plan)
    if lines and not plan.is_eager:
        table.add_row("limit", plain("\n".join(lines[:MAX_FINDINGS]), keeps_lines=True))
    if plan.baselines:
        table.add_row("instead", baselines_text(plan))
    sections.append(table)

    if 1 < len(plan.stages) <= MAX_STAGES:
        sections += [Text(), stage_overview(plan)]
    sections += _notes(plan)
    return Group(*sections)


def _add_step(
    table: Table, plan: Plan, num_samples: int | None, seconds_at_peak: float | None
) -> None:
    """Add rows with the seconds of a step, its rate, and where the seconds go."""
    seconds = plan.predicted.step_seconds
    line = Text.assemble((format_seconds(seconds), "bold"))
    if num_samples and seconds > 0:
        line.append(f", {format_count(num_samples / seconds)} samples/s")
    if seconds_at_peak and seconds > 0:
        line.append(f", MFU {seconds_at_peak / seconds:.1%}")
    table.add_row("step", line)
    parts = step_parts(plan)
    if parts:
        table.add_row("", seconds_bar(parts))
        table.add_row("", seconds_legend(parts))


def _memory(plan: Plan, memory_limit: float | None, process_bytes: int) -> Text:
    """Return the bytes at the peak, by parts, of the devices that need most."""
    text = peak_text(plan, memory_limit, process_bytes)
    largest = max(memory_by_mesh(plan).values(), key=lambda parts: sum(parts.values()))
    words = []
    for name, num_bytes in largest.items():
        if num_bytes > 0:
            words.append(f"{name} {format_bytes(num_bytes)}")
    if words:
        text.append(f"\n{', '.join(words)}", style="dim")
    return text


def _notes(plan: Plan) -> list[RenderableType]:
    """Return the first notes, those that say the same once."""
    notes = [note for note, _ in groupby(plan.notes)]
    shown: list[RenderableType] = []
    for note in notes[:MAX_NOTES]:
        if len(note) > MAX_NOTE_CHARACTERS:
            note = note[:MAX_NOTE_CHARACTERS].rsplit(" ", 1)[0] + " ..."
        shown.append(note_text(note))
    others = "layouts and collectives"
    if len(notes) > MAX_NOTES:
        others += f" and {len(notes) - MAX_NOTES} more notes"
    shown.append(plain(f"{others}: alpa show PLAN.json", "dim"))
    return shown
