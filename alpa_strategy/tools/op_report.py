"""The findings on all ops, as tables: what `alpa ops` shows and `scripts/op_coverage.py` stores."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from alpa_strategy.errors import OptionError
from alpa_strategy.sharding.rule_table import rule_lines

NONE_EXISTS = "none exists"  # how `OpVerdict.why` begins where no split of a call can be right
STORED = Path(__file__).with_name("op_coverage.json")


@dataclass(frozen=True)
class OpVerdict:
    """What is known of one op.

    Attributes:
        op: for example `aten.linear.default`.
        origin: `notation`, `view`, `pointwise`, `reduction` (rules of the table), `discovered`, or `replicated`.
        sharded: the strategies that divide work or data, in the order found (of all calls together).
        num_calls: calls that were tried.
        num_proved: strategies that were run in shards on data, forward and backward, and gave the whole result.
        wrong: those that did not.
        why: for an op without sharded strategy, why it has none.
    """

    op: str
    origin: str
    sharded: tuple[str, ...]
    num_calls: int
    num_proved: int
    wrong: tuple[str, ...] = ()
    why: str = ""


def load(path: Path = STORED) -> tuple[OpVerdict, ...]:
    """The verdicts that were stored last."""
    rows = json.loads(path.read_text())["ops"]
    return tuple(OpVerdict(**{**row, "sharded": tuple(row["sharded"]), "wrong": tuple(row["wrong"])}) for row in rows)


def figures(verdicts: Sequence[OpVerdict]) -> list[str]:
    """How many ops and calls were tried, have proved strategies, are replicated, are wrong: a line each."""
    sharded = [v for v in verdicts if v.sharded]
    missing, impossible = without_strategies(verdicts)
    origins = Counter("discovered" if v.origin == "discovered" else "covered by a rule" for v in sharded)
    share = len(sharded) / max(len(sharded) + len(missing), 1)
    return [
        f"{len(verdicts)} ops, {sum(v.num_calls for v in verdicts)} calls, {sum(v.num_proved for v in verdicts)} "
        "strategies run in shards, forward and backward",
        f"proved sharded strategies: {len(sharded)} ops ("
        + ", ".join(f"{name} {count}" for name, count in sorted(origins.items()))
        + f"), {share:.1%} of the {len(sharded) + len(missing)} where one exists",
        f"replicated: {len(missing)} for want of a rule, {len(impossible)} because no split can be right",
        f"wrong: {sum(bool(v.wrong) for v in verdicts)}",
    ]


def without_strategies(verdicts: Sequence[OpVerdict]) -> tuple[list[OpVerdict], list[OpVerdict]]:
    """Ops without a sharded strategy: for want of one, and because none can be right."""
    without = [v for v in verdicts if not v.sharded]
    impossible = [v for v in without if v.why.startswith(NONE_EXISTS)]
    return [v for v in without if v not in impossible], impossible


def op_table(pattern: str = "*") -> Table:
    """Ops whose name matches the glob pattern (`linear` finds `aten.linear.default`), with rule, origin and proof.

    Raises OptionError when there is none.
    """
    lines = rule_lines()
    verdicts = {v.op: v for v in load()}
    known = {*verdicts, *(key for key in lines if not any(op == key or op.startswith(f"{key}.") for op in verdicts))}
    names = sorted(n for n in known if fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n, f"*{pattern}*"))
    if not names:
        raise OptionError(
            f"no op matches {pattern!r}",
            "ops are named as in aten.linear.default; ops that are not listed get their rules by experiment, or from "
            "register_sharding",
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.caption = "PyTorch's operator database: " + "\n".join(figures(tuple(verdicts.values())))
    for column in ("op", "from", "rule, or strategies"):
        table.add_column(column, overflow="fold")
    table.add_column("proved", justify="right")
    for name in names:
        table.add_row(name, *_row(verdicts.get(name), lines.get(name) or lines.get(name.rpartition(".")[0])))
    return table


def _row(verdict: OpVerdict | None, line: tuple[str, str] | None) -> tuple[str, str, str]:
    """(origin, rule, proof) of one op."""
    if verdict is None:
        origin, text = line or ("", "")
        return origin, escape(text), "in the tests"
    if not verdict.sharded:
        return verdict.origin, f"[dim]replicated: {verdict.why}[/dim]", ""
    text = line[1] if line and line[1] else "  ".join(verdict.sharded[:4])
    if len(verdict.sharded) > 4 and not (line and line[1]):
        text += f"  and {len(verdict.sharded) - 4} more"
    proof = f"{verdict.num_proved} runs" if not verdict.wrong else f"[red]{len(verdict.wrong)} wrong[/red]"
    return verdict.origin, escape(text), proof
