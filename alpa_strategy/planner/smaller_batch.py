"""A step that is a planned one on a smaller batch (the last of an epoch): it runs under the same
layouts, without planning. So it needs no costs, and a resumed run computes it as the run before
did, whatever is measured where it goes on.
"""

import math
from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.plan_check import check_plan

BatchShapes = list[list[int]]


def batch_shapes(step: StepGraph) -> BatchShapes:
    """Return the shapes of the step's batch, of all ranks together: plain data."""
    return [list(step.values[leaf.value].shape) for leaf in step.batch]


def plan_on_smaller_batch(
    step: StepGraph, planned: BatchShapes | None, running: Plan
) -> Plan | None:
    """Return the running plan if it can execute `step`: the same ops on a batch that is nowhere
    larger. None if it cannot, for a pipeline, and if `planned` is None.

    Args:
        planned: `batch_shapes` of the step that `running` was made for; None: unknown.
    """
    if planned is None or running.is_pipelined or not _fit_into(batch_shapes(step), planned):
        return None
    if running.fingerprint.parameters != step.parameter_digest:
        return None
    try:
        check_plan(running, step, math.prod(running.stages[0].submesh))
    except PlanError:  # other ops, or a dim that is divided has too few elements
        return None
    prints = running.fingerprint
    prints = replace(prints, graph=step.graph_digest, batch=step.batch_digest)
    return replace(running, fingerprint=prints)


def _fit_into(ours: BatchShapes, theirs: BatchShapes) -> bool:
    """Return whether tensors of shapes `ours` fit into those of `theirs`, dim by dim."""
    if [len(shape) for shape in ours] != [len(shape) for shape in theirs]:
        return False
    pairs = [
        pair for shapes in zip(ours, theirs, strict=True) for pair in zip(*shapes, strict=True)
    ]
    return all(size <= planned for size, planned in pairs)
