"""What the program of a pipeline stage, or of one span of a stage that recomputes, takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Values = dict[int, Tensor]  # by value index of the micro-batched step


@dataclass(frozen=True)
class StageInputs:
    """One micro-batch's local tensors.

    Attributes:
        parameters, buffers: by name; the counters among the buffers under `COUNTERS`.
        batch: by place in the step's batch.
        received: what other stages made, and earlier spans of this one, by value.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Any]
    batch: Mapping[int, Tensor]
    received: Mapping[int, Tensor]


# Gives (escaping values, whole on every device of the stage; values sent to other stages, in the stage's layouts).
StageProgram = Callable[[StageInputs], tuple[Values, Values]]
# Gives the same, and the values made for later spans, as they are made.
SpanProgram = Callable[[StageInputs], tuple[Values, Values, Values]]
