"""Orders: what every mesh of a pipeline does in a step, action by action. Checked once, before anything runs.

Actions are data (`schedules.py`); the executor loops over its mesh's, whatever schedule they came from. Sends
never hold up the sender, so the only way to lock up is a circle of actions that wait for each other: all meshes are
played through here, and a circle is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from alpa_strategy.errors import PlanError
from alpa_strategy.schedules import SCHEDULES, Action, actions

Orders = tuple[tuple[Action, ...], ...]  # by mesh; meshes are numbered by their first stage


def forward_orders(stage_meshes: Sequence[int], num_microbatches: int) -> Orders:
    """Without backward: all micro-batches of a stage, then those of the mesh's next."""
    stages = [[s for s, mesh in enumerate(stage_meshes) if mesh == wanted] for wanted in range(max(stage_meshes) + 1)]
    return tuple(tuple(Action(s, "F", m) for s in own for m in range(num_microbatches)) for own in stages)


def checked_orders(schedule: str | Orders, stage_meshes: Sequence[int], num_microbatches: int) -> Orders:
    """Every mesh's actions under a schedule: a name of `schedules.py`, any case, or the actions themselves.

    Args:
        stage_meshes: stage -> its mesh.

    Raises:
        PlanError: it cannot run so many stages or micro-batches, or not on these meshes, or it would lock up.
    """
    num_stages, num_meshes = len(stage_meshes), max(stage_meshes) + 1
    name, reason = "of these actions", None
    orders: Orders = ()
    if not isinstance(schedule, str):
        orders = schedule
    elif num_stages % num_meshes:
        name, reason = schedule, "it wants equally many stages on every mesh"
    else:
        name = {known.lower(): known for known in SCHEDULES}.get(schedule.lower(), schedule)
        try:
            orders = actions(name, num_meshes, num_microbatches, num_stages // num_meshes)
        except PlanError as error:
            reason = error.problem
    reason = (
        reason
        or _misplaced(orders, stage_meshes)
        or _miscounted(orders, num_stages, num_microbatches)
        or _locked_up(orders, num_stages)
    )
    if reason is not None:
        raise PlanError(
            f"schedule {name} cannot run {num_stages} stages on {num_meshes} meshes with {num_microbatches} "
            f"micro-batches: {reason}",
            f"choose another of {', '.join(SCHEDULES)}, or other numbers",
        )
    return orders


def _misplaced(orders: Orders, stage_meshes: Sequence[int]) -> str | None:
    """Where a stage is not on its own mesh."""
    mesh_of = {action.stage: mesh for mesh, order in enumerate(orders) for action in order}
    if len(mesh_of) == len(orders) < len(stage_meshes):
        return "it runs one stage per mesh"
    found = [mesh_of[stage] for stage in sorted(mesh_of)]
    if found != list(stage_meshes):
        return f"it puts stages on meshes {found}, the plan on {list(stage_meshes)}"
    return None


def _miscounted(orders: Orders, num_stages: int, num_microbatches: int) -> str | None:
    """Where a micro-batch has not one forward and one backward, whole or in its two halves, in a stage."""
    count = Counter(action for order in orders for action in order)
    for stage in range(num_stages):
        for m in range(num_microbatches):
            kinds = "".join(kind * count.pop(Action(stage, kind, m), 0) for kind in "FBIW")
            if kinds not in ("FB", "FIW"):
                return f"stage {stage} does {kinds or 'nothing'} with micro-batch {m}, not F and B or F, I and W"
    return f"there is no {_text(next(iter(count)))}" if count else None


def _locked_up(orders: Orders, num_stages: int) -> str | None:
    """Where all meshes stand still when each does its next action as soon as those that it needs are done."""
    done: set[tuple[int, str, int]] = set()
    left = [list(reversed(order)) for order in orders]
    moved = True
    while moved:
        moved = False
        for order in left:
            while order and done.issuperset(_needed(order[-1], num_stages)):
                action = order.pop()
                done.add((action.stage, "B" if action.kind == "I" else action.kind, action.microbatch))
                moved = True
    stuck = [f"mesh {mesh} before {_text(order[-1])}" for mesh, order in enumerate(left) if order]
    return f"its actions wait for each other: {', '.join(stuck)}" if stuck else None


def _needed(action: Action, num_stages: int) -> list[tuple[int, str, int]]:
    """(stage, `F` or `B`, micro-batch) that are done before. A value that skips stages is there earlier still."""
    stage, m = action.stage, action.microbatch
    match action.kind:
        case "F":
            return [(stage - 1, "F", m)] if stage > 0 else []
        case "W":
            return [(stage, "B", m)]
        case _:
            return [(stage, "F", m), *([(stage + 1, "B", m)] if stage + 1 < num_stages else [])]


def _text(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.microbatch}"
