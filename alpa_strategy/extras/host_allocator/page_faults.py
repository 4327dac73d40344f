"""Page faults of plans on CPUs: blocks that go back to the system in the midst of a step."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.extras.host_allocator.allocator import KEPT_BLOCKS, LEAST_BYTES
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.units import format_bytes, format_seconds

# Share of a step's seconds that page faults take at least, if blocks are returned to the system: up
# to 0.35 was measured.
PAGE_FAULTS = 0.15


def with_page_faults(plan: Plan, task: PlanTask, choose: Callable[[PlanTask], Plan]) -> Plan:
    """Return `plan` with the costs of page faults, or a plan without any.

    A plan with headroom for freed blocks has no page faults. It is taken if it is not slower than
    the best plan with its page faults, whose seconds are added to the prediction otherwise.

    Args:
        plan: the best one without page faults.
        task: its task, on CPUs.
        choose: returns the best plan of another task.
    """
    planned = plan.predicted
    limit_with_headroom = task.memory_limit / KEPT_BLOCKS
    if planned.peak_bytes <= max(limit_with_headroom, LEAST_BYTES):
        return plan

    faults = PAGE_FAULTS * planned.step_seconds
    options = replace(task.options, memory_limit=limit_with_headroom)
    with suppress(PlanError):
        other = choose(replace(task, options=options))
        if other.predicted.step_seconds <= planned.step_seconds + faults:
            return replace(other, fingerprint=plan.fingerprint)

    enough = format_bytes(KEPT_BLOCKS * planned.peak_bytes)
    note = (
        f"{format_seconds(faults)} of a step are page faults: it needs nearly all of the memory"
        f" limit, so freed memory goes back to the system at once. A limit of {enough} has none"
    )
    planned = replace(
        planned,
        step_seconds=planned.step_seconds + faults,
        compute_seconds=planned.compute_seconds + faults,
    )
    return replace(plan, predicted=planned, notes=(*plan.notes, note))
