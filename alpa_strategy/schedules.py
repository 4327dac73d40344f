"""Pipeline schedules as data: the order of every mesh's work, the seconds of a step, and how many
micro-batches are in flight.

The built-in orders and their names are those of `torch.distributed.pipelining`. Nothing here runs a
step. Users add a schedule as a function from numbers of stages, micro-batches and meshes to orders
(`schedule=`, `register_schedule`); its memory and time follow from the orders.

`v` is the number of stages per mesh. Stage s of N = v * num_meshes stages is on mesh
s % num_meshes. In a folded schedule (ZBV), mesh m has the stages m and N - 1 - m.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.schedule_orders import (
    Action,
    Orders,
    each_mesh,
    gpipe,
    interleaved,
    interleaved_alive,
    looped_bfs,
    needs_full_meshes,
    one_f_one_b,
    zbv,
    zbv_refuses,
)
from alpa_strategy.schedule_times import (
    Seconds,
    Source,
    Steps,
    input_of,
    numbered_steps,
    result_of,
    timed_steps,
)


@dataclass(frozen=True)
class Schedule:
    """An order of work, for `schedule=` and `register_schedule`."""

    # Its name in plans and options.
    name: str

    # (num_stages, num_microbatches, num_meshes) -> every mesh's actions in order. Each of its
    # stages does `F` and `B` (or `I` and later `W`) of every micro-batch once.
    orders: Callable[[int, int, int], Orders]

    # The numbers of stages that a mesh may have. The planner tries all of them.
    stages_per_mesh: tuple[int, ...] = (1,)

    # Which mesh has which stages, see the module's docstring.
    is_folded: bool = False

    # (num_meshes, num_microbatches) -> the reason why it cannot run these ("needs ..."), or None.
    refuses: Callable[[int, int], str | None] = lambda num_meshes, num_microbatches: None

    # Whether the planner tries it if the user requests no schedule.
    is_searched: bool = False

    # Bubble in the `closed_form` of a step, as a multiple of 1F1B's. None: stages are simulated.
    bubble: float | None = None

    # (num_meshes, num_microbatches, stages per mesh) -> the result of `in_flight` in closed form.
    # None: the actions are counted.
    alive: Callable[[int, int, int], Sequence[int]] | None = None

    @property
    def has_one_stage_per_mesh(self) -> bool:
        """Whether each mesh has one stage, so that meshes may have different sizes."""
        return self.stages_per_mesh == (1,)


# Name -> schedule. The only list of schedules.
SCHEDULES: dict[str, Schedule] = {}


def register_schedule(schedule: Schedule | Callable[[int, int, int], Orders]) -> Schedule:
    """Add a schedule, so that options and plan files can name it.

    A function becomes a schedule with one stage per mesh, named like the function.

    Raises:
        OptionError: another schedule has this name.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule.__name__, schedule)
    known = SCHEDULES.get(schedule.name)
    if known is not None and known != schedule:
        raise OptionError(
            f"there is another schedule {schedule.name!r}", "give this one a different name"
        )
    SCHEDULES[schedule.name] = schedule
    return schedule


@dataclass(frozen=True)
class TimedAction(Action):
    """An action of a simulated step."""

    mesh: int

    # Seconds since the step's start.
    start: float
    end: float


@dataclass(frozen=True)
class PipelineLatency:
    """The coefficients of a step's time in closed form.

    A step takes `warmup * sum_s t_s + steady * max_s t_s` seconds, with t_s the seconds of one
    micro-batch in stage s.
    """

    warmup: float
    steady: float


def refusal(schedule: str, num_meshes: int, num_microbatches: int) -> str | None:
    """Return why a schedule cannot run these meshes and micro-batches; None if it can."""
    if schedule not in SCHEDULES:
        return f"the schedule {schedule!r} is unknown"
    reason = SCHEDULES[schedule].refuses(num_meshes, num_microbatches)
    return reason and f"{schedule} on {num_meshes} meshes {reason}"


def mesh_of(schedule: str, num_meshes: int, stage: int) -> int:
    """Return the index of the mesh that runs a stage."""
    if SCHEDULES[schedule].is_folded and stage >= num_meshes:
        return 2 * num_meshes - 1 - stage
    return stage % num_meshes


def meshes_of_stages(schedule: str, num_meshes: int, stages_per_mesh: int) -> list[int]:
    """Return the index of the mesh that runs each stage."""
    return [mesh_of(schedule, num_meshes, i) for i in range(num_meshes * stages_per_mesh)]


def closed_form(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1, splits: bool = True
) -> PipelineLatency:
    """Return the closed form of a step's time: exact for equal stages whose backward takes twice
    the forward (see the tests).

    - GPipe and 1F1B: sum + (B - 1) max (Alpa, section 5.2). An upper bound for unequal stages under
      1F1B.
    - v stages on a mesh: the pipeline fills v times as fast (Narayanan et al. 2021, section 2.2):
      sum / v + (B v - 1) max.
    - Zero-bubble schedules fill the drain with weight gradients (Qi et al. 2023). A bubble of one
      forward, t / 3, per hop and stage remains.
    - Other schedules: the coefficients of the simulated time of equal stages, for any `splits`.

    Args:
        v: stages per mesh.
        splits: whether backwards are split in two. Stages that recompute do not gain from that, so
            zero-bubble schedules then have the bubble of 1F1B.

    Raises:
        PlanError: the schedule is unknown, or cannot run these numbers.
    """
    _check(schedule, num_meshes, num_microbatches)
    bubble = SCHEDULES[schedule].bubble
    if bubble is None:
        # Chosen so that the closed form of equal stages is the simulated time:
        # warmup * (num_meshes * v) + steady.
        simulated = _equal_seconds(schedule, num_meshes, num_microbatches, v)
        return PipelineLatency(1.0 / v, simulated - num_meshes)

    if not splits:
        bubble = 1.0
    return PipelineLatency(bubble / v, num_microbatches * v - bubble)


@lru_cache(maxsize=256)
def _equal_seconds(schedule: str, num_meshes: int, num_microbatches: int, v: int) -> float:
    """Return the simulated seconds of a step in which every stage takes one second per micro-batch:
    1/3 for the forward, 2/3 for the backward.

    Args:
        v: stages per mesh.

    Raises:
        PlanError: the schedule locks up.
    """
    num_stages = num_meshes * v
    forward = [1 / 3] * num_stages
    backward = [2 / 3] * num_stages
    timed = timeline(schedule, forward, backward, num_microbatches, num_meshes)
    return max(action.end for action in timed)


def in_flight(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> tuple[int, ...]:
    """Return how many (micro-batch, stage) activations each mesh, of v stages, stores at most.

    Raises:
        PlanError: the schedule cannot run these numbers of meshes and micro-batches.
    """
    _check(schedule, num_meshes, num_microbatches)
    alive = SCHEDULES[schedule].alive
    if alive is not None:
        return tuple(alive(num_meshes, num_microbatches, v))
    return tuple(_alive(order) for order in actions(schedule, num_meshes, num_microbatches, v))


def in_flight_by_stage(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1
) -> tuple[int, ...]:
    """Return, per stage, how many activations of a (micro-batch, stage) pair its mesh stores at
    most.

    Raises:
        PlanError: the schedule cannot run these numbers of meshes and micro-batches.
    """
    per_mesh = in_flight(schedule, num_meshes, num_microbatches, v)
    return tuple(per_mesh[mesh] for mesh in meshes_of_stages(schedule, num_meshes, v))


def splits_backward(schedule: str, num_meshes: int, num_microbatches: int, v: int = 1) -> bool:
    """Whether the weights' gradients are computed by actions of their own (`W`).

    Stages that recompute gain nothing from that.

    Raises:
        PlanError: as of `actions`; only for a schedule of the user.
    """
    # Of the built-in ones the bubble says it, if they have one, without all the actions of a step.
    if schedule in BUILT_IN and SCHEDULES[schedule].bubble is not None:
        return SCHEDULES[schedule].bubble != 1.0
    orders = actions(schedule, num_meshes, num_microbatches, v)
    return any(action.kind == "W" for order in orders for action in order)


@lru_cache(maxsize=64)
def actions(
    schedule: str, num_meshes: int, num_microbatches: int, v: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return every mesh's actions in order, with v stages per mesh.

    Raises:
        PlanError: the schedule cannot run these numbers of meshes and micro-batches, leaves work
            out, or locks up.
    """
    _check(schedule, num_meshes, num_microbatches)
    returned = SCHEDULES[schedule].orders(num_meshes * v, num_microbatches, num_meshes)
    orders = tuple(tuple(order) for order in returned)

    # Tests compare the built-in orders with those of torch. Counting them takes planning time.
    if schedule not in BUILT_IN:
        _check_work(schedule, orders, num_meshes, num_microbatches, v)
        # Raises PlanError if the actions lock up.
        _topological(schedule, orders, num_meshes * v)
    return orders


def _check_work(
    schedule: str,
    orders: tuple[tuple[Action, ...], ...],
    num_meshes: int,
    num_microbatches: int,
    v: int,
) -> None:
    """Check that every mesh does the work of its stages, each action once.

    Args:
        orders: every mesh's actions in order.
        v: stages per mesh.

    Raises:
        PlanError: an order is missing, has something that is no action, or does some work more
            or less than once.
    """
    if len(orders) != num_meshes:
        raise PlanError(
            f"the schedule {schedule!r} has orders for {len(orders)} meshes of {num_meshes}",
            _FIX_WORK,
        )

    for mesh, order in enumerate(orders):
        done: Counter[Source] = Counter()
        for action in order:
            if not isinstance(action, Action) or action.kind not in _HALVES:
                raise PlanError(
                    f"the schedule {schedule!r} has {action!r} on mesh {mesh}, which is no action",
                    _FIX_WORK,
                )
            for half in _HALVES[action.kind]:
                done[half, action.stage, action.microbatch] += 1

        expected: Counter[Source] = Counter()
        for stage in range(num_meshes * v):
            if mesh_of(schedule, num_meshes, stage) == mesh:
                for half, microbatch in itertools.product("FIW", range(num_microbatches)):
                    expected[half, stage, microbatch] += 1

        if done != expected:
            raise _wrong_count(schedule, mesh, done, expected)


_FIX_WORK = "give every mesh F and B (or I and W) of every micro-batch in each of its stages once"

# Kind of an action -> the work that is counted. A full backward is both of its halves.
_HALVES = {"F": "F", "B": "IW", "I": "I", "W": "W"}
_HALF_NAMES = {"F": "the forward", "I": "the backward", "W": "the weights' backward"}


def _wrong_count(
    schedule: str, mesh: int, done: Counter[Source], expected: Counter[Source]
) -> PlanError:
    """Return the error about the first work, by stage, that mesh number `mesh` does not do once.

    Args:
        done, expected: (half of `_HALVES`, stage, micro-batch) -> number of times.
    """
    differing = [*(expected - done), *(done - expected)]
    half, stage, microbatch = min(differing, key=lambda source: (source[1], source[0], source[2]))
    return PlanError(
        f"the schedule {schedule!r} does {_HALF_NAMES[half]} of micro-batch {microbatch} in stage"
        f" {stage} on mesh {mesh} {done[half, stage, microbatch]} times instead of"
        f" {expected[half, stage, microbatch]}",
        _FIX_WORK,
    )


def timeline(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    num_meshes: int | None = None,
    boundary: Sequence[float] = (),
) -> list[TimedAction]:
    """Return start and end of every action of a step, sorted by mesh and start.

    Each mesh works through its actions in order. An action starts as soon as its input has arrived.

    Args:
        forward, backward: seconds of one micro-batch per stage, in pipeline order.
        num_meshes: number of meshes, a divisor of the number of stages (default: one per stage).
        boundary: seconds of a message between stage s and s + 1, each way. A link transfers one
            message at a time.

    Raises:
        PlanError: the schedule cannot run these numbers of meshes and micro-batches, or locks up.
    """
    num_stages = len(forward)
    if not num_meshes:
        num_meshes = num_stages
    v = num_stages // num_meshes
    order = _in_order(schedule, num_meshes, num_microbatches, v)
    steps = _steps_of(schedule, num_meshes, num_microbatches, v)

    timed = []
    times = timed_steps(steps, forward, backward, boundary, max)
    for (mesh, action, _), (start, end) in zip(order, times, strict=True):
        timed.append(TimedAction(action.stage, action.kind, action.microbatch, mesh, start, end))
    return sorted(timed, key=lambda action: (action.mesh, action.start))


def seconds_of_many(
    schedule: str,
    forward: np.ndarray,
    backward: np.ndarray,
    num_microbatches: int,
    num_meshes: int,
    boundary: np.ndarray,
) -> np.ndarray:
    """Return the seconds of a step of several pipelines: [pipeline].

    The order of waiting does not depend on the seconds, so pipelines with the same number of stages
    are simulated together.

    Args:
        forward, backward, boundary: as of `timeline`, [pipeline, stage].

    Raises:
        PlanError: as of `timeline`.
    """
    steps = _steps_of(schedule, num_meshes, num_microbatches, forward.shape[1] // num_meshes)
    if len(forward) == 1:
        # Python's floats are faster than arrays of one.
        times = timed_steps(
            steps, forward[0].tolist(), backward[0].tolist(), boundary[0].tolist(), max
        )
    else:
        times = timed_steps(steps, list(forward.T), list(backward.T), list(boundary.T), np.maximum)
    ends = _ends_of_meshes(steps, times)
    return np.atleast_1d(np.max(list(ends.values()), axis=0))


def _ends_of_meshes(steps: Steps, times: Iterable[tuple[Seconds, Seconds]]) -> dict[int, Seconds]:
    """Return when each mesh has done its last action.

    Args:
        steps: the actions.
        times: of `timed_steps`.
    """
    ends = {}
    # A mesh's last action ends last.
    for numbers, (_, end) in zip(steps.numbers, times, strict=True):
        ends[numbers[0]] = end
    return ends


@dataclass(frozen=True)
class LongestPath:
    """The longest path of waiting actions to the last action of a mesh."""

    # Seconds from the step's start to its end.
    seconds: float

    # [stage] how many forwards and (full) backwards of a stage are on it.
    forward: np.ndarray
    backward: np.ndarray


def longest_paths(
    schedule: str,
    forward: np.ndarray,
    backward: np.ndarray,
    num_microbatches: int,
    num_meshes: int,
    boundary: np.ndarray,
) -> list[LongestPath]:
    """Return the longest path to the end of each mesh.

    Args:
        forward, backward, boundary: as of `timeline`, [stage].

    Raises:
        PlanError: as of `timeline`.
    """
    num_stages = len(forward)
    steps = _steps_of(schedule, num_meshes, num_microbatches, num_stages // num_meshes)
    # A time is an array: the seconds, then how many forwards and backwards of each stage they are.
    counts = np.eye(2 * num_stages)
    of_forward = np.column_stack([forward, counts[:num_stages]])
    of_backward = np.column_stack([backward, counts[num_stages:]])
    of_links = np.column_stack([boundary, np.zeros((len(boundary), 2 * num_stages))])

    def latest(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return one if one[0] >= other[0] else other

    times = timed_steps(steps, list(of_forward), list(of_backward), list(of_links), latest)
    ends = _ends_of_meshes(steps, times)
    paths = []
    for mesh in range(num_meshes):
        seconds, stages = ends[mesh][0], ends[mesh][1:]
        paths.append(LongestPath(float(seconds), stages[:num_stages], stages[num_stages:]))
    return paths


# An entry takes megabytes if there are many micro-batches.
@lru_cache(maxsize=4)
def _in_order(
    schedule: str, num_meshes: int, num_microbatches: int, v: int
) -> tuple[tuple[int, Action, Source | None], ...]:
    """Return all actions of a schedule as `_topological` sorts them."""
    orders = actions(schedule, num_meshes, num_microbatches, v)
    return _topological(schedule, orders, num_meshes * v)


# An entry takes megabytes if there are many micro-batches.
@lru_cache(maxsize=4)
def _steps_of(schedule: str, num_meshes: int, num_microbatches: int, v: int) -> Steps:
    """Return all actions of a schedule as numbers, in the order of `_in_order`."""
    in_order = _in_order(schedule, num_meshes, num_microbatches, v)
    return numbered_steps(in_order, num_meshes * v, num_microbatches)


def _topological(
    schedule: str, orders: tuple[tuple[Action, ...], ...], num_stages: int
) -> tuple[tuple[int, Action, Source | None], ...]:
    """Return all actions, each after the one it waits for, as (mesh, action, its input; None if
    that is the batch).

    Sends never block the sender, so actions that wait for each other in a circle are the only way
    to lock up.

    Raises:
        PlanError: the schedule locks up.
    """
    # Per mesh, the index of its next action.
    position = [0] * len(orders)
    num_waiting = sum(map(len, orders))

    available: set[Source | None] = {None}
    in_order = []
    while num_waiting:
        num_before = num_waiting
        for mesh, order in enumerate(orders):
            for action in order[position[mesh] :]:
                needed = input_of(action, num_stages)
                if needed not in available:
                    break
                available.add(result_of(action))
                in_order.append((mesh, action, needed))
                position[mesh] += 1
                num_waiting -= 1
        if num_waiting == num_before:
            raise _lock_up(schedule, orders, position)
    return tuple(in_order)


def _lock_up(
    schedule: str, orders: tuple[tuple[Action, ...], ...], position: list[int]
) -> PlanError:
    """Return the error about actions that wait for each other.

    The order is the user's, or a plan file has stages on other meshes than the schedule.

    Args:
        position: per mesh, the index of its next action.
    """
    stuck = []
    for mesh, order in enumerate(orders):
        if position[mesh] < len(order):
            action = order[position[mesh]]
            stuck.append(f"mesh {mesh} before {action.stage}{action.kind}{action.microbatch}")
    return PlanError(
        f"the schedule {schedule!r} locks up, its actions wait for each other: {', '.join(stuck)}",
        "let every action come after those that it waits for, and place the stages as the"
        " schedule does",
    )


def _alive(order: Sequence[Action]) -> int:
    """Return the largest number of forwards without their (last) backward, over the order."""
    changes = [(action.kind == "F") - (action.kind in "BW") for action in order]
    return max(itertools.accumulate(changes))


def _check(schedule: str, num_meshes: int, num_microbatches: int) -> None:
    """Raise PlanError if the schedule cannot run these numbers of meshes and micro-batches."""
    reason = refusal(schedule, num_meshes, num_microbatches)
    if reason is not None:
        raise PlanError(
            reason, f"choose another number of micro-batches, or one of {', '.join(SCHEDULES)}"
        )


# The built-in schedules.


# Numbers of stages per mesh that the planner tries.
LOOPS = (2, 3, 4)
for _schedule in (
    # GPipe and LoopedBFS are as fast as 1F1B and Interleaved1F1B and store more activations: they
    # are not searched.
    Schedule("GPipe", each_mesh(gpipe), bubble=1.0, alive=lambda S, B, v: [B] * S),
    Schedule(
        "1F1B",
        each_mesh(one_f_one_b),
        bubble=1.0,
        alive=lambda S, B, v: [min(B, S - r) for r in range(S)],
        is_searched=True,
    ),
    Schedule(
        "LoopedBFS",
        looped_bfs,
        LOOPS,
        refuses=partial(needs_full_meshes, needs_rounds=False),
        bubble=1.0,
    ),
    Schedule(
        "Interleaved1F1B",
        each_mesh(interleaved),
        LOOPS,
        refuses=needs_full_meshes,
        bubble=1.0,
        alive=interleaved_alive,
        is_searched=True,
    ),
    Schedule(
        "InterleavedZeroBubble",
        each_mesh(partial(interleaved, zero_bubble=True)),
        LOOPS,
        refuses=needs_full_meshes,
        bubble=1 / 3,
        is_searched=True,
    ),
    Schedule(
        "ZBVZeroBubble",
        each_mesh(zbv),
        stages_per_mesh=(2,),
        is_folded=True,
        refuses=zbv_refuses,
        bubble=1 / 3,
        is_searched=True,
    ),
):
    register_schedule(_schedule)
BUILT_IN = frozenset(SCHEDULES)
