"""Seconds of a step by op and parameter, in one unit with the stage's step, and the slowest ops."""

import os
from dataclasses import dataclass

from rich.console import Group, RenderableType

from alpa_strategy.display.communication import ROUNDING
from alpa_strategy.display.console import plain
from alpa_strategy.display.findings import busiest_text
from alpa_strategy.display.stage_groups import busiest_stages
from alpa_strategy.display.table import add_columns, plain_table
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.ir.plan_details import (
    MessageDetails,
    OpDetails,
    ParameterDetails,
    PlanDetails,
    StageDetails,
)
from alpa_strategy.ir.value_names import collapse_indices
from alpa_strategy.units import format_seconds, format_share

# Rows of the list of the slowest ops.
MAX_ROWS = 5


@dataclass(frozen=True)
class StepClock:
    """How often what a stage does once per micro-batch is done in a step."""

    num_microbatches: int

    # Whether forwards run once more in the backward.
    is_recomputed: bool

    @classmethod
    def of(cls, plan: Plan, stage: StagePlan) -> "StepClock":
        """Return the clock of a stage of a plan."""
        return cls(plan.num_microbatches, stage.remat)

    def op_seconds(self, op: OpDetails) -> float:
        """Return the seconds of an op in a step, with its collectives."""
        forward = op.forward_seconds
        if not op.is_per_step:
            forward *= self._forwards
        backward = self.num_microbatches * op.backward_seconds
        return forward + backward + self._message_seconds(op.messages)

    def parameter_seconds(self, parameter: ParameterDetails) -> float:
        """Return the seconds of a parameter's update in a step, with its collectives."""
        return parameter.update_seconds + self._message_seconds(parameter.messages)

    @property
    def _forwards(self) -> int:
        return self.num_microbatches * (2 if self.is_recomputed else 1)

    def _message_seconds(self, messages: tuple[MessageDetails, ...]) -> float:
        times = {"step": 1, "forward": self._forwards, "backward": self.num_microbatches}
        return sum(times[message.phase] * message.seconds for message in messages)


def total_seconds(clock: StepClock, details: StageDetails) -> float:
    """Return the seconds of a stage's ops and parameters in a step, one after the other."""
    ops = sum(map(clock.op_seconds, details.ops))
    return ops + sum(map(clock.parameter_seconds, details.parameters))


def total_text(plan: Plan, stage: StagePlan, details: StageDetails) -> str:
    """Return a text with the seconds of a stage's ops and parameters in a step, and how many of
    them overlap with other work.
    """
    total = total_seconds(StepClock.of(plan, stage), details)
    step = stage.predicted.step_seconds
    text = f"all ops and updates take {format_seconds(total)} of a step"
    if total - step <= ROUNDING * total:
        return text
    hidden = format_seconds(total - step)
    return f"{text}, {hidden} of it overlapped: {format_seconds(step)}"


@dataclass(frozen=True)
class SlowOps:
    """Ops of one line of code in modules whose names differ in their indices."""

    module: str
    target: str
    source: str
    count: int

    # Of all of them in a step.
    seconds: float

    @property
    def label(self) -> str:
        """Such as `blocks.*.mlp.fc: linear`."""
        return f"{self.module or 'the step'}: {op_label(self.target)}"


def slowest_ops(plan: Plan, details: PlanDetails) -> list[SlowOps]:
    """Return the ops of the busiest devices that take most of a step, the slowest first: at most
    `MAX_ROWS`, added up by module, op and source line.
    """
    by_line: dict[tuple[str, str, str], list[float]] = {}
    for index in busiest_stages(plan):
        clock = StepClock.of(plan, plan.stages[index])
        for op in details.stages[index].ops:
            key = collapse_indices(op.module), op.target, op.source
            by_line.setdefault(key, []).append(clock.op_seconds(op))
    rows = []
    for key, seconds in by_line.items():
        rows.append(SlowOps(*key, len(seconds), sum(seconds)))
    rows.sort(key=lambda row: -row.seconds)
    return [row for row in rows[:MAX_ROWS] if row.seconds > 0]


def op_label(target: str) -> str:
    """Return the short name of an op for tables.

    `aten.linear.default`, `ops.linear` (a function of this package) and `per_rank.linear.1f2e3d4c`
    (the op on each rank's samples) are `linear`; `my_library.linear.default` is
    `my_library.linear`.
    """
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if namespace in ("aten", "ops", "per_rank") or not name:
        return name or namespace
    return f"{namespace}.{name}"


def slowest_ops_table(plan: Plan, details: PlanDetails) -> RenderableType | None:
    """Return a table of the slowest ops, with the share of the step; None if none takes time."""
    rows = slowest_ops(plan, details)
    if not rows:
        return None
    table = plain_table()
    table.add_column("slowest ops", overflow="fold")
    add_columns(table, ("line",), ("ops", "a step", ""))
    step = plan.predicted.step_seconds
    for row in rows:
        share = format_share(row.seconds / step) if step > 0 else ""
        seconds = format_seconds(row.seconds)
        line = plain(os.path.basename(row.source))
        table.add_row(plain(row.label), line, str(row.count), seconds, share)
    return Group(table, plain(busiest_text(plan), "dim"))
