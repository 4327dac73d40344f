"""The page of a plan: one HTML file with its style, script and data, which loads nothing.

The data is JSON, compressed, in a script element. d3 (d3.LICENSE) draws the charts.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from alpa_strategy.ir.measured_steps import MeasuredSteps
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import PlanDetails
from alpa_strategy.page.model import page_model

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = (
    "core.js",
    "tree.js",
    "details.js",
    "mesh.js",
    "timeline.js",
    "measured.js",
    "memory.js",
    "overview.js",
    "compare.js",
    "main.js",
)
_DATA_START = '<script id="data" type="application/octet-stream">'
_DATA_END = "</script>"


def plan_page(
    plan: Plan,
    details: PlanDetails | None = None,
    name: str = "",
    measured: MeasuredSteps | None = None,
) -> str:
    """Return the page of a plan.

    Args:
        plan: to show.
        details: of its parameters and ops; None: the page has the plan alone.
        name: of the plan, such as its file's.
        measured: by a run of the plan; None: nothing.
    """
    return page_of([page_model(plan, details, name, measured)])


def page_of(models: Sequence[dict[str, Any]]) -> str:
    """Return the page of one plan, or of two plans side by side.

    Args:
        models: of `page_model`.
    """
    text = json.dumps(list(models), separators=(",", ":"), ensure_ascii=True)
    # The same plan has the same page: no time stamp.
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    data = base64.b64encode(packed).decode()
    template = _static("page.html")
    style = _static("page.css")
    script = "\n".join(_static(name) for name in _SCRIPTS)
    # Pieces are joined, not substituted one after the other: none is searched for placeholders.
    pieces = []
    contents = {
        "STYLE": style,
        "D3": _static("d3.min.js"),
        "DATA": f"{_DATA_START}{data}{_DATA_END}",
        "SCRIPT": script,
    }
    for piece in template.split("%%"):
        pieces.append(contents.get(piece, piece))
    return "".join(pieces)


def models_of(page: str) -> list[dict[str, Any]]:
    """Return the data of a page: the inverse of `page_of`."""
    start = page.index(_DATA_START) + len(_DATA_START)
    packed = base64.b64decode(page[start : page.index(_DATA_END, start)])
    return json.loads(gzip.decompress(packed))


def page_path(plan_path: str | Path) -> Path:
    """Return the path of the page of a plan file: `plan.html` beside `plan.json`."""
    path = Path(plan_path)
    return path.with_name(path.name.removesuffix(".json") + ".html")


@cache
def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")
