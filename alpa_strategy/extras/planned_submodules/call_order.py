"""CallOrder: ranks whose code is their own make the same collective calls, or learn who does not.

Each rank runs the user's step on its own batch, and some calls of that code need all ranks. Before
each of them the ranks exchange what they are about to call. If they differ, all raise one error,
where collectives alone would hang, or mix what does not belong together.
"""

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.collectives import all_gather_object, all_reduce_max, world_size
from alpa_strategy.errors import UnlikeStepsError


class CallOrder:
    """The calls that all ranks of a group make together.

    Args:
        group: the ranks; None: all ranks of the job.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_alone = world_size(group) == 1

        # A call or choice -> its number, the same on every rank.
        self._numbers: dict[Hashable, int] = {}

    def meet(self, call: str, choice: Hashable = None) -> bool:
        """Wait until all ranks are about to make `call`. Collective, between hosts.

        Args:
            call: names it in messages.
            choice: how this rank would make it.

        Returns:
            Whether all ranks have the same `choice`.

        Raises:
            UnlikeStepsError: on all ranks: their calls differ.
        """
        if self._is_alone:
            return True
        number = self._number(call)
        chosen = self._number(choice)
        largest = all_reduce_max([number, -number, chosen, -chosen], self._group)
        if largest[0] != -largest[1]:
            calls = all_gather_object(call, self._group)
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            raise UnlikeStepsError(
                f"the ranks' steps need each other for different things: {texts}",
                "let the steps of all ranks call the same submodules in the same order, or leave"
                " out the option that divides submodules over ranks (parallel, placements,"
                " logical_mesh): then each rank's step may differ, as under DDP",
            )
        return largest[2] == -largest[3]

    def in_backward(self, call: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return copies of tensors that require gradients, before whose backward the ranks meet."""
        return _MeetInBackward.apply(self, f"the backward of {call}", *tensors)

    def _number(self, value: Hashable) -> int:
        """Return a number of at most 63 bits, the same on every rank."""
        if value not in self._numbers:
            digest = hashlib.sha256(repr(value).encode()).digest()
            self._numbers[value] = int.from_bytes(digest[:8], "big") >> 1
        return self._numbers[value]


class _MeetInBackward(torch.autograd.Function):
    """(order, call, *tensors) -> copies of the tensors.

    One node has the gradients of all of them, so that the collectives of their backward run on a
    rank whose loss does not depend on some of them, too.
    """

    @staticmethod
    def forward(ctx: Any, order: CallOrder, call: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return copies of `tensors`, whose backward meets the other ranks for `call`."""
        ctx.order = order
        ctx.call = call
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.order.meet(ctx.call)
        return None, None, *grads
