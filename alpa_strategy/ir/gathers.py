"""Gathers of sharded values: which reshardings gather, their bytes, when they are launched."""

import math
from collections.abc import Iterator, Sequence

from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import DualLayout


def local_bytes(meta: TensorMeta, layout: DualLayout, mesh_shape: tuple[int, ...]) -> int:
    """Return the bytes of the largest shard of a value in `layout`: that of device 0."""
    # Planning asks this by the million: without the shards of other devices.
    shape = list(meta.shape)
    for placement, num_chunks in zip(layout, mesh_shape, strict=True):
        dim = placement.shard_dim
        if dim is not None:
            shape[dim] = -(-shape[dim] // num_chunks)
    return math.prod(shape) * meta.dtype.itemsize


def is_gather(source: DualLayout, target: DualLayout) -> bool:
    """Whether some axis goes from a shard to the full value: the target is a copy that can be
    re-gathered.
    """
    for before, after in zip(is_sharded(source), is_sharded(target), strict=True):
        if before and not after:
            return True
    return False


def is_sharded(layout: DualLayout) -> list[bool]:
    """Return, per mesh axis, whether the layout has a shard."""
    return [placement.shard_dim is not None for placement in layout]


def launched_counts(sizes: Sequence[int], prefetched_bytes: int) -> Iterator[int]:
    """Yield, per gather in the order of the program, how many gathers are launched when it is
    waited for.

    Args:
        sizes: bytes of each.
        prefetched_bytes: most bytes that are gathered in addition to the one that is waited for.
    """
    count = 0
    in_flight = 0
    for number, size in enumerate(sizes):
        if count <= number:
            count = number + 1
            in_flight = size
        in_flight -= size
        while count < len(sizes) and in_flight + sizes[count] <= prefetched_bytes:
            in_flight += sizes[count]
            count += 1
        yield count
