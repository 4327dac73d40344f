"""What capture/ takes of Lightning and torchmetrics. No other file of planning imports them."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

__all__ = [
    "LightningModule",
    "Metric",
    "MetricCollection",
    "WrapperMetric",
    "takes_batch_idx",
]


def takes_batch_idx(training_step: Any) -> bool:
    """Whether the Trainer passes `batch_idx` to a module's `training_step`."""
    return is_param_in_hook_signature(training_step, "batch_idx", min_args=2)
