"""The precision plugin of `AlpaStrategy(master_weights=True)`: `bf16-true` for the step, fp32 for what is updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from typing_extensions import override

from alpa_strategy.capture.low_precision import check_has_masters, keep_masters, low_precision_copies


class MasterWeights(HalfPrecision):
    """Parameters, their gradients and the optimizer's state are fp32; every step computes with bf16 copies."""

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self._module: nn.Module | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._module = module
        keep_masters(module, torch.bfloat16)
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @contextmanager
    @override
    def forward_context(self) -> Iterator[None]:
        assert self._module is not None
        with low_precision_copies(self._module, torch.bfloat16):
            yield

    def dtype_context(self) -> AbstractContextManager[None]:
        """The dtype of new tensors, without the copies: for what of a step is not the user's own code."""
        return super().forward_context()


def with_masters(plugin: Any) -> MasterWeights:
    """What `master_weights=True` makes of the Trainer's precision; SetupError where that is not bf16-true."""
    check_has_masters(getattr(plugin, "precision", type(plugin).__name__))
    return MasterWeights()
