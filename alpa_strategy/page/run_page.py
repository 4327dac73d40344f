"""The page beside a plan file, and what a run has measured. No planner is needed for it."""

from pathlib import Path

from alpa_strategy.files import replacing
from alpa_strategy.ir.measured_steps import MeasuredSteps, measured_path
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import PlanDetails, details_of_file
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


def store_measured(path: str | Path, plan: Plan, measured: MeasuredSteps) -> Path:
    """Write what a run has measured beside its plan's file, and the page with it.

    Args:
        path: of the plan file.
        plan: of the run.
        measured: by the run.

    Raises:
        OSError: a file cannot be written.
        PlanError: the details beside the plan cannot be read.
    """
    measured.save(measured_path(path))
    return write_page(path, plan, details_of_file(path, plan), measured)
