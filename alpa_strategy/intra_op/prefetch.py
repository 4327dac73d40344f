"""How far ahead of its use a parameter is gathered (ZeRO-3): decided by the stage's own times, once it is solved.

A gathering that begins when its op is reached holds up the op. One that begins earlier goes on beside other ops, and
its parameter is whole for longer. As many bytes are on their way as hide what can be hidden, and as there is room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.options import is_gather, local_bytes
from alpa_strategy.sharding.redistribute import reshard_steps

WORTH = 0.005  # of the forward's seconds: less is not worth twice the memory


def begun(sizes: Sequence[int], ahead_bytes: int) -> Iterator[int]:
    """For every gathering, in the order of the program: how many have begun when it is waited for.

    Args:
        sizes: bytes of each. ahead_bytes: of those at most that have begun beyond the one that is waited for.
    """
    count = under_way = 0
    for number, size in enumerate(sizes):
        if count <= number:
            count, under_way = number + 1, size
        under_way -= size
        while count < len(sizes) and under_way + sizes[count] <= ahead_bytes:
            under_way += sizes[count]
            count += 1
        yield count


@dataclass(frozen=True)
class _Gathering:
    """Of a parameter for op number `op` of the stage, its first use in this layout."""

    op: int
    num_bytes: int
    seconds: float


def bytes_ahead(intra: IntraOp, assignment: Sequence[int], room: float) -> int:
    """`StagePlan.ahead_bytes` of an assignment, at most `room`."""
    gatherings = sorted(_gatherings(intra, assignment), key=lambda each: each.op)
    of_ops = zip(intra.ops, assignment[len(intra.parameters) :], strict=False)
    before = np.cumsum([0.0, *(float(options.forward_seconds[k]) for options, k in of_ops)])
    largest, total = max((each.num_bytes for each in gatherings), default=0), sum(each.num_bytes for each in gatherings)
    tried, ahead = [0], largest
    while 0 < ahead <= room and tried[-1] < total:
        tried.append(ahead)
        ahead *= 2
    seconds = [_forward_seconds(gatherings, before, each) for each in tried]
    return next(each for each, taken in zip(tried, seconds, strict=True) if taken <= min(seconds) * (1 + WORTH))


def _forward_seconds(gatherings: Sequence[_Gathering], before: np.ndarray, ahead_bytes: int) -> float:
    """Of a forward whose links do one gathering after the other. before: [ops + 1] seconds of the ops up to each."""
    waited = link = 0.0
    ends: list[float] = []
    for number, count in enumerate(begun([each.num_bytes for each in gatherings], ahead_bytes)):
        now = before[gatherings[number].op] + waited
        while len(ends) < count:
            link = max(link, now) + gatherings[len(ends)].seconds
            ends.append(link)
        waited += max(0.0, ends[number] - now)
    return float(before[-1] + waited)


def _gatherings(intra: IntraOp, assignment: Sequence[int]) -> Iterator[_Gathering]:
    offset, mesh = len(intra.parameters), intra.mesh
    for transfer, layouts in zip(intra.problem.transfers, intra.transfers, strict=True):
        if layouts.value not in intra.gathered_again:
            continue
        meta, source = intra.step.values[layouts.value], layouts.sources[transfer.source[assignment[transfer.producer]]]
        uses = [use for use in transfer.uses if not intra.is_per_step(use.choice)]
        first: dict[int, int] = {}
        for use in sorted(uses, key=lambda use: use.choice):
            first.setdefault(int(use.layout[assignment[use.choice]]), use.choice - offset)
        for column, op in first.items():
            target = layouts.targets[column]
            if is_gather(source, target) and op < len(intra.ops):
                steps = reshard_steps(source, target, mesh.shape)
                moved = [
                    (mesh.axes[s.axis], kind, round(s.share * meta.num_bytes))
                    for s in steps
                    for kind, phase in s.collectives(False)
                ]
                yield _Gathering(
                    op, local_bytes(meta, target, mesh.shape), sum(a.seconds(kind, n) for a, kind, n in moved)
                )
