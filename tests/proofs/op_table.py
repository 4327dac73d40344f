"""What `scripts/op_coverage.py --show` prints: how ops may be sharded, by which rule, and what was
proved in shards.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from alpa_strategy.errors import OptionError
from alpa_strategy.sharding.notation_rules import NOTATION
from alpa_strategy.sharding.rule_table import FAMILIES, UNTAGGED_POINTWISE

STORED = (
    Path(__file__).parents[2] / "docs" / "op_coverage.json"
)  # what `scripts/op_coverage.py` found


def op_table(pattern: str = "*") -> Table:
    """Ops whose name matches the glob pattern (`linear` finds `aten.linear.default`), with rule,
    origin and proof.

    Raises OptionError when there is none.
    """
    stored, lines = json.loads(STORED.read_text()), rule_lines()
    verdicts = {row["op"]: row for row in stored["ops"]}
    # Rules of ops that PyTorch's database has no samples of are shown as well.
    known = {
        *verdicts,
        *(
            key
            for key in lines
            if not any(op == key or op.startswith(f"{key}.") for op in verdicts)
        ),
    }
    names = sorted(
        n for n in known if fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n, f"*{pattern}*")
    )
    if not names:
        raise OptionError(
            f"no op matches {pattern!r}",
            "ops are named as in aten.linear.default; ops that are not listed get their rules by experiment, or from "
            "register_sharding",
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.caption = "PyTorch's operator database: " + "\n".join(stored["figures"])
    for column in ("op", "from", "rule, or strategies"):
        table.add_column(column, overflow="fold")
    table.add_column("proved", justify="right")
    for name in names:
        table.add_row(
            name, *_row(verdicts.get(name), lines.get(name) or lines.get(name.rpartition(".")[0]))
        )
    return table


def rule_lines() -> dict[str, tuple[str, str]]:
    """The table: op name (with or without overload) -> (origin, its line of notation where it has a
    fixed one).
    """
    lines = {
        name: ("notation", rule.line if isinstance(rule.line, str) else "")
        for name, rule in NOTATION.items()
    }
    lines |= dict.fromkeys(FAMILIES, ("rule", ""))
    return lines | dict.fromkeys(UNTAGGED_POINTWISE, ("pointwise", ""))


def _row(verdict: dict[str, Any] | None, line: tuple[str, str] | None) -> tuple[str, str, str]:
    """(origin, rule, proof) of one op."""
    if verdict is None:
        origin, text = line or ("", "")
        return origin, escape(text), "in the tests"
    origin, sharded, wrong = verdict["origin"], verdict["sharded"], verdict["wrong"]
    if not sharded:
        return origin, f"[dim]replicated: {verdict['why']}[/dim]", ""
    text = line[1] if line and line[1] else "  ".join(sharded[:4])
    if len(sharded) > 4 and not (line and line[1]):
        text += f"  and {len(sharded) - 4} more"
    return (
        origin,
        escape(text),
        f"[red]{len(wrong)} wrong[/red]" if wrong else f"{verdict['num_proved']} runs",
    )
