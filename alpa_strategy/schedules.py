"""Pipeline schedules as data: who does what in which order, how long a step takes, how much is alive meanwhile.

The built-in orders are those of `torch.distributed.pipelining` (names too); nothing here runs anything. A schedule of
one's own is a function from numbers to orders, given as `schedule=` or by `register_schedule`; what it keeps in memory
and how long it takes follows from its actions.

With several stages per mesh, stage s is on mesh s % num_meshes. A backward is one piece. Weights' gradients done
apart, to fill the drain (zero bubbles), gain nothing where stages recompute or run compiled: no plan of
docs/paper_table.md took them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from alpa_strategy.errors import OptionError, PlanError


@dataclass(frozen=True)
class Action:
    """One piece of work: kind `F` forward, `B` backward."""

    stage: int
    kind: str
    microbatch: int


Orders = Sequence[Sequence[Action]]  # per mesh, its actions in order


@dataclass(frozen=True)
class Schedule:
    """An order of work, for `schedule=` and `register_schedule`.

    Attributes:
        name: as plans and options name it.
        orders: (num_stages, num_microbatches, num_meshes) -> every mesh's actions in order: each of its stages does
            `F` and `B` of every micro-batch once.
        stages_per_mesh: how many stages a mesh may have; several are tried.
        refuses: (num_meshes, num_microbatches) -> why it cannot run these, or None.
        is_searched: whether the planner tries it where no schedule is asked for.
        is_closed: whether a step's time has the closed form of `terms`; else that of equal stages is simulated.
        alive: (num_meshes, num_microbatches, stages per mesh) -> what `in_flight` is, in closed form; None: counted.
    """

    name: str
    orders: Callable[[int, int, int], Orders]
    stages_per_mesh: tuple[int, ...] = (1,)
    refuses: Callable[[int, int], str | None] = lambda num_meshes, num_microbatches: None
    is_searched: bool = False
    is_closed: bool = False
    alive: Callable[[int, int, int], Sequence[int]] | None = None

    @property
    def has_one_stage_per_mesh(self) -> bool:
        """Whether meshes may be of different sizes: each holds one stage."""
        return self.stages_per_mesh == (1,)


SCHEDULES: dict[str, Schedule] = {}  # by name: the only list of schedules


def register_schedule(schedule: Schedule | Callable[[int, int, int], Orders]) -> Schedule:
    """Make a schedule known by its name, for options and plan files; a function is one with one stage per mesh.

    Raises:
        OptionError: another schedule has this name.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule.__name__, schedule)
    known = SCHEDULES.get(schedule.name)
    if known is not None and known != schedule:
        raise OptionError(f"there is another schedule {schedule.name!r}", "give this one a name of its own")
    SCHEDULES[schedule.name] = schedule
    return schedule


@dataclass(frozen=True)
class TimedAction:
    """An action of a simulated step, seconds."""

    mesh: int
    start: float
    end: float
    kind: str
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Terms:
    """A step takes fill * sum_s t_s + run * max_s t_s, with t_s the seconds of one micro-batch in stage s."""

    fill: float
    run: float

    def seconds(self, stage_seconds: Sequence[float]) -> float:
        """Of the whole schedule, from the seconds of one micro-batch per stage."""
        return self.fill * sum(stage_seconds) + self.run * max(stage_seconds)


def why_not(schedule: str, num_meshes: int, num_microbatches: int) -> str | None:
    """The reason why a schedule cannot run so many micro-batches on so many meshes, or None."""
    if schedule not in SCHEDULES:
        return f"the schedule {schedule!r} is unknown"
    return SCHEDULES[schedule].refuses(num_meshes, num_microbatches)


def terms(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> Terms:
    """The closed form of a step's time; exact for equal stages with backward = 2 x forward, see the tests.

    GPipe and 1F1B: sum + (B - 1) max (Alpa, section 5.2), an upper bound for unequal stages under 1F1B. With v stages
    on a mesh the pipeline fills v times as fast (Narayanan et al. 2021, section 2.2): sum / v + (B v - 1) max.
    """
    _check(schedule, num_meshes, num_microbatches)
    if not SCHEDULES[schedule].is_closed:
        # Chosen so that equal stages come to the simulated time: fill * (num_meshes * v) + run.
        return Terms(1.0 / v, _equal_seconds(schedule, num_meshes, num_microbatches, v) - num_meshes)
    return Terms(1.0 / v, num_microbatches * v - 1.0)


@lru_cache(maxsize=256)
def _equal_seconds(schedule: str, num_meshes: int, num_microbatches: int, v: int) -> float:
    """Of a step whose stages all take one second of a micro-batch."""
    # A backward takes twice its forward.
    each = num_meshes * v
    return max(done.end for done in timeline(schedule, [1 / 3] * each, [2 / 3] * each, num_microbatches, num_meshes))


def in_flight(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> tuple[int, ...]:
    """Per mesh: the most (micro-batch, stage) pairs of its stages whose activations are alive at once."""
    _check(schedule, num_meshes, num_microbatches)
    alive = SCHEDULES[schedule].alive
    if alive is not None:
        return tuple(alive(num_meshes, num_microbatches, v))
    return tuple(_alive(order) for order in actions(schedule, num_meshes, num_microbatches, v))


@lru_cache(maxsize=64)
def actions(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Every mesh's actions in order.

    Raises:
        PlanError: the schedule cannot run these, leaves work out, or locks up.
    """
    _check(schedule, num_meshes, num_microbatches)
    orders = SCHEDULES[schedule].orders(num_meshes * v, num_microbatches, num_meshes)
    found = tuple(tuple(order) for order in orders)
    if schedule not in BUILT_IN:  # those are compared with torch's by the tests; counting takes planning time
        _check_work(schedule, found, num_meshes, num_microbatches, v)
        _check_waiting(schedule, found, num_meshes * v)
    return found


def _check_work(
    schedule: str, orders: tuple[tuple[Action, ...], ...], num_meshes: int, num_microbatches: int, v: int
) -> None:
    """PlanError unless every mesh does the work of its stages, each piece once."""
    fix = "give every mesh F and B of every micro-batch in each of its stages once"
    if len(orders) != num_meshes:
        raise PlanError(f"the schedule {schedule!r} has orders for {len(orders)} meshes of {num_meshes}", fix)
    for mesh, order in enumerate(orders):
        if odd := [a for a in order if not isinstance(a, Action) or a.kind not in ("F", "B")]:
            raise PlanError(f"the schedule {schedule!r} has {odd[0]!r} on mesh {mesh}, which is no action", fix)
        done = Counter(order)
        stages = range(mesh, num_meshes * v, num_meshes)
        wanted = Counter(Action(s, kind, m) for s in stages for kind in "FB" for m in range(num_microbatches))
        if done != wanted:
            odd_one = min((*(wanted - done), *(done - wanted)), key=lambda a: (a.stage, -ord(a.kind), a.microbatch))
            what = "the forward" if odd_one.kind == "F" else "the backward"
            raise PlanError(
                f"the schedule {schedule!r} does {what} of micro-batch {odd_one.microbatch} in stage {odd_one.stage} "
                f"on mesh {mesh} {done[odd_one]} times instead of {wanted[odd_one]}",
                fix,
            )


def _check_waiting(schedule: str, orders: tuple[tuple[Action, ...], ...], num_stages: int) -> None:
    """PlanError where all meshes stand still, though each does its next action as soon as those that it needs are done.

    Sends never hold up the sender, so a circle of actions that wait for each other is the only way to lock up.
    """
    done: set[Action] = set()
    left = [list(reversed(order)) for order in orders]
    moved = True
    while moved:
        moved = False
        for order in left:
            while order and done.issuperset(_needed(order[-1], num_stages)):
                done.add(order.pop())
                moved = True
    heads = [(mesh, order[-1]) for mesh, order in enumerate(left) if order]
    if heads:
        stuck = ", ".join(f"mesh {mesh} before {a.stage}{a.kind}{a.microbatch}" for mesh, a in heads)
        raise PlanError(
            f"the schedule {schedule!r} locks up, its actions wait for each other: {stuck}",
            "let every action come after those that it waits for",
        )


def _needed(action: Action, num_stages: int) -> list[Action]:
    """What is done before. A value that skips stages is there earlier still."""
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", m)] if stage > 0 else []
    return [Action(stage, "F", m), *([Action(stage + 1, "B", m)] if stage + 1 < num_stages else [])]


def timeline(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    num_meshes: int | None = None,
    boundary: Sequence[float] = (),
) -> list[TimedAction]:
    """When everything happens: each mesh works through its actions, each as soon as what it needs has arrived.

    Args:
        forward, backward: seconds of one micro-batch per stage, in pipeline order.
        num_meshes: meshes (default: one per stage); stages are laid on them as the schedule does.
        boundary: seconds between stage s and s + 1, each way. One message after the other: a link that takes longer
            than its stages holds them up.
    """
    num_stages = len(forward)
    meshes = num_meshes or num_stages
    wire = [*boundary, *[0.0] * (num_stages - len(boundary))]
    seconds = {"F": forward, "B": backward}
    orders = actions(schedule, meshes, num_microbatches, num_stages // meshes)
    ended: dict[Action, float] = {}
    arrived: dict[Action, float] = {}  # at the stage after (F) or before (B) the sender
    link_free: dict[tuple[str, int], float] = defaultdict(float)
    position, clock = [0] * meshes, [0.0] * meshes
    timed: list[TimedAction] = []
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for mesh, order in enumerate(orders):
            while position[mesh] < len(order):
                action = order[position[mesh]]
                ready = _ready(action, num_stages, ended, arrived)
                if ready is None:
                    break
                start = max(clock[mesh], ready)
                end = start + seconds[action.kind][action.stage]
                clock[mesh] = end
                ended[action] = end
                link = action.kind, action.stage if action.kind == "F" else action.stage - 1
                link_free[link] = max(link_free[link], end) + wire[link[1]]
                arrived[action] = link_free[link]
                timed.append(TimedAction(mesh, start, end, action.kind, action.microbatch, action.stage))
                position[mesh] += 1
                waiting -= 1
        if waiting == before:  # stages of a plan file that lie where the schedule does not have them
            raise PlanError(
                f"{schedule} locks up on {meshes} meshes with {num_microbatches} micro-batches",
                "place the stages as the schedule does, or take another one",
            )
    return sorted(timed, key=lambda s: (s.mesh, s.start))


def _ready(action: Action, num_stages: int, ended: dict[Action, float], arrived: dict[Action, float]) -> float | None:
    """When an action's inputs are there; None while they are not made."""
    s, m = action.stage, action.microbatch
    if action.kind == "F":
        return 0.0 if s == 0 else arrived.get(Action(s - 1, "F", m))
    if s == num_stages - 1:
        return ended.get(Action(s, "F", m))
    return arrived.get(Action(s + 1, "B", m))


def _alive(order: Sequence[Action]) -> int:
    """Most forwards without their backward, over the order."""
    most = now = 0
    for action in order:
        now += 1 if action.kind == "F" else -1
        most = max(most, now)
    return most


def _check(schedule: str, num_meshes: int, num_microbatches: int) -> None:
    reason = why_not(schedule, num_meshes, num_microbatches)
    if reason is not None:
        raise PlanError(reason, f"choose another number of micro-batches, or one of {', '.join(SCHEDULES)}")


# --- The built-in schedules: orders of one mesh (S meshes, B micro-batches, v stages per mesh), and their entries.


def _each_mesh(order: Callable[[int, int, int, int], list[Action]]) -> Callable[[int, int, int], Orders]:
    """All orders, from the function (S, B, v, mesh) that writes one."""
    return lambda num_stages, B, S: [order(S, B, num_stages // S, mesh) for mesh in range(S)]


def _gpipe(S: int, B: int, v: int, mesh: int) -> list[Action]:
    return [Action(mesh, kind, m) for kind in "FB" for m in range(B)]


def _one_f_one_b(S: int, B: int, v: int, mesh: int) -> list[Action]:
    warmup = min(B, S - mesh)
    order = [Action(mesh, "F", m) for m in range(warmup)]
    for m in range(B):
        order.append(Action(mesh, "B", m))
        if warmup + m < B:
            order.append(Action(mesh, "F", warmup + m))
    return order


def _interleaved(S: int, B: int, v: int, mesh: int) -> list[Action]:
    """Depth first over the local stages."""
    # So many micro-batches go through a stage before the mesh's next stage has its turn.
    per_round = B // max(1, B // S)
    warmup = min(B * v, (v - 1) * per_round + 2 * (S - 1 - mesh))
    count: dict[tuple[str, int], int] = defaultdict(int)
    order: list[Action] = []

    def add(kind: str, chunk: int) -> None:
        stage = chunk * S + mesh
        order.append(Action(stage, kind, count[kind, stage]))
        count[kind, stage] += 1

    for step in range(B * v + warmup):
        if step < B * v:
            add("F", step // per_round % v)
        if step >= warmup:
            add("B", v - 1 - (step - warmup) // per_round % v)
    return order


def _interleaved_alive(S: int, B: int, v: int) -> list[int]:
    per_round = B // max(1, B // S)
    return [min(B * v, (v - 1) * per_round + 2 * (S - 1 - r) + 1) for r in range(S)]


def _interleaved_refuses(num_meshes: int, num_microbatches: int) -> str | None:
    rounds = max(1, num_microbatches // num_meshes)
    if num_microbatches % rounds:
        return f"Interleaved1F1B on {num_meshes} meshes needs micro-batches that are a multiple of {rounds}"
    if num_microbatches < num_meshes:
        return f"Interleaved1F1B on {num_meshes} meshes needs at least as many micro-batches"
    return None


for _schedule in (
    # GPipe is as fast as 1F1B and keeps more alive: not searched.
    Schedule("GPipe", _each_mesh(_gpipe), is_closed=True, alive=lambda S, B, v: [B] * S),
    Schedule(
        "1F1B",
        _each_mesh(_one_f_one_b),
        is_closed=True,
        alive=lambda S, B, v: [min(B, S - r) for r in range(S)],
        is_searched=True,
    ),
    Schedule(
        "Interleaved1F1B",
        _each_mesh(_interleaved),
        stages_per_mesh=(2, 3, 4),
        refuses=_interleaved_refuses,
        is_closed=True,
        alive=_interleaved_alive,
        is_searched=True,
    ),
):
    register_schedule(_schedule)
BUILT_IN = frozenset(SCHEDULES)
