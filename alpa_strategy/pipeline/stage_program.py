"""One stage's forward and backward of a micro-batch, with saved or recomputed activations.

A stage that recomputes runs its forward without a graph, and its backward recompute segment by
segment (`Span`): each segment's forward runs once more just before its backward. Between the two
only the values that pass from segment to segment are stored, and intermediates of one segment at a
time. All devices of the stage run the same forwards and backwards in the same order, collectives
included. Hooks of saved tensors (`torch.utils.checkpoint`) could not guarantee that: devices save
different tensors.

This file knows neither schedules nor messages.
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

# Tensors by value index of the micro-batched step.
Values = dict[int, Tensor]


@dataclass(frozen=True)
class StageInputs:
    """One micro-batch's local tensors."""

    # By name.
    parameters: Mapping[str, Tensor]

    # By name; the counters under `COUNTERS`.
    buffers: Mapping[str, Any]

    # By index in the step's batch.
    batch: Mapping[int, Tensor]

    # Values that other stages made, or earlier segments of this one.
    received: Mapping[int, Tensor]


# Returns (escaping values, full on every device of the stage; values sent to other stages, in the
# stage's layouts; values made for later segments, as they are made).
SpanProgram = Callable[[StageInputs], tuple[Values, Values, Values]]


@dataclass(frozen=True)
class Span:
    """A recompute segment: consecutive ops of a stage that are recomputed together."""

    program: SpanProgram

    # Values that it reads: received by the stage, or made by earlier segments.
    reads: tuple[int, ...]

    # Values made for later segments that get a gradient.
    differentiable: tuple[int, ...] = ()

    # Names of trainable parameters that earlier segments use too: their gradients are complete only
    # after the backward of the first of these.
    used_before: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageProgram:
    """A stage as its recompute segments, in order."""

    spans: Sequence[Span]

    # Value index of the step's loss, whichever stage makes it.
    loss: int

    # Records the state of the random numbers (`ShardedRandom.bookmark`) if the stage recomputes.
    # None: there is one segment, whose activations are saved.
    bookmark: Callable[[], Replay] | None = None


@dataclass(frozen=True)
class _Graph:
    """A segment that has run, ready for its backward.

    It has edges of the graph instead of results, so that these can be freed.
    """

    # Detached values that were read and get a gradient.
    leaves: Values

    # Edges of values made for later segments, and of values sent to other stages.
    passed_on: dict[int, GradientEdge]
    sent: dict[int, GradientEdge]

    # Edge of the loss and its value, if the segment makes the loss.
    loss: tuple[GradientEdge, Tensor] | None


class StageRun:
    """One micro-batch in a stage: `forward`, then `backward`, then `weights` if the backward was
    requested in halves.

    Args:
        stage: the program.
        wanted: received values that need a gradient.
    """

    def __init__(self, stage: StageProgram, wanted: Collection[int]) -> None:
        self._stage = stage
        self._wanted = wanted
        self._differentiable = set(wanted)
        for span in stage.spans:
            self._differentiable.update(span.differentiable)

        # Of the last segment.
        self._graph: _Graph | None = None

        # Stored for the recomputation: the inputs, values that pass from segment to segment, and
        # each segment's random state.
        self._inputs: StageInputs | None = None
        self._values: Values = {}
        self._replays: list[Replay] = []

        # Runs the second half of the backward.
        self.weights: Callable[[], None] = lambda: None

    def forward(self, inputs: StageInputs) -> tuple[Values, Values]:
        """Return (escaping values, values sent to other stages); they may have a graph."""
        if self._stage.bookmark is None:
            (span,) = self._stage.spans
            escaping, sent, self._graph = self._run(span, inputs)
            return escaping, sent

        escaping = {}
        sent = {}
        self._inputs = replace(inputs, buffers=dict(inputs.buffers))
        self._values = dict(inputs.received)

        # Nothing is saved for the backward, which recomputes the segments.
        with torch.no_grad():
            for span in self._stage.spans:
                self._replays.append(self._stage.bookmark())
                read = {value: self._values[value] for value in span.reads}
                span_escaping, span_sent, passed_on = span.program(replace(inputs, received=read))
                escaping |= span_escaping
                sent |= span_sent
                self._values |= passed_on
        return escaping, sent

    def backward(
        self,
        receive: Callable[[], Values],
        loss_scale: Tensor,
        hold: Callable[[Collection[str]], None],
        in_halves: bool,
    ) -> dict[int, Tensor | None]:
        """Differentiate all segments, and return the gradients of the received values that need
        one.

        Args:
            receive: waits for the gradients of values that were sent to other stages, those that
                the stage only passes on included. The last segment is recomputed while they are in
                flight.
            loss_scale: gradients are those of the loss times this.
            hold: called before every segment with the names of the parameters whose gradients are
                not complete with it.
            in_halves: whether `weights` computes the gradients of the weights; ignored if the stage
                recomputes.
        """
        # Recomputed activations are not stored for a later half.
        in_halves = in_halves and self._stage.bookmark is None

        graph: _Graph | None = self._graph or self._recomputed(len(self._stage.spans) - 1)
        self._graph = None
        sent_grads = receive()

        # Gradients of received values, and of values between segments.
        inner_grads = {v: sent_grads[v] for v in self._wanted if v in sent_grads}
        for number in reversed(range(len(self._stage.spans))):
            span = self._stage.spans[number]
            for value in span.differentiable:
                # The segments that read it are done.
                self._values.pop(value, None)
            graph = graph or self._recomputed(number)
            hold(span.used_before)
            new_grads = self._differentiate(graph, inner_grads, sent_grads, loss_scale, in_halves)
            for value, grad in new_grads.items():
                is_known = value in inner_grads
                inner_grads[value] = inner_grads[value] + grad if is_known else grad

            # Frees the segment's activations before the next one is recomputed.
            graph = None
            del new_grads

        hold(())
        self._inputs = None
        self._values = {}
        return {value: inner_grads.get(value) for value in self._wanted}

    def _recomputed(self, number: int) -> _Graph:
        """Return the autograd graph of segment `number`, whose forward runs once more with the
        random numbers of the first time.
        """
        assert self._inputs is not None
        inputs = replace(self._inputs, received=self._values)
        with self._replays[number]():
            _, _, graph = self._run(self._stage.spans[number], inputs)
        return graph

    def _run(self, span: Span, inputs: StageInputs) -> tuple[Values, Values, _Graph]:
        """Run the forward of a segment with autograd.

        Args:
            inputs: of the stage, with the values that the segment reads.

        Returns:
            (values that leave the stage for the step's results, values for other stages, the graph
            for the backward).
        """
        read = {value: inputs.received[value] for value in span.reads}
        leaves: Values = {}
        for value, tensor in read.items():
            if value in self._differentiable:
                leaves[value] = tensor.detach().requires_grad_()
        with torch.enable_grad():
            escaping, sent, passed_on = span.program(replace(inputs, received=read | leaves))

        # A segment that reads the loss may return it among escaping values (a logged value).
        is_made_here = self._stage.loss not in span.reads
        loss = escaping.get(self._stage.loss) if is_made_here else None
        loss_edge = None
        if loss is not None and loss.requires_grad:
            loss_edge = (get_gradient_edge(loss), loss.detach())

        passed_on_edges = {
            v: get_gradient_edge(passed_on[v])
            for v in span.differentiable
            if passed_on[v].requires_grad
        }
        sent_edges = {v: get_gradient_edge(t) for v, t in sent.items() if t.requires_grad}
        return escaping, sent, _Graph(leaves, passed_on_edges, sent_edges, loss_edge)

    def _differentiate(
        self,
        graph: _Graph,
        inner_grads: Values,
        sent_grads: Values,
        loss_scale: Tensor,
        in_halves: bool,
    ) -> Values:
        """Run the backward of a segment, and return the gradients of the values that it read; those
        without a gradient are left out.

        Args:
            graph: of the segment.
            inner_grads: gradients of values made for later segments; those of this one are removed.
            sent_grads: gradients of values sent to other stages.
            loss_scale: gradients are those of the loss times this.
            in_halves: whether `self.weights`, which is set here, computes the gradients of the
                weights.
        """
        pairs = []
        for value, edge in graph.passed_on.items():
            if value in inner_grads:
                pairs.append((edge, inner_grads.pop(value)))
        for value, edge in graph.sent.items():
            if value in sent_grads:
                pairs.append((edge, sent_grads[value]))
        if graph.loss is not None:
            edge, loss = graph.loss
            pairs.append((edge, loss_scale.to(loss).expand_as(loss)))
        roots = [edge for edge, _ in pairs]
        root_grads = [grad for _, grad in pairs]
        if in_halves and roots and graph.leaves:
            split = SplitBackward(roots, root_grads, list(graph.leaves.values()))
            self.weights = split.run_weights
            leaf_grads = split.run_inputs()
        elif in_halves and roots:
            self.weights = partial(torch.autograd.backward, roots, root_grads)
            leaf_grads = []
        else:
            if roots:
                torch.autograd.backward(roots, root_grads)
            leaf_grads = [leaf.grad for leaf in graph.leaves.values()]
        pairs_of_leaves = zip(graph.leaves, leaf_grads, strict=True)
        return {value: grad for value, grad in pairs_of_leaves if grad is not None}
