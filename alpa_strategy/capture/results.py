"""What the step returned, logged and wrote, as the outputs of a StepGraph; a loss that cannot be one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from alpa_strategy.capture.recorder import Recording
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import AppendRecord, Check, LogRecord, MetricRecord, ValueRef
from alpa_strategy.ir.op import TensorMeta


@dataclass(frozen=True)
class Results:
    """What a step leaves behind.

    Attributes:
        loss: value index, -1 where the step makes none.
        output: what it returned, with ValueRefs.
        updates: value of a buffer -> its new value.
    """

    loss: int
    output: Any
    logs: tuple[LogRecord, ...]
    metrics: tuple[MetricRecord, ...]
    updates: Mapping[int, int]
    checks: tuple[Check, ...]
    appended: tuple[AppendRecord, ...]

    def values(self) -> set[int]:
        """Every value that somebody reads after the step."""
        trees = (
            self.output,
            [record.items for record in self.appended],
            [record.value for record in self.logs],
            [(record.args, record.kwargs) for record in self.metrics],
        )
        found = {leaf.index for leaf in pytree.tree_leaves(trees) if isinstance(leaf, ValueRef)}
        found.update(self.updates.values(), (check.value for check in self.checks))
        return found | ({self.loss} if self.loss >= 0 else set())


def results_of(found: Mapping[str, Any], loss: int, updates: Mapping[int, int], recording: Recording) -> Results:
    """What the trace found ({"output", "logs", "metrics", "checks", "appended"}, see `Trace`), as records."""
    lists = zip(recording.stand_ins.lists, found["appended"], strict=True)
    return Results(
        loss=loss,
        output=found["output"],
        logs=tuple(LogRecord(n, v, tuple(sorted(k.items()))) for n, v, k in found["logs"]),
        metrics=tuple(MetricRecord(n, m, tuple(a), tuple(sorted(k.items()))) for n, m, a, k in found["metrics"]),
        updates=updates,
        checks=tuple(Check(ref.index, expected, source) for ref, expected, source in found["checks"]),
        appended=tuple(AppendRecord(place, tuple(items)) for place, items in lists if items),
    )


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
