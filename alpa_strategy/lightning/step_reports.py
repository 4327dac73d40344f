"""StepReports: who looks at a training's steps: the Trainer's loggers, and a profile."""

from typing import TYPE_CHECKING, Any

from alpa_strategy.comm.collectives import rank_in
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.measured_steps import MeasuredSteps, measured_of_file
from alpa_strategy.ir.plan_companion import plan_digest
from alpa_strategy.lightning.logger_report import LoggerReport

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
        if trainer is not None and strategy.limits.log_plan and strategy.global_rank == 0:
            self._logger_report = LoggerReport(trainer)
        self._profile = None if trainer is None else _profile_of(strategy)

    def begin_batch(self, run: "ShardedRun | None") -> None:
        """Count a training batch that begins, after the module is sharded."""
        if run is None:
            return
        if self._profile is not None:
            self._profile.begin_batch(run)
        if self._logger_report is not None:
            self._logger_report.begin_batch(run)

    def end(self, run: "ShardedRun | None") -> None:
        """Report what is left when the training ends. Collective."""
        seconds = None if run is None else run.finish_measuring()
        if self._profile is not None:
            self._profile.end(run)
        if run is not None and rank_in(None) == 0:
            self._store_seconds(run, seconds)

    def _store_seconds(self, run: "ShardedRun", seconds: float | None) -> None:
        """Store the seconds of a step beside the plan, whose page shows them."""
        path = run.plan_path
        if seconds is None or not path.exists():
            return
        # The page is drawn when a training ends.
        from alpa_strategy.page.run_page import store_measured

        profiled = None if self._profile is None else self._profile.profiled
        try:
            if profiled is None:
                earlier = measured_of_file(path, run.plan)
                profiled = None if earlier is None else earlier.profiled
            store_measured(path, run.plan, MeasuredSteps(plan_digest(run.plan), seconds, profiled))
        except (OSError, AlpaError) as error:
            run.say(f"alpa: the measured seconds cannot be stored: {error}")

    def close(self) -> None:
        """Stop, after errors as well. No communication."""
        if self._profile is not None:
            self._profile.close()


def _profile_of(strategy: Any) -> "StepProfile | None":
    """Return the profile that the user wants, if any."""
    steps = strategy.limits.profile_steps
    if steps is None:
        return None

    # torch's profiler, the runtime and the page: for those alone who profile.
    from alpa_strategy.lightning.step_profile import StepProfile

    return StepProfile(strategy, steps)
