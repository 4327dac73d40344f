"""Which of a step's sums over the devices can begin before the forward: those of the batch alone.

A mean over targets that are not ignored divides by their number among all devices' rows. Where the loss needs it, all
devices would wait for the slowest; begun first, it is there long before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor.placement_types import Partial

from alpa_strategy.capture.step_graph import Op, StepGraph
from alpa_strategy.sharding.localize import is_random
from alpa_strategy.sharding.op import AxisStrategy

MAX_SUM_NUMEL = 4096  # larger sums take bandwidth from the forward's own collectives
MAX_BATCHES = 2  # bytes that may be made early, in the batch's own: they might be kept for longer


def sums_of_the_batch(step: StepGraph, strategies: Mapping[str, tuple[str, ...]]) -> tuple[list[Op], frozenset[int]]:
    """(ops that make sums over devices of nothing but the batch, in the step's order; those sums' values).

    Args:
        strategies: op name -> the text of its `AxisStrategy` on every mesh axis.
    """
    makers: dict[int, Op] = {}
    known = {given.value for given in (*step.batch, *step.buffers, *step.constants)}
    for op in step.ops:
        plain = not any(step.values[value].requires_grad for value in op.results)
        if plain and known.issuperset(op.operands) and not is_random(op.call):
            makers |= dict.fromkeys(op.results, op)
            known.update(op.results)
    sums = frozenset(value for value, op in makers.items() if _is_small_sum(step, op, value, strategies))
    needed: set[str] = set()
    for value in sums:
        _add_ancestors(makers, makers[value], needed)
    first = [op for op in step.ops if op.name in needed]
    made = sum(step.values[value].num_bytes for op in first for value in op.results)
    if made > MAX_BATCHES * sum(step.values[given.value].num_bytes for given in step.batch):
        return [], frozenset()
    return first, sums


def _is_small_sum(step: StepGraph, op: Op, value: int, strategies: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the devices hold parts of `value` that must be added."""
    if step.values[value].num_elements > MAX_SUM_NUMEL:
        return False
    position = op.results.index(value)
    parsed = [AxisStrategy.parse(text) for text in strategies.get(op.name, ())]
    return any(strategy.outputs[position].value == Partial() for strategy in parsed)


def _add_ancestors(makers: Mapping[int, Op], op: Op, needed: set[str]) -> None:
    """Add the names of `op` and of all ops that it needs."""
    if op.name not in needed:
        needed.add(op.name)
        for value in op.operands:
            if value in makers:
                _add_ancestors(makers, makers[value], needed)
