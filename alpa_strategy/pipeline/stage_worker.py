"""StageWorker: what one stage does with a micro-batch on this device, forward and backward. Knows no schedule.

The executor calls `forward`, then `backward` or `backward_inputs` and `backward_weights`, for every micro-batch in its
schedule's order. Between the two the worker keeps what the backward needs, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.messages import Outbox, Receipt, Transfer
from alpa_strategy.pipeline.per_step_values import PerStepValues
from alpa_strategy.pipeline.recompute import Kept, Recompute, RecomputedBackward, StageInputs, StageProgram, Values
from alpa_strategy.pipeline.split_backward import SplitBackward
from alpa_strategy.runtime.parameters import MeshParameters
from alpa_strategy.schedules import Action
from alpa_strategy.sharding.cross_mesh import Channel, StageSpec

# (stage, `F` or `B`) -> micro-batches in the order in which the stage sends what it makes forward, or back.
Sends = Mapping[tuple[int, str], Sequence[int]]


@dataclass
class OwnStage:
    """What this rank brings for one of its stages. Stages on one mesh may pass the same `store`."""

    program: StageProgram | Recompute  # `Recompute` where the stage recomputes its activations
    store: MeshParameters
    mesh: MeshComm
    parameters: Mapping[str, nn.Parameter]  # by name; a step makes their `.grad`s (local storage shards)
    buffers: dict[str, Any]  # by name; entries are replaced when a micro-batch updates them
    per_step: PerStepValues  # what the program makes of the parameters once per step


class ChannelEnd:
    """A channel's end at a stage of this device: with every micro-batch one bundle comes in and one goes out.

    Args:
        is_source: values go out here and gradients come in; else the other way round.
        offset: of the channel's tags among those of the pipeline.
    """

    def __init__(self, channel: Channel, is_source: bool, forward: Transfer, backward: Transfer, offset: int) -> None:
        self.values, self.differentiable = channel.values, channel.differentiable
        self.peer = channel.target if is_source else channel.source
        self._inbound, self._outbound = (backward, forward) if is_source else (forward, backward)
        self._is_source, self._offset = is_source, offset
        self._posted: dict[int, Receipt] = {}
        self._abandoned: list[dict[int, Receipt]] = []  # of steps that were broken off: gloo may still write into them

    def start_step(self, sent: Sequence[int], first_tag: int) -> None:
        """Forget the step before. sent: micro-batches in the order in which the other end sends them."""
        if self._posted:
            self._abandoned.append(self._posted)
        self._coming, self._posted = iter(sent), {}
        tag = first_tag + self._offset  # micro-batch m: values at tag + 2 m, gradients at tag + 2 m + 1
        self._tag_in, self._tag_out = (tag + 1, tag) if self._is_source else (tag, tag + 1)
        self._inbound.forget()
        self._outbound.forget()

    def post(self, microbatch: int) -> None:
        """Post its receive, after those of what is sent before it: NCCL pairs messages by their order alone."""
        while microbatch not in self._posted:
            first = next(self._coming)
            self._posted[first] = self._inbound.receive(self._tag_in + 2 * first)

    def take(self, microbatch: int) -> list[Tensor]:
        """What comes in; waits until it is there."""
        self.post(microbatch)
        return self._posted.pop(microbatch).wait()

    def send(self, outbox: Outbox, tensors: Sequence[Tensor | None], microbatch: int) -> None:
        """What goes out; None stands for zeros."""
        outbox.send(self._outbound.send_ops(tensors, self._tag_out + 2 * microbatch))


@dataclass
class _InFlight:
    """What is kept of a micro-batch between its forward and its last backward."""

    inputs: Values  # received values that want a gradient
    kept: Kept | None = None  # where the stage recomputes; nothing below is there then
    roots: dict[int, GradientEdge] = field(default_factory=dict)  # results that get one: no tensors, so these can go
    loss: tuple[GradientEdge, Tensor] | None = None
    weights: Callable[[], None] | None = None  # the second half of the backward


class StageWorker:
    """One stage on this device.

    Args:
        index: the stage's place in the pipeline.
        own: what it runs and on what; its buffers are updated in place.
        loss: value index of the loss where this stage makes it, else None.
    """

    def __init__(self, index: int, spec: StageSpec, own: OwnStage, loss: int | None) -> None:
        self.index, self.spec = index, spec
        self._own, self._loss = own, loss
        self._incoming: list[ChannelEnd] = []  # of channels from earlier stages
        self._outgoing: list[ChannelEnd] = []  # of channels to later ones
        self._in_flight: dict[int, _InFlight] = {}
        self.finish_step()

    def connect(self, channel: Channel, forward: Transfer, backward: Transfer, offset: int) -> None:
        """Attach a channel that begins or ends here. In channel order."""
        is_source = channel.source == self.index
        end = ChannelEnd(channel, is_source, forward, backward, offset)
        (self._outgoing if is_source else self._incoming).append(end)

    def start_step(
        self,
        batches: Sequence[Mapping[int, Tensor]],
        given: Sequence[Values],
        loss_scale: Tensor,
        outbox: Outbox,
        sends: Sends,
        first_tag: int,
    ) -> None:
        """Ready for a step's first micro-batch.

        Args:
            batches: per micro-batch the stage's tensors of the batch.
            given: per micro-batch the received values that no stage makes.
            loss_scale: gradients are those of the loss times this.
            sends: in which order the stages send.
            first_tag: of the step's messages.
        """
        self._batches, self._given, self._loss_scale, self._outbox = batches, given, loss_scale, outbox
        for end in self._incoming:
            end.start_step(sends[end.peer, "F"], first_tag)
        for end in self._outgoing:
            end.start_step(sends[end.peer, "B"], first_tag)

    def finish_step(self) -> None:
        """Let go of all tensors, of a step that was broken off too."""
        self._batches, self._given = [], []
        self.escaped: dict[int, Values] = {}  # by micro-batch, in the order of the forwards
        self._in_flight.clear()
        self._own.per_step.forget()

    def post(self, action: Action) -> None:
        """Post the receives that a forward or backward waits for."""
        for end in self._incoming if action.kind == "F" else self._outgoing:
            end.post(action.microbatch)

    # Forward

    def forward(self, microbatch: int) -> None:
        """Receive, run, send on."""
        received, inputs = dict(self._given[microbatch]), {}
        for end in self._incoming:
            for value, tensor in zip(end.values, end.take(microbatch), strict=True):
                if value in end.differentiable:
                    inputs[value] = tensor.requires_grad_()
                received[value] = tensor
        escaping, sent, kept = self._run(self._batches[microbatch], received, inputs)
        del received
        for end in self._outgoing:
            end.send(self._outbox, [sent[v] for v in end.values], microbatch)
        flight = self._in_flight[microbatch] = _InFlight(inputs, kept)
        if kept is None:
            self._find_roots(flight, escaping, sent)
        for name, value in self.spec.buffer_updates.items():
            self._own.buffers[name] = escaping[value].detach()
        self.escaped[microbatch] = {value: escaping[value].detach() for value in self.spec.escaping}

    def _run(self, batch: Mapping[int, Tensor], received: Values, inputs: Values) -> tuple[Values, Values, Kept | None]:
        """(escaping, sent or passed on, what recomputation keeps)."""
        own, kept = self._own, None
        given = StageInputs(own.store.step_inputs(), own.buffers, batch, received)
        if isinstance(own.program, Recompute):
            escaping, sent, kept = own.program.forward(given, inputs)
        else:
            with torch.enable_grad():
                escaping, sent = own.program(given)
        passed_on = {v: received[v] for end in self._outgoing for v in end.values if v in received}
        return escaping, {**passed_on, **sent}, kept

    def _find_roots(self, flight: _InFlight, escaping: Values, sent: Values) -> None:
        wanted = sorted({v for end in self._outgoing for v in end.differentiable})
        flight.roots = {v: get_gradient_edge(sent[v]) for v in wanted if sent[v].requires_grad}
        loss = None if self._loss is None else escaping[self._loss]
        if loss is not None and loss.requires_grad:
            flight.loss = get_gradient_edge(loss), self._loss_scale.to(loss).expand_as(loss)

    # Backward

    def backward(self, microbatch: int) -> None:
        """The whole backward of a micro-batch: receive, differentiate, send back."""
        flight = self._in_flight.pop(microbatch)
        if flight.kept is not None:
            self._recomputed_backward(microbatch, flight)
            return
        roots, grads = self._roots(microbatch, flight)
        if roots:
            torch.autograd.backward(roots, grads)
        self._send_grads(microbatch, {v: leaf.grad for v, leaf in flight.inputs.items()})

    def backward_inputs(self, microbatch: int) -> None:
        """The first half of the backward, which other stages wait for."""
        flight = self._in_flight[microbatch]
        if flight.kept is not None:  # what is recomputed is not kept for a later half
            self._recomputed_backward(microbatch, flight)
            return
        roots, grads = self._roots(microbatch, flight)
        found: list[Tensor | None] = [None] * len(flight.inputs)
        if roots and flight.inputs:
            split = SplitBackward(roots, grads, list(flight.inputs.values()))
            found, flight.weights = split.run_inputs(), split.run_weights
        elif roots:
            flight.weights = partial(torch.autograd.backward, roots, grads)
        self._send_grads(microbatch, dict(zip(flight.inputs, found, strict=True)))

    def backward_weights(self, microbatch: int) -> None:
        """The second half: the weights' gradients."""
        weights = self._in_flight.pop(microbatch).weights
        if weights is not None:
            weights()

    def _roots(self, microbatch: int, flight: _InFlight) -> tuple[list[GradientEdge], list[Tensor]]:
        """What the backward starts from: edges of the graph, and their gradients."""
        arrived = self._arrived_grads(microbatch)
        pairs = [(edge, arrived[value]) for value, edge in flight.roots.items()]
        if flight.loss is not None:
            pairs.append(flight.loss)
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _arrived_grads(self, microbatch: int) -> Values:
        """Receive the gradients of the sent values; what several stages hand back is summed in the stages' order."""
        grads: Values = {}
        for end in self._outgoing:
            for value, tensor in zip(end.differentiable, end.take(microbatch), strict=True):
                grads[value] = grads[value] + tensor if value in grads else tensor
        return grads

    def _recomputed_backward(self, microbatch: int, flight: _InFlight) -> None:
        kept, flight.kept, flight.inputs = flight.kept, None, {}
        assert kept is not None
        assert isinstance(self._own.program, Recompute)
        # The last span is recomputed while gradients are on their way.
        recomputed = RecomputedBackward(self._own.program, kept, self._own.store.step_inputs())
        grads = recomputed.backward(self._arrived_grads(microbatch), self._loss_scale, self._own.store.hold)
        self._send_grads(microbatch, grads)

    def _send_grads(self, microbatch: int, grads: Mapping[int, Tensor | None]) -> None:
        for end in self._incoming:
            end.send(self._outbox, [grads[v] for v in end.differentiable], microbatch)
