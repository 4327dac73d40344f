"""The plan as one self-contained picture: stages as cards with device grids, parameters coloured by mode."""

from __future__ import annotations

import math
import re
from html import escape

from alpa_strategy.display.plan_facts import (
    MODE_MEANINGS,
    ParameterGroup,
    beaten,
    merge_groups,
    mesh_text,
    parameter_groups,
    proof_of,
    recomputes,
    short_layers,
    step_parts,
    used_modes,
    whereabouts,
)
from alpa_strategy.display.timeline import MAX_DRAWN, plan_timeline, timeline_svg
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import INVARIANT, PARTIAL
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_plan import StagePlan
from alpa_strategy.units import format_bytes, format_seconds

WIDTH, MARGIN, ROW, CHIP, GRID = 960, 32, 24, 52, 168  # pixels; a chip shows a mode on one axis, a grid the devices
INK, SOFT, LINE, CARD = "#1f2933", "#6b7785", "#e1e6eb", "#ffffff"
MODE_COLOURS = {"R": "#c9d1d9", "R*": "#7fb4d6", "S": "#c79bd1", "G": "#8fc7a4"}
TIME_COLOURS = {"compute": "#5b8db8", "communication": "#b57fc0", "optimizer": "#74b38c", "waiting": "#d5dbe1"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def plan_svg(plan: Plan) -> str:
    """The picture as SVG text."""
    body: list[str] = []
    y = _header(body, plan, 44)  # `y` is always where the next thing may begin
    for index, stage in enumerate(plan.stages):
        if index:
            body.append(f'<path d="M{WIDTH / 2} {y - 14} v10 m-4 -4 l4 4 l4 -4" stroke="{SOFT}" fill="none"/>')
        y = _stage(body, plan, index, stage, y)
    y = _legend(body, plan, y + 8)
    drawn, height = ops_strip_svg(plan, MARGIN, y + 8, WIDTH - 2 * MARGIN)
    body, y = body + drawn, y + height + (16 if drawn else 0)
    if (clock := plan_timeline(plan, MAX_DRAWN["picture"])) is not None:
        drawn, height = timeline_svg(clock, MARGIN, y + 8, WIDTH - 2 * MARGIN)
        body, y = body + drawn, y + height + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}" '
        f'font-family="{FONT}" font-size="13" fill="{INK}">\n<rect width="100%" height="100%" fill="#f6f8fa"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def plan_html(plan: Plan) -> str:
    """A page with the picture and the collectives as a table. It loads nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{index}</td><td>{escape(c.kind)}</td><td>{c.axis}</td><td>{escape(c.phase)}</td>"
        f"<td class=n>{c.count}</td><td class=n>{format_bytes(c.num_bytes)}</td>"
        f"<td class=n>{format_seconds(c.seconds)}</td></tr>"
        for index, stage in enumerate(plan.stages)
        for c in sorted(stage.collectives, key=lambda c: -c.seconds)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    heads = "".join(
        f"<th>{head}</th>" for head in ("stage", "collective", "axis", "phase", "calls", "bytes", "per step")
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Alpa plan</title><style>
body {{ margin: 2rem auto; max-width: {WIDTH}px; font: 14px {FONT}; color: {INK}; background: #f6f8fa }}
svg {{ width: 100%; height: auto }} table {{ border-collapse: collapse; margin: 1rem {MARGIN}px }}
th {{ text-align: left; color: {SOFT}; font-weight: 500 }}
th, td {{ padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid {LINE} }}
.n {{ text-align: right }} ul {{ margin: 1rem {MARGIN}px; padding-left: 1rem; color: {SOFT} }}
</style></head><body>
{plan_svg(plan)}
{f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""}
{f"<ul>{notes}</ul>" if notes else ""}
</body></html>
"""


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(text)}</text>'


def _header(body: list[str], plan: Plan, y: float) -> float:
    p = plan.predicted
    body.append(_text(MARGIN, y, whereabouts(plan), 'font-size="20" font-weight="600"'))
    proof = proof_of(plan)
    facts = f"{format_seconds(p.step_seconds)} per step, {format_bytes(p.peak_bytes)} per device, {proof}"
    facts += f", {plan.num_microbatches} micro-batches" if plan.num_microbatches > 1 else ""
    facts += f", {plan.schedule}" if len(plan.stages) > 1 else recomputes(plan.stages[0])
    body.append(_text(MARGIN, y + 24, facts, f'fill="{SOFT}"'))
    y = _time_bar(body, plan, y + 40)
    return _baselines(body, plan, y) + 12


def _time_bar(body: list[str], plan: Plan, y: float) -> float:
    parts = step_parts(plan)
    if not parts:
        return y
    total = sum(parts.values())
    x, label_x = float(MARGIN), float(MARGIN)
    for name, seconds in parts.items():
        width = (WIDTH - 2 * MARGIN) * seconds / total
        body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="10" fill="{TIME_COLOURS[name]}"/>')
        label = f"{name} {format_seconds(seconds)}"
        body.append(f'<rect x="{label_x:.1f}" y="{y + 20}" width="9" height="9" rx="2" fill="{TIME_COLOURS[name]}"/>')
        body.append(_text(label_x + 15, y + 29, label, f'font-size="12" fill="{SOFT}"'))
        x, label_x = x + width, label_x + 36 + 6.6 * len(label)  # no font metrics here: a mean width
    return y + 46


def _baselines(body: list[str], plan: Plan, y: float) -> float:
    if not plan.baselines:
        return y
    texts = [
        f"{name} does not fit" if seconds is None else f"{name} {format_seconds(seconds)} ({ratio:.2f}x)"
        for name, seconds, ratio in beaten(plan)
    ]
    body.append(_text(MARGIN, y + 6, "instead: " + ", ".join(texts), f'font-size="12" fill="{SOFT}"'))
    return y + 20


def _stage(body: list[str], plan: Plan, index: int, stage: StagePlan, y: float) -> float:
    groups = merge_groups(parameter_groups(stage.parameter_plans))
    rows, columns = stage.logical_mesh if len(stage.logical_mesh) == 2 else (1, math.prod(stage.logical_mesh))
    cell = min(36.0, GRID / max(rows, columns))  # of one device: 64 of them still fit
    height = 64 + max(ROW * len(groups), cell * rows + 40)
    body.append(
        f'<rect x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{height:.0f}" rx="8" fill="{CARD}" '
        f'stroke="{LINE}"/>'
    )
    title = (
        f"Stage {index}  {short_layers(stage.layers)}".rstrip() + recomputes(stage) if len(plan.stages) > 1 else "Mesh"
    )
    body.append(_text(MARGIN + 20, y + 30, title, 'font-weight="600"'))
    _grid(body, stage, MARGIN + 20, y + 48, cell, rows, columns)
    left = MARGIN + 20 + GRID + 40
    chips = WIDTH - MARGIN - 20 - CHIP * len(stage.logical_mesh)
    for axis, size in enumerate(stage.logical_mesh):
        label = f"axis {axis} ({size})" if len(stage.logical_mesh) == 1 else f"axis {axis}"
        extra = f'font-size="11" fill="{SOFT}" text-anchor="middle"'
        body.append(_text(chips + CHIP * (axis + 0.5) - 3, y + 30, label, extra))
    for row, group in enumerate(groups):
        _group(body, group, left, chips, y + 40 + ROW * row)
    return y + height + 22


def _grid(body: list[str], stage: StagePlan, x: float, y: float, cell: float, rows: int, columns: int) -> None:
    gap = max(1.0, cell * 0.08)
    for device in range(rows * columns):
        cx, cy = x + (device % columns) * cell, y + (device // columns) * cell
        size = cell - gap
        body.append(
            f'<rect x="{cx:.1f}" y="{cy:.1f}" width="{size:.1f}" height="{size:.1f}" rx="{cell / 9:.1f}" '
            'fill="#dbe7f1"/>'
        )
        if cell >= 14:  # smaller squares have no room for a number
            extra = f'font-size="{cell * 0.36:.1f}" fill="{SOFT}" text-anchor="middle"'
            body.append(_text(cx + size / 2, cy + size / 2 + cell * 0.13, str(stage.first_device + device), extra))
    facts = [mesh_text(stage.logical_mesh), format_bytes(stage.predicted.peak_bytes)]
    body.append(_text(x, y + rows * cell + 18, ", ".join(facts), f'font-size="12" fill="{SOFT}"'))


def _group(body: list[str], group: ParameterGroup, left: float, chips: float, y: float) -> None:
    count = f"  x{len(group.names)}" if len(group.names) > 1 else ""
    room = int((chips - left - 16) / 7.4)  # letters of the monospaced font at 12 px
    name = group.pattern + count
    name = name if len(name) <= room else name[: room - 1] + "…"
    body.append(_text(left, y + 15, name, 'font-size="12" font-family="ui-monospace, \'DejaVu Sans Mono\', monospace"'))
    for axis, mode in enumerate(group.modes):
        x = chips + CHIP * axis
        colour = MODE_COLOURS.get(mode.storage.value, "#eeeeee")
        body.append(f'<rect x="{x:.1f}" y="{y}" width="{CHIP - 6}" height="{ROW - 4}" rx="4" fill="{colour}"/>')
        body.append(_text(x + (CHIP - 6) / 2, y + 14.5, str(mode), 'font-size="11" text-anchor="middle"'))


def _legend(body: list[str], plan: Plan, y: float) -> float:
    for kind in used_modes(plan):
        body.append(f'<rect x="{MARGIN}" y="{y}" width="30" height="16" rx="4" fill="{MODE_COLOURS[kind]}"/>')
        label = kind + ("n" if kind in "SG" else "")
        body.append(_text(MARGIN + 15, y + 12, label, 'font-size="11" text-anchor="middle"'))
        body.append(_text(MARGIN + 42, y + 12.5, MODE_MEANINGS[kind], f'font-size="12" fill="{SOFT}"'))
        y += 24
    return y + 16


# How products are divided, as in the case study of the Alpa paper: a strip of boxes, one box an op, one part
# of it per mesh axis, coloured by what the devices of that axis divide: rows of the batch, what goes out (columns,
# output channels), or what is summed over (rows of the weight, input channels).
PRODUCTS = re.compile(r"^(conv|convolution|linear|segmented_linear|einsum|bmm|matmul|mm|addmm|baddbmm|scaled_dot)")
SPLIT_COLOURS = {"batch": "#5b8db8", "out": "#d08c60", "in": "#b57fc0", "other": "#74b38c", "repeated": "#d5dbe1"}
SPLIT_MEANINGS = {
    "batch": "batch (or experts)",
    "out": "columns or output channels",
    "in": "rows or input channels (summed)",
    "other": "another dim",
    "repeated": "repeated",
}
MAX_BOX, MIN_BOX, BOX_HEIGHT, STRIP_LABEL = 18.0, 5.0, 22, 190


def split_kind(strategy: AxisStrategy) -> str:
    """What one mesh axis divides under an op's strategy: `S0,R*->S0` is `batch`, `R*,S0->S1` is `out`."""
    first = strategy.inputs[0].shard_dim if strategy.inputs else None
    result = strategy.outputs[0] if strategy.outputs else INVARIANT
    if result is PARTIAL:
        return "in"
    if result.shard_dim is None:
        return "repeated"
    if first is None:
        return "out"
    return "batch" if first == result.shard_dim == 0 else "other"


def products(stage: StagePlan) -> list[tuple[str, tuple[str, ...]]]:
    """(op name, what each mesh axis divides) of the stage's products, in order."""
    found = []
    for name, strategy in stage.strategies.items():
        if PRODUCTS.match(name):
            found.append((name, tuple(map(split_kind, strategy))))
    return found


def ops_strip_svg(plan: Plan, x: float, y: float, width: float) -> tuple[list[str], float]:
    """SVG elements of all stages' strips and their height; nothing where no stage has products."""
    strips = [products(stage) for stage in plan.stages]
    if not any(strips):
        return [], 0.0
    body = [
        _text(
            x,
            y + 14,
            "How each product's work is divided over the mesh axes, from the batch to the loss",
            'font-weight="600"',
        )
    ]
    top = y + 30
    for index, (stage, ops) in enumerate(zip(plan.stages, strips, strict=True)):
        shape = mesh_text(stage.logical_mesh)
        label = (f"stage {index}: " if len(plan.stages) > 1 else "") + f"{math.prod(stage.submesh)} devices as {shape}"
        body.append(_text(x, top + 15, label, f'font-size="12" fill="{SOFT}"'))
        top = _strip(body, ops, x + STRIP_LABEL, top, width - STRIP_LABEL) + 8
    used = {kind for ops in strips for _, kinds in ops for kind in kinds}
    left = x
    for kind in (kind for kind in SPLIT_COLOURS if kind in used):
        body.append(f'<rect x="{left:.1f}" y="{top + 4}" width="12" height="12" rx="2" fill="{SPLIT_COLOURS[kind]}"/>')
        body.append(_text(left + 18, top + 14, SPLIT_MEANINGS[kind], f'font-size="11" fill="{SOFT}"'))
        left += 36 + 5.9 * len(SPLIT_MEANINGS[kind])
    return body, top + 24 - y


def _strip(body: list[str], ops: list[tuple[str, tuple[str, ...]]], x: float, top: float, width: float) -> float:
    """One stage's boxes, wrapped to `width`; returns where they end."""
    box = max(MIN_BOX, min(MAX_BOX, width / max(1, len(ops))))
    a_row = max(1, int(width / box))  # boxes; deep models go on in the next row
    for position, (name, kinds) in enumerate(ops):
        left, row_top = x + (position % a_row) * box, top + (position // a_row) * (BOX_HEIGHT + 4)
        part = BOX_HEIGHT / len(kinds)
        title = f"{name}: " + ", ".join(f"axis {axis} {SPLIT_MEANINGS[kind]}" for axis, kind in enumerate(kinds))
        rects = "".join(
            f'<rect x="{left:.1f}" y="{row_top + axis * part:.1f}" width="{box - 1.5:.1f}" height="{part:.1f}" '
            f'fill="{SPLIT_COLOURS[kind]}"/>'
            for axis, kind in enumerate(kinds)
        )
        body.append(f"<g><title>{escape(title)}</title>{rects}</g>")
    rows = -(-len(ops) // a_row) if ops else 1
    return top + rows * (BOX_HEIGHT + 4)
