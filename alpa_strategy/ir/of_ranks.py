"""Values of single ranks in a step on the batches of all ranks."""

from dataclasses import dataclass

from torch import Tensor

from alpa_strategy.ir.placement import DualLayout, shard


@dataclass(frozen=True)
class OfRanks:
    """How a value that leaves the step holds the value of every rank.

    A rank's value is its block along `dim`. Of a number per rank it is the rank's item.
    """

    # Dim along which the ranks' tensors follow one another, in rank order.
    dim: int

    # Whether each rank has a number: the value has one item per rank.
    is_number: bool = False

    def layout(self, num_axes: int) -> DualLayout:
        """Return the layout in which each device of a mesh has one rank's value, in rank order."""
        return (shard(self.dim),) * num_axes

    def of(self, tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return the value of `rank`, a view."""
        if self.is_number:
            return tensor.select(self.dim, rank)
        size = tensor.shape[self.dim] // num_ranks
        return tensor.narrow(self.dim, rank * size, size)
