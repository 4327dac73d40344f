"""Parameters of equal fate as one line: `blocks.*.attn.qkv.weight`, 24 times, instead of 24 lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alpa_strategy.ir.plan import ParameterPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one name pattern, shape and plan. `shape` is None when it is not known."""

    pattern: str
    names: tuple[str, ...]
    modes: tuple[str, ...]
    layout: str
    shape: Shape | None


def parameter_groups(
    plans: Mapping[str, ParameterPlan], shapes: Mapping[str, Shape] | None = None
) -> tuple[ParameterGroup, ...]:
    """Group by name with its indices collapsed, shape and modes, in order of first appearance.

    Where one pattern falls into several groups, each shows the indices that it stands for: `blocks.{0-2,5}.fc.weight`.
    """
    members: dict[tuple[str, Shape | None, tuple[str, ...]], list[str]] = {}
    for name, plan in plans.items():
        shape = shapes.get(name) if shapes else None
        members.setdefault((collapse_indices(name), shape, plan.module_modes), []).append(name)
    patterns = [pattern for pattern, _, _ in members]
    return tuple(
        ParameterGroup(
            pattern=names[0] if len(names) == 1 else pattern if patterns.count(pattern) == 1 else _with_ranges(names),
            names=tuple(names),
            modes=modes,
            layout=str(plans[names[0]].module_layout),
            shape=shape,
        )
        for (pattern, shape, modes), names in members.items()
    )


def collapse_indices(name: str) -> str:
    """Every part of a dotted name that is a number becomes `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def merge_groups(groups: tuple[ParameterGroup, ...]) -> tuple[ParameterGroup, ...]:
    """Join groups that differ only in their last part and are kept alike: `blocks.*.attn.qkv.{weight,bias}`."""
    merged: dict[tuple[str, tuple[str, ...]], list[ParameterGroup]] = {}
    for group in groups:
        stem = group.pattern.rpartition(".")[0]
        merged.setdefault((stem, group.modes), []).append(group)
    result = []
    for (stem, modes), parts in merged.items():
        if len(parts) == 1:
            result.append(parts[0])
            continue
        ends = ",".join(part.pattern.rpartition(".")[2] for part in parts)
        names = tuple(name for part in parts for name in part.names)
        result.append(ParameterGroup(f"{stem}.{{{ends}}}", names, modes, parts[0].layout, None))
    return tuple(result)


def _with_ranges(names: list[str]) -> str:
    indices = [int(part) for name in names for part in re.findall(r"(?<![^.])\d+(?![^.])", name)[:1]]
    parts = collapse_indices(names[0]).split(".")
    parts[parts.index("*")] = f"{{{index_ranges(indices)}}}"
    return ".".join(parts)


def index_ranges(indices: Iterable[int]) -> str:
    """`0-7,13`."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
