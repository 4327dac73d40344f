"""The backward need not wait for the sum of the loss over the devices, where nobody reads it before.

Without this all ranks would wait for the slowest in the middle of every step, which DDP (whose loss is each rank's
own) does not.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from typing_extensions import override

from alpa_strategy.lightning.checks import any_overridden

_SEE_THE_LOSS = ("on_before_backward", "backward", "on_before_zero_grad", "optimizer_zero_grad")


class AsyncResult(ClosureResult):
    """Lightning's record of a step, which copies the loss when it is asked for it, not when the step returns."""

    @property
    def loss(self) -> Tensor | None:  # type: ignore[override]
        return None if self.closure_loss is None else self.closure_loss.detach().clone()

    @override
    def _clone_loss(self) -> None:
        """Nothing yet: the loss may be on its way."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> AsyncResult:
        result = super().from_training_step_output(training_step_output, normalize)
        assert isinstance(result, AsyncResult)
        output = training_step_output
        result.closure_loss = output["loss"] if isinstance(output, Mapping) else output  # not a quotient of it
        return result


def allows_async_loss(trainer: Any, module: Any) -> bool:
    """Whether nobody reads the step's values before its backward is done; the Trainer itself is told not to."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if loop.output_result_cls not in (ClosureResult, AsyncResult):  # somebody else's
        return False
    may = (
        trainer.accumulate_grad_batches == 1
        and not loop._skip_backward
        and getattr(trainer.precision_plugin, "scaler", None) is None
        and not torch.is_anomaly_enabled()
        and not any_overridden(trainer, module, _SEE_THE_LOSS)
    )
    loop.output_result_cls = AsyncResult if may else ClosureResult
    return may


def forbid_async_loss(trainer: Any) -> None:
    """Steps return their loss complete from now on."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if loop.output_result_cls is AsyncResult:
        loop.output_result_cls = ClosureResult


@contextmanager
def as_in_training_step(module: Any) -> Generator[None, None, None]:
    """`self.log` takes what is logged here as the training step's."""
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before
