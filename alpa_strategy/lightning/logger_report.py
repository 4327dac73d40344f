"""What the Trainer's loggers get: the plan as hyperparameters, and metrics of its steps.

Hyperparameters and metrics are named `alpa/...`. Loggers that store files (W&B, MLflow) get the
plan's page.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

if TYPE_CHECKING:
    from alpa_strategy.ir.plan import Plan, TaskFigures
    from alpa_strategy.lightning.sharded_run import ShardedRun

PREFIX = "alpa/"
PAGE_NAME = "alpa_plan.html"


class LoggerReport:
    """Reports a training to its Trainer's loggers, every `log_every_n_steps` batches.

    Seconds of a step are those from the begin of one batch to the begin of the next, so they
    include the loader, callbacks and evaluation within an epoch.

    Args:
        trainer: of the training.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        # The plan that the loggers have.
        self._plan: Plan | None = None
        # Batches since the time `_since`; the first batch under a plan is not timed.
        self._num_batches = 0
        self._since = 0.0

    def begin_batch(self, run: "ShardedRun") -> None:
        """Count a training batch that begins, and log the plan of `run` at its first batch, then
        metrics every `log_every_n_steps` batches.
        """
        if not self._trainer.loggers:
            return
        if run.plan is not self._plan:
            self._plan = run.plan
            self._log_plan(run.plan)
            self._num_batches = -1
        self._num_batches += 1
        now = time.perf_counter()
        if self._num_batches == 0:
            self._since = now
            return
        # 0 turns logging off, as in Lightning.
        interval = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval > 0 and self._num_batches >= interval:
            self._log_metrics(run, (now - self._since) / self._num_batches)
            self._num_batches = 0
            self._since = now

    def leave_out(self, seconds: float) -> None:
        """Do not count seconds that the current steps have not taken, such as those of a page."""
        self._since += seconds

    def _log_plan(self, plan: "Plan") -> None:
        """Log the plan's figures, and store its page, with all loggers."""
        hyperparameters = _prefixed(plan_hyperparameters(plan))
        for logger in self._trainer.loggers:
            logger.log_hyperparams(hyperparameters)
            _store_page(logger, plan)

    def _log_metrics(self, run: "ShardedRun", seconds: float) -> None:
        """Log seconds, memory (planned; allocated on GPUs only) and rate of a step beside what was
        predicted, to all loggers of the Trainer.
        """
        metrics = {
            "step_seconds": seconds,
            "predicted_step_seconds": run.plan.predicted.step_seconds,
            "planned_bytes": float(run.plan.predicted.peak_bytes),
        }
        metrics |= _rates(run.plan.figures, seconds)
        device = run.store.device
        if device.type == "cuda":
            metrics["allocated_bytes"] = float(torch.cuda.max_memory_allocated(device))
        for logger in self._trainer.loggers:
            logger.log_metrics(_prefixed(metrics), self._trainer.global_step)


def _rates(figures: "TaskFigures | None", seconds: float) -> dict[str, float]:
    """Return metric -> rate of a step that takes `seconds`, as far as they are known; none without
    `figures` of the task.
    """
    if figures is None:
        return {}
    rates = {
        "samples_per_second": figures.samples_per_second(seconds),
        "tokens_per_second": figures.tokens_per_second(seconds),
        "mfu": figures.mfu(seconds),
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def plan_hyperparameters(plan: "Plan") -> dict[str, Any]:
    """Return name -> decision of a plan, as numbers and short strings."""
    return {
        "eager": plan.is_eager,
        "stages": len(plan.stages),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "meshes": " ".join("x".join(map(str, stage.logical_mesh)) for stage in plan.stages),
        "precision": "" if plan.figures is None else plan.figures.precision,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "planned_bytes": plan.predicted.peak_bytes,
    }


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + name: value for name, value in values.items()}


def _store_page(logger: Logger, plan: "Plan") -> None:
    """Store the plan's page with `logger` if it is one that stores files (MLflow, W&B)."""
    if not isinstance(logger, MLFlowLogger | WandbLogger):
        return
    # The page is drawn only where it is stored.
    from alpa_strategy.page.page import plan_page

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, PAGE_NAME)
        path.write_text(plan_page(plan), encoding="utf-8")
        if isinstance(logger, MLFlowLogger):
            logger.experiment.log_artifact(logger.run_id, str(path))
        else:
            # W&B copies the file before it returns.
            logger.experiment.save(str(path), base_path=folder, policy="now")
