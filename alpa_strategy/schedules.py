"""Pipeline schedules as data: who does what in which order, how long a step takes, how much is
alive meanwhile.

The built-in orders are those of `torch.distributed.pipelining` (names too); nothing here runs
anything. A schedule of one's own is a function from numbers to orders (`schedule=`,
`register_schedule`); memory and time follow from these.

With `v` stages per mesh, stage s of N = v * num_meshes is on mesh s % num_meshes, or folded (ZBV):
m and N - 1 - m.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from alpa_strategy.errors import OptionError, PlanError

WEIGHT_SHARE = 0.5  # of a backward's time that is the weights' gradients, where it is done apart


@dataclass(frozen=True)
class Action:
    """One piece of work: kind `F` forward, `B` whole backward, `I` backward to the inputs, `W` to
    the weights.
    """

    stage: int
    kind: str
    microbatch: int


Orders = Sequence[Sequence[Action]]  # per mesh, its actions in order
Source = tuple[str, int, int]  # (F | B | W, stage, micro-batch) of what an action makes
Seconds = TypeVar("Seconds", float, np.ndarray)


@dataclass(frozen=True)
class Schedule:
    """An order of work, for `schedule=` and `register_schedule`."""

    name: str  # as plans and options name it
    # (num_stages, num_microbatches, num_meshes) -> every mesh's actions in order: each of its
    # stages does `F` and `B` (or `I` and later `W`) of every micro-batch once
    orders: Callable[[int, int, int], Orders]
    stages_per_mesh: tuple[int, ...] = (1,)  # how many stages a mesh may have; several are tried
    is_folded: bool = False  # where the stages lie, see the module's docstring
    # (num_meshes, num_microbatches) -> why it cannot run these ("needs ..."), or None
    refuses: Callable[[int, int], str | None] = lambda num_meshes, num_microbatches: None
    is_searched: bool = False  # whether the planner tries it where no schedule is asked for
    bubble: float | None = (
        None  # of the closed form of a step's time (see `terms`); None: equal stages are simulated
    )
    # (num_meshes, num_microbatches, stages per mesh) -> what `in_flight` is, in closed form; None:
    # counted
    alive: Callable[[int, int, int], Sequence[int]] | None = None

    @property
    def has_one_stage_per_mesh(self) -> bool:
        """Whether meshes may be of different sizes: each holds one stage."""
        return self.stages_per_mesh == (1,)


SCHEDULES: dict[str, Schedule] = {}  # by name: the only list of schedules


def register_schedule(schedule: Schedule | Callable[[int, int, int], Orders]) -> Schedule:
    """Make a schedule known by its name, for options and plan files; a function is one with one
    stage per mesh.

    Raises:
        OptionError: another schedule has this name.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule.__name__, schedule)
    known = SCHEDULES.get(schedule.name)
    if known is not None and known != schedule:
        raise OptionError(
            f"there is another schedule {schedule.name!r}", "give this one a name of its own"
        )
    SCHEDULES[schedule.name] = schedule
    return schedule


@dataclass(frozen=True)
class TimedAction(Action):
    """An action of a simulated step, seconds."""

    mesh: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineLatency:
    """A step takes `warmup * sum_s t_s + steady * max_s t_s` seconds, with t_s the seconds of one
    micro-batch in stage s.
    """

    warmup: float
    steady: float


def why_not(schedule: str, num_meshes: int, num_microbatches: int) -> str | None:
    """The reason why a schedule cannot run so many micro-batches on so many meshes, or None."""
    if schedule not in SCHEDULES:
        return f"the schedule {schedule!r} is unknown"
    why = SCHEDULES[schedule].refuses(num_meshes, num_microbatches)
    return why and f"{schedule} on {num_meshes} meshes {why}"


def mesh_of(schedule: str, num_meshes: int, stage: int) -> int:
    """The mesh that holds a stage."""
    if SCHEDULES[schedule].is_folded and stage >= num_meshes:
        return 2 * num_meshes - 1 - stage
    return stage % num_meshes


def terms(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1, splits: bool = True
) -> PipelineLatency:
    """The closed form of a step's time; exact for equal stages with backward = 2 x forward, see the
    tests.

    GPipe and 1F1B: sum + (B - 1) max (Alpa, section 5.2), an upper bound for unequal stages under
    1F1B. With v stages on a mesh the pipeline fills v times as fast (Narayanan et al. 2021, section
    2.2): sum / v + (B v - 1) max. Zero-bubble schedules fill the drain with weight gradients (Qi et
    al. 2023): what is left of a bubble is one forward, t / 3, per hop and stage-sized chunk;
    nothing is gained without `splits` (as where stages recompute).
    """
    _check(schedule, num_meshes, num_microbatches)
    total, bubble = num_microbatches * v, SCHEDULES[schedule].bubble
    if bubble is None:
        # Chosen so that equal stages come to the simulated time:
        # warmup * (num_meshes * v) + steady.
        return PipelineLatency(
            1.0 / v, _equal_seconds(schedule, num_meshes, num_microbatches, v) - num_meshes
        )
    bubble = bubble if splits else 1.0
    return PipelineLatency(bubble / v, total - bubble)


@lru_cache(maxsize=256)
def _equal_seconds(schedule: str, num_meshes: int, num_microbatches: int, v: int) -> float:
    """Of a step whose stages all take one second of a micro-batch."""
    # A backward takes twice its forward.
    each = num_meshes * v
    return max(
        done.end
        for done in timeline(schedule, [1 / 3] * each, [2 / 3] * each, num_microbatches, num_meshes)
    )


def in_flight(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> tuple[int, ...]:
    """Per mesh: the most (micro-batch, stage) pairs of its stages whose activations are alive at
    once.
    """
    _check(schedule, num_meshes, num_microbatches)
    alive = SCHEDULES[schedule].alive
    if alive is not None:
        return tuple(alive(num_meshes, num_microbatches, v))
    return tuple(_alive(order) for order in actions(schedule, num_meshes, num_microbatches, v))


def in_flight_by_stage(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1
) -> tuple[int, ...]:
    """Per stage: what `in_flight` is of its mesh."""
    pairs = in_flight(schedule, num_meshes, num_microbatches, v)
    return tuple(pairs[mesh_of(schedule, num_meshes, stage)] for stage in range(num_meshes * v))


def splits_backward(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> bool:
    """Whether weights' gradients are made apart (`W`): stages that recompute gain nothing by
    that.
    """
    if SCHEDULES[schedule].bubble == 1.0:
        return False
    return any(
        action.kind == "W" for action in actions(schedule, num_meshes, num_microbatches, v)[0]
    )


@lru_cache(maxsize=64)
def actions(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Every mesh's actions in order.

    Raises:
        PlanError: the schedule cannot run these, leaves work out, or locks up.
    """
    _check(schedule, num_meshes, num_microbatches)
    orders = SCHEDULES[schedule].orders(num_meshes * v, num_microbatches, num_meshes)
    found = tuple(tuple(order) for order in orders)
    if (
        schedule not in BUILT_IN
    ):  # those are compared with torch's by the tests; counting takes planning time
        _check_work(schedule, found, num_meshes, num_microbatches, v)
        _topological(schedule, found, num_meshes * v)  # refuses what locks up
    return found


def _check_work(
    schedule: str,
    orders: tuple[tuple[Action, ...], ...],
    num_meshes: int,
    num_microbatches: int,
    v: int,
) -> None:
    """PlanError unless every mesh does the work of its stages, each piece once."""
    fix = "give every mesh F and B (or I and W) of every micro-batch in each of its stages once"
    if len(orders) != num_meshes:
        raise PlanError(
            f"the schedule {schedule!r} has orders for {len(orders)} meshes of {num_meshes}", fix
        )
    for mesh, order in enumerate(orders):
        # A whole backward is both of its halves.
        parts = {"F": "F", "B": "IW", "I": "I", "W": "W"}
        if odd := [a for a in order if not isinstance(a, Action) or a.kind not in parts]:
            raise PlanError(
                f"the schedule {schedule!r} has {odd[0]!r} on mesh {mesh}, which is no action", fix
            )
        done = Counter((a.stage, part, a.microbatch) for a in order for part in parts[a.kind])
        stages = [s for s in range(num_meshes * v) if mesh_of(schedule, num_meshes, s) == mesh]
        wanted = Counter(
            (s, part, m) for s in stages for part in "FIW" for m in range(num_microbatches)
        )
        if done != wanted:
            stage, part, microbatch = min((*(wanted - done), *(done - wanted)))
            what = {"F": "the forward", "I": "the backward", "W": "the weights' backward"}[part]
            raise PlanError(
                f"the schedule {schedule!r} does {what} of micro-batch {microbatch} in stage"
                f" {stage} on mesh {mesh} "
                f"{done[stage, part, microbatch]} times instead of"
                f" {wanted[stage, part, microbatch]}",
                fix,
            )


def timeline(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    num_meshes: int | None = None,
    boundary: Sequence[float] = (),
) -> list[TimedAction]:
    """When everything happens: each mesh works through its actions, each as soon as what it needs
    has arrived.

    Args:
        forward, backward: seconds of one micro-batch per stage, in pipeline order.
        num_meshes: meshes (default: one per stage); stages are laid on them as the schedule does.
        boundary: seconds between stage s and s + 1, each way; one message after the other: a slow
            link holds them up.
    """
    num_stages = len(forward)
    meshes = num_meshes or num_stages
    order = _in_order(schedule, meshes, num_microbatches, num_stages // meshes)
    timed = _timed(order, forward, backward, boundary, max)
    found = [
        TimedAction(a.stage, a.kind, a.microbatch, m, start, end) for m, a, start, end in timed
    ]
    return sorted(found, key=lambda done: (done.mesh, done.start))


def seconds_of_many(
    schedule: str,
    forward: np.ndarray,
    backward: np.ndarray,
    num_microbatches: int,
    num_meshes: int,
    boundary: np.ndarray,
) -> np.ndarray:
    """[pipeline] seconds until the last action of each is done; arguments as those of `timeline`,
    [pipeline, stage].

    Who waits for whom does not depend on the seconds, so pipelines of as many stages are timed side
    by side.
    """
    order = _in_order(schedule, num_meshes, num_microbatches, forward.shape[1] // num_meshes)
    if len(forward) == 1:  # plain numbers are faster
        timed = _timed(order, forward[0].tolist(), backward[0].tolist(), boundary[0].tolist(), max)
    else:
        timed = _timed(order, list(forward.T), list(backward.T), list(boundary.T), np.maximum)
    return np.atleast_1d(np.max([end for _, _, _, end in timed], axis=0))


@lru_cache(maxsize=4)  # megabytes each where micro-batches are many
def _in_order(
    schedule: str, num_meshes: int, num_microbatches: int, v: int
) -> tuple[tuple[int, Action, Source | None], ...]:
    """See `_topological`."""
    return _topological(
        schedule, actions(schedule, num_meshes, num_microbatches, v), num_meshes * v
    )


def _topological(
    schedule: str, orders: tuple[tuple[Action, ...], ...], num_stages: int
) -> tuple[tuple[int, Action, Source | None], ...]:
    """All actions, each after those it waits for: (mesh, action, what it needs); PlanError where
    all stand still.

    Sends never hold up the sender, so a circle of actions that wait for each other is the only way
    to lock up.
    """
    position, waiting = [0] * len(orders), sum(map(len, orders))
    made: set[Source | None] = {None}
    found = []
    while waiting:
        before = waiting
        for mesh, order in enumerate(orders):
            for action in order[position[mesh] :]:
                needed = _needed(action, num_stages)
                if needed not in made:
                    break
                made.add(_makes(action))
                found.append((mesh, action, needed))
                position[mesh] += 1
                waiting -= 1
        if (
            waiting == before
        ):  # an order of one's own, or stages of a plan file that lie where the schedule has others
            heads = [
                (m, order[position[m]])
                for m, order in enumerate(orders)
                if position[m] < len(order)
            ]
            stuck = ", ".join(
                f"mesh {mesh} before {a.stage}{a.kind}{a.microbatch}" for mesh, a in heads
            )
            raise PlanError(
                f"the schedule {schedule!r} locks up, its actions wait for each other: {stuck}",
                "let every action come after those that it waits for, and place the stages as the"
                " schedule does",
            )
    return tuple(found)


def _needed(action: Action, num_stages: int) -> Source | None:
    s, m = action.stage, action.microbatch
    if action.kind == "F":
        return ("F", s - 1, m) if s else None
    if action.kind == "W":
        return "B", s, m
    return ("B", s + 1, m) if s + 1 < num_stages else ("F", s, m)


def _makes(action: Action) -> Source:
    return "B" if action.kind == "I" else action.kind, action.stage, action.microbatch


def _timed(
    order: Sequence[tuple[int, Action, Source | None]],
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    boundary: Sequence[Seconds],
    latest: Callable[[Seconds, Seconds], Seconds],
) -> Iterator[tuple[int, Action, Seconds, Seconds]]:
    """(mesh, action, start, end); all seconds are numbers, or arrays of several pipelines'.

    latest: the larger of two, element by element.
    """
    seconds = {
        "F": forward,
        "B": backward,
        "I": [b * (1 - WEIGHT_SHARE) for b in backward],
        "W": [b * WEIGHT_SHARE for b in backward],
    }
    zero = forward[0] * 0.0
    ended: dict[Source, Seconds] = {}
    arrived: dict[Source, Seconds] = {}  # at the stage after (F) or before (B) the sender
    link_free: dict[tuple[str, int], Seconds] = defaultdict(lambda: zero)
    clock: dict[int, Seconds] = defaultdict(lambda: zero)
    for mesh, action, needed in order:
        start = clock[mesh]
        if needed is not None:
            start = latest(start, (ended if needed[1] == action.stage else arrived)[needed])
        clock[mesh] = end = start + seconds[action.kind][action.stage]
        made = kind, stage, _ = _makes(action)
        ended[made] = end
        link = stage if kind == "F" else stage - 1
        if kind != "W" and 0 <= link < len(boundary):
            link_free[kind, link] = latest(link_free[kind, link], end) + boundary[link]
            arrived[made] = link_free[kind, link]
        else:
            arrived[made] = end
        yield mesh, action, start, end


def _alive(order: Sequence[Action]) -> int:
    """Most forwards without their (last) backward, over the order."""
    return max(
        itertools.accumulate((action.kind == "F") - (action.kind in "BW") for action in order)
    )


def _check(schedule: str, num_meshes: int, num_microbatches: int) -> None:
    reason = why_not(schedule, num_meshes, num_microbatches)
    if reason is not None:
        raise PlanError(
            reason, f"choose another number of micro-batches, or one of {', '.join(SCHEDULES)}"
        )


# --- The built-in schedules: orders of one mesh (S meshes, B micro-batches, v stages per mesh), and
# their entries.


Work = list[tuple[int, str]]  # (stage, kind) pairs: of each, the micro-batches come in order


def _each_mesh(work: Callable[[int, int, int, int], Work]) -> Callable[[int, int, int], Orders]:
    """All orders, from the function (S, B, v, mesh) that writes the work of one mesh."""
    return lambda num_stages, B, S: [
        _numbered(work(S, B, num_stages // S, mesh)) for mesh in range(S)
    ]


def _numbered(work: Work) -> list[Action]:
    count: dict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)
    return [Action(*each, next(count[each])) for each in work]


def _at(stage: int, kinds: str) -> Work:
    return [(stage, kind) for kind in kinds]


def _gpipe(S: int, B: int, v: int, mesh: int) -> Work:
    return _at(mesh, "F" * B + "B" * B)


def _one_f_one_b(S: int, B: int, v: int, mesh: int) -> Work:
    warmup = min(B, S - mesh)
    return _at(mesh, "F" * warmup + "BF" * (B - warmup) + "B" * warmup)


def _looped_bfs(num_stages: int, B: int, S: int) -> Orders:
    """Backward the last micro-batch goes first."""
    loops = [range(mesh, num_stages, S) for mesh in range(S)]
    return [
        [Action(s, "F", m) for s in stages for m in range(B)]
        + [Action(s, "B", m) for s in reversed(stages) for m in reversed(range(B))]
        for stages in loops
    ]


def _interleaved(S: int, B: int, v: int, mesh: int, zero_bubble: bool = False) -> Work:
    """Depth first over the local stages; with zero bubbles, weight gradients wait `mesh`
    micro-batches (ZB1P).
    """
    # So many micro-batches go through a stage before the mesh's next stage has its turn.
    per_round = B // max(1, B // S)
    warmup = min(B * v, (v - 1) * per_round + (1 if zero_bubble else 2) * (S - 1 - mesh))
    turns = [step // per_round % v for step in range(B * v)]
    forward, backward = (
        [turn * S + mesh for turn in turns],
        [(v - 1 - turn) * S + mesh for turn in turns],
    )
    work: Work = []
    for step in range(B * v + warmup):
        done = step - warmup
        if step < B * v:
            work += _at(forward[step], "F")
        if done >= 0:
            work += _at(backward[done], "I" if zero_bubble else "B")
        if zero_bubble and done >= mesh:
            work += _at(backward[done - mesh], "W")
    return work + [(stage, "W") for stage in backward[B * v - mesh :] if zero_bubble]


def _zbv(S: int, B: int, v: int, mesh: int) -> Work:
    """ZB-V (Qi et al. 2023, section 6): stages `mesh` and `2 S - 1 - mesh`, wave-like."""
    down, up = mesh, 2 * S - 1 - mesh
    return [
        *_at(down, "F" * (2 * (S - mesh) - 1)),
        *(_at(up, "F") + _at(down, "F")) * mesh,
        *_at(up, "FIW" * (S - mesh)),
        *(_at(down, "FIW") + _at(up, "FIW")) * (B - up),
        *(_at(down, "IW") + _at(up, "FIW")) * (up - S),
        *(_at(down, "I") + _at(up, "I")) * mesh,
        *_at(down, "IW" * (S - mesh)),
        *_at(up, "W" * mesh),
        *_at(down, "W" * mesh),
    ]


def _interleaved_alive(S: int, B: int, v: int) -> list[int]:
    per_round = B // max(1, B // S)
    return [min(B * v, (v - 1) * per_round + 2 * (S - 1 - r) + 1) for r in range(S)]


def _needs_full_meshes(
    num_meshes: int, num_microbatches: int, needs_rounds: bool = True
) -> str | None:
    rounds = max(1, num_microbatches // num_meshes)
    if needs_rounds and num_microbatches % rounds:
        return f"needs micro-batches that are a multiple of {rounds}"
    return "needs at least as many micro-batches" if num_microbatches < num_meshes else None


def _zbv_refuses(num_meshes: int, num_microbatches: int) -> str | None:
    least = 2 * num_meshes - 1
    return f"needs at least {least} micro-batches" if num_microbatches < least else None


LOOPS = (2, 3, 4)  # stages per mesh that are tried
for _schedule in (
    # GPipe and LoopedBFS are as fast as 1F1B and Interleaved1F1B and keep more alive: not searched.
    Schedule("GPipe", _each_mesh(_gpipe), bubble=1.0, alive=lambda S, B, v: [B] * S),
    Schedule(
        "1F1B",
        _each_mesh(_one_f_one_b),
        bubble=1.0,
        alive=lambda S, B, v: [min(B, S - r) for r in range(S)],
        is_searched=True,
    ),
    Schedule(
        "LoopedBFS",
        _looped_bfs,
        LOOPS,
        refuses=partial(_needs_full_meshes, needs_rounds=False),
        bubble=1.0,
    ),
    Schedule(
        "Interleaved1F1B",
        _each_mesh(_interleaved),
        LOOPS,
        refuses=_needs_full_meshes,
        bubble=1.0,
        alive=_interleaved_alive,
        is_searched=True,
    ),
    Schedule(
        "InterleavedZeroBubble",
        _each_mesh(partial(_interleaved, zero_bubble=True)),
        LOOPS,
        refuses=_needs_full_meshes,
        bubble=1 / 3,
        is_searched=True,
    ),
    Schedule(
        "ZBVZeroBubble", _each_mesh(_zbv), (2,), True, _zbv_refuses, is_searched=True, bubble=1 / 3
    ),
):
    register_schedule(_schedule)
BUILT_IN = frozenset(SCHEDULES)
