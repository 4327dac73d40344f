"""What a module and a Trainer must be for the strategy; each refusal is one clear error before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from alpa_strategy.errors import AlpaError

_OTHER_PRECISIONS = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)


def check_module(trainer: Any, module: Any) -> None:
    """AlpaError for modules and callbacks that cannot train under this strategy."""
    if not any(p.requires_grad for p in module.parameters()):
        raise AlpaError(
            f"{type(module).__name__} has no trainable parameters",
            "create its layers in __init__ or configure_model, and leave requires_grad on for what should train",
        )
    if not module.automatic_optimization:
        raise AlpaError(
            f"{type(module).__name__} uses manual optimization, which runs its own backward passes",
            "use automatic optimization (remove `self.automatic_optimization = False`), or another strategy",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise AlpaError("training_step takes a dataloader_iter", "let it take (batch, batch_idx)")


def check_shapes(module: Any) -> None:
    """AlpaError for lazy layers that have seen no batch."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise AlpaError(
                f"{name} has no shape before the first batch, and what the ranks share and plan is made from shapes",
                "call the lazy layers on an example batch in __init__ or configure_model, or give them their sizes",
            )


def check_callbacks(trainer: Any) -> None:
    """AlpaError for callbacks of Lightning's that cannot work under this strategy."""
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):
        raise AlpaError(
            "ModelPruning puts masks and new parameters into the module while it trains, which shards cannot follow",
            "remove the callback and prune the trained module (torch.nn.utils.prune), or use another strategy",
        )


def check_precision(plugin: Any) -> None:
    """AlpaError for precision plugins that replace layers, or belong to another strategy."""
    if isinstance(plugin, _OTHER_PRECISIONS):
        raise AlpaError(
            f"{type(plugin).__name__} replaces the module's layers or belongs to another strategy",
            'use precision="32-true", "64-true", "16-mixed", "bf16-mixed", "16-true" or "bf16-true"',
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """AlpaError unless there is exactly one optimizer."""
    if len(optimizers) != 1:
        raise AlpaError(
            f"configure_optimizers returned {len(optimizers)} optimizers, one is supported",
            "return one optimizer with a parameter group for each setting",
        )
