"""Buckets: gradients that are reduced together, by one collective after another."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from alpa_strategy.ir.placement import chunk_sizes
from alpa_strategy.runtime.sharded_parameter import ShardedParameter

# Is called with parameters whose gradients are complete, while others are still reduced.
Completed = Callable[[Sequence[nn.Parameter]], None]


class Bucket:
    """Gradients that go through the same collectives together.

    Args:
        parameters: of these gradients.
        needed: names of the parameters that have a gradient afterwards, with a local one or not.
        scale: by what the sums are multiplied.
    """

    def __init__(
        self, parameters: list[ShardedParameter], needed: Collection[str], scale: float
    ) -> None:
        self.parameters = parameters
        self.needed = needed
        self._scale = scale

        # Per collective the sums of all gradients: over the same axis, each along a dim of its own.
        sums = (sharded.to_use.gradient_sums for sharded in parameters)
        self._collectives = list(zip(*sums, strict=True))

        # The reduction, stopped while a collective is in flight; None before `start`.
        self.running: Iterator[None] | None = None

    def start(self) -> None:
        """Take the local gradients, and start the first collective."""
        self.running = self._reduce()
        next(self.running)

    def advance(self) -> bool:
        """Wait for the collective in flight and start the next one.

        Returns:
            False if there was no next one: the gradients are stored in their parameters.
        """
        assert self.running is not None
        return next(self.running, False) is None

    def _reduce(self) -> Iterator[None]:
        """Run one collective after another, and store the gradients in their parameters in the end.

        Yields:
            None while a collective is in flight.
        """
        # A gradient that an earlier backward has reduced, and to which this one does not add, stays
        # as it is.
        grads = []
        is_reduced = []
        for sharded in self.parameters:
            takes_part = sharded.has_local_gradient or sharded.name in self.needed
            is_reduced.append(takes_part)
            grads.append(sharded.take_gradient() if takes_part else sharded.no_gradient())

        for sums in self._collectives:
            axis = sums[0].axis
            shapes = [grad.shape for grad in grads]
            dims = [gradient_sum.dim for gradient_sum in sums if gradient_sum.dim is not None]
            if not dims:
                pending = axis.start_all_reduce(flat_gradients(grads, self._scale))
                sizes = [shape.numel() for shape in shapes]
            else:
                pending = axis.start_reduce_scatter(_rows(grads, dims, axis.size, self._scale))
                # Chunks are padded to the size of the first.
                splits = list(zip(shapes, dims, strict=True))
                sizes = [chunk_shape(shape, dim, axis.size, 0).numel() for shape, dim in splits]
                shapes = [chunk_shape(shape, dim, axis.size, axis.index) for shape, dim in splits]

            # The gradients are in the collective's input: not twice in memory.
            grads = []
            yield
            for flat, shape in zip(pending.wait().split(sizes), shapes, strict=True):
                grads.append(flat[: shape.numel()].view(shape))

        for sharded, takes_part, grad in zip(self.parameters, is_reduced, grads, strict=True):
            if takes_part:
                sharded.put_gradient(grad)


def finish_buckets(buckets: list[Bucket], completed: Completed | None = None) -> None:
    """Wait for buckets that have started; all devices advance them in the same order.

    Args:
        buckets: that have started.
        completed: called with the parameters of each bucket that is done, but not of the last one.
    """
    while buckets:
        running = []
        for bucket in buckets:
            if bucket.advance():
                running.append(bucket)
                continue
            others_in_flight = bool(running) or bucket is not buckets[-1]
            if completed is not None and others_in_flight:
                completed([sharded.parameter for sharded in bucket.parameters])
        buckets = running


def flat_gradients(grads: Sequence[Tensor], scale: float) -> Tensor:
    """Return a new tensor with all elements of the gradients, one after the other, times `scale`.

    Args:
        grads: of one dtype and device.
    """
    if scale == 1.0:
        return torch.cat([grad.reshape(-1) for grad in grads])

    sizes = [grad.numel() for grad in grads]
    flat = grads[0].new_empty(sum(sizes))
    for grad, piece in zip(grads, flat.split(sizes), strict=True):
        # Scaled in the pass that copies, as DDP does.
        torch.mul(grad, scale, out=piece.view(grad.shape))
    return flat


def _rows(grads: Sequence[Tensor], dims: Sequence[int], count: int, scale: float) -> Tensor:
    """Return [count, elements]: a row for each device, with its chunks of all gradients.

    Args:
        grads: all gradients.
        dims: of each gradient the dim that is split over the devices.
        count: number of devices. Each chunk is padded to the size of the largest.
        scale: by what the gradients are multiplied.
    """
    splits = list(zip(grads, dims, strict=True))
    widths = [chunk_shape(grad.shape, dim, count, 0).numel() for grad, dim in splits]
    rows = grads[0].new_zeros((count, sum(widths)))
    for (grad, dim), columns in zip(splits, rows.split(widths, 1), strict=True):
        chunks = grad.split(chunk_sizes(grad.shape[dim], count), dim)
        for row, chunk in zip(columns, chunks, strict=True):
            torch.mul(chunk, scale, out=row[: chunk.numel()].view(chunk.shape))
    return rows


def chunk_shape(shape: torch.Size, dim: int, count: int, index: int) -> torch.Size:
    """Return the shape of chunk `index` of `count` along `dim`; the first is the largest."""
    sizes = list(shape)
    sizes[dim] = chunk_sizes(shape[dim], count)[index]
    return torch.Size(sizes)
