"""Placements and layouts: how one tensor is placed on a logical mesh, and how its gradient is.

A *layout* is one `torch.distributed.tensor` placement per mesh axis. A *dual placement* has, for
autograd, the placements of a value and of its gradient on the same axis.

Chunks are as even as possible: the first `size % n` of `n` chunks have one element more. So any dim
with at least `n` elements can be sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.errors import ShardingError


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return start and stop of chunk `index` of `size` elements in `num_chunks` chunks, the first
    `size % num_chunks` of which are larger by one.
    """
    base, extra = divmod(size, num_chunks)
    start = index * base + min(index, extra)
    length = base + (1 if index < extra else 0)
    return start, start + length


def chunk_sizes(size: int, num_chunks: int) -> tuple[int, ...]:
    """Return the sizes of all chunks, in order, as of `chunk_range`; they sum to `size`."""
    sizes = []
    for index in range(num_chunks):
        start, stop = chunk_range(size, num_chunks, index)
        sizes.append(stop - start)
    return tuple(sizes)


def placement_to_str(placement: Placement) -> str:
    """Return the short form of plans, tables and pins: `R`, `S0`, `P`."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


class Layout(tuple[Placement, ...]):
    """One placement per mesh axis, for example `Layout.parse("S0 R")` on a 2-D mesh."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Return the layout of a text in short form: placements separated by blanks.

        Raises:
            ShardingError: a word is no placement.
        """
        return value_layout(dual_layout(text))

    def __str__(self) -> str:
        return " ".join(map(placement_to_str, self))

    def slices(
        self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) per dim of the shard at `coordinate` of the mesh.

        Axes are applied in order: if two axes shard the same dim, the later one splits the chunk of
        the earlier one.

        Args:
            shape: of the global tensor.
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
        """Return the shape of the local tensor at `coordinate`."""
        return tuple(stop - start for start, stop in self.slices(shape, mesh_shape, coordinate))


@dataclass(frozen=True, eq=False)
class DualPlacement:
    """A value's placement on one axis together with its gradient's.

    There is one object of each (below, and `shard(dim)`). They are compared by identity, because
    planning hashes them by the million. Invariant and replicate differ as in `spmd_types`, which
    torchtitan uses: the gradient of a replicate value is partial, that of an invariant value is
    invariant.

    Four kinds exist, written as in plans (docs/formulas.md#sharding-rules):

    - `S<d>`: value `Shard(d)`, gradient `Shard(d)`.
    - `R`, invariant:  value `Replicate`, gradient `Replicate`: every device does the same work.
    - `R*`, replicate: value `Replicate`, gradient `Partial`: the devices of the axis divide the
      work that uses it.
    - `P`:    value `Partial("sum")`, gradient `Replicate`.
    """

    value: Placement
    grad: Placement

    # The sharded dim, or None.
    shard_dim: int | None = None

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
        """Return the placement written as `R`, `R*`, `P` or `S<dim>`.

        Raises:
            ShardingError: `text` is none of these.
        """
        unsharded = {"R": INVARIANT, "R*": REPLICATE, "P": PARTIAL}
        if text in unsharded:
            return unsharded[text]
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
    """Return the dual placement `S<dim>`."""
    return DualPlacement(Shard(dim), Shard(dim), dim)


# One placement per mesh axis.
DualLayout = tuple[DualPlacement, ...]


def dual_layout(text: str) -> DualLayout:
    """Return the dual layout of a text such as `"S0 R*"`.

    Raises:
        ShardingError: a word is no placement.
    """
    return tuple(DualPlacement.parse(word) for word in text.split())


def dual_layout_to_str(layout: DualLayout) -> str:
    """Return a dual layout as text: the inverse of `dual_layout`."""
    return " ".join(map(str, layout))


def value_layout(layout: DualLayout) -> Layout:
    """Return the layout of the value, without that of its gradient."""
    return Layout(placement.value for placement in layout)
