"""What passes between the rooms of the inter-op part: a micro-batched step, and a stage of it as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from alpa_strategy.ir.graph import StepGraph

Combine = Literal["sum", "same", "cat"]


@dataclass(frozen=True)
class Cut:
    """Dim `dim` holds `segments` runs of rows, one after the other; a micro-batch has its part of every run."""

    dim: int = 0
    segments: int = 1


@dataclass(frozen=True)
class MicroStep:
    """A step cut into `num_microbatches` equal micro-batches, exactly.

    Values keep the step's numbers; what has no counterpart in the step (a share of 1/M, a given value that the graph
    also makes itself) is numbered after them. The step's values after all micro-batches are the prologue's, the
    combined ones and the epilogue's together: with them logs, metrics, the output and buffer updates are done once, as
    the whole step's records say. `graph`, `prologue` and `epilogue` have no records of their own: `output` of each is a
    tuple with a ValueRef of everything that must leave it.

    Attributes:
        num_microbatches: M.
        graph: the step on one micro-batch, at global shapes divided by M along the batch. Its loss (and every other
            escaping value marked `sum`) is a summand: the sum over the micro-batches is the whole step's value. The
            gradients of its parameters add up over the micro-batches.
        prologue: what must be known of the whole batch before any micro-batch runs and depends on no parameter (the
            number of targets that are not ignored, a random mask): a step over the whole batch whose `escaping` values
            are handed to `graph` or belong to the step's results, or None.
        given: value in `graph` (one of `graph.received`) -> value in `prologue` that fills it.
        combine: escaping value of `graph` -> how the micro-batches' values make up the step's: `sum`, `same` (equal in
            all; the last is taken: updates of sequential buffers too), `cat` as `cuts` says.
        cuts: value -> how micro-batches have their parts of it (see `cut`): every `cat` value of
            `combine`, and those of `given` that are handed in as rows, like a batch leaf. All others of `given` are
            handed in whole.
        sequential_buffers: buffers that every micro-batch updates and the next one reads (BatchNorm statistics, as in
            plain gradient accumulation). All other buffers keep their values until the step's end.
        epilogue: logs and outputs that are no sums over micro-batches (`loss.exp()`): a step over combined and prologue
            values (its `received`), or None.
    """

    num_microbatches: int
    graph: StepGraph
    prologue: StepGraph | None = None
    given: dict[int, int] = field(default_factory=dict)
    combine: dict[int, Combine] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)
    sequential_buffers: tuple[str, ...] = ()
    epilogue: StepGraph | None = None


# --- How rows are cut into micro-batches' parts, and joined again.


def cut(tensor: Tensor, how: Cut, num_microbatches: int, index: int, num_ranks: int = 1) -> Tensor:
    """What micro-batch `index` has of a whole tensor: the `index`-th part of every rank's rows, in rank order.

    A rank that cuts what it holds itself has `num_ranks=1`.
    """
    runs = how.segments * num_ranks  # rows of one rank in one segment lie together
    parts = tensor.unflatten(how.dim, (runs, num_microbatches, -1))
    return parts.select(how.dim + 1, index).flatten(how.dim, how.dim + 1)


def joined(parts: Sequence[Tensor], how: Cut, num_ranks: int = 1) -> Tensor:
    """Inverse of `cut`: the micro-batches' parts as the whole tensor, rows in the ranks' order."""
    runs = how.segments * num_ranks
    stacked = torch.stack([part.unflatten(how.dim, (runs, -1)) for part in parts], how.dim + 1)
    return stacked.flatten(how.dim, how.dim + 2)
