"""A model by name under changes: `alpa whatif hf:...`. A step is captured once for all clusters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.fit.changes import FitCase, plan_case
from alpa_strategy.fit.command import read_options
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.fit.task import FitTask, captured
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.task import PlanTask, Progress


class CapturedRequests:
    """The captured steps of requests that differ in some fields."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        # By the request without its optimizer, which no captured step has.
        self._tasks: dict[FitRequest, FitTask] = {}

    def planning(
        self, request: FitRequest, cluster: ClusterSpec, overrides: Sequence[str]
    ) -> tuple[PlanTask, Callable[[], Plan]]:
        """Return the planner's task of a request, and a function that plans it. Requests that
        differ in their optimizer alone share a captured step, of the devices of the first one's
        cluster.

        Args:
            request: what is asked.
            cluster: to plan for.
            overrides: `strategy.key=value`, options of the plan.

        Raises:
            AlpaError: the request is wrong, or its step cannot be captured. The function raises
                PlanError if nothing fits.
        """
        key = replace(request, optimizer="adamw")
        if key not in self._tasks:
            self._tasks[key] = captured(request, cluster.num_devices, self.progress)
        task = self._tasks[key]
        task = replace(task, request=replace(task.request, optimizer=request.optimizer))
        case = FitCase(task, cluster, read_options(overrides))
        plan_task = task.plan_task(cluster, case.options, self.progress)
        return plan_task, lambda: plan_case(case, self.progress)
