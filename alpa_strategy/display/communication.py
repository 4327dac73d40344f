"""Communication of a plan: the sum of a stage's collectives, and the messages between stages."""

from dataclasses import dataclass, replace

import numpy as np
from rich.console import Group, RenderableType

from alpa_strategy.display.console import plain
from alpa_strategy.display.table import add_columns, plain_table
from alpa_strategy.display.timeline import MAX_ACTIONS, has_timeline, num_actions
from alpa_strategy.ir.plan import Plan, StagePlan, stages_by_devices
from alpa_strategy.schedules import seconds_of_many
from alpa_strategy.units import format_bytes, format_seconds

# Seconds that differ by less than this share are the same: they were summed in another order.
ROUNDING = 1e-6


@dataclass(frozen=True)
class BoundaryMessages:
    """The messages of a step between stage `stage` and the next one."""

    stage: int

    # Both ways.
    count: int

    # Of one message.
    one_way_seconds: float

    # Of a micro-batch, both ways, over all links of the boundary; None: not known.
    round_trip_bytes: int | None

    @property
    def seconds(self) -> float:
        """Of all messages of a step, one after the other."""
        return self.count * self.one_way_seconds


def boundary_messages(plan: Plan) -> list[BoundaryMessages]:
    """Return the messages of every boundary that has some: values, and their gradients back."""
    messages = []
    for index, stage in enumerate(plan.stages[:-1]):
        if stage.boundary_seconds > 0:
            count = 2 * plan.num_microbatches
            one_way_seconds = stage.boundary_seconds / 2
            messages.append(BoundaryMessages(index, count, one_way_seconds, stage.boundary_bytes))
    return messages


def exposed_message_seconds(plan: Plan) -> float | None:
    """Return the seconds by which a step is longer than without its messages between stages.

    None if the schedule or its seconds are not known, or if the step has too many actions.
    """
    if not has_timeline(plan) or num_actions(plan) > MAX_ACTIONS:
        return None
    seconds = [plan, replace(plan, stages=tuple(map(_without_messages, plan.stages)))]
    longer, shorter = map(_schedule_seconds, seconds)
    return max(0.0, longer - shorter)


def _without_messages(stage: StagePlan) -> StagePlan:
    return replace(stage, boundary_seconds=0.0)


def _schedule_seconds(plan: Plan) -> float:
    """Return the seconds of all forwards and backwards of a step."""
    forward = np.array([[stage.forward_seconds for stage in plan.stages]])
    backward = np.array([[stage.backward_seconds for stage in plan.stages]])
    boundary = np.array([[stage.boundary_seconds / 2 for stage in plan.stages[:-1]]])
    num_meshes = len(stages_by_devices(plan))
    counts = plan.num_microbatches, num_meshes
    return float(seconds_of_many(plan.schedule, forward, backward, *counts, boundary)[0])


def hidden_messages_text(plan: Plan) -> str:
    """Return a text: how long all messages take, and how much shorter a step would be without them;
    "" if that is not known or there are none.
    """
    messages = boundary_messages(plan)
    exposed = exposed_message_seconds(plan) if messages else None
    if exposed is None:
        return ""
    total = sum(of.seconds for of in messages)
    return (
        f"All messages take {format_seconds(total)} of links' time. Without them a step would take"
        f" {format_seconds(exposed)} less, which is a part of waiting: the rest is hidden behind"
        " computation."
    )


def messages_table(plan: Plan) -> RenderableType | None:
    """Return a table of the messages between stages, a row for each boundary; None: there are
    none.
    """
    messages = boundary_messages(plan)
    if not messages:
        return None
    table = plain_table("messages")
    add_columns(table, (), ("calls", "bytes per step", "each way", "time per step"))
    for of in messages:
        table.add_row(
            f"stage {of.stage} to {of.stage + 1} and back",
            str(of.count),
            format_bytes(of.round_trip_bytes * of.count / 2) if of.round_trip_bytes else "",
            format_seconds(of.one_way_seconds),
            format_seconds(of.seconds),
        )
    return Group(table, plain(hidden_messages_text(plan), "dim"))


def sum_of_collectives_text(stage: StagePlan) -> str:
    """Return the seconds of a stage's collectives in a step, how many of them overlap with
    computation, and what is left: the communication of the stage's step.
    """
    total = sum(collective.seconds for collective in stage.collectives)
    left = stage.predicted.communication_seconds
    text = f"sum {format_seconds(total)}"
    if abs(total - left) <= ROUNDING * total:
        return f"{text}: the communication of the step"
    shown = f"{format_seconds(left)} left, the communication of the step"
    if total > left:
        return f"{text}, {format_seconds(total - left)} overlapped with computation: {shown}"
    other = format_seconds(left - total)
    return f"{text}, and {other} of communication that is no collective: {format_seconds(left)}"
