"""Hooks of users and callbacks that look at parameters or gradients see whole ones, as on one device.

Everywhere else in a training the module's parameters are this device's parts. Which hooks look is decided before, by
what their code mentions, so that all ranks decide alike; what a hook changes goes back into the parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alpa_strategy.capture.code_reads import is_user_code, mentioned_names
from alpa_strategy.errors import AlpaError
from alpa_strategy.lightning.whole import WholeParameters

_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
)
_HOOKS_OF_STEPS = ("on_train_batch_start", "on_before_backward", *_GRADIENT_HOOKS, "on_train_batch_end")
_HOOKS = (
    *_HOOKS_OF_STEPS,
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_train_end",
)
_LOOKING = (WeightAveraging, StochasticWeightAveraging)  # of Lightning's own callbacks
_PARAMETER_WORDS = re.compile(
    r"(?:^|_)(?:params?|parameters?|weights?|bias(?:es)?|grads?|gradients?|state_dict|deepcopy)(?:_|$)"
)
_NOT_PARAMETERS = {"param_groups", "add_param_group", "gradient_clip_val", "gradient_clip_algorithm"}


class WholeHooks:
    """Wraps the hooks of a running training that look at parameters; `remove` gives the hooks back as they were.

    Args:
        whole: makes parameters whole.
        fits: None where whole parameters (True: and gradients) have room on this device beside the training, else why
            not.
    """

    def __init__(
        self,
        trainer: Any,
        module: LightningModule,
        whole: WholeParameters,
        fits: Callable[[bool], str | None],
    ) -> None:
        self._whole, self._fits = whole, fits
        self._replaced: list[tuple[Any, str, Any]] = []
        every_step = []
        for owner, base in ((module, LightningModule), *((c, Callback) for c in trainer.callbacks)):
            for name in _HOOKS:
                if _looks(owner, name, base) and self._wrap(owner, name) and name in _HOOKS_OF_STEPS:
                    every_step.append(f"{type(owner).__name__}.{name}")
        if every_step:
            rank_zero_warn(
                f"alpa: {', '.join(every_step)} may look at parameters or gradients: they are gathered for it at every "
                "step, which costs time and memory. Hooks that need no whole parameters are quicker without naming any"
            )

    def remove(self) -> None:
        """Undo the wrapping."""
        for owner, name, before in self._replaced:
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._replaced.clear()

    def _wrap(self, owner: Any, name: str) -> bool:
        """Replace the hook; False when whole parameters have no room."""
        hook = getattr(owner, name)
        with_gradients = name in _GRADIENT_HOOKS
        against = self._fits(with_gradients)
        if against is not None:
            if isinstance(owner, _LOOKING):
                raise AlpaError(
                    f"{type(owner).__name__} looks at whole parameters, and {against}",
                    "remove the callback, or work on the checkpoints afterwards",
                )
            rank_zero_warn(
                f"alpa: {type(owner).__name__}.{name} may look at parameters or gradients; whole ones have no room on "
                "a device, so it sees the parts that are there"
            )
            return False

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._whole.with_gradients() if with_gradients else self._whole:
                return hook(*args, **kwargs)

        self._replaced.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = call
        return True


def _looks(owner: Any, name: str, base: type) -> bool:
    """Whether a hook is the owner's own and may look at parameters."""
    hook = getattr(owner, name, None)
    if hook is None or getattr(hook, "__func__", hook) is getattr(base, name, None):
        return False
    if isinstance(owner, _LOOKING):
        return True
    return is_user_code(hook) and any(map(_PARAMETER_WORDS.search, mentioned_names(hook) - _NOT_PARAMETERS))
