"""The stages of a pipeline as one table (layers, devices, mesh, time, memory, waiting); a plan's proof."""

from __future__ import annotations

import math
import re

from rich import box
from rich.table import Table

from alpa_strategy.display.groups import collapse_indices, parameter_groups
from alpa_strategy.display.timeline import plan_timeline
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.units import format_bytes, format_seconds


def stage_overview(plan: Plan) -> Table:
    """One row a stage, seconds of one micro-batch.

    `remat`: whether, and in how many spans, it recomputes; `idle`: the share of the step in which its devices wait.
    """
    clock = plan_timeline(plan)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", overflow="fold", min_width=15)
    for name in ("devices", "mesh"):
        table.add_column(name, no_wrap=True)
    remat = any(stage.remat for stage in plan.stages)
    names = ("forward", "backward", *(("remat",) if remat else ()), "memory", *(("idle",) if clock else ()))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        seconds = (stage.forward_seconds, stage.backward_seconds)
        row = [str(index), short_layers(stage.layers), device_range(stage), " x ".join(map(str, stage.logical_mesh))]
        row += [format_seconds(each) if each else "" for each in seconds]
        if remat:
            row.append("" if not stage.remat else f"in {len(stage.spans)}" if stage.remat_cuts else "whole")
        row.append(format_bytes(stage.predicted.peak_bytes))
        if clock:
            mesh = next(m for m, stages in enumerate(clock.stages) if index in stages)
            row.append(f"{clock.idle_share(mesh):.0%}")
        table.add_row(*row)
    return table


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


def waiting_seconds(plan: Plan) -> float:
    """Seconds of a step in which a pipeline's busiest stage has nothing to do."""
    p = plan.predicted
    busy = p.compute_seconds + p.communication_seconds + p.optimizer_seconds
    return max(0.0, p.step_seconds - busy) if len(plan.stages) > 1 else 0.0


def device_range(stage: StagePlan) -> str:
    """`3`, or `0-3`."""
    first, count = stage.first_device, math.prod(stage.submesh)
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def recomputes(stage: StagePlan) -> str:
    """In words, to be appended; empty where it does not."""
    spans = f" in {len(stage.spans)} spans" if stage.remat_cuts else ""
    return f", activations recomputed{spans}" if stage.remat else ""


def proof_of(plan: Plan) -> str:
    """How good the plan is known to be; of a pipeline, the layouts inside of its stages (the cut is searched)."""
    what = "layouts " if plan.is_pipelined else ""
    if plan.gap <= 1e-6:
        return f"{what}proved optimal"
    return f"{what}within {max(plan.gap, 1e-4):.2%} of the optimum"
