"""The segments of a stage that are recomputed one by one, chosen for the least memory."""

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_problem import balanced_groups, cost_of

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_solve import PricedStage

# Op positions at which a stage's recompute segments begin, and the costs of the stage with them.
Segmentation = tuple[tuple[int, ...], StageCost]


class RecomputeSegments:
    """Segmentations of the stages of one solver; those of equal stages are computed once."""

    def __init__(self) -> None:
        # By the stage's key: the first of `_halvings`, as far as they were tried.
        self._known: dict[Hashable, list[Segmentation]] = {}

    def least_memory(self, priced: "PricedStage", alive: float) -> tuple[int, ...]:
        """Return the starts of the segments that need least memory under the optimum without a
        limit.

        Half as many segments are tried, and half as many again, while they need less.

        Args:
            priced: the stage, with all starts that are possible.
            alive: (micro-batch, stage) pairs in flight on the mesh.
        """
        known = [] if priced.key is None else self._known.setdefault(priced.key, [])
        best = priced.request.starts
        least_bytes = math.inf
        if not known:
            known.append((best, cost_of(priced.finest, priced.free.assignment)))
        _, finest_cost = known[0]
        for index, count in enumerate(_halvings(len(best))):
            if index == len(known):
                known.append(_segmentation(priced, finest_cost, count))
            starts, cost = known[index]
            num_bytes = cost.num_bytes(alive, True)
            if num_bytes >= least_bytes:
                break
            best = starts
            least_bytes = num_bytes
        return best


def _halvings(count: int) -> Iterator[int]:
    """Yield `count`, half of it, and so on down to 1."""
    while count:
        yield count
        count //= 2


def _segmentation(priced: "PricedStage", finest_cost: StageCost, count: int) -> Segmentation:
    """Return a stage split into `count` recompute segments with graphs of about equal size, with
    its costs under the optimum without a limit.

    Many segments store more for every micro-batch in flight, few have larger graphs.

    Args:
        priced: the stage.
        finest_cost: its cost with a segment at each start that is possible.
        count: fewer than these.
    """
    positions = balanced_groups(finest_cost.again, count)
    fewer = tuple(priced.request.starts[position] for position in positions)
    return fewer, cost_of(priced.problem(fewer), priced.free.assignment)
