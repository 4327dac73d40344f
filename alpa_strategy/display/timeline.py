"""A pipeline's schedule over time: when each mesh works and when it is idle, as lines for a
terminal.
"""

import math
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from alpa_strategy.display.stage_groups import idle_shares
from alpa_strategy.ir.plan import Plan, StagePlan, stages_by_devices
from alpa_strategy.schedules import SCHEDULES, TimedAction, refusal, timeline
from alpa_strategy.units import format_seconds, format_share

# Micro-batches that are drawn at most: more make the pieces too small to see.
MAX_DRAWN = 8

# By kind of action: its colour, its signs by micro-batch, and its meaning.
STYLES = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}
SIGNS = {
    "F": "0123456789",
    "B": "abcdefghij",
    "I": "abcdefghij",
    "W": "ABCDEFGHIJ",
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
}
# Columns of the lines in a terminal, at most.
MAX_WIDTH = 120

# Actions of a step up to which its schedule is laid out for a table: it takes about 0.1 s.
MAX_ACTIONS = 40_000


@dataclass(frozen=True)
class ScheduleTimeline:
    """The actions of every mesh with their times, for the first micro-batches of a plan."""

    # With start and end in seconds.
    timed: tuple[TimedAction, ...]

    # Name of each mesh, such as `0-3`.
    meshes: tuple[str, ...]

    # Indices of the stages on each mesh.
    stages: tuple[tuple[int, ...], ...]

    # Micro-batches that are drawn, of those of the plan.
    num_drawn: int
    num_microbatches: int

    # From the first start to the last end.
    seconds: float

    # Of each mesh, the share of the plan's whole step in which it is idle (`idle_shares`).
    idle: tuple[float, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the text: a line for each mesh, of which each cell is a moment.

        The sign of a cell is the micro-batch and the kind of action; `·` is idle. The second of
        several stages on a mesh is printed in reverse.
        """
        label_width = max(len(mesh) for mesh in self.meshes) + len("devices ")
        width = min(options.max_width, MAX_WIDTH)
        num_cells = max(20, width - label_width - len("  100% idle"))
        is_complete = self.num_drawn == self.num_microbatches
        if is_complete:
            seconds = format_seconds(self.seconds)
            title = f"{self.num_microbatches} micro-batches, {seconds} without the optimizer"
        else:
            title = f"drawn with {self.num_drawn} of {self.num_microbatches} micro-batches"

        text = Text(f"schedule  {title}\n", style="dim")
        for mesh, name in enumerate(self.meshes):
            text.append(f"devices {name}".ljust(label_width + 1), style="default")
            for action in _cells(self, mesh, num_cells):
                if action is None:
                    text.append("·", style="dim")
                    continue
                is_reversed = self.stages[mesh].index(action.stage) % 2
                style = STYLES[action.kind] + (" reverse" if is_reversed else "")
                text.append(SIGNS[action.kind][action.microbatch % 10], style=style)

            # With fewer micro-batches than the plan has, warm-up and end look longer than they
            # are: the table of stages has the idle share of the step.
            idle = f" {format_share(self.idle[mesh]):>4} idle\n"
            text.append(idle if is_complete else "\n", style="dim")

        kinds = {action.kind for action in self.timed}
        for kind, meaning in MEANINGS.items():
            if kind in kinds:
                text.append(SIGNS[kind][:3], style=STYLES[kind])
                text.append(f" {meaning}  ", style="dim")
        text.append("· waiting", style="dim")
        if max(map(len, self.stages)) > 1:
            text.append("  (reversed: the mesh's other stages)", style="dim")
        yield text


def plan_timeline(plan: Plan, max_microbatches: int | None = None) -> ScheduleTimeline | None:
    """Return the plan's schedule with the seconds of its stages.

    None if there is one stage, or if the schedule or the seconds are not known.

    Args:
        plan: with its stages.
        max_microbatches: number of micro-batches that are drawn at most, or the fewest that the
            schedule can run; None: all.
    """
    if not has_timeline(plan):
        return None

    names = {stage.first_device: device_range(stage) for stage in plan.stages}
    num_drawn = _num_drawn(plan.schedule, len(names), plan.num_microbatches, max_microbatches)
    forward = [stage.forward_seconds for stage in plan.stages]
    backward = [stage.backward_seconds for stage in plan.stages]
    # The boundary's seconds are those of both directions.
    transfers = [stage.boundary_seconds / 2 for stage in plan.stages[:-1]]
    timed = timeline(plan.schedule, forward, backward, num_drawn, len(names), transfers)

    return ScheduleTimeline(
        tuple(timed),
        tuple(names.values()),
        tuple(map(tuple, stages_by_devices(plan))),
        num_drawn,
        plan.num_microbatches,
        max(action.end for action in timed),
        tuple(idle_shares(plan)),
    )


def short_timeline(plan: Plan) -> ScheduleTimeline | None:
    """Return `plan_timeline` of all micro-batches; None as well if a step has more than
    `MAX_ACTIONS` actions, which take seconds to lay out.
    """
    return plan_timeline(plan) if num_actions(plan) <= MAX_ACTIONS else None


def has_timeline(plan: Plan) -> bool:
    """Return whether a plan has several stages, a schedule that is known, and its seconds."""
    has_seconds = any(stage.forward_seconds for stage in plan.stages)
    return len(plan.stages) > 1 and plan.schedule in SCHEDULES and has_seconds


def num_actions(plan: Plan) -> int:
    """Return the forwards and backwards of a step, of all stages and micro-batches."""
    return 2 * len(plan.stages) * plan.num_microbatches


def device_range(stage: StagePlan) -> str:
    """Return the devices of a stage as text: `3`, `0-3`, or if they are not in order `0, 3, 1, 2`
    (at most 8).
    """
    if stage.devices:
        shown = ", ".join(map(str, stage.devices[:8]))
        return shown + (", ..." if len(stage.devices) > 8 else "")
    first = stage.first_device
    count = math.prod(stage.submesh)
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _num_drawn(schedule: str, num_meshes: int, count: int, most: int | None) -> int:
    """Return the number of micro-batches to draw.

    The largest number up to `most` that fills the pipeline and that the schedule can run; if there
    is none, the smallest larger one; if there is none either, `count`.
    """
    if most is None or count <= most:
        return count
    least = num_meshes + 1 if SCHEDULES[schedule].has_one_stage_per_mesh else num_meshes
    start = max(most, least)

    # Downwards first: fewer are drawn larger.
    for number in [*range(start, least - 1, -1), *range(start + 1, count)]:
        if number < count and refusal(schedule, num_meshes, number) is None:
            return number
    return count


def _cells(drawn: ScheduleTimeline, mesh: int, num_cells: int) -> list[TimedAction | None]:
    """Return the action of a mesh in each of `num_cells` equal intervals; None: it is idle."""
    actions = [action for action in drawn.timed if action.mesh == mesh]
    cells: list[TimedAction | None] = []
    for column in range(num_cells):
        # The middle of the interval: two actions meet at edges.
        moment = (column + 0.5) * drawn.seconds / num_cells
        running = [action for action in actions if action.start <= moment < action.end]
        cells.append(running[0] if running else None)
    return cells
