"""PlanPages: the pages of a training's plans, written after its first steps.

A page and the details of its plan take about a sixth of the time to the first step, and no step
needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alpa_strategy.ir.measured_steps import MeasuredSteps, measured_path
from alpa_strategy.ir.plan import Plan

if TYPE_CHECKING:
    from alpa_strategy.ir.plan_details import PlanDetails
    from alpa_strategy.planner.plan_store import PlanStore


@dataclass(frozen=True)
class _ExpectedPage:
    """A page that is to be written."""

    # A plan that `store` has.
    plan: Plan
    store: "PlanStore"

    # Makes the plan's details.
    details: "Callable[[], PlanDetails | None]"

    # Whether this job has made the plan. Then it uploads the page, too.
    is_new: bool


class PlanPages:
    """The pages that a training will write. Only ranks that make plans have any."""

    def __init__(self) -> None:
        self._expected: dict[Path, _ExpectedPage] = {}

    def expect(
        self,
        plan: Plan,
        store: "PlanStore",
        details: "Callable[[], PlanDetails | None]",
        is_new: bool,
    ) -> None:
        """Remember a stored plan without page or details, to write them later.

        Args:
            plan: that `store` has.
            store: of plans.
            details: makes the plan's details.
            is_new: whether this job has made the plan.
        """
        path = store.path(plan.fingerprint)
        self._expected[path] = _ExpectedPage(plan, store, details, is_new)

    def write(self, path: Path, plan: Plan, measured: MeasuredSteps | None = None) -> Path:
        """Write the page of a plan file, and return its path.

        Args:
            path: of the plan file.
            plan: of the file.
            measured: by this training. It is stored as well, and details that are missing are
                made. None: the page has no new details.

        Raises:
            OSError: a file cannot be written.
            AlpaError: the details cannot be read or made.
        """
        # Pages are drawn by one rank, and not before its first step.
        from alpa_strategy.ir.plan_details import details_of_file, details_path
        from alpa_strategy.page.run_page import write_page

        expected = self._expected.pop(path, None)
        details = details_of_file(path, plan)
        if measured is not None:
            measured.save(measured_path(path))
            if details is None and expected is not None:
                details = expected.details()
                if details is not None:
                    details.save(details_path(path))
        page = write_page(path, plan, details, measured)
        if expected is not None and expected.is_new:
            expected.store.put_companions(plan)
        return page

    def missing(self) -> list[tuple[Path, Plan]]:
        """Return path and plan of each page that is not written yet."""
        return [(path, expected.plan) for path, expected in self._expected.items()]
