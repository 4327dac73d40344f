"""A pipeline's schedule on the clock: who works when, who waits; as lines for a terminal."""

import math
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.schedules import SCHEDULES, TimedAction, timeline, why_not
from alpa_strategy.units import format_seconds

MAX_DRAWN = 8  # micro-batches: more make the pieces too small to see
STYLES = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}
SIGNS = {
    "F": "0123456789",
    "B": "abcdefghij",
    "I": "abcdefghij",
    "W": "ABCDEFGHIJ",
}  # by micro-batch
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
}
MAX_WIDTH = 120  # of the lines in a terminal


@dataclass(frozen=True)
class ScheduleTimeline:
    """Slots of every mesh (`TimedAction.mesh`) in seconds, for the first `num_drawn` of the plan's
    micro-batches.
    """

    timed: tuple[TimedAction, ...]
    meshes: tuple[str, ...]  # name of each, such as `0-3`
    stages: tuple[tuple[int, ...], ...]  # per mesh, its stages
    num_drawn: int
    num_microbatches: int
    seconds: float  # from the first start to the last end

    def idle_share(self, mesh: int) -> float:
        """The share of the time in which a mesh has nothing to do."""
        busy = sum(done.end - done.start for done in self.timed if done.mesh == mesh)
        return max(0.0, 1 - busy / self.seconds) if self.seconds > 0 else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line a mesh: a cell is a moment, its sign the micro-batch and what is done with it;
        `·` is waiting.

        With several stages on a mesh, later ones are printed in reverse.
        """
        label = max(len(mesh) for mesh in self.meshes) + len("devices ")
        room = max(20, min(options.max_width, MAX_WIDTH) - label - len("  100% idle"))
        is_whole = self.num_drawn == self.num_microbatches
        if is_whole:
            title = f"{self.num_microbatches} micro-batches, {format_seconds(self.seconds)} without the optimizer"
        else:
            title = f"drawn with {self.num_drawn} of {self.num_microbatches} micro-batches"
        text = Text(f"schedule  {title}\n", style="dim")
        for mesh, name in enumerate(self.meshes):
            text.append(f"devices {name}".ljust(label + 1), style="default")
            for done in _cells(self, mesh, room):
                if done is None:
                    text.append("·", style="dim")
                    continue
                late = " reverse" if self.stages[mesh].index(done.stage) % 2 else ""
                text.append(SIGNS[done.kind][done.microbatch % 10], style=STYLES[done.kind] + late)
            # With fewer micro-batches than there are the ends weigh more: the stages' table says
            # how idle the step is.
            text.append(f" {self.idle_share(mesh):>4.0%} idle\n" if is_whole else "\n", style="dim")
        shown = {done.kind for done in self.timed}
        for kind in (kind for kind in MEANINGS if kind in shown):
            text.append(SIGNS[kind][:3], style=STYLES[kind]).append(
                f" {MEANINGS[kind]}  ", style="dim"
            )
        text.append("· waiting", style="dim")
        if max(map(len, self.stages)) > 1:
            text.append("  (reversed: the mesh's other stages)", style="dim")
        yield text


def plan_timeline(plan: Plan, max_microbatches: int | None = None) -> ScheduleTimeline | None:
    """The plan's schedule with its stages' own seconds; None where there is none, or no stage's
    seconds are known.

    Args:
        max_microbatches: draw no more than so many (or the fewest that the schedule can run).
    """
    if (
        len(plan.stages) < 2
        or plan.schedule not in SCHEDULES
        or not any(s.forward_seconds for s in plan.stages)
    ):
        return None
    names = {stage.first_device: device_range(stage) for stage in plan.stages}
    num_drawn = _num_drawn(plan.schedule, len(names), plan.num_microbatches, max_microbatches)
    forward = [stage.forward_seconds for stage in plan.stages]
    backward = [stage.backward_seconds for stage in plan.stages]
    wires = [stage.boundary_seconds / 2 for stage in plan.stages[:-1]]
    timed = timeline(plan.schedule, forward, backward, num_drawn, len(names), wires)
    stages = tuple(
        tuple(i for i, s in enumerate(plan.stages) if s.first_device == f) for f in names
    )
    return ScheduleTimeline(
        tuple(timed),
        tuple(names.values()),
        stages,
        num_drawn,
        plan.num_microbatches,
        max(done.end for done in timed),
    )


def device_range(stage: StagePlan) -> str:
    """`3`, or `0-3`, or in an order of their own `0, 3, 1, 2`."""
    if stage.devices:
        return ", ".join(map(str, stage.devices[:8])) + ", ..." * (len(stage.devices) > 8)
    first, count = stage.first_device, math.prod(stage.submesh)
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _num_drawn(schedule: str, num_meshes: int, count: int, most: int | None) -> int:
    """The largest number up to `most` that fills the pipeline and that the schedule can run, else
    all.
    """
    if most is None or count <= most:
        return count
    least = num_meshes + 1 if SCHEDULES[schedule].has_one_stage_per_mesh else num_meshes
    # Downwards first: fewer are drawn larger.
    tried = [*range(max(most, least), least - 1, -1), *range(max(most, least) + 1, count)]
    return next((n for n in tried if n < count and why_not(schedule, num_meshes, n) is None), count)


def _cells(drawn: ScheduleTimeline, mesh: int, room: int) -> list[TimedAction | None]:
    """What the mesh does in the middle of each of `room` equal moments."""
    own = [done for done in drawn.timed if done.mesh == mesh]
    moments = (
        (column + 0.5) * drawn.seconds / room for column in range(room)
    )  # at the edges neighbours meet
    return [
        next((done for done in own if done.start <= moment < done.end), None) for moment in moments
    ]
