"""The stages of a pipeline as one table (layers, devices, mesh, time, memory, waiting); a plan's proof."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from alpa_strategy.display.timeline import plan_timeline
from alpa_strategy.plan.plan import Plan, StagePlan
from alpa_strategy.units import format_bytes, format_seconds


def stage_overview(plan: Plan) -> Table:
    """One row a stage; seconds of one micro-batch, `idle` is the share of the step in which its devices wait."""
    clock = plan_timeline(plan)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", overflow="fold")
    for name in ("devices", "mesh"):
        table.add_column(name, no_wrap=True)
    names = ("forward", "backward", "memory", *(("idle",) if clock else ()))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        seconds = (stage.forward_seconds, stage.backward_seconds)
        row = [str(index), stage.layers, device_range(stage), " x ".join(map(str, stage.logical_mesh))]
        row += [format_seconds(each) if each else "" for each in seconds]
        row[5] += f" (recomputes{_spans(stage)})" if stage.remat else ""
        row.append(format_bytes(stage.predicted.peak_bytes))
        if clock:
            mesh = next(m for m, stages in enumerate(clock.stages) if index in stages)
            row.append(f"{clock.idle_share(mesh):.0%}")
        table.add_row(*row)
    return table


def _spans(stage: StagePlan) -> str:
    return f" in {len(stage.spans)} spans" if stage.remat_cuts else ""


def device_range(stage: StagePlan) -> str:
    """`3`, or `0-3`."""
    first, count = stage.first_device, math.prod(stage.submesh)
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def proof_of(plan: Plan) -> str:
    """How good the plan is known to be; of a pipeline, the layouts inside of its stages (the cut is searched)."""
    what = "layouts " if plan.is_pipelined else ""
    if plan.gap <= 1e-6:
        return f"{what}proved optimal"
    return f"{what}within {max(plan.gap, 1e-4):.2%} of the optimum"
