"""The values that leave a step: their layouts, and what they tell about other ranks' buffers."""

from collections.abc import Iterable, Mapping

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, DualLayout
from alpa_strategy.sharding.redistribute import reshard_steps


def leaving_layout(step: StepGraph, value: int, layout: DualLayout, mesh: MeshComm) -> DualLayout:
    """Return the layout in which a value leaves the step's program.

    Each device gets its own rank's value of those that ranks have, and the full value of others.
    Nothing reads the mean of the ranks' losses, where the backward begins: it may stay a sum.

    Args:
        value: one of `step.escaping`.
        layout: in which it is computed.
        mesh: the devices that run the step.
    """
    num_axes = len(mesh.shape)
    is_mean_loss = value == step.loss and step.loss_of_ranks >= 0
    if is_mean_loss and all(placement in (PARTIAL, INVARIANT) for placement in layout):
        return layout

    how = dict(step.of_ranks).get(value)
    # Blocks are in the order of ranks. Else a device's block is another rank's.
    if how is not None and mesh.is_in_order:
        return how.layout(num_axes)
    return (INVARIANT,) * num_axes


def reads_others_buffers(
    step: StepGraph,
    strategies: Mapping[str, tuple[AxisStrategy, ...]],
    layouts: Mapping[int, DualLayout],
    copies: Iterable[tuple[int, DualLayout]],
    mesh_shape: tuple[int, ...],
) -> bool:
    """Whether a value that a device computes from its buffers is communicated to another device.

    Only buffers that each rank updates from its own batch count: all others are the same on every
    rank.

    Args:
        strategies: op name -> strategies of the op.
        layouts: value -> layout in which it is computed.
        copies: (value, layout) of values that are resharded.
        mesh_shape: of the devices that run the step.
    """
    of_ranks = dict(step.of_ranks)
    dependent = {buffer.value for buffer in step.buffers if buffer.update in of_ranks}
    for op in step.ops:
        if dependent.isdisjoint(op.operands):
            continue
        dependent.update(op.results)
        if any(strategy.collectives for strategy in strategies[op.name]):
            return True

    for value, target in copies:
        if value in dependent:
            for reshard in reshard_steps(layouts[value], target, mesh_shape):
                if reshard.collectives(differentiable=False):
                    return True
    return False
