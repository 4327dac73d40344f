"""One stage's forward and backward of a micro-batch, whose activations are kept in between or made
again.

A stage that recomputes runs its forward without a graph, and its backward span by span, each span
run once more just before. Between the two only what passes from span to span is kept, and of the
intermediates never more than one span's. All devices of the stage run the same forwards and
backwards in the same order, collectives included, which hooks of saved tensors
(`torch.utils.checkpoint`) cannot promise: devices save different tensors. Knows no schedule, no
messages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from alpa_strategy.comm.random import Replay
from alpa_strategy.pipeline.split_backward import SplitBackward

Values = dict[int, Tensor]  # by value index of the micro-batched step


@dataclass(frozen=True)
class StageInputs:
    """One micro-batch's local tensors."""

    parameters: Mapping[str, Tensor]  # by name
    buffers: Mapping[str, Any]  # by name; the counters under `COUNTERS`
    batch: Mapping[int, Tensor]  # by place in the step's batch
    received: Mapping[
        int, Tensor
    ]  # what other stages made, and earlier spans of this one, by value


# Gives (escaping values, whole on every device of the stage; values sent to other stages, in the
# stage's layouts; the values made for later spans, as they are made).
SpanProgram = Callable[[StageInputs], tuple[Values, Values, Values]]


@dataclass(frozen=True)
class Span:
    """A run of a stage's ops that is recomputed together."""

    program: SpanProgram
    reads: tuple[int, ...]  # values handed in: what the stage received, and what earlier spans made
    differentiable: tuple[int, ...] = ()  # values made for later spans that get a gradient
    # Names of trainable parameters that earlier spans use too: their gradients are complete only
    # there.
    used_before: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageProgram:
    """A stage as its spans, in order."""

    spans: Sequence[Span]
    loss: int  # value index of the step's loss, whichever stage makes it
    # of its random numbers (`ShardedRandom.bookmark`) where it recomputes. None: one span, whose
    # activations are kept.
    bookmark: Callable[[], Replay] | None = None


@dataclass(frozen=True)
class _Graph:
    """A span that has run, ready for its backward: edges of the graph, so that the results
    themselves can go.
    """

    leaves: Values
    made: dict[int, GradientEdge]
    sent: dict[int, GradientEdge]
    loss: tuple[GradientEdge, Tensor] | None


class StageRun:
    """One micro-batch in a stage: `forward`, then `backward`, then `weights` where that was asked
    for in halves.

    Args:
        wanted: received values that want a gradient.
    """

    def __init__(self, stage: StageProgram, wanted: Collection[int]) -> None:
        self._stage, self._wanted = stage, wanted
        self._differentiable = {
            *wanted,
            *(value for span in stage.spans for value in span.differentiable),
        }
        self._graph: _Graph | None = None  # of the last span
        # What is kept to recompute: tensors as they were, what passes from span to span, each
        # span's random numbers.
        self._inputs: StageInputs | None = None
        self._values: Values = {}
        self._replays: list[Replay] = []
        self.weights: Callable[[], None] = lambda: None  # the second half of the backward

    def forward(self, inputs: StageInputs) -> tuple[Values, Values]:
        """(escaping values, values sent to other stages); the values may carry a graph."""
        if self._stage.bookmark is None:
            (span,) = self._stage.spans
            escaping, sent, self._graph = self._run(span, inputs)
            return escaping, sent
        escaping, sent = {}, {}
        self._inputs, self._values = (
            replace(inputs, buffers=dict(inputs.buffers)),
            dict(inputs.received),
        )
        with torch.no_grad():  # nothing is saved for a backward: the spans run again for it
            for span in self._stage.spans:
                self._replays.append(self._stage.bookmark())
                handed = {value: self._values[value] for value in span.reads}
                left, handed_on, made = span.program(replace(inputs, received=handed))
                escaping |= left
                sent |= handed_on
                self._values |= made
        return escaping, sent

    def backward(
        self,
        receive: Callable[[], Values],
        loss_scale: Tensor,
        hold: Callable[[Collection[str]], None],
        in_halves: bool,
    ) -> dict[int, Tensor | None]:
        """Differentiate all spans; returns the gradients of the received values that want one.

        Args:
            receive: waits for the gradients of what was sent to other stages, by value, of values
                that the stage only passes on too. What is recomputed first is so while they are on
                their way.
            loss_scale: gradients are those of the loss times this.
            hold: told before every span whose parameters' gradients are not complete with it.
            in_halves: gradients of the weights are left to `weights`, where nothing is recomputed.
        """
        in_halves = (
            in_halves and self._stage.bookmark is None
        )  # what is recomputed is not kept for a later half
        graph: _Graph | None = self._graph or self._again(len(self._stage.spans) - 1)
        self._graph, grads = None, receive()
        inside = {
            v: grads[v] for v in self._wanted if v in grads
        }  # of received values, and between spans
        for number in reversed(range(len(self._stage.spans))):
            span = self._stage.spans[number]
            for value in span.differentiable:
                self._values.pop(value, None)  # its readers are done
            graph = graph or self._again(number)
            hold(span.used_before)
            for value, grad in self._differentiate(
                graph, inside, grads, loss_scale, in_halves
            ).items():
                inside[value] = inside[value] + grad if value in inside else grad
            graph = None  # the span's activations, before the next is recomputed
        hold(())
        self._inputs, self._values = None, {}
        return {value: inside.get(value) for value in self._wanted}

    def _again(self, number: int) -> _Graph:
        assert self._inputs is not None
        with self._replays[number]():
            return self._run(
                self._stage.spans[number], replace(self._inputs, received=self._values)
            )[2]

    def _run(self, span: Span, inputs: StageInputs) -> tuple[Values, Values, _Graph]:
        """(escaping, sent, the graph) of a span."""
        handed = {value: inputs.received[value] for value in span.reads}
        leaves = {
            v: t.detach().requires_grad_() for v, t in handed.items() if v in self._differentiable
        }
        with torch.enable_grad():
            escaping, sent, made = span.program(replace(inputs, received=handed | leaves))
        is_made_here = self._stage.loss not in span.reads  # a record may hold it once more
        loss = escaping.get(self._stage.loss) if is_made_here else None
        graph = _Graph(
            leaves,
            {v: get_gradient_edge(made[v]) for v in span.differentiable if made[v].requires_grad},
            {v: get_gradient_edge(t) for v, t in sent.items() if t.requires_grad},
            None
            if loss is None or not loss.requires_grad
            else (get_gradient_edge(loss), loss.detach()),
        )
        return escaping, sent, graph

    def _differentiate(
        self, graph: _Graph, inside: Values, grads: Values, loss_scale: Tensor, in_halves: bool
    ) -> Values:
        """The backward of a span: gradients of what it read. Those of what it made are taken out of
        `inside`.
        """
        pairs = []
        for value, edge in graph.made.items():
            if value in inside:
                pairs.append((edge, inside.pop(value)))
        for value, edge in graph.sent.items():
            if value in grads:
                pairs.append((edge, grads[value]))
        if graph.loss is not None:
            edge, loss = graph.loss
            pairs.append((edge, loss_scale.to(loss).expand_as(loss)))
        roots = [edge for edge, _ in pairs]
        root_grads = [grad for _, grad in pairs]
        if in_halves and roots and graph.leaves:
            split = SplitBackward(roots, root_grads, list(graph.leaves.values()))
            self.weights = split.run_weights
            found = split.run_inputs()
        elif in_halves and roots:
            found, self.weights = [], partial(torch.autograd.backward, roots, root_grads)
        else:
            if roots:
                torch.autograd.backward(roots, root_grads)
            found = [leaf.grad for leaf in graph.leaves.values()]
        return {
            value: grad for value, grad in zip(graph.leaves, found, strict=True) if grad is not None
        }
