"""The order of work of the built-in pipeline schedules, mesh by mesh.

Names are those of the papers: S meshes, B micro-batches, v stages per mesh. The orders equal those
of `torch.distributed.pipelining`. `schedules.py` registers them.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One forward or backward of one micro-batch in one stage."""

    stage: int

    # `F` forward, `B` full backward, `I` backward to the inputs, `W` backward to the weights.
    kind: str

    microbatch: int


# Per mesh, its actions in order.
Orders = Sequence[Sequence[Action]]

# (stage, kind) pairs in order. The micro-batches of each pair are in order as well.
Work = list[tuple[int, str]]


def each_mesh(work: Callable[[int, int, int, int], Work]) -> Callable[[int, int, int], Orders]:
    """Return `Schedule.orders` made from a function (S, B, v, mesh) -> the work of one mesh."""

    def orders(num_stages: int, B: int, S: int) -> Orders:
        v = num_stages // S
        return [_numbered(work(S, B, v, mesh)) for mesh in range(S)]

    return orders


def _numbered(work: Work) -> list[Action]:
    """Return the actions of `work`, micro-batches numbered per stage and kind."""
    next_microbatch: dict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)
    return [Action(stage, kind, next(next_microbatch[stage, kind])) for stage, kind in work]


def _at(stage: int, kinds: str) -> Work:
    """Return work of one stage: `_at(2, "FB")` is a forward and a backward of stage 2."""
    return [(stage, kind) for kind in kinds]


def gpipe(S: int, B: int, v: int, mesh: int) -> Work:
    """Return the work of one mesh under GPipe: all forwards, then all backwards."""
    return _at(mesh, "F" * B + "B" * B)


def one_f_one_b(S: int, B: int, v: int, mesh: int) -> Work:
    """Return the work of one mesh under 1F1B."""
    warmup = min(B, S - mesh)
    return _at(mesh, "F" * warmup + "BF" * (B - warmup) + "B" * warmup)


def looped_bfs(num_stages: int, B: int, S: int) -> Orders:
    """Return the orders of LoopedBFS. Its backward starts with the last micro-batch.

    Args:
        num_stages: of all meshes.
        B: number of micro-batches.
        S: number of meshes.
    """
    orders = []
    for mesh in range(S):
        stages = range(mesh, num_stages, S)
        forward = itertools.product(stages, range(B))
        backward = itertools.product(reversed(stages), reversed(range(B)))
        order = [Action(stage, "F", microbatch) for stage, microbatch in forward]
        order += [Action(stage, "B", microbatch) for stage, microbatch in backward]
        orders.append(order)
    return orders


def interleaved(S: int, B: int, v: int, mesh: int, zero_bubble: bool = False) -> Work:
    """Return the work of one mesh, depth first over its stages (Interleaved1F1B).

    Args:
        S: number of meshes.
        B: number of micro-batches.
        v: stages per mesh.
        mesh: its index.
        zero_bubble: split the backward; weight gradients wait for `mesh` micro-batches (ZB1P).
    """
    # Micro-batches that go through a stage before the mesh's next stage has its turn.
    per_round = B // max(1, B // S)
    hops_to_last_mesh = S - 1 - mesh
    warmup_per_hop = 1 if zero_bubble else 2
    warmup = min(B * v, (v - 1) * per_round + warmup_per_hop * hops_to_last_mesh)

    turns = [step // per_round % v for step in range(B * v)]
    forward = [turn * S + mesh for turn in turns]
    backward = [(v - 1 - turn) * S + mesh for turn in turns]

    work: Work = []
    for step in range(B * v + warmup):
        done = step - warmup
        if step < B * v:
            work += _at(forward[step], "F")
        if done >= 0:
            work += _at(backward[done], "I" if zero_bubble else "B")
        if zero_bubble and done >= mesh:
            work += _at(backward[done - mesh], "W")
    if zero_bubble:
        work += [(stage, "W") for stage in backward[B * v - mesh :]]
    return work


def zbv(S: int, B: int, v: int, mesh: int) -> Work:
    """Return the work of one mesh under ZB-V (Qi et al. 2023, section 6).

    Its stages are `mesh` and `2 S - 1 - mesh`: micro-batches go down the meshes and up again.

    Args: as of `interleaved`; v is 2.
    """
    down = mesh
    up = 2 * S - 1 - mesh
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


def interleaved_alive(S: int, B: int, v: int) -> list[int]:
    """Return `in_flight` of Interleaved1F1B: the warmup and one more forward, per mesh."""
    per_round = B // max(1, B // S)
    return [min(B * v, (v - 1) * per_round + 2 * (S - 1 - mesh) + 1) for mesh in range(S)]


def needs_full_meshes(
    num_meshes: int, num_microbatches: int, needs_rounds: bool = True
) -> str | None:
    """Return why there are too few micro-batches for every mesh to have one; None if there are not.

    Args:
        needs_rounds: whether the micro-batches must divide into equal rounds, each of at least
            `num_meshes`.
    """
    num_rounds = max(1, num_microbatches // num_meshes)
    if needs_rounds and num_microbatches % num_rounds:
        return f"needs micro-batches that are a multiple of {num_rounds}"
    if num_microbatches < num_meshes:
        return "needs at least as many micro-batches"
    return None


def zbv_refuses(num_meshes: int, num_microbatches: int) -> str | None:
    """Return why ZB-V cannot run these meshes and micro-batches; None if it can."""
    least = 2 * num_meshes - 1
    if num_microbatches < least:
        return f"needs at least {least} micro-batches"
    return None
