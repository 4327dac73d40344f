"""Pipeline schedules as data: who does what in which order, how long a step takes, how much is alive meanwhile.

The orders are those of `torch.distributed.pipelining` (names too), which executes them; nothing here runs anything.
A *rank* is one mesh of the pipeline; with `v` stages per rank, stage s of N = v * num_ranks is on rank s % num_ranks,
or folded (`ZBVZeroBubble`): stages r and N - 1 - r on rank r.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from alpa_strategy.errors import PlanError

ONE_STAGE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble",)
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
SCHEDULES = (*ONE_STAGE, *LOOPED, *FOLDED)
WEIGHT_SHARE = 0.5  # of a backward's time that is the weights' gradients, where it is done apart


@dataclass(frozen=True)
class Action:
    """One piece of work: kind `F` forward, `B` whole backward, `I` backward to the inputs, `W` to the weights."""

    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True)
class Slot:
    """An action on the clock, seconds."""

    rank: int
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


def stages_per_rank(schedule: str) -> tuple[int, ...]:
    """How many stages a rank may have under a schedule (those that are searched)."""
    return (1,) if schedule in ONE_STAGE else (2,) if schedule in FOLDED else (2, 3, 4)


def why_not(schedule: str, num_ranks: int, num_microbatches: int) -> str | None:
    """The reason why a schedule cannot run so many micro-batches on so many ranks, or None."""
    if schedule not in SCHEDULES:
        return f"the schedule {schedule!r} is unknown"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches % rounds:
            return f"{schedule} on {num_ranks} meshes needs micro-batches that are a multiple of {rounds}"
    if schedule in LOOPED and num_microbatches < num_ranks:
        return f"{schedule} on {num_ranks} meshes needs at least as many micro-batches"
    if schedule == "ZBVZeroBubble" and num_microbatches < 2 * num_ranks - 1:
        return f"{schedule} on {num_ranks} meshes needs at least {2 * num_ranks - 1} micro-batches"
    return None


def rank_of(schedule: str, num_ranks: int, stage: int) -> int:
    """The rank that holds a stage."""
    if schedule in FOLDED and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def terms(schedule: str, num_ranks: int, num_microbatches: int, v: int = 1, splits: bool = True) -> Terms:
    """The closed form of a step's time; exact for equal stages with backward = 2 x forward, see the tests.

    GPipe and 1F1B: sum + (B - 1) max (Alpa, section 5.2), an upper bound for unequal stages under 1F1B. With v stages
    on a rank the pipeline fills v times as fast (Narayanan et al. 2021, section 2.2): sum / v + (B v - 1) max.
    Zero-bubble schedules fill the drain with weight gradients (Qi et al. 2023): what is left of a bubble is one
    forward, t / 3, per hop and stage-sized chunk. Without `splits` (stages that recompute do their backward in one
    piece) they gain nothing by it.
    """
    _check(schedule, num_ranks, num_microbatches)
    if schedule in ONE_STAGE:
        return Terms(1.0, num_microbatches - 1.0)
    total = num_microbatches * v
    fill = (1 / 3 if schedule in ZERO_BUBBLE and splits else 1.0) / v
    return Terms(fill, total - fill * v)


def in_flight(schedule: str, num_ranks: int, num_microbatches: int, v: int = 1) -> tuple[int, ...]:
    """Per rank: the most (micro-batch, stage) pairs of its stages whose activations are alive at once."""
    _check(schedule, num_ranks, num_microbatches)
    S, B = num_ranks, num_microbatches
    match schedule:
        case "GPipe" | "LoopedBFS":
            return (B * v,) * S
        case "1F1B":
            return tuple(min(B, S - r) for r in range(S))
        case "Interleaved1F1B":
            per_round = B // max(1, B // S)
            return tuple(min(B * v, (v - 1) * per_round + 2 * (S - 1 - r) + 1) for r in range(S))
        case _:
            return tuple(_alive(order) for order in actions(schedule, S, B, v))


def num_actions(schedule: str, num_microbatches: int, v: int = 1) -> int:
    """Actions of one rank in a step."""
    return num_microbatches * v * (3 if schedule in ZERO_BUBBLE else 2)


@lru_cache(maxsize=64)
def actions(schedule: str, num_ranks: int, num_microbatches: int, v: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions in order."""
    _check(schedule, num_ranks, num_microbatches)
    writer = {
        "GPipe": _gpipe,
        "1F1B": _one_f_one_b,
        "LoopedBFS": _looped_bfs,
        "Interleaved1F1B": _interleaved,
        "InterleavedZeroBubble": _interleaved,
        "ZBVZeroBubble": _zbv,
    }[schedule]
    return tuple(tuple(writer(schedule, num_ranks, num_microbatches, v, rank)) for rank in range(num_ranks))


def timeline(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    num_ranks: int | None = None,
    boundary: Sequence[float] = (),
) -> list[Slot]:
    """When everything happens: each rank works through its actions, each as soon as what it needs has arrived.

    Args:
        forward, backward: seconds of one micro-batch per stage, in pipeline order.
        num_ranks: meshes (default: one per stage); stages are laid on them as the schedule does.
        boundary: seconds between stage s and s + 1, each way. One message after the other: a link that takes longer
            than its stages holds them up.
    """
    num_stages = len(forward)
    ranks = num_ranks or num_stages
    wire = [*boundary, *[0.0] * (num_stages - len(boundary))]
    seconds = {
        "F": list(forward),
        "B": list(backward),
        "I": [b * (1 - WEIGHT_SHARE) for b in backward],
        "W": [b * WEIGHT_SHARE for b in backward],
    }
    orders = actions(schedule, ranks, num_microbatches, num_stages // ranks)
    ended: dict[tuple[str, int, int], float] = {}  # (F | B | W, stage, micro-batch) -> time
    arrived: dict[tuple[str, int, int], float] = {}  # at the stage after (F) or before (B) the sender
    link_free: dict[tuple[str, int], float] = defaultdict(float)
    position, clock = [0] * ranks, [0.0] * ranks
    slots: list[Slot] = []
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                ready = _ready(action, num_stages, ended, arrived)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                end = start + seconds[action.kind][action.stage]
                clock[rank] = end
                kind, stage = "B" if action.kind == "I" else action.kind, action.stage
                ended[kind, stage, action.microbatch] = end
                if kind != "W":
                    link = stage if kind == "F" else stage - 1
                    link_free[kind, link] = max(link_free[kind, link], end) + wire[link]
                    arrived[kind, stage, action.microbatch] = link_free[kind, link]
                slots.append(Slot(rank, start, end, action.kind, action.microbatch, action.stage))
                position[rank] += 1
                waiting -= 1
        if waiting == before:
            raise AssertionError(f"{schedule} on {ranks} ranks with {num_microbatches} micro-batches locks up")
    return sorted(slots, key=lambda s: (s.rank, s.start))


def _ready(
    action: Action,
    num_stages: int,
    ended: dict[tuple[str, int, int], float],
    arrived: dict[tuple[str, int, int], float],
) -> float | None:
    """When an action's inputs are there; None while they are not made."""
    s, m = action.stage, action.microbatch
    if action.kind == "F":
        return 0.0 if s == 0 else arrived.get(("F", s - 1, m))
    if action.kind == "W":
        return ended.get(("B", s, m))
    if s == num_stages - 1:
        return ended.get(("F", s, m))
    return arrived.get(("B", s + 1, m))


def _alive(order: Sequence[Action]) -> int:
    """Most forwards without their (last) backward, over the order."""
    most = now = 0
    last = "W" if any(a.kind == "W" for a in order) else "B"
    for action in order:
        now += (action.kind == "F") - (action.kind == last)
        most = max(most, now)
    return most


def _check(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    reason = why_not(schedule, num_ranks, num_microbatches)
    if reason is not None:
        raise PlanError(reason, f"choose another number of micro-batches, or one of {', '.join(SCHEDULES)}")


def _gpipe(schedule: str, S: int, B: int, v: int, rank: int) -> list[Action]:
    return [Action(rank, kind, m) for kind in "FB" for m in range(B)]


def _one_f_one_b(schedule: str, S: int, B: int, v: int, rank: int) -> list[Action]:
    warmup = min(B, S - rank)
    order = [Action(rank, "F", m) for m in range(warmup)]
    for m in range(B):
        order.append(Action(rank, "B", m))
        if warmup + m < B:
            order.append(Action(rank, "F", warmup + m))
    return order


def _looped_bfs(schedule: str, S: int, B: int, v: int, rank: int) -> list[Action]:
    stages = range(rank, S * v, S)
    order = [Action(s, "F", m) for s in stages for m in range(B)]
    return order + [Action(s, "B", m) for s in reversed(stages) for m in reversed(range(B))]


def _interleaved(schedule: str, S: int, B: int, v: int, rank: int) -> list[Action]:
    """Depth first over the local stages; with zero bubbles, weight gradients wait `rank` micro-batches (ZB1P)."""
    zero_bubble = schedule in ZERO_BUBBLE
    per_round = B // max(1, B // S)
    warmup = min(B * v, (v - 1) * per_round + (1 if zero_bubble else 2) * (S - 1 - rank))
    count: dict[tuple[str, int], int] = defaultdict(int)
    order: list[Action] = []

    def add(kind: str, stage: int) -> None:
        order.append(Action(stage, kind, count[kind, stage]))
        count[kind, stage] += 1

    def forward_stage(step: int) -> int:
        return (step // per_round) % v * S + rank

    def backward_stage(step: int) -> int:
        return (v - 1 - (step // per_round) % v) * S + rank

    weights = 0
    for step in range(B * v + warmup):
        if step < B * v:
            add("F", forward_stage(step))
        if step >= warmup:
            add("I" if zero_bubble else "B", backward_stage(step - warmup))
            if zero_bubble and step - warmup >= rank:
                add("W", backward_stage(weights))
                weights += 1
    if zero_bubble:
        for step in range(weights, B * v):
            add("W", backward_stage(step))
    return order


def _zbv(schedule: str, S: int, B: int, v: int, rank: int) -> list[Action]:
    """ZB-V (Qi et al. 2023, section 6): stages `rank` and `2 S - 1 - rank`, wave-like."""
    stages = (rank, 2 * S - 1 - rank)
    count: dict[tuple[str, int], int] = defaultdict(int)
    order: list[Action] = []

    def add(kinds: str, chunk: int) -> None:
        for kind in kinds:
            order.append(Action(stages[chunk], kind, count[kind, chunk]))
            count[kind, chunk] += 1

    for _ in range(2 * (S - rank) - 1):
        add("F", 0)
    for _ in range(rank):
        add("F", 1)
        add("F", 0)
    for _ in range(S - rank):
        add("FIW", 1)
    while count["F", 1] < count["F", 0] or count["F", 0] < B:
        if count["F", 0] < B:
            add("F", 0)
        add("IW", 0)
        add("FIW", 1)
    for _ in range(rank):
        add("I", 0)
        add("I", 1)
    for _ in range(S - rank):
        add("IW", 0)
    while count["W", 1] < count["I", 1]:
        add("W", 1)
    while count["W", 0] < count["I", 0]:
        add("W", 0)
    return order
