"""Where no plan fits otherwise, parameters may be updated within the backward, each when its gradient is complete.

Whether that is possible here, and if not, what the user can be told about it.

It is where nothing can tell the difference: nobody looks at gradients between the backward and the optimizer's step,
and the step happens after every backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alpa_strategy.cost.flops import is_view
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.user_code import is_user_code, mentioned_names
from alpa_strategy.options import OptimizerInfo, PlanOptions

_BETWEEN = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_THE_STEP = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_AFTERWARDS = ("on_train_batch_start", "on_train_batch_end")  # gradients of the last step are still there on one device


@dataclass(frozen=True)
class TrainerSettings:
    """What decides beside the module and its optimizer.

    Attributes:
        clips: whether the Trainer clips gradients. (That it sums those of several batches is in the plan's options.)
        scales: whether its precision plugin looks at all gradients before the step.
        callbacks: its callbacks.
    """

    clips: bool = False
    scales: bool = False
    callbacks: tuple[Any, ...] = ()

    @classmethod
    def of(cls, trainer: Any) -> TrainerSettings:
        """Those of a Trainer."""
        precision = trainer.precision_plugin
        is_known = type(precision).__module__.startswith("lightning.")
        return cls(
            clips=bool(trainer.gradient_clip_val),
            scales=not is_known or getattr(precision, "scaler", None) is not None,
            callbacks=tuple(trainer.callbacks),
        )


def who_looks_at_gradients(module: Any, settings: TrainerSettings) -> str | None:
    """What stands against updating parameters early in this training, None where nothing does."""
    if settings.clips:
        return "gradients are clipped"
    if any(_lightning_class(callback, "GradientAccumulationScheduler") for callback in settings.callbacks):
        return "gradients are accumulated over several batches"
    if settings.scales:
        return "the precision plugin looks at all gradients before the step"
    for owner, names in (
        (module, (*_BETWEEN, *_OF_THE_STEP)),
        *((callback, _BETWEEN) for callback in settings.callbacks),
    ):
        for name in names:
            if _is_overridden(owner, name):
                return f"{type(owner).__name__}.{name} may look at gradients"
    for owner in (module, *settings.callbacks):
        for name in _AFTERWARDS:
            hook: Any = getattr(owner, name, None)
            is_users = _is_overridden(owner, name) and is_user_code(hook)
            if is_users and any("grad" in mentioned for mentioned in mentioned_names(hook)):
                return f"{type(owner).__name__}.{name} may look at gradients"
    return None


def _is_overridden(owner: Any, name: str) -> bool:
    """Whether a module or callback has a hook of its own, found without Lightning, which planning does not import."""
    hook = getattr(owner, name, None)
    base = _lightning_class(owner, "LightningModule") or _lightning_class(owner, "Callback")
    return hook is not None and getattr(hook, "__func__", hook) is not getattr(base, name, None)


def _lightning_class(thing: Any, name: str) -> type | None:
    """The class of Lightning's with this name that `thing` is an instance of."""
    bases = (base for base in type(thing).__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning.")))
    return next((base for base in bases if base.__name__ == name), None)


def against_early_step(step: StepGraph, optimizer: OptimizerInfo, options: PlanOptions) -> str | None:
    """What stands against updating parameters within the backward, None where nothing does."""
    if options.asks_for_pipeline:
        return "stages of a pipeline and recomputed activations were asked for"
    if options.accumulate_grad_batches != 1:
        return "gradients are accumulated over several batches"
    if optimizer.against_early_step is None and uses_detached_parameters(step):
        return "the step uses a parameter's value where it gives it no gradient (detach), which may be read after that"
    return optimizer.against_early_step


def with_reason(error: DoesNotFitError, against: str | None) -> DoesNotFitError:
    """The same error, with what would have needed less memory and why it could not be had."""
    if against is None:
        text = "updating parameters within the backward, which needs less memory, would not be enough"
    else:
        text = f"parameters cannot be updated within the backward, which would need less memory: {against}"
    return DoesNotFitError(f"{error.problem}\n    {text}", error.fix)


def uses_detached_parameters(step: StepGraph) -> bool:
    """Whether the backward may need a parameter's value in an op that gives the parameter no gradient.

    Such an op may run after the parameter's gradient is complete, and would find the new value.
    """
    same_memory = {p.value for p in step.parameters if p.meta.requires_grad}
    detached: set[int] = set()
    for op in step.ops:
        reads = [value for value in op.operands if value in same_memory]
        if is_view(op.call) and reads:
            same_memory.update(op.results)
            detached.update(v for v in op.results if not step.values[v].requires_grad or reads[0] in detached)
        elif detached.intersection(reads) and any(step.values[v].requires_grad for v in op.results):
            return True
    return False
