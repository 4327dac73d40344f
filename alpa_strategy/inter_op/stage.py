"""What passes between the rooms of the inter-op part: a micro-batched step, and a stage of it as a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from alpa_strategy.capture.step_graph import StepGraph

Combine = Literal["sum", "same", "cat"]


@dataclass(frozen=True)
class MicroStep:
    """A step cut into `num_microbatches` equal micro-batches, exactly.

    Attributes:
        num_microbatches: M.
        graph: the step on one micro-batch, at global shapes divided by M along the batch. Its loss (and every other
            escaping value marked `sum`) is a summand: the sum over the micro-batches is the whole step's value.
        prologue: what must be known of the whole batch before any micro-batch runs and depends on no parameter (the
            number of targets that are not ignored): a step over the whole batch whose `escaping` values are handed to `graph`, or None.
        given: value in `graph` -> value in `prologue` that fills it.
        combine: escaping value of `graph` -> how the micro-batches' values make up the step's: `sum`, `same` (equal in all;
            the last is taken: buffer updates too), `cat` along dim 0.
    """

    num_microbatches: int
    graph: StepGraph
    prologue: StepGraph | None = None
    given: dict[int, int] = field(default_factory=dict)
    combine: dict[int, Combine] = field(default_factory=dict)
