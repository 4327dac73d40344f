"""The page beside a plan file. No planner is needed for it."""

from pathlib import Path

from alpa_strategy.files import replacing
from alpa_strategy.ir.measured_steps import MeasuredSteps
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import PlanDetails
from alpa_strategy.page.page import page_path, plan_page


def write_page(
    path: str | Path,
    plan: Plan,
    details: PlanDetails | None,
    measured: MeasuredSteps | None = None,
) -> Path:
    """Write the page of a plan file beside it, and return its path.

    Args:
        path: of the plan file.
        plan: of the file.
        details: of its parameters and ops; None: the page has the plan alone.
        measured: by a run of the plan; None: nothing.

    Raises:
        OSError: the page cannot be written.
    """
    with replacing(page_path(path), durable=False) as temporary:
        page = plan_page(plan, details, Path(path).name, measured)
        temporary.write_text(page, encoding="utf-8")
    return page_path(path)
