"""What a program can overlap of a matmul and a sum over devices (`lower/overlapped_matmul.py`).

The prices of layouts (`intra_op/overlap.py`) and the programs of a plan
(`planner/matmul_overlap.py`) both ask here.
"""

from alpa_strategy.capture.products import Product, product_of
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.placement import DualLayout, value_layout
from alpa_strategy.sharding.redistribute import gradient_sums, value_sums

# Ways to compute a matmul on shards; None: as the op itself.
IMPLEMENTATIONS = (None, "bias_on_first")


def overlapping_matmul(call: OpCall) -> Product | None:
    """Return the matmul of samples and a weight that an op is; None if it is something else, or its
    arguments change from step to step.
    """
    return None if is_symbolic(call) else product_of(call)


def sums_gradient(source: DualLayout, target: DualLayout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether bringing a gradient back from `target` to `source` is one sum over devices."""
    return len(gradient_sums(source, target, mesh_shape)) == 1


def is_in_segments(call: OpCall, matmul: Product) -> bool:
    """Whether the result of a matmul has one dim more than its samples, as a fused projection's."""
    return len(call.results[0].shape) != len(call.operands[matmul.rows].shape)


def chunk_dims(
    shape: tuple[int, ...], source: DualLayout, target: DualLayout, mesh_shape: tuple[int, ...]
) -> dict[int, int]:
    """Return the dims in whose chunks the result of a matmul can be summed, with the sizes that the
    last device has of them; none if bringing it from `source` to `target` is not one sum.

    Args:
        shape: of the full result, [*rows, n].
        source: the layout in which it is computed.
        target: the layout in which it is read.
        mesh_shape: of the devices.
    """
    sums = value_sums(source, target, mesh_shape)
    if len(sums) != 1:
        return {}
    last = tuple(size - 1 for size in mesh_shape)
    sizes = value_layout(source).local_shape(shape, mesh_shape, last)
    # Any dim but the last, and the one that the sum shards.
    dims = {}
    for dim, size in enumerate(sizes[:-1]):
        if dim != sums[0].dim:
            dims[dim] = size
    return dims


def most_chunks(
    shape: tuple[int, ...], source: DualLayout, target: DualLayout, mesh_shape: tuple[int, ...]
) -> int:
    """Return the largest number of chunks in which the result of a matmul can be summed; at most 1:
    it cannot. For the arguments see `chunk_dims`.
    """
    return max(chunk_dims(shape, source, target, mesh_shape).values(), default=0)
