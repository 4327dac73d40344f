"""Whether the values of a step tell about other ranks' buffers."""

from collections.abc import Iterable, Mapping

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.sharding.redistribute import reshard_steps


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
