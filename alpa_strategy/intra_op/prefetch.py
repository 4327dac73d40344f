"""How far ahead of its use a parameter is gathered (ZeRO-3): decided by the stage's own times, once it is solved.

A gathering that begins when its op is reached holds up the op. One that begins earlier goes on beside other ops, and
its parameter is whole for longer. As many bytes are on their way as hide what can be hidden, and as there is room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.decode import used_transfers
from alpa_strategy.intra_op.options import is_gather, local_bytes
from alpa_strategy.sharding.redistribute import reshard_steps


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


class _Gathering(NamedTuple):
    """Of a parameter for op number `op` of the stage, its first use in this layout."""

    op: int
    num_bytes: int
    seconds: float


def bytes_ahead(intra: IntraOp, assignment: Sequence[int], room: float) -> int:
    """`StagePlan.ahead_bytes` of an assignment, at most `room`."""
    gatherings = sorted(_gatherings(intra, assignment), key=lambda each: each.op)
    of_ops = zip(intra.ops, assignment[len(intra.parameters) :], strict=False)
    before = np.cumsum([0.0, *(float(options.forward_seconds[k]) for options, k in of_ops)])
    sizes = [each.num_bytes for each in gatherings]
    largest = max(sizes, default=1)
    doubled = (largest << k for k in range((sum(sizes) // largest).bit_length()))
    tried = [0, *(size for size in doubled if size <= room)]
    seconds = [_forward_seconds(gatherings, before, each) for each in tried]
    # What gains less than 0.5 % is not worth twice the memory.
    return next(each for each, taken in zip(tried, seconds, strict=True) if taken <= 1.005 * min(seconds))


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
    uses = [transfer.uses for transfer in intra.problem.transfers]
    for (value, source, targets), own in zip(used_transfers(intra, assignment), uses, strict=True):
        meta, op = intra.step.values[value], min(use.choice for use in own) - offset
        if value not in intra.gathered_again or op in intra.per_step.ops:
            continue
        for target in (target for target in targets if is_gather(source, target)):
            steps = reshard_steps(source, target, mesh.shape)
            moved = ((step, kind) for step in steps for kind, _ in step.collectives(differentiable=False))
            seconds = sum(mesh.axes[step.axis].seconds(kind, step.share * meta.num_bytes) for step, kind in moved)
            yield _Gathering(min(op, len(intra.ops)), local_bytes(meta, target, mesh.shape), seconds)
