"""Training in lines: the progress-bar metrics every few steps, for logs and other places without a terminal."""

from __future__ import annotations

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console

from alpa_strategy.units import format_seconds


class StepLines(Callback):
    """Prints `step 50  train_loss 2.71  4.3 steps/s` on rank 0, and what became of the metrics at the end.

    Args:
        every: steps between two lines; None: only the line at the end.
        console: where to; stdout by default.
    """

    def __init__(self, every: int | None = 25, console: Console | None = None) -> None:
        self.every = every
        self.console = console or Console(highlight=False)
        self._first: dict[str, float] = {}
        self._start = self._since = 0.0
        self._shown = self._first_step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._shown:
            return
        metrics = _metrics(trainer)
        if not self._start:
            # From the end of the first step: planning and warming up are no part of the speed.
            self._first, self._start, self._since = metrics, time.perf_counter(), time.perf_counter()
            self._first_step = self._shown = step
            if self.every:
                self.console.print(f"step {step}{_listed(metrics)}")
        elif self.every and step % self.every == 0:
            now = time.perf_counter()
            rate = (step - self._shown) / (now - self._since)
            self.console.print(f"step {step}{_listed(metrics)}  {rate:.3g} steps/s")
            self._since, self._shown = now, step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self._start:
            return
        last = _metrics(trainer)
        changes = [f"{name} {first:.4g} -> {last[name]:.4g}" for name, first in self._first.items() if name in last]
        elapsed = time.perf_counter() - self._start
        steps = trainer.global_step - self._first_step
        rate = f" ({steps / elapsed:.3g} steps/s)" if steps and elapsed else ""
        text = f"trained {trainer.global_step} steps in {format_seconds(elapsed)}{rate}"
        self.console.print(", ".join([text, *changes]))


def _metrics(trainer: Trainer) -> dict[str, float]:
    values = {name: value for name, value in trainer.progress_bar_metrics.items() if name != "v_num"}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _listed(metrics: dict[str, float]) -> str:
    return "".join(f"  {name} {value:.4g}" for name, value in metrics.items())
