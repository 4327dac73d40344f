"""What a user pinned for a pipeline, checked before anything is solved: which pin cannot be met, why, and what can."""

from __future__ import annotations

import math

from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.schedules import ONE_STAGE, SCHEDULES, stages_per_rank, why_not
from alpa_strategy.inter_op.submeshes import submeshes
from alpa_strategy.options import PlanOptions


def check_pins(step: StepGraph, cluster: ClusterSpec, options: PlanOptions) -> None:
    """PlanError where num_stages, schedule and num_microbatches cannot be met together on this cluster and step."""
    wanted, schedule, count = options.num_stages, options.schedule, options.num_microbatches
    if wanted == 1:
        return
    most = sum(1 for op in step.ops if op.operands)
    if wanted is not None and wanted > most:
        raise PlanError(
            f"num_stages={wanted}, but training_step has only {most} ops, and a stage holds at least one",
            f"ask for at most {most} stages, or leave num_stages out",
        )
    schedules = [schedule] if schedule else list(SCHEDULES)
    possible = {name: _stages_and_meshes(name, cluster) for name in schedules}
    if wanted is not None and not any(wanted in dict(found) for found in possible.values()):
        raise _no_such_stages(wanted, schedule, cluster, sorted({n for found in possible.values() for n, _ in found}))
    if schedule is None or count is None:
        return
    meshes = {ranks for n, ranks in possible[schedule] if wanted in (None, n)}
    reasons = {why_not(schedule, ranks, count) for ranks in sorted(meshes)}
    if reasons and None not in reasons:
        raise PlanError(
            f"num_microbatches={count} cannot be met: {'; '.join(sorted(filter(None, reasons)))}",
            "leave num_microbatches out to have it solved, or use another schedule, such as 1F1B",
        )


def _stages_and_meshes(schedule: str, cluster: ClusterSpec) -> list[tuple[int, int]]:
    """(number of stages, number of meshes) that a schedule can have on the cluster's devices."""
    devices = cluster.num_devices
    if schedule in ONE_STAGE:
        return [(n, n) for n in range(1, devices + 1)]
    ranks = {devices // math.prod(mesh) for mesh in submeshes(cluster) if devices % math.prod(mesh) == 0}
    return sorted((n * v, n) for n in ranks if n > 1 for v in stages_per_rank(schedule))


def _no_such_stages(wanted: int, schedule: str | None, cluster: ClusterSpec, possible: list[int]) -> PlanError:
    where = f"{cluster.num_devices} device{'s' * (cluster.num_devices != 1)}"
    if schedule is None:
        return PlanError(
            f"num_stages={wanted} cannot be met on {where} by any schedule",
            f"ask for one of {_short(possible)}, or leave num_stages out",
        )
    each = " or ".join(map(str, stages_per_rank(schedule)))
    return PlanError(
        f"num_stages={wanted} cannot be met by schedule={schedule!r} on {where}: it puts {each} stage"
        f"{'s' * (each != '1')} on each mesh" + ("" if each == "1" else ", and all meshes are of one size"),
        f"ask for one of {_short(possible)}, or leave num_stages or schedule out"
        if possible
        else "use the schedule 1F1B or GPipe, or more devices",
    )


def _short(numbers: list[int]) -> str:
    if len(numbers) > 8:
        return f"{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))
