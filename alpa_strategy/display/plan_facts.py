"""What the table and the picture say of a plan: parameters of equal fate as one line, stages, the proof."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alpa_strategy.ir.parameter_plan import ParameterMode, ParameterPlan
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_plan import StagePlan

Shape = tuple[int, ...]
MODE_MEANINGS = {
    "R": "replicated",
    "R*": "replicated, gradient summed once per step (data parallel)",
    "S": "sharded along dim n, used in shards or gathered at each use (tensor parallel, ZeRO-3)",
    "G": "sharded along dim n, gathered once per step (ZeRO-1/2)",
}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one name pattern, shape and plan. `shape` is None when it is not known."""

    pattern: str
    names: tuple[str, ...]
    modes: tuple[ParameterMode, ...]
    layout: str
    shape: Shape | None


def parameter_groups(
    plans: Mapping[str, ParameterPlan], shapes: Mapping[str, Shape] | None = None
) -> tuple[ParameterGroup, ...]:
    """Group by name with its indices collapsed, shape and modes, in order of first appearance.

    Where one pattern falls into several groups, each shows the indices that it stands for: `blocks.{0-2,5}.fc.weight`.
    """
    members: dict[tuple[str, Shape | None, tuple[ParameterMode, ...]], list[str]] = {}
    for name, plan in plans.items():
        shape = shapes.get(name) if shapes else None
        # In the module's dims: a fused weight [3, n, k] of the step is [3 n, k] to the user.
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
    merged: dict[tuple[str, tuple[ParameterMode, ...]], list[ParameterGroup]] = {}
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
    # Only the first index is spelled out: blocks.{0-2}.experts.*
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


def short_layers(layers: str) -> str:
    """`blocks.0-blocks.3` as `blocks.0-3`."""
    return re.sub(r"\b([\w.]+\.)(\d+)-\1(\d+)", r"\1\2-\3", layers)


def equal_stages(plan: Plan) -> list[list[int]]:
    """Indices of stages whose parameters (up to the numbers in their names) and collectives are the same, together."""
    found: dict[tuple, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        groups = parameter_groups(stage.parameter_plans, stage.shapes)
        held = tuple((collapse_indices(g.pattern), len(g.names), g.shape, g.modes) for g in groups)
        said = tuple((c.kind, c.axis, c.phase, c.count, c.num_bytes) for c in stage.collectives)
        found.setdefault((stage.logical_mesh, stage.remat, len(stage.spans), held, said), []).append(index)
    return list(found.values())


def step_parts(plan: Plan) -> dict[str, float]:
    """What a step's seconds go to; `waiting`: a pipeline's busiest stage has nothing to do. Empty where unknown."""
    p = plan.predicted
    parts = {"compute": p.compute_seconds, "communication": p.communication_seconds, "optimizer": p.optimizer_seconds}
    waiting = p.step_seconds - sum(parts.values())
    if plan.is_pipelined and waiting > 0:
        parts["waiting"] = waiting
    return parts if any(parts.values()) else {}


def beaten(plan: Plan) -> list[tuple[str, float | None, float]]:
    """(name, seconds, how many times the plan's) of the named plans that were priced; None: it does not fit."""
    step = plan.predicted.step_seconds
    fits = {name: s if s is not None and math.isfinite(s) else None for name, s in plan.baselines.items()}
    return [(name, s, s / step if s is not None and step > 0 else 1.0) for name, s in fits.items()]


def whereabouts(plan: Plan) -> str:
    """`8 devices on p3_16xlarge_x8`."""
    count = max(stage.first_device + math.prod(stage.submesh) for stage in plan.stages)
    return f"{count} device{'s' * (count != 1)}" + (f" on {plan.cluster_name}" if plan.cluster_name else "")


def mesh_text(shape: Sequence[int]) -> str:
    """`2 x 4`."""
    return " x ".join(map(str, shape))


def used_modes(plan: Plan) -> list[str]:
    """The kinds of modes (`R`, `R*`, `S`, `G`) that parameters of the plan have, in the order of the legend."""
    plans = [parameter for stage in plan.stages for parameter in stage.parameter_plans.values()]
    used = {mode.storage.value for parameter in plans for mode in parameter.modes}
    return [kind for kind in MODE_MEANINGS if kind in used]


def device_range(stage: StagePlan) -> str:
    """`3`, or `0-3`."""
    first, count = stage.first_device, math.prod(stage.submesh)
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def recomputes(stage: StagePlan) -> str:
    """In words, to be appended; empty where it does not."""
    spans = f" in {len(stage.spans)} spans" if stage.remat_cuts else ""
    return f", activations recomputed{spans}" if stage.remat else ""


def proof_of(plan: Plan) -> str:
    """How good the plan is known to be, and among which plans."""
    if plan.is_as_written:
        return "steps as written, a replica on each device"
    count, of_many = plan.num_microbatches, sum(math.prod(stage.submesh) for stage in plan.stages) > 1
    among = f" for {count} micro-batch{'es' * (count != 1)}" if plan.is_pipelined else " of one stage" * of_many
    if plan.gap <= 1e-6:
        return f"proved optimal{among}"
    return f"within {max(plan.gap, 1e-4):.2%} of a bound{among}"
