"""Which values can be brought to where they are needed before the forward: those made of the batch alone.

A mean over targets that are not ignored divides by their number among all devices' rows. Where the loss needs it, all
devices would wait for the slowest; begun first, it is there long before.
"""

from __future__ import annotations

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.sharding.localize import is_random


def made_of_the_batch(step: StepGraph) -> frozenset[int]:
    """The batch's leaves and what is computed of them without parameters and random numbers.

    Values with more bytes than the batch, and what needs them, are left out: they would be kept for longer.
    """
    known = {leaf.value for leaf in step.batch}
    most = sum(step.values[leaf.value].num_bytes for leaf in step.batch)
    given = {given.value for given in (*step.buffers, *step.constants)}
    for op in step.ops:
        metas = [step.values[value] for value in op.results]
        small = all(meta.num_bytes <= most and not meta.requires_grad for meta in metas)
        of_batch = any(value in known for value in op.operands) and (known | given).issuperset(op.operands)
        if small and of_batch and not is_random(op.call):
            known.update(op.results)
    return frozenset(known)
