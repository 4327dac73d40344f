"""The seconds of a stage without the communication that is hidden behind its computation.

The integer programs add up computation and communication. The run begins to reduce gradients during
the backward, and to gather parameters (ZeRO-3) before they are used. On a cluster with `overlap`,
that share of such communication costs no time, as far as there is computation to hide it.
Collectives between two ops (tensor parallelism) are not hidden here, see `intra_op/overlap.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.decode import Message, messages
from alpa_strategy.intra_op.options import REDUCTIONS


@dataclass
class _Communication:
    """Seconds of an assignment's messages."""

    # All messages of a phase.
    forward: float = 0.0
    backward: float = 0.0

    # Of parameters: what is gathered for uses in the forward; what is re-gathered, and summed,
    # in the backward; and what is gathered and reduced once per step.
    used_forward: float = 0.0
    used_backward: float = 0.0
    gathered_once: float = 0.0
    reduced_once: float = 0.0

    def add(self, message: Message, intra: IntraOp) -> None:
        """Add the seconds of a message to the sums of its phase. Messages once a step count only if
        they are of a parameter.
        """
        if message.phase == "step":
            if not message.of_parameter:
                return
            seconds = message.seconds_together(intra)
            if message.kind in REDUCTIONS:
                self.reduced_once += seconds
            else:
                self.gathered_once += seconds
            return

        seconds = message.seconds(intra)
        is_forward = message.phase == "forward"
        if is_forward:
            self.forward += seconds
        else:
            self.backward += seconds
        if message.of_parameter and is_forward:
            self.used_forward += seconds
        elif message.of_parameter:
            self.used_backward += seconds


def without_hidden(
    intra: IntraOp, assignment: Sequence[int], cost: StageCost, prefetch: bool | None
) -> StageCost:
    """Return the cost of an assignment without the seconds that overlap with computation; unchanged
    on a cluster without `overlap`.

    Args:
        cost: with sums of seconds.
        prefetch: as of `stage_problem.cost_of`.
    """
    if not intra.mesh.overlap:
        return cost
    if prefetch is None:
        return without_reductions(intra, assignment, cost)
    return without_prefetched(intra, assignment, cost, gathers_early=prefetch)


def without_reductions(intra: IntraOp, assignment: Sequence[int], cost: StageCost) -> StageCost:
    """Return `cost` with less `once`: a pipeline's stage reduces gradients during the backward of
    the last micro-batch, whose computation hides the share `mesh.overlap` of them.

    Args:
        assignment: strategy of every choice of `intra.problem`.
        cost: with all communication added to the seconds of computation.
    """
    communication = _communication(intra, assignment)
    computing = max(0.0, cost.backward - communication.backward)
    hidden = min(communication.reduced_once, computing)
    return replace(cost, once=cost.once - intra.mesh.overlap * hidden)


def without_prefetched(
    intra: IntraOp, assignment: Sequence[int], cost: StageCost, gathers_early: bool
) -> StageCost:
    """Return the cost of one stage on all devices without the seconds that computation hides: less
    of `forward` and `backward` (only if `gathers_early`) and of `once`.

    Copies for the whole step are gathered during the forward (`MeshParameters.step_inputs`), and
    gradients that are reduced once are reduced during the backward.

    Args:
        assignment: strategy of every choice of `intra.problem`.
        cost: with all communication added to the seconds of computation.
        gathers_early: whether there is memory to gather parameters before they are used, and to sum
            their gradients during the backward (`StagePlan.prefetched_bytes`).
    """
    communication = _communication(intra, assignment)
    overlap = intra.mesh.overlap
    # Of the forward and the backward, what computation has left to hide.
    in_forward = max(0.0, cost.forward - communication.forward)
    in_backward = max(0.0, cost.backward - communication.backward)

    used_forward = used_backward = 0.0
    if gathers_early:
        used_forward = min(communication.used_forward, in_forward)
        used_backward = min(communication.used_backward, in_backward)
    gathered_once = min(communication.gathered_once, in_forward - used_forward)
    reduced_once = min(communication.reduced_once, in_backward - used_backward)
    return replace(
        cost,
        forward=cost.forward - overlap * used_forward,
        backward=cost.backward - overlap * used_backward,
        once=cost.once - overlap * (gathered_once + reduced_once),
    )


def _communication(intra: IntraOp, assignment: Sequence[int]) -> _Communication:
    """Return the seconds of an assignment's messages."""
    total = _Communication()
    for message in messages(intra, assignment):
        total.add(message, intra)
    return total
