"""What the step returned, logged and wrote, as the outputs of a StepGraph; a loss that cannot be one is refused."""

from __future__ import annotations

from typing import Any

from alpa_strategy.capture.step_graph import ValueRef
from alpa_strategy.errors import CaptureError
from alpa_strategy.sharding.op import TensorMeta


def loss_of(output: Any, step: str) -> ValueRef:
    """The loss in what `step` returned: the tensor itself or `["loss"]`."""
    if output is None:
        raise CaptureError(f"{step} returned None: skipping a batch is not supported", "return a loss for every batch")
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, ValueRef):
        raise CaptureError(
            f"{step} returned {type(output).__name__} without a loss tensor", 'return the loss, or a dict with "loss"'
        )
    return loss


def check_loss(meta: TensorMeta, is_trainable: bool, step: str) -> None:
    """CaptureError unless the loss is one number that depends on a parameter. is_trainable: some parameter is."""
    if meta.num_elements != 1:
        raise CaptureError(
            f"{step} returned a loss of shape {list(meta.shape)}; a loss is one number",
            "reduce it: loss.mean() or loss.sum()",
        )
    if not is_trainable:
        raise CaptureError(
            "no parameter of the module requires grad: there is nothing to train",
            "give the module parameters, or unfreeze some (requires_grad_(True))",
        )
    if not meta.requires_grad:
        raise CaptureError(
            f"the loss that {step} returned depends on no parameter that requires grad",
            "look for .detach(), no_grad or frozen parameters on the way to the loss",
        )
