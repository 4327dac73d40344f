"""The findings on all ops, which `scripts/op_coverage.py` stores and shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa_strategy.display.op_table import STORED

NONE_EXISTS = "none exists"  # how `OpVerdict.why` begins where no split of a call can be right


@dataclass(frozen=True)
class OpVerdict:
    """What is known of one op.

    Attributes:
        op: for example `aten.linear.default`.
        origin: `notation`, `view`, `pointwise`, `reduction` (rules of the table), or `replicated`.
        sharded: the strategies that divide work or data, in the order found (of all calls
            together).
        num_calls: calls that were tried.
        num_proved: strategies that were run in shards on data, forward and backward, and gave the
            whole result.
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
    return tuple(
        OpVerdict(**{**row, "sharded": tuple(row["sharded"]), "wrong": tuple(row["wrong"])})
        for row in rows
    )


def figures(verdicts: Sequence[OpVerdict]) -> list[str]:
    """How many ops and calls were tried, have proved strategies, are replicated, are wrong: a line
    each.
    """
    sharded = [v for v in verdicts if v.sharded]
    missing, impossible = without_strategies(verdicts)
    share = len(sharded) / max(len(sharded) + len(missing), 1)
    return [
        f"{len(verdicts)} ops, {sum(v.num_calls for v in verdicts)} calls,"
        f" {sum(v.num_proved for v in verdicts)} "
        "strategies run in shards, forward and backward",
        f"proved sharded strategies: {len(sharded)} ops, {share:.1%} of the"
        f" {len(sharded) + len(missing)} where one "
        "exists",
        f"replicated: {len(missing)} for want of a rule, {len(impossible)} because no split can be"
        " right",
        f"wrong: {sum(bool(v.wrong) for v in verdicts)}",
    ]


def without_strategies(verdicts: Sequence[OpVerdict]) -> tuple[list[OpVerdict], list[OpVerdict]]:
    """Ops without a sharded strategy: for want of one, and because none can be right."""
    without = [v for v in verdicts if not v.sharded]
    impossible = [v for v in without if v.why.startswith(NONE_EXISTS)]
    return [v for v in without if v not in impossible], impossible
