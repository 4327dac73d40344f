"""Which reshardings of a program are launched before its forward.

For example, a mean over targets that are not ignored divides by their number among the samples of
all devices. When the loss needs it, all devices would wait for the slowest; launched first, it has
arrived long before.
"""

import math
from collections.abc import Mapping

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.placement import DualLayout, value_layout
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.ir.value_names import maker_names
from alpa_strategy.sharding.strategies import is_random


def early_reshardings(
    graph: StepGraph, stage: StagePlan, layouts: Mapping[int, DualLayout]
) -> tuple[str, ...]:
    """Return the names of the batch's leaves and ops whose results are resharded early.

    Args:
        graph: of the program.
        stage: its plan.
        layouts: `layouts_of_stage`.
    """
    names = maker_names(graph)
    resharded = []
    for value in early_values(graph):
        if _is_resharded(value, graph, stage, layouts):
            resharded.append(names[value])
    return tuple(dict.fromkeys(resharded))


def can_be_early(graph: StepGraph) -> set[str]:
    """Return the names of the batch's leaves, and of ops on them that could be resharded early."""
    names = maker_names(graph)
    return {names[value] for value in _values_of_batch(graph, math.inf)}


def early_values(graph: StepGraph) -> list[int]:
    """Return the batch's leaves, and values computed from them without parameters and randomness.

    Values with more bytes than the batch are left out, as they would be stored for longer. So are
    values computed from these.
    """
    batch_bytes = sum(graph.values[leaf.value].num_bytes for leaf in graph.batch)
    return _values_of_batch(graph, batch_bytes)


def _values_of_batch(graph: StepGraph, most_bytes: float) -> list[int]:
    """Return the batch's leaves and the values of at most `most_bytes` that are computed from them
    alone, without gradients and random numbers, in the order of the graph.
    """
    known = dict.fromkeys(leaf.value for leaf in graph.batch)
    readable = {constant.value for constant in graph.constant_inputs} | known.keys()
    for op in graph.ops:
        metas = [graph.values[value] for value in op.results]
        is_small = all(meta.num_bytes <= most_bytes for meta in metas)
        has_grad = any(meta.requires_grad for meta in metas)
        reads_batch = any(value in known for value in op.operands)
        reads_else = not readable.issuperset(op.operands)
        if not is_small or has_grad or not reads_batch or reads_else:
            continue
        if not is_random(op.call):
            known.update(dict.fromkeys(op.results))
            readable.update(op.results)
    return list(known)


def _is_resharded(
    value: int, graph: StepGraph, stage: StagePlan, layouts: Mapping[int, DualLayout]
) -> bool:
    """Whether a value is read in another layout than it has, or may leave the program in another
    one.
    """
    if value in graph.escaping or value in graph.sent:
        return True
    for index, position in graph.consumers.get(value, ()):
        strategies = stage.strategies[graph.ops[index].name]
        target = tuple(strategy.inputs[position] for strategy in strategies)
        if value_layout(target) != value_layout(layouts[value]):
            return True
    return False
