"""Whether a training allows that parameters are updated within the backward, each when its gradient is complete.

It does where nothing can tell the difference: nobody looks at gradients between the backward and the optimizer's step,
and the step happens after every backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim import Optimizer

from alpa_strategy.ir.user_code import is_user_code, mentioned_names
from alpa_strategy.lightning.checks import hook_owners, is_overridden
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.planner.optimizer_info import steps_parameter_by_parameter

_BETWEEN = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_THE_STEP = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_AFTERWARDS = ("on_train_batch_start", "on_train_batch_end")  # gradients of the last step are still there on one device


@dataclass(frozen=True)
class Surroundings:
    """What decides beside the module and its optimizer: settings of the Trainer.

    Attributes:
        clips: whether it clips gradients. (That it sums those of several batches is in the plan's options.)
        scales: whether its precision plugin looks at all gradients before the step.
        callbacks: its callbacks.
    """

    clips: bool = False
    scales: bool = False
    callbacks: tuple[Callback, ...] = ()

    @classmethod
    def of(cls, trainer: Any) -> Surroundings:
        """Those of a Trainer."""
        precision = trainer.precision_plugin
        is_known = type(precision).__module__.startswith("lightning.")
        return cls(
            clips=bool(trainer.gradient_clip_val),
            scales=not is_known or getattr(precision, "scaler", None) is not None,
            callbacks=tuple(trainer.callbacks),
        )


def with_early_step(
    info: OptimizerInfo, module: Any, optimizer: Optimizer, surroundings: Surroundings
) -> OptimizerInfo:
    """`info` with what is known of this training."""
    return replace(info, against_early_step=against_steps_in_backward(module, optimizer, info, surroundings))


def against_steps_in_backward(
    module: Any, optimizer: Optimizer, info: OptimizerInfo, surroundings: Surroundings
) -> str | None:
    """What stands against it in this training, None where nothing does."""
    if surroundings.clips:
        return "gradients are clipped"
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in surroundings.callbacks):
        return "gradients are accumulated over several batches"
    if surroundings.scales:
        return "the precision plugin looks at all gradients before the step"
    for name in (*_BETWEEN, *_OF_THE_STEP):
        if is_overridden(module, name, LightningModule):
            return f"{type(module).__name__}.{name} may look at gradients"
    for callback in surroundings.callbacks:
        for name in _BETWEEN:
            if is_overridden(callback, name, Callback):
                return f"{type(callback).__name__}.{name} may look at gradients"
    for owner, base in hook_owners(module, surroundings.callbacks):
        for name in _AFTERWARDS:
            if is_overridden(owner, name, base) and _mentions_gradients(getattr(owner, name)):
                return f"{type(owner).__name__}.{name} may look at gradients"
    if not info.element_wise or not steps_parameter_by_parameter(optimizer):
        return f"{info.name} cannot step parameters one by one"
    return None


def _mentions_gradients(hook: Any) -> bool:
    return is_user_code(hook) and any("grad" in name for name in mentioned_names(hook))
