"""The table of `alpa ops`: how ops may be sharded, by which rule, and how many runs in shards have
proved it.

The figures come from scripts/op_coverage.py, which runs the shards of every op in PyTorch's
operator database on data, forward and backward (docs/op_coverage.json; part of the package in a
wheel).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.errors import OptionError, did_you_mean
from alpa_strategy.files import FINDINGS, shipped_folder
from alpa_strategy.ir.op import target_name
from alpa_strategy.sharding.notation_rules import NOTATION
from alpa_strategy.sharding.rule_table import FAMILIES, UNTAGGED_POINTWISE, is_pointwise

STORED = shipped_folder(FINDINGS) / "op_coverage.json"
# Strategies that are shown of an op whose rule is no fixed line.
MOST_STRATEGIES = 4


@dataclass(frozen=True)
class OpRow:
    """A row of the table: one op."""

    # For example `aten.linear.default`; without an overload the rule is for all overloads.
    op: str

    # The kind of its rule: `notation`, `view`, `pointwise`, `reduction`; `replicated`: it has none.
    origin: str

    # The line of index notation; empty if strategies follow from the call's arguments.
    rule: str

    # Strategies that divide work or data and were run in shards.
    strategies: tuple[str, ...]

    # Number of runs in shards, forward and backward, that gave the full result.
    num_proved: int

    # Strategies that gave another result.
    wrong: tuple[str, ...]

    # Why it is replicated; empty if it is not.
    why: str


def op_rows(pattern: str = "*") -> list[OpRow]:
    """Return the ops whose names match a glob pattern; `linear` stands for `*linear*`.

    If none does, they are the pointwise overloads of the op of this name, which need no row.

    Raises:
        OptionError: no op matches, or the op that is named has no rule.
    """
    rows = _all_rows()
    globs = [pattern]
    is_glob = bool(set(pattern) & set("*?["))
    if not is_glob:
        globs.append(f"*{pattern}*")

    matching = []
    for row in rows:
        if any(fnmatchcase(row.op, glob) for glob in globs):
            matching.append(row)
    return matching or _unlisted_rows(pattern)


def op_table(rows: Sequence[OpRow]) -> RenderableType:
    """Return a table with a row per op: name, where its rule comes from, rule and proof. The
    figures of PyTorch's full operator database are below it.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("op", overflow="fold", ratio=5)
    table.add_column("rule from", overflow="fold")
    table.add_column("rule, or strategies", overflow="fold", ratio=7)
    table.add_column("proved", justify="right")
    for row in rows:
        # Texts, not strings: rich would take `[*b, k]` for markup.
        table.add_row(Text(row.op), Text(row.origin), _rule_text(row), _proof_text(row))
    figures = "\n".join(_stored()["figures"])
    return Group(table, Text(f"PyTorch's operator database:\n{figures}", style="dim"))


def op_data(rows: Sequence[OpRow]) -> list[dict[str, Any]]:
    """Return the ops as plain data for JSON, with `proved`: some shardings were, and none was
    wrong.
    """
    data = []
    for row in rows:
        is_proved = bool(row.num_proved) and not row.wrong
        data.append({**vars(row), "proved": is_proved})
    return data


def rule_lines() -> dict[str, tuple[str, str]]:
    """Return all rules: op (with or without overload) -> (kind, line of index notation).

    The line is empty if it depends on the call.
    """
    lines = {}
    for name, rule in NOTATION.items():
        lines[name] = ("notation", rule.line if isinstance(rule.line, str) else "")
    lines |= dict.fromkeys(FAMILIES, ("rule", ""))
    return lines | dict.fromkeys(UNTAGGED_POINTWISE, ("pointwise", ""))


def _unlisted_rows(pattern: str) -> list[OpRow]:
    """Return the pointwise overloads of one op that the table lacks because PyTorch has no samples
    of it.

    Raises:
        OptionError: PyTorch has no such op, or the op has no rule.
    """
    namespace, name, overload = _parts_of_name(pattern)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    targets = []
    if isinstance(packet, torch._ops.OpOverloadPacket):
        for overload_name in packet.overloads():
            if overload in ("", overload_name):
                targets.append(getattr(packet, overload_name))
    if not targets:
        near = did_you_mean(pattern, [row.op for row in _all_rows()])
        raise OptionError(
            f"no op matches {pattern!r}", f"{near} Ops are named as in aten.linear.default".lstrip()
        )

    rows = []
    for target in targets:
        if is_pointwise(target):
            rows.append(OpRow(target_name(target), "pointwise", "", (), 0, (), ""))
    if not rows:
        op = f"{namespace}::{name}" + (f".{overload}" if overload else "")
        raise OptionError(
            f"no rule for {op}: it runs in full on every device",
            f'if its work can be divided, register_sharding("{op}", ...) says how'
            " (docs/extending.md)",
        )
    return rows


def _parts_of_name(pattern: str) -> tuple[str, str, str]:
    """Return (namespace, name, overload) of `aten.ger*`, `aten::ger.default` or `ger`.

    A `*` at the end is dropped. The namespace is `aten` if there is none, a missing overload "".
    """
    text = pattern.replace("::", ".").strip("*.")
    if "." not in text:
        text = f"aten.{text}"
    namespace, name, overload, *_ = [*text.split("."), ""]
    return namespace, name, overload


@cache
def _all_rows() -> list[OpRow]:
    """Return every op that has samples in the database, and every rule of ops without samples."""
    lines = rule_lines()
    rows = []
    sampled = set()
    for finding in _stored()["ops"]:
        name = finding["op"]
        family = name.rpartition(".")[0]
        sampled |= {name, family}
        _, line = lines.get(name) or lines.get(family) or ("", "")
        row = OpRow(
            op=name,
            origin=finding["origin"],
            rule=line,
            strategies=tuple(finding["sharded"]),
            num_proved=finding["num_proved"],
            wrong=tuple(finding["wrong"]),
            why=finding["why"],
        )
        rows.append(row)

    for name in lines.keys() - sampled:
        origin, line = lines[name]
        rows.append(OpRow(name, origin, line, (), 0, (), ""))
    return sorted(rows, key=lambda row: row.op)


@cache
def _stored() -> dict[str, Any]:
    """Return the figures that scripts/op_coverage.py has stored."""
    return json.loads(Path(STORED).read_text(encoding="utf-8"))


def _rule_text(row: OpRow) -> Text:
    """Return the rule of an op: a reason why it is replicated, its notation, or its first
    strategies.
    """
    if row.why:
        return Text(f"replicated: {row.why}", style="dim")
    if row.rule:
        return Text(row.rule)
    shown = "  ".join(row.strategies[:MOST_STRATEGIES])
    num_more = len(row.strategies) - MOST_STRATEGIES
    if num_more > 0:
        shown += f"  and {num_more} more"
    return Text(shown or "by the call's arguments")


def _proof_text(row: OpRow) -> Text:
    """Return how the op's rule was proved: by how many runs, by the tests, or wrong."""
    if row.wrong:
        return Text(f"{len(row.wrong)} wrong", style="red")
    if row.num_proved:
        return Text(f"{row.num_proved} runs")
    return Text("" if row.why else "by tests")
