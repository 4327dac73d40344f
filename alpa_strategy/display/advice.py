"""The changes that would help a plan most, estimated from the plan's own figures.

Nothing is planned: a change is weighed by the seconds that it takes away from the plan as it is.
`alpa whatif` plans with a change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_strategy.display.findings import slow_boundaries
from alpa_strategy.display.memory import memory_limit_of
from alpa_strategy.display.stage_groups import (
    busiest_stages,
    group_sizes,
    idle_shares,
    longest_stage,
)
from alpa_strategy.display.table import step_parts
from alpa_strategy.display.timeline import ScheduleTimeline, has_timeline, plan_timeline
from alpa_strategy.ir.plan import Plan, memory_by_mesh
from alpa_strategy.schedules import SCHEDULES, in_flight_by_stage, refusal
from alpa_strategy.units import format_bytes

# A change must bring at least this share more samples per second.
LEAST_GAIN = 0.05
# From this share of the step on, computation is worth a change that may shorten it.
MOSTLY_COMPUTATION = 0.5
# From this share of a device's limit on, memory is full.
FULL = 0.99
# With more idle time, as a mean over all devices, more or faster ones are no advice.
MOST_IDLE = 0.1


@dataclass(frozen=True)
class Change:
    """A change, and the samples per second with it, as a multiple of the present ones."""

    text: str
    gain: float

    # Whether it needs other devices or links.
    is_of_cluster: bool = False


def best_change(
    plan: Plan, memory_limit: float | None = None, schedule: ScheduleTimeline | None = None
) -> str | None:
    """Return the change that would help a plan most, and what it brings.

    Changes that were planned (`alpa plan hf:`) are returned as they are. Of others, a change of the
    cluster comes second, and only if it brings more. If none helps, the text says what takes time.

    Args:
        plan: whose seconds are known.
        memory_limit: bytes per device; None: that of the plan's figures.
        schedule: of the plan over time; None: it is laid out if it is needed.

    Returns:
        None if the seconds of the plan's step are not known.
    """
    parts = step_parts(plan)
    if not parts or plan.predicted.step_seconds <= 0:
        return None
    if plan.figures is not None and plan.figures.planned_changes:
        return "; ".join(plan.figures.planned_changes)
    waiting = _waiting_share(plan)
    schedule = schedule or schedule_of_waiting(plan)
    changes = [*_half_precision(plan), *_larger_batch(plan, memory_limit, schedule)]
    changes += [*_no_recomputation(plan), *_faster_links(plan, schedule)]
    best = _best([change for change in changes if not change.is_of_cluster])
    of_cluster = _best([change for change in changes if change.is_of_cluster])
    words = []
    if best is not None:
        words.append(f"{best.text}: about {best.gain:.2f}x the samples/s")
    if of_cluster is not None and (best is None or of_cluster.gain > best.gain):
        unit = "" if words else " the samples/s"
        words.append(f"{of_cluster.text}: about {of_cluster.gain:.2f}x{unit} with this plan")
    if words:
        words += _untried(plan, memory_limit)
    pins = _pins_of_waiting(plan)
    if pins and waiting >= LEAST_GAIN:
        words.append(
            f"waiting takes {waiting:.0%} of the step: without {' and '.join(pins)} another plan"
            " may wait less"
        )
    if words:
        return "; ".join(words)

    idle = _idle_of_devices(plan)
    mean = max(sum(idle) / len(idle), waiting)
    if mean > MOST_IDLE:
        return _advice_on_idle_devices(plan, idle, mean)
    share = parts["compute"] / sum(parts.values())
    return f"computation takes {share:.0%} of the step: {_advice_on_computation(plan)}"


def _advice_on_computation(plan: Plan) -> str:
    """Return what shortens a step of computation alone."""
    if _is_compiled(plan):
        return "only more or faster devices shorten it"
    return (
        "compile=True may shorten it (`alpa whatif` with --set plan.compile=true says by how much),"
        " and more or faster devices do"
    )


def _untried(plan: Plan, memory_limit: float | None) -> list[str]:
    """Return changes whose gain only planning tells: to compile, where most of the step is
    computation, and more memory, where it is full.
    """
    words = []
    parts = step_parts(plan)
    share = parts["compute"] / sum(parts.values())
    if share >= MOSTLY_COMPUTATION and not _is_compiled(plan):
        words.append(f"compile=True may shorten computation ({share:.0%} of the step)")
    memory_limit = memory_limit_of(plan, memory_limit)
    if memory_limit is not None and plan.predicted.peak_bytes >= FULL * memory_limit:
        words.append("memory is full: `alpa whatif --set device.memory_bytes=2x` plans with more")
    return words


def _is_compiled(plan: Plan) -> bool:
    execution = plan.stages[0].execution
    return execution is not None and execution.compiled is not None


def _pins_of_waiting(plan: Plan) -> list[str]:
    """Return the pinned options of a plan that decide how long its devices wait."""
    pins = plan.figures.pins if plan.figures is not None else ()
    decisive = ("schedule=", "num_stages=", "stages=", "num_microbatches=")
    return [pin for pin in pins if pin.startswith(decisive)]


def _advice_on_idle_devices(plan: Plan, idle: Sequence[float], mean: float) -> str:
    """Return a text of a change that would shorten the time in which devices are idle, or that none
    is known.

    Args:
        plan: a pipeline.
        idle: of every device, the share of the step.
        mean: of all devices.
    """
    slow = slow_boundaries(plan)
    if slow:
        _, stage = max(slow)
        return (
            f"faster links between stages {stage} and {stage + 1}: beside a slow boundary stages"
            f" are unequal, and devices are idle for {mean:.0%} of the step (one for"
            f" {max(idle):.0%})"
        )
    pins = _pins_of_waiting(plan)
    if pins:
        return (
            f"devices are idle for {mean:.0%} of the step: without {' and '.join(pins)} another"
            " plan may wait less"
        )
    return (
        f"none that is known: devices are idle for {mean:.0%} of the step; `alpa whatif` plans"
        " with a change"
    )


def schedule_of_waiting(plan: Plan) -> ScheduleTimeline | None:
    """Return the plan's schedule over time; None if it has none, or waiting takes too little of the
    step to matter: long schedules take seconds to lay out.
    """
    return plan_timeline(plan) if _waiting_share(plan) >= LEAST_GAIN else None


def _waiting_share(plan: Plan) -> float:
    """Return the share of the step in which the busiest devices wait; 0 if it is not known."""
    parts = step_parts(plan)
    return parts.get("waiting", 0.0) / sum(parts.values()) if parts else 0.0


def _idle_of_devices(plan: Plan) -> list[float]:
    """Return the share of the step in which each device is idle; [0.0] if it is not known."""
    if not has_timeline(plan):
        return [0.0]
    idle: list[float] = []
    for share, size in zip(idle_shares(plan), group_sizes(plan), strict=True):
        idle += [share] * size
    return idle


def _best(changes: Sequence[Change]) -> Change | None:
    """Return the change that brings most, None if none brings much."""
    helpful = [change for change in changes if change.gain >= 1 + LEAST_GAIN]
    return max(helpful, key=lambda change: change.gain, default=None)


def _gain(plan: Plan, saved_seconds: float) -> float:
    """Return how many times as many samples per second a step gives that takes less time."""
    seconds = plan.predicted.step_seconds
    return seconds / max(seconds - saved_seconds, 1e-3 * seconds)


def _half_precision(plan: Plan) -> list[Change]:
    """Return the change to half precision; [] if the devices are not known to multiply faster in
    it.
    """
    figures = plan.figures
    if figures is None or figures.half_share is None:
        return []
    saved = plan.predicted.compute_seconds * (1 - figures.half_share)
    return [Change(f'precision="{figures.half_precision}"', _gain(plan, saved))]


def _larger_batch(
    plan: Plan, memory_limit: float | None, schedule: ScheduleTimeline | None
) -> list[Change]:
    """Return two changes: twice as many accumulated batches, and a batch twice as large (a change
    of the cluster unless it is known to fit). More samples share what takes time once per step.

    Args:
        plan: the plan.
        memory_limit: as of `best_change`.
        schedule: of the plan over time; None: it has none, or waiting takes too little to matter.
    """
    parts = step_parts(plan)
    once = parts["optimizer"] + _seconds_once_per_step(plan)
    once_per_batch = once + parts.get("host", 0.0)
    once_per_batch += _share_of_waiting_once(plan, schedule) * parts.get("waiting", 0.0)
    needed = _bytes_with_twice_the_batch(plan)
    memory_limit = memory_limit_of(plan, memory_limit)
    text = f"a batch twice as large{_cut(plan)}, with more memory"
    fits = False
    if needed is not None:
        limit = math.inf if memory_limit is None else memory_limit
        fits = needed <= limit
        if fits:
            text = f"a batch twice as large{_cut(plan)} ({format_bytes(needed)} a device)"
    return [
        # The first of equal ones is taken: this one needs no memory.
        Change("accumulate_grad_batches twice as large", _gain(plan, once / 2)),
        Change(text, _gain(plan, once_per_batch / 2), is_of_cluster=not fits),
    ]


def _seconds_once_per_step(plan: Plan) -> float:
    """Return the seconds of the slowest stage's collectives once per step, as far as nothing hides
    them.
    """
    stage = longest_stage(plan)
    total = sum(collective.seconds for collective in stage.collectives)
    if not total:
        return 0.0
    once = sum(c.seconds for c in stage.collectives if c.phase == "step")
    return stage.predicted.communication_seconds * once / total


def _share_of_waiting_once(plan: Plan, before: ScheduleTimeline | None) -> float:
    """Return the share of a pipeline's waiting that twice as many micro-batches do not add to: to
    fill and to drain it. The rest is waiting for messages and for other stages. 1 if the schedule
    is not known.
    """
    num_meshes = len(group_sizes(plan))
    count = plan.num_microbatches
    if before is None or refusal(plan.schedule, num_meshes, 2 * count):
        return 1.0
    after = plan_timeline(replace(plan, num_microbatches=2 * count))
    assert after is not None
    stages = [plan.stages[index] for index in busiest_stages(plan)]
    busy = count * sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
    waiting = before.seconds - busy
    if waiting <= 0:
        return 1.0
    added = after.seconds - before.seconds - busy
    return min(1.0, max(0.0, 1 - added / waiting))


def _bytes_with_twice_the_batch(plan: Plan) -> float | None:
    """Return the bytes of the fullest device with twice the batch; None: not known."""
    growth = _activation_growth(plan) - 1
    most: float | None = None
    for parts in memory_by_mesh(plan).values():
        if parts:
            of_batch = parts["activations"] + parts["temporary"]
            most = max(most or 0.0, sum(parts.values()) + growth * of_batch)
    return most


def _cut(plan: Plan) -> str:
    """Return how twice the batch is cut into micro-batches, to append; "" if it is not cut."""
    if len(plan.stages) == 1 and plan.num_microbatches == 1:
        return ""
    count = 2 * plan.num_microbatches
    if _keeps_size(plan):
        return f" in {count} micro-batches of the present size"
    return f" in {plan.num_microbatches} micro-batches twice as large"


def _keeps_size(plan: Plan) -> bool:
    """Whether twice the batch can be twice as many micro-batches of the same size."""
    if len(plan.stages) == 1:
        return plan.num_microbatches > 1
    if plan.schedule not in SCHEDULES:
        return False
    return not refusal(plan.schedule, len(group_sizes(plan)), 2 * plan.num_microbatches)


def _activation_growth(plan: Plan) -> float:
    """Return how many times as many activations a device stores with twice the batch, in
    micro-batches of the same size where that is possible.
    """
    count = plan.num_microbatches
    num_stages = len(plan.stages)
    if not _keeps_size(plan):
        return 2.0
    if num_stages == 1:
        return 1.0
    num_meshes = len(group_sizes(plan))
    stages_per_mesh = num_stages // num_meshes
    before = in_flight_by_stage(plan.schedule, num_meshes, count, stages_per_mesh)
    after = in_flight_by_stage(plan.schedule, num_meshes, 2 * count, stages_per_mesh)
    return max(new / old for old, new in zip(before, after, strict=True))


def _no_recomputation(plan: Plan) -> list[Change]:
    """Return the change to no recomputation; [] if the slowest stage does not recompute."""
    stage = longest_stage(plan)
    if not stage.remat:
        return []
    saved = plan.num_microbatches * stage.forward_seconds
    text = "no recomputation, with more memory"
    return [Change(text, _gain(plan, saved), is_of_cluster=True)]


def _faster_links(plan: Plan, schedule: ScheduleTimeline | None) -> list[Change]:
    """Return the change to links of twice the bandwidth. Args: as of `_larger_batch`."""
    in_stages = plan.predicted.communication_seconds / 2
    between = _saved_by_faster_boundaries(plan, schedule)
    text = "links twice as fast"
    if between > in_stages:
        text += ", first of all between stages"
    return [Change(text, _gain(plan, in_stages + between), is_of_cluster=True)]


def _saved_by_faster_boundaries(plan: Plan, before: ScheduleTimeline | None) -> float:
    """Return the seconds that a step is shorter if messages between stages take half as long; at
    most its waiting.

    Args:
        before: the schedule now; None: waiting is no part of the step, the result is 0.
    """
    if before is None:
        return 0.0
    stages = [replace(s, boundary_seconds=s.boundary_seconds / 2) for s in plan.stages]
    after = plan_timeline(replace(plan, stages=tuple(stages)))
    assert after is not None
    waiting = step_parts(plan).get("waiting", 0.0)
    return min(waiting, max(0.0, before.seconds - after.seconds))
