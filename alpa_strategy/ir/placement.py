"""Placements and layouts: how one tensor lies on a logical mesh, and how its gradient does.

A *layout* is one `torch.distributed.tensor` placement per mesh axis. A *dual placement* adds what
autograd needs to
know: where the value lies and where its gradient will lie on the same axis. Chunks are as even as
possible: the first
`size % n` of `n` chunks hold one element more, so that any dim with at least `n` elements can be
sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.errors import ShardingError


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk `index` when `size` elements are cut into `num_chunks` near-equal
    chunks.
    """
    base, extra = divmod(size, num_chunks)
    start = index * base + min(index, extra)
    return start, start + base + (1 if index < extra else 0)


def chunk_sizes(size: int, num_chunks: int) -> tuple[int, ...]:
    """Sizes of all chunks, in order; they sum to `size`."""
    return tuple(
        stop - start
        for start, stop in (chunk_range(size, num_chunks, i) for i in range(num_chunks))
    )


def placement_to_str(placement: Placement) -> str:
    """`R`, `S0`, `P`: the short form used in plans, tables and pins."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


class Layout(tuple[Placement, ...]):
    """One placement per mesh axis, for example `Layout.parse("S0 R")` on a 2-D mesh."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the short form: placements separated by blanks."""
        return value_layout(dual_layout(text))

    def __str__(self) -> str:
        return " ".join(map(placement_to_str, self))

    def slices(
        self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """(start, stop) per dim of the part of a tensor of global `shape` that the device at
        `coordinate` holds.

        Axes are applied in order: an axis that shards a dim already sharded by an earlier axis cuts
        that chunk again.
        """
        ranges = [(0, size) for size in shape]
        for placement, num_chunks, index in zip(self, mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, stop = ranges[placement.dim]
                low, high = chunk_range(stop - start, num_chunks, index)
                ranges[placement.dim] = (start + low, start + high)
        return tuple(ranges)

    def local_shape(
        self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[int, ...]:
        """Shape of the local tensor at `coordinate`."""
        return tuple(stop - start for start, stop in self.slices(shape, mesh_shape, coordinate))


@dataclass(frozen=True, eq=False)
class DualPlacement:
    """A value's placement on one axis together with its gradient's.

    There is one object of each (below, and `shard(dim)`), compared by identity: planning hashes
    them by the million. Invariant and replicate are told apart as in `spmd_types`, which torchtitan
    uses: the gradient of what is replicate is partial, that of what is invariant is invariant too.

    Four kinds exist, written as in plans (docs/formulas.md#sharding-rules):

    - `S<d>`: value `Shard(d)`, gradient `Shard(d)`.
    - `R`, invariant:  value `Replicate`, gradient `Replicate`: every device does the same work.
    - `R*`, replicate: value `Replicate`, gradient `Partial`: the devices of the axis divide the
      work that uses it.
    - `P`:    value `Partial("sum")`, gradient `Replicate`.
    """

    value: Placement
    grad: Placement
    shard_dim: int | None = None  # the sharded dim, or None

    def __str__(self) -> str:
        if isinstance(self.value, Replicate) and isinstance(self.grad, Partial):
            return "R*"
        return placement_to_str(self.value)

    __repr__ = __str__

    # Unpickled to the one object of its kind: they are compared by identity.
    def __reduce__(self) -> tuple:
        return DualPlacement.parse, (str(self),)

    @classmethod
    @cache
    def parse(cls, text: str) -> "DualPlacement":
        """Read `R`, `R*`, `P`, `S<d>`."""
        if (named := {"R": INVARIANT, "R*": REPLICATE, "P": PARTIAL}.get(text)) is not None:
            return named
        if text[:1] == "S" and text[1:].isdigit():
            return shard(int(text[1:]))
        raise ShardingError(
            f"{text!r} is not a placement", "write R, R*, P or S<dim>, for example S0"
        )


INVARIANT = DualPlacement(Replicate(), Replicate())
REPLICATE = DualPlacement(Replicate(), Partial("sum"))
PARTIAL = DualPlacement(Partial("sum"), Replicate())


@cache
def shard(dim: int) -> DualPlacement:
    """The dual placement `S<dim>`."""
    return DualPlacement(Shard(dim), Shard(dim), dim)


DualLayout = tuple[DualPlacement, ...]  # one per mesh axis


def dual_layout(text: str) -> DualLayout:
    """Read a dual layout such as `"S0 R*"`."""
    return tuple(DualPlacement.parse(part) for part in text.split())


def dual_layout_to_str(layout: DualLayout) -> str:
    """Inverse of `dual_layout`."""
    return " ".join(map(str, layout))


def value_layout(layout: DualLayout) -> Layout:
    """The values' layout of a dual layout."""
    return Layout(d.value for d in layout)
