"""A step that is a planned one on a smaller batch (the last of an epoch): it runs under the same
layouts, without planning. So it needs no costs, and a resumed run computes it as the run before
did, whatever is measured where it goes on.
"""

import math
from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.plan_check import check_plan


def plan_on_smaller_batch(step: StepGraph, planned: StepGraph, running: Plan) -> Plan | None:
    """The plan of `step`: that of `planned`, where both are the same ops and no tensor of `step` is
    larger; None where it needs a plan of its own.

    Args:
        running: the plan of `planned`.
    """
    if running.is_pipelined or not _is_smaller(step, planned):
        return None
    try:
        num_devices = math.prod(running.stages[0].submesh)
        check_plan(running, step, num_devices)
    except PlanError:  # a dim that is divided has too few elements
        return None
    prints = running.fingerprint
    prints = replace(prints, graph=step.graph_digest, batch=step.batch_digest)
    return replace(running, fingerprint=prints)


def _is_smaller(step: StepGraph, planned: StepGraph) -> bool:
    if step.parameter_digest != planned.parameter_digest or len(step.ops) != len(planned.ops):
        return False
    is_same = all(
        (ours.name, ours.call.target_name, ours.operands)
        == (theirs.name, theirs.call.target_name, theirs.operands)
        for ours, theirs in zip(step.ops, planned.ops, strict=True)
    )
    if not is_same or len(step.values) != len(planned.values):
        return False
    return all(map(_fits_into, step.values, planned.values))


def _fits_into(ours: TensorMeta, theirs: TensorMeta) -> bool:
    if ours.dtype != theirs.dtype or len(ours.shape) != len(theirs.shape):
        return False
    return all(size <= planned for size, planned in zip(ours.shape, theirs.shape, strict=True))
