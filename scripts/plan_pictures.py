"""Pictures of plans for README and the documentation, drawn from plan files.

    # make the plans of `PICTURES` and draw them into docs/pictures
    python scripts/plan_pictures.py

    # only some of them
    python scripts/plan_pictures.py --only plan_moe_10b

    # draw a plan of your own
    python scripts/plan_pictures.py plan.json plan.svg

A picture has three parts: the seconds of a step by kind, a row per stage (its devices, modules,
memory and how its parameters are stored), and the schedule in true proportions. Colours are Okabe
and Ito's, which colour-blind readers can tell apart. Nothing is predicted here: all figures are the
plan's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from html import escape
from math import prod
from pathlib import Path

from plan_process import run_plan

from alpa_strategy.display.table import step_parts
from alpa_strategy.display.timeline import ScheduleTimeline, device_range, plan_timeline
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"

# Name of the picture -> arguments of `alpa plan`.
PICTURES = {
    "plan_gpt_1_3b": ("gpt_1_3b", "p3_16xlarge_x8", "cluster.num_nodes=1"),
    "plan_gpt_1_3b_h100": (
        "gpt_1_3b",
        "dgx_h100",
        "cluster.num_nodes=1",
        "trainer.precision=bf16-mixed",
    ),
    "plan_moe_2_4b": (
        "moe_2_4b",
        "dgx_h100",
        "cluster.num_nodes=1",
        "trainer.precision=bf16-mixed",
    ),
    "plan_moe_10b": ("moe_10b", "p3_16xlarge_x8", "cluster.num_nodes=2"),
}

WIDTH = 860
MARGIN = 20
LINE = 22
BAR = 14
# Left ends of the columns of a stage's row.
COLUMNS = {"stage": 20, "devices": 68, "modules": 170, "memory": 450, "parameters": 640}
BAR_WIDTH = 180
LABEL_WIDTH = 100
# Micro-batches that the schedule is drawn with at most.
MAX_MICROBATCHES = 8
MAX_STAGES = 16

PARTS = {
    "compute": "#0072b2",
    "communication": "#d55e00",
    "optimizer": "#009e73",
    "host": "#f0e442",
    "waiting": "#8a8f98",
}
# By `Storage`, which a plan file writes in front of the sharded dim.
STORAGE = {
    "G": ("#009e73", "G sharded, gathered once a step (ZeRO-1)"),
    "S": ("#e69f00", "S sharded (tensor parallel, ZeRO-3)"),
    "R*": ("#56b4e9", "R* replicated (data parallel)"),
    "R": ("#8a8f98", "R same work on all devices"),
}
ACTIONS = {
    "F": ("#0072b2", "forward"),
    "B": ("#009e73", "backward"),
    "I": ("#009e73", "backward to inputs"),
    "W": ("#e69f00", "backward to weights"),
}
STYLE = """
.paper { fill: #ffffff } text { fill: #1f2933 } .soft { fill: #59636e } .track { fill: #e8edf2 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16191d } text { fill: #e6e9ec } .soft { fill: #a6aeb6 } .track { fill: #2b3138 }
}
"""


def plan_picture(plan: Plan, memory_limit: float, title: str) -> str:
    """Return the SVG picture of `plan`.

    Args:
        memory_limit: bytes per device that memory bars are drawn against.
        title: of the picture, in words.
    """
    parts = [_text(MARGIN, 30, title, size=16, weight=600)]
    y = 56
    parts += _step_bar(plan, y)
    y += 62
    parts += _stage_rows(plan, memory_limit, y)
    y += LINE * (2 + _num_rows(plan)) + 14
    schedule = plan_timeline(plan, MAX_MICROBATCHES)
    if schedule is not None:
        parts += _schedule_rows(schedule, y)
        y += LINE * (2 + len(schedule.meshes)) + 14

    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
        f' height="{y}" font-family="system-ui, sans-serif" font-size="13" role="img"'
        f' aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{y}"/>\n{body}\n</svg>\n'
    )


def _step_bar(plan: Plan, y: float) -> Iterator[str]:
    """Yield the seconds of a step as one bar, and its legend."""
    seconds = step_parts(plan)
    total = sum(seconds.values())
    text = f"one step, {format_seconds(plan.predicted.step_seconds)}"
    yield _text(MARGIN, y + 11, text, kind="soft")
    left = 170.0
    x = left
    for name, value in seconds.items():
        width = (WIDTH - MARGIN - left) * value / total
        yield _rectangle(x, y, max(width, 1.5), BAR, PARTS[name])
        x += width
    entries: list[tuple[str | None, str]] = []
    for name, value in seconds.items():
        entries.append((PARTS[name], f"{name} {format_seconds(value)}"))
    yield from _legend(left, y + 34, entries)


def _stage_rows(plan: Plan, memory_limit: float, y: float) -> Iterator[str]:
    """Yield a row for each stage below a heading, and the legend of the parameters' storage."""
    headings = {
        "stage": "stage",
        "devices": "devices",
        "modules": "modules",
        "memory": f"memory of {format_bytes(memory_limit)}",
        "parameters": "parameters, by storage",
    }
    for column, heading in headings.items():
        yield _text(COLUMNS[column], y, heading, kind="soft")

    for index, stage in enumerate(plan.stages[:MAX_STAGES]):
        row = y + LINE * (index + 1)
        mesh = "x".join(map(str, stage.logical_mesh))
        yield _text(COLUMNS["stage"], row, str(index))
        yield _text(COLUMNS["devices"], row, f"{device_range(stage)} ({mesh})")
        yield _text(COLUMNS["modules"], row, _modules(stage, len(plan.stages)))
        yield from _memory_bar(stage, memory_limit, row)
        yield from _storage_bar(stage, row)

    if len(plan.stages) > MAX_STAGES:
        row = y + LINE * (MAX_STAGES + 1)
        yield _text(COLUMNS["stage"], row, f"... {len(plan.stages) - MAX_STAGES} more stages")
    row = y + LINE * (_num_rows(plan) + 1)
    kinds = {kind for stage in plan.stages for kind in storage_elements(stage)}
    yield from _legend(COLUMNS["stage"], row, [STORAGE[kind] for kind in STORAGE if kind in kinds])


def _num_rows(plan: Plan) -> int:
    """Return the rows that the stages take."""
    num_stages = len(plan.stages)
    return num_stages if num_stages <= MAX_STAGES else MAX_STAGES + 1


def _modules(stage: StagePlan, num_stages: int) -> str:
    """Return the names of the stage's modules, with ranges written short, at most 40 letters."""
    if num_stages == 1:
        return "the model"
    text = re.sub(r"\b([\w.]+\.)(\d+)-\1(\d+)", r"\1\2-\3", stage.layers)
    if len(text) <= 40:
        return text
    names = text.split(", ")
    return f"{names[0]}, ..., {names[-1]}"


def _memory_bar(stage: StagePlan, memory_limit: float, y: float) -> Iterator[str]:
    share = min(1.0, stage.predicted.peak_bytes / memory_limit)
    left = COLUMNS["memory"]
    yield _rectangle(left, y - 11, BAR_WIDTH - 80, BAR, None)
    yield _rectangle(left, y - 11, (BAR_WIDTH - 80) * share, BAR, PARTS["compute"])
    yield _text(left + BAR_WIDTH - 74, y, format_bytes(stage.predicted.peak_bytes))


def _storage_bar(stage: StagePlan, y: float) -> Iterator[str]:
    """Yield a bar of the stage's parameters, by elements, with a piece for each kind of storage."""
    elements = storage_elements(stage)
    total = sum(elements.values())
    x = float(COLUMNS["parameters"])
    for kind, count in elements.items():
        width = (WIDTH - MARGIN - COLUMNS["parameters"]) * count / total
        yield _rectangle(x, y - 11, width, BAR, STORAGE[kind][0])
        x += width


def storage_elements(stage: StagePlan) -> dict[str, int]:
    """Return the elements of the stage's parameters by kind of storage, in the order of `STORAGE`.

    A parameter that is stored differently on two mesh axes counts for the kind that comes first.
    """
    elements: dict[str, int] = {}
    for name, placement in stage.parameter_plans.items():
        kinds = {mode.storage.value for mode in placement.modes}
        kind = next(kind for kind in STORAGE if kind in kinds)
        elements[kind] = elements.get(kind, 0) + prod(stage.shapes[name])
    return {kind: elements[kind] for kind in STORAGE if kind in elements}


def _schedule_rows(schedule: ScheduleTimeline, y: float) -> Iterator[str]:
    """Yield a line for each mesh, with a rectangle for each action in true proportion."""
    text = f"schedule, drawn with {schedule.num_drawn} of {schedule.num_microbatches} micro-batches"
    yield _text(MARGIN, y, text, kind="soft")
    left = MARGIN + LABEL_WIDTH
    scale = (WIDTH - MARGIN - left) / schedule.seconds
    for mesh, name in enumerate(schedule.meshes):
        row = y + LINE * (mesh + 1)
        yield _text(MARGIN, row, f"devices {name}")
        yield _rectangle(left, row - 11, WIDTH - MARGIN - left, BAR, None)
    for action in schedule.timed:
        row = y + LINE * (action.mesh + 1)
        width = max((action.end - action.start) * scale - 0.8, 0.4)
        opacity = 0.62 if schedule.stages[action.mesh].index(action.stage) % 2 else 1.0
        colour = ACTIONS[action.kind][0]
        x = left + action.start * scale
        yield _rectangle(x, row - 11, width, BAR, colour, opacity)

    timed_kinds = {action.kind for action in schedule.timed}
    kinds = [kind for kind in ACTIONS if kind in timed_kinds]
    row = y + LINE * (len(schedule.meshes) + 1)
    entries: list[tuple[str | None, str]] = [ACTIONS[kind] for kind in kinds]
    entries.append((None, "waiting"))
    if max(map(len, schedule.stages)) > 1:
        entries[-1] = (None, "waiting; paler: the second stage of these devices")
    yield from _legend(left, row, entries)


def _legend(x: float, y: float, entries: list[tuple[str | None, str]]) -> Iterator[str]:
    for colour, text in entries:
        yield _rectangle(x, y - 10, 10, 10, colour)
        yield _text(x + 15, y - 1, text, kind="soft", size=12)
        x += 15 + 6.6 * len(text) + 16


def _text(
    x: float, y: float, text: str, kind: str = "", size: int = 13, weight: int | None = None
) -> str:
    style = f' class="{kind}"' if kind else ""
    if weight is not None:
        style += f' font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{style}>{escape(text)}</text>'


def _rectangle(
    x: float, y: float, width: float, height: float, colour: str | None, opacity: float = 1.0
) -> str:
    """Return a filled rectangle; without a colour, the track behind a bar."""
    fill = 'class="track"' if colour is None else f'fill="{colour}"'
    if opacity != 1.0:
        fill += f' opacity="{opacity}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" {fill}/>'


def picture_of_file(file: Path) -> str:
    """Return the picture of the plan in `file`, with memory bars up to the largest stage's."""
    plan = Plan.load(file)
    largest = max(stage.predicted.peak_bytes for stage in plan.stages)
    return plan_picture(plan, largest, f"{file.stem} on {plan.cluster_name}")


def make_pictures(pictures: Mapping[str, tuple[str, ...]]) -> None:
    """Plan, and draw into docs/pictures.

    Raises:
        RuntimeError: there is no plan, with what `alpa plan` printed.
    """
    from alpa_strategy import ClusterSpec

    for name, (recipe, cluster, *overrides) in pictures.items():
        made = run_plan(ROOT, recipe, cluster, *overrides)
        if made.plan is None:
            raise RuntimeError(f"{name}: no plan\n{made.output[-2000:]}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            file.write_text(json.dumps(made.plan))
            plan = Plan.load(file)
        device = ClusterSpec.load(cluster).device
        num_devices = len(_devices(plan))
        how = "one stage"
        if len(plan.stages) > 1:
            how = f"{len(plan.stages)} stages, {plan.schedule}"
        count = plan.num_microbatches
        title = f"{recipe} on {num_devices} x {device.name}: {how}, {count} micro-batches"
        picture = plan_picture(plan, device.memory_bytes * 0.9, title)
        (FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"{name}: {format_seconds(plan.predicted.step_seconds)}", flush=True)


def _devices(plan: Plan) -> set[int]:
    devices: set[int] = set()
    for stage in plan.stages:
        size = prod(stage.submesh)
        devices |= set(range(stage.first_device, stage.first_device + size))
    return devices


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    args = parser.parse_args()
    if args.plan is None:
        make_pictures({name: PICTURES[name] for name in args.only})
        return 0
    if args.output is None:
        parser.error("name the SVG file to write")
    args.output.write_text(picture_of_file(args.plan), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
