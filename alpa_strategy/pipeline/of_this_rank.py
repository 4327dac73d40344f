"""The values that one rank's step has, out of those of a step on the batches of all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.graph import StepGraph


def of_this_rank(
    step: StepGraph, values: Mapping[int, Tensor], rank: int, num_ranks: int
) -> dict[int, Tensor]:
    """Return the values that leave the step of one rank.

    They have no autograd graph but for the loss. Of a graph without a loss (submodules of an eager
    step), all have one: a backward of the user's own step goes through them.

    Args:
        step: the step of all ranks.
        values: its values by number. Those of `step.of_ranks` hold the values of `num_ranks` ranks.
        rank: index of this rank among them.
    """
    local_values = dict(values)
    for value, how in step.of_ranks:
        if value not in values:
            continue
        if step.loss < 0:
            local_values[value] = how.of(values[value], rank, num_ranks)
        else:
            local_values[value] = how.of(values[value].detach(), rank, num_ranks).clone()
    if step.loss_of_ranks in local_values:
        local_loss = local_values[step.loss_of_ranks]
        local_values[step.loss_of_ranks] = _LossOfRank.apply(values[step.loss], local_loss)
    return local_values


class _LossOfRank(torch.autograd.Function):
    """(mean of the ranks' losses, this rank's) -> this rank's, with the gradient of the mean.

    The backward of the step of all ranks begins at the mean. Users see the loss of their rank.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, local_loss: Tensor) -> Tensor:
        ctx.shape = mean.shape
        return local_loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.shape), None
