"""The products of every stage (convolutions, linear layers, ...) as a strip of boxes: how each one's work is divided.

One box an op, one part of it per mesh axis, coloured by what the devices of that axis divide: rows of the batch, what
goes out (columns, output channels), or what is summed over (rows of the weight, input channels). As in the case study
of the Alpa paper.
"""

from __future__ import annotations

import math
import re
from html import escape

from alpa_strategy.ir.plan import Plan, StagePlan

PRODUCTS = re.compile(r"^(conv|convolution|linear|segmented_linear|einsum|bmm|matmul|mm|addmm|baddbmm|scaled_dot)")
COLOURS = {"batch": "#5b8db8", "out": "#d08c60", "in": "#b57fc0", "other": "#74b38c", "repeated": "#d5dbe1"}
MEANINGS = {
    "batch": "batch (or experts)",
    "out": "columns or output channels",
    "in": "rows or input channels (summed)",
    "other": "another dim",
    "repeated": "repeated",
}
SOFT = "#6b7785"
MAX_BOX, MIN_BOX, BOX_HEIGHT, LABEL = 18.0, 5.0, 22, 190


def split_kind(strategy: str) -> str:
    """What one mesh axis divides under an op's strategy text: `S0,R*->S0` is `batch`, `R*,S0->S1` is `out`."""
    left, _, right = strategy.partition("@")[0].partition("->")
    first, result = left.split(",")[0].strip(), right.split(",")[0].strip() or "R"
    if result == "P":
        return "in"
    if result[0] != "S":
        return "repeated"
    if first[0] != "S":
        return "out"
    return "batch" if first == result == "S0" else "other"


def products(stage: StagePlan) -> list[tuple[str, tuple[str, ...]]]:
    """(op name, what each mesh axis divides) of the stage's products, in order."""
    found = []
    for name, strategy in stage.strategies.items():
        if PRODUCTS.match(name) and all("->" in text for text in strategy):
            found.append((name, tuple(split_kind(text) for text in strategy)))
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
        shape = " x ".join(map(str, stage.logical_mesh))
        label = (f"stage {index}: " if len(plan.stages) > 1 else "") + f"{math.prod(stage.submesh)} devices as {shape}"
        body.append(_text(x, top + 15, label, f'font-size="12" fill="{SOFT}"'))
        top = _strip(body, ops, x + LABEL, top, width - LABEL) + 8
    used = {kind for ops in strips for _, kinds in ops for kind in kinds}
    left = x
    for kind in (kind for kind in COLOURS if kind in used):
        body.append(f'<rect x="{left:.1f}" y="{top + 4}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>')
        body.append(_text(left + 18, top + 14, MEANINGS[kind], f'font-size="11" fill="{SOFT}"'))
        left += 36 + 5.9 * len(MEANINGS[kind])
    return body, top + 24 - y


def _strip(body: list[str], ops: list[tuple[str, tuple[str, ...]]], x: float, top: float, width: float) -> float:
    """One stage's boxes, wrapped to `width`; returns where they end."""
    box = max(MIN_BOX, min(MAX_BOX, width / max(1, len(ops))))
    a_row = max(1, int(width / box))
    for position, (name, kinds) in enumerate(ops):
        left, row_top = x + (position % a_row) * box, top + (position // a_row) * (BOX_HEIGHT + 4)
        part = BOX_HEIGHT / len(kinds)
        title = f"{name}: " + ", ".join(f"axis {axis} {MEANINGS[kind]}" for axis, kind in enumerate(kinds))
        rects = "".join(
            f'<rect x="{left:.1f}" y="{row_top + axis * part:.1f}" width="{box - 1.5:.1f}" height="{part:.1f}" '
            f'fill="{COLOURS[kind]}"/>'
            for axis, kind in enumerate(kinds)
        )
        body.append(f"<g><title>{escape(title)}</title>{rects}</g>")
    rows = -(-len(ops) // a_row) if ops else 1
    return top + rows * (BOX_HEIGHT + 4)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(text)}</text>'
