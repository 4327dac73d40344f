"""Recompute: a stage's forward without a graph, and its backward span by span, each span run once more just before.

Between the two only what passes from span to span is kept, and of the intermediates never more than one span's. All
devices of the stage run the same forwards and backwards in the same order, collectives included, which hooks of saved
tensors (`torch.utils.checkpoint`) cannot promise: devices save different tensors. Knows no schedule and no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from alpa_strategy.comm.random import Replay

Values = dict[int, Tensor]  # by value index of the micro-batched step


@dataclass(frozen=True)
class StageInputs:
    """One micro-batch's local tensors."""

    parameters: Mapping[str, Tensor]  # by name
    buffers: Mapping[str, Any]  # by name; the counters under `COUNTERS`
    batch: Mapping[int, Tensor]  # by place in the step's batch
    received: Mapping[int, Tensor]  # what other stages made, and earlier spans of this one, by value


# Gives (escaping values, whole on every device of the stage; values sent to other stages, in the stage's layouts).
StageProgram = Callable[[StageInputs], tuple[Values, Values]]
# Gives the same, and the values made for later spans, as they are made.
SpanProgram = Callable[[StageInputs], tuple[Values, Values, Values]]


@dataclass(frozen=True)
class Span:
    """A run of a stage's ops that is recomputed together."""

    program: SpanProgram
    reads: tuple[int, ...]  # values handed in: what the stage received, and what earlier spans made
    differentiable: tuple[int, ...] = ()  # values made for later spans that get a gradient
    # Names of trainable parameters that earlier spans use too: their gradients are complete only there.
    used_before: frozenset[str] = frozenset()


@dataclass
class Kept:
    """What is kept of a micro-batch until its backward: tensors as they were, and each span's random numbers."""

    buffers: Mapping[str, Any]
    batch: Mapping[int, Tensor]
    values: Values  # received, and made for later spans
    replays: list[Replay]
    wanted: set[int]  # received values that want a gradient


@dataclass(frozen=True)
class Recompute:
    """A stage as its spans, in order."""

    spans: Sequence[Span]
    bookmark: Callable[[], Replay]  # of the stage's random numbers (`ShardedRandom.bookmark`)
    loss: int | None  # value index of the loss where a span makes it

    def forward(self, inputs: StageInputs, wanted: Collection[int]) -> tuple[Values, Values, Kept]:
        """(escaping, sent, what its backward needs); `wanted`: received values that want a gradient."""
        kept = Kept(dict(inputs.buffers), inputs.batch, dict(inputs.received), [], set(wanted))
        escaping: Values = {}
        sent: Values = {}
        with torch.no_grad():  # nothing is saved for a backward: the spans run again for it
            for span in self.spans:
                kept.replays.append(self.bookmark())
                handed = {value: kept.values[value] for value in span.reads}
                left, handed_on, made = span.program(replace(inputs, received=handed))
                escaping |= left
                sent |= handed_on
                kept.values |= made
        return escaping, sent, kept


@dataclass
class _Open:
    """A recomputed span, ready for its backward: edges of the graph, so that the results themselves can go."""

    leaves: Values
    made: dict[int, GradientEdge]
    sent: dict[int, GradientEdge]
    loss: tuple[GradientEdge, Tensor] | None


class RecomputedBackward:
    """One micro-batch's recomputation and backward; made before any gradient is there, it recomputes the last span."""

    def __init__(self, stage: Recompute, kept: Kept, parameters: Mapping[str, Tensor]) -> None:
        self._spans, self._kept, self._parameters, self._loss = stage.spans, kept, parameters, stage.loss
        self._differentiable = kept.wanted.union(*(span.differentiable for span in stage.spans))
        self._last: _Open | None = self._run(len(stage.spans) - 1)

    def backward(
        self, grads: Values, loss_scale: Tensor, hold: Callable[[Collection[str]], None]
    ) -> dict[int, Tensor | None]:
        """Differentiate all spans; returns the gradients of the received values that want one.

        Args:
            grads: by value, of what was sent to other stages, values that the stage only passes on included.
            hold: told before every span whose parameters' gradients are not complete with it.
        """
        values = self._kept.values
        inside = {v: grads[v] for v in self._kept.wanted if v in grads}  # of received values, and between spans
        for number in reversed(range(len(self._spans))):
            span = self._spans[number]
            for value in span.differentiable:
                values.pop(value, None)  # its readers are done
            opened, self._last = self._last or self._run(number), None
            hold(span.used_before)
            _differentiate(opened, inside, grads, loss_scale)
            for value, leaf in opened.leaves.items():
                if leaf.grad is not None:
                    inside[value] = inside[value] + leaf.grad if value in inside else leaf.grad
            del opened  # the span's activations, before the next is recomputed
        hold(())
        return {value: inside.get(value) for value in self._kept.wanted}

    def _run(self, number: int) -> _Open:
        kept, span = self._kept, self._spans[number]
        handed = {value: kept.values[value] for value in span.reads}
        leaves = {v: t.detach().requires_grad_() for v, t in handed.items() if v in self._differentiable}
        with kept.replays[number](), torch.enable_grad():
            escaping, sent, made = span.program(
                StageInputs(self._parameters, kept.buffers, kept.batch, handed | leaves)
            )
        is_made_here = self._loss not in span.reads  # a record may hold it once more
        loss = escaping.get(self._loss) if self._loss is not None and is_made_here else None
        return _Open(
            leaves,
            {v: get_gradient_edge(made[v]) for v in span.differentiable if made[v].requires_grad},
            {v: get_gradient_edge(t) for v, t in sent.items() if t.requires_grad},
            None if loss is None or not loss.requires_grad else (get_gradient_edge(loss), loss.detach()),
        )


def _differentiate(opened: _Open, inside: Values, grads: Values, loss_scale: Tensor) -> None:
    """The span's backward; takes the gradients of what it made out of `inside`."""
    pairs = [(edge, inside.pop(v)) for v, edge in opened.made.items() if v in inside]
    pairs += [(edge, grads[v]) for v, edge in opened.sent.items() if v in grads]
    if opened.loss is not None:
        edge, loss = opened.loss
        pairs.append((edge, loss_scale.to(loss).expand_as(loss)))
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
