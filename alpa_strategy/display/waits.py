"""What the devices of each pipeline stage wait for while they are idle."""

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType

from alpa_strategy.display.console import plain
from alpa_strategy.display.stage_groups import busiest_stages, stages_name
from alpa_strategy.display.table import add_columns, plain_table
from alpa_strategy.display.timeline import ScheduleTimeline, short_timeline
from alpa_strategy.ir.plan import Plan
from alpa_strategy.schedule_times import input_of, result_of
from alpa_strategy.schedules import TimedAction
from alpa_strategy.units import format_seconds

# Reasons that take less than this share of all waiting are left out of a sentence.
_LEAST_SHARE = 0.05
_MOST_REASONS = 3
# Rows of the table of meshes.
_MOST_MESHES = 8
_END = "the end of the step, when their work is done"


def waits(drawn: ScheduleTimeline) -> list[list[tuple[str, float]]]:
    """Return what each mesh waits for, with the seconds, the longest first.

    A mesh waits for another stage while that stage has not computed the input of the mesh's next
    action, then for the message with it, and after its last action for the end of the step.
    """
    num_stages = sum(map(len, drawn.stages))
    ends = {result_of(action): action.end for action in drawn.timed if action.kind != "W"}
    of_meshes = []
    for mesh in range(len(drawn.meshes)):
        actions = [action for action in drawn.timed if action.mesh == mesh]
        actions.sort(key=lambda action: action.start)
        seconds: dict[str, float] = defaultdict(float)
        now = 0.0
        for action in actions:
            for reason, idle in _waits_of(action, now, ends, num_stages):
                seconds[reason] += idle
            now = max(now, action.end)
        seconds[_END] += drawn.seconds - now
        # Sums of floats differ in their last digits.
        rows = [row for row in seconds.items() if row[1] > 1e-9 * drawn.seconds]
        of_meshes.append(sorted(rows, key=lambda row: -row[1]))
    return of_meshes


def _waits_of(
    action: TimedAction, since: float, ends: dict[tuple[str, int, int], float], num_stages: int
) -> list[tuple[str, float]]:
    """Return what a mesh that is idle from `since` on waits for until an action starts.

    Args:
        ends: of the actions of all meshes, by their result.
    """
    source = input_of(action, num_stages)
    if source is None or action.start <= since:
        return []
    kind, stage, _ = source
    computed = min(max(ends[source], since), action.start)
    work = "forward" if kind == "F" else "backward"
    return [
        (f"the {work} of stage {stage}", computed - since),
        (f"messages from stage {stage}", action.start - computed),
    ]


def waits_table(plan: Plan) -> RenderableType | None:
    """Return a table of what the devices of each stage wait for, a row for each mesh.

    None if the plan has one stage, its schedule is not known, or it is too long to lay out.
    """
    schedule = short_timeline(plan)
    if schedule is None:
        return None
    of_meshes = waits(schedule)
    table = plain_table("devices")
    add_columns(table, (), ("idle",))
    table.add_column("of that")
    for mesh, rows in enumerate(of_meshes[:_MOST_MESHES]):
        idle = format_seconds(sum(seconds for _, seconds in rows))
        table.add_row(schedule.meshes[mesh], idle, waits_text(rows))
    parts: list[RenderableType] = [table]
    num_others = len(of_meshes) - _MOST_MESHES
    if num_others > 0:
        parts.append(plain(f"and {num_others} more on the page", "dim"))
    parts.append(plain(less_waiting_text(plan), "dim"))
    return Group(*parts)


def less_waiting_text(plan: Plan) -> str:
    """Return a sentence on what reduces the waiting of a pipeline's devices."""
    busiest = stages_name(busiest_stages(plan))
    return (
        f"Devices wait less if what they wait for gets shorter: the busiest devices have {busiest}."
        " Other cuts of layers or more micro-batches may do that (`alpa whatif` with --set"
        " plan.num_stages=N or plan.num_microbatches=N), and faster links where it is messages."
    )


def waits_text(rows: Sequence[tuple[str, float]]) -> str:
    """Return what a mesh waits for as text, with shares of all its waiting; "" if it never waits:
    `62% for the backward of stage 1, 30% for messages from stage 1`.
    """
    total = sum(seconds for _, seconds in rows)
    words = []
    for reason, seconds in rows[:_MOST_REASONS]:
        if seconds >= _LEAST_SHARE * total:
            words.append(f"{seconds / total:.0%} for {reason}")
    return ", ".join(words)
