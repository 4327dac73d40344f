"""A plan file with what belongs beside it: its details and its page."""

from pathlib import Path

from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin, details_path
from alpa_strategy.page.run_page import write_page
from alpa_strategy.planner.details import details_of
from alpa_strategy.planner.task import PlanTask


def store_plan(path: str | Path, plan: Plan, task: PlanTask, origin: Origin | None = None) -> Path:
    """Write a plan file, its details (if `details_of` has any) and its page, and return the path of
    the page.

    Args:
        path: of the plan file.
        plan: to be stored.
        task: what the plan was made for.
        origin: the recipe that it was made from, if it is known.

    Raises:
        OSError: a file cannot be written.
    """
    plan.save(path)
    details = details_of(task, plan, origin)
    if details is not None:
        details.save(details_path(path))
    return write_page(path, plan, details)
