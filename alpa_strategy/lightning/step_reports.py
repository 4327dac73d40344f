"""StepReports: who looks at a training's steps: the Trainer's loggers, a profile, and the page."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.measured_steps import MeasuredSteps, measured_of_file
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.logger_report import LoggerReport
from alpa_strategy.lightning.plan_pages import PlanPages

if TYPE_CHECKING:
    from alpa_strategy.lightning.sharded_run import ShardedRun
    from alpa_strategy.lightning.step_profile import StepProfile


class StepReports:
    """Reports the steps of a `trainer.fit` to all that want to know.

    Args:
        strategy: with its options.
        trainer: of the training; None: nothing is reported.
    """

    def __init__(self, strategy: Any, trainer: Any = None) -> None:
        self._logger_report: LoggerReport | None = None
        self._is_first_rank = trainer is not None and strategy.global_rank == 0
        if self._is_first_rank and strategy.limits.log_plan:
            self._logger_report = LoggerReport(trainer)
        self._profile = None if trainer is None else _profile_of(strategy)

        # Pages of the plans that the training makes.
        self.pages = PlanPages()

        # The plan whose page has the measured step.
        self._written: Plan | None = None

    def begin_batch(self, run: "ShardedRun | None") -> None:
        """Count a training batch that begins, after the module is sharded (None: it is not), for
        the profile, the logger's report and the plan's page.
        """
        if run is None:
            return
        if self._profile is not None:
            self._profile.begin_batch(run)
        if self._logger_report is not None:
            self._logger_report.begin_batch(run)
        if run.measured_step_seconds is None or run.plan is self._written:
            return
        # The page has the profile as well, if there will be one.
        if self._profile is None or self._profile.is_over:
            self._write_measured_page(run)

    def end(self, run: "ShardedRun | None") -> None:
        """Report what is left when the training ends. Collective.

        Args:
            run: of the training; None: nothing that was measured is reported.
        """
        if run is not None:
            run.finish_measuring()
        if self._profile is not None:
            self._profile.end(run)
        self._write_pages(run)

    def close(self, run: "ShardedRun | None") -> None:
        """Stop, after errors as well. No communication."""
        if self._profile is not None:
            self._profile.close()
        self._write_pages(run)

    def _write_pages(self, run: "ShardedRun | None") -> None:
        """Write all pages that are not written yet, on the first rank: of measured steps, if there
        is a run, and of plans.
        """
        if run is not None:
            self._write_measured_page(run)
        if self._is_first_rank:
            for path, plan in self.pages.missing():
                if path.exists():
                    self._write_page(run, path, plan)

    def _write_measured_page(self, run: "ShardedRun") -> None:
        """Write the page of the running plan with what was measured, once, on the first rank.

        Nothing is written if nothing was measured, or if the plan is not stored.
        """
        if not self._is_first_rank or run.plan is self._written:
            return
        profiled = None if self._profile is None else self._profile.profiled
        if run.measured_step_seconds is None and profiled is None:
            return
        self._written = run.plan
        path = run.plan_path
        if path.exists():
            measured = run.measured_steps(profiled)
            if profiled is None:
                measured = _with_earlier_profile(measured, path, run.plan)
            self._write_page(run, path, run.plan, measured)

    def _write_page(
        self,
        run: "ShardedRun | None",
        path: Path,
        plan: Plan,
        measured: MeasuredSteps | None = None,
    ) -> None:
        """Write the page of a plan file, and print its path, or why it cannot be written, if there
        is a run to print it.

        Args:
            measured: as of `PlanPages.write`.
        """
        started = time.perf_counter()
        try:
            line = f"alpa: the plan's page is {self.pages.write(path, plan, measured)}"
        except (OSError, AlpaError) as error:
            line = f"alpa: the plan's page cannot be stored: {error}"
        if run is not None:
            run.say(line)
        if self._logger_report is not None:
            self._logger_report.leave_out(time.perf_counter() - started)


def _with_earlier_profile(measured: MeasuredSteps, path: Path, plan: Plan) -> MeasuredSteps:
    """Return the measurements of a run, with the profile that an earlier training has stored beside
    the plan, if any. The profile keeps the prediction for its own run.

    Args:
        path: of the plan.
    """
    try:
        earlier = measured_of_file(path, plan)
    # The file is written anew.
    except AlpaError:
        return measured
    if earlier is None or earlier.profiled is None:
        return measured
    predicted = earlier.profile_predicted_seconds
    if predicted is None:
        predicted = plan.predicted.step_seconds
    return replace(measured, profiled=earlier.profiled, earlier_predicted_seconds=predicted)


def _profile_of(strategy: Any) -> "StepProfile | None":
    """Return the profile that the option `profile_steps` requires; None without it."""
    steps = strategy.limits.profile_steps
    if steps is None:
        return None

    # torch's profiler, the runtime and the page: for those alone who profile.
    from alpa_strategy.lightning.step_profile import StepProfile

    return StepProfile(strategy, steps)
