"""Lowering: StepGraph + StagePlan -> this device's program on local tensors, with explicit collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class LoweredStep(Protocol):
    """This device's training step. Called under grad mode; `loss.backward()` of the result gives local gradients.

    parameters: name (`ParameterInput.name`) -> the tensor that the plan's modes promise: local shard for `S<d>` axes, whole
        for `R`, `R*` and `G<d>` axes. Their gradients come out summed over `S` and complete over `R`; over `R*` and `G` axes
        they are left Partial, for the once-per-step reduction.
    buffers: name -> whole tensor (buffers and constants are replicated).
    batch: tensor leaves, in `step.batch` order, this rank's rows.
    Returns value index -> tensor for `step.escaping`, whole on every device (the loss included).
    """

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Sequence[Tensor]
    ) -> dict[int, Tensor]: ...
