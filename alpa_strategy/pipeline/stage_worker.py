"""StageWorker: what one stage does with a micro-batch on this device, forward and backward. Knows no schedule.

A schedule calls `forward`, then `backward` or `backward_inputs` and `backward_weights`, for every micro-batch in an
order of its choice. Between the two the worker keeps what the backward needs, and nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from alpa_strategy.comm.messages import Outbox, Receipt, Transfer
from alpa_strategy.inter_op.cross_mesh import Channel, StageSpec
from alpa_strategy.pipeline.per_step_values import DerivedValues
from alpa_strategy.pipeline.recompute import Kept, Recompute
from alpa_strategy.pipeline.spec import StageInputs, StageProgram, Values
from alpa_strategy.pipeline.split_backward import SplitBackward


class Parameters(Protocol):
    """The stage's parameters (`runtime.parameters.MeshParameters`, which stages on one mesh share)."""

    def step_inputs(self) -> Mapping[str, Tensor]:
        """Name -> what the stage's program takes."""
        ...

    def sync(self, enabled: bool) -> None:
        """Whether the next backward ends with the reduction."""
        ...

    def hold(self, names: Collection[str]) -> None:
        """Gradients of these parameters are not complete when they are made next."""
        ...

    def finish_backward(self) -> None:
        """Complete the gradients. Collective."""
        ...


class SharedStore:
    """One store of parameters used by one or several stages on the same mesh: reduced once, after the last of them."""

    def __init__(self, store: Parameters) -> None:
        self.store = store
        self.num_users = 0
        self.num_in_flight = self.max_in_flight = 0  # (stage, micro-batch) pairs between forward and last backward
        self._num_backwards = self._num_reduced = 0

    def start_step(self) -> None:
        """Nothing of this step has run yet."""
        self._num_backwards = self._num_reduced = self.num_in_flight = 0
        self.store.sync(False)

    def after_forward(self) -> None:
        """A stage has done a micro-batch's forward."""
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)

    def before_backward(self, num_microbatches: int) -> None:
        """Called before each stage's last half of each backward: the very last one starts the reduction by itself."""
        self._num_backwards += 1
        self.num_in_flight -= 1
        if self._num_backwards == num_microbatches * self.num_users:
            self.store.sync(True)

    def reduce(self) -> None:
        """A stage has done its last backward."""
        self._num_reduced += 1
        if self._num_reduced == self.num_users:
            self.store.finish_backward()


@dataclass
class _Port:
    """One end of a channel on this device: what its messages are tagged with, and bundles on their way."""

    channel: Channel
    forward: Transfer
    backward: Transfer
    first_tag: int
    arriving: dict[int, Receipt] = field(default_factory=dict)

    def forward_tag(self, microbatch: int) -> int:
        return self.first_tag + 2 * microbatch

    def backward_tag(self, microbatch: int) -> int:
        return self.first_tag + 2 * microbatch + 1


@dataclass
class _InFlight:
    """What is kept of a micro-batch between its forward and its backward."""

    inputs: Values  # received values that want a gradient
    kept: Kept | None = None  # where the stage recomputes; nothing below is there then
    roots: dict[int, GradientEdge] = field(default_factory=dict)  # results that get one: no tensors, so these can go
    loss: tuple[GradientEdge, Tensor] | None = None
    split: SplitBackward | None = None
    roots_used: tuple[list[GradientEdge], list[Tensor]] | None = None


class StageWorker:
    """One stage on this device.

    Args:
        index: the stage's place in the pipeline.
        program, store, buffers: what it runs and on what; `buffers` is updated in place.
        loss: value index of the loss where this stage makes it, else None.
        recompute: given where activations are recomputed: the program span by span.
        derived: what the program keeps from micro-batch to micro-batch of one step.
    """

    def __init__(
        self,
        index: int,
        spec: StageSpec,
        program: StageProgram,
        store: SharedStore,
        buffers: dict[str, Any],
        loss: int | None,
        num_microbatches: int,
        outbox: Outbox,
        recompute: Recompute | None = None,
        derived: DerivedValues | None = None,
    ) -> None:
        self._recompute, self._derived = recompute, derived
        self.index, self.spec = index, spec
        self._program, self.store, self._buffers = program, store, buffers
        self._loss, self._num_microbatches, self._outbox = loss, num_microbatches, outbox
        self._incoming: list[_Port] = []
        self._outgoing: list[_Port] = []
        self._in_flight: dict[int, _InFlight] = {}
        store.num_users += 1
        self.start_step([], [], torch.ones(()), False)

    def connect(self, channel: Channel, forward: Transfer, backward: Transfer, first_tag: int) -> None:
        """Attach a channel that begins or ends here. In channel order."""
        ports = self._outgoing if channel.source == self.index else self._incoming
        ports.append(_Port(channel, forward, backward, first_tag))

    def start_step(
        self, batches: Sequence[Mapping[int, Tensor]], given: Sequence[Values], loss_scale: Tensor, has_backward: bool
    ) -> None:
        """Forget the step before.

        Args:
            batches: per micro-batch the stage's tensors of the batch.
            given: per micro-batch the received values that no stage makes.
        """
        self._batches, self._given, self._loss_scale, self._has_backward = batches, given, loss_scale, has_backward
        self.escaped: list[Values] = []
        if self._derived is not None:
            self._derived.start_step(has_backward)
        self._in_flight.clear()
        for port in (*self._incoming, *self._outgoing):
            port.arriving.clear()
            port.forward.forget()
            port.backward.forget()

    # Forward

    def post_forward(self, microbatch: int) -> None:
        """Post the receives of a micro-batch's values, if they are not."""
        for port in self._incoming:
            if microbatch not in port.arriving:
                port.arriving[microbatch] = port.forward.receive(port.forward_tag(microbatch))

    def forward(self, microbatch: int) -> None:
        """Receive, run, send on."""
        self.post_forward(microbatch)
        received, inputs = dict(self._given[microbatch]), {}
        for port in self._incoming:
            tensors = port.arriving.pop(microbatch).wait()
            for value, tensor in zip(port.channel.values, tensors, strict=True):
                if self._has_backward and value in port.channel.differentiable:
                    inputs[value] = tensor.requires_grad_()
                received[value] = tensor
        escaping, sent, kept = self._run(self._batches[microbatch], received, inputs)
        del received
        for port in self._outgoing:
            self._outbox.send(
                port.forward.send_ops([sent[v] for v in port.channel.values], port.forward_tag(microbatch))
            )
        if self._has_backward:
            flight = self._in_flight[microbatch] = _InFlight(inputs, kept)
            if kept is None:
                self._find_roots(flight, escaping, sent)
            self.store.after_forward()
        for name, value in self.spec.buffer_updates.items():
            self._buffers[name] = escaping[value].detach()
        self.escaped.append({value: escaping[value].detach() for value in self.spec.escaping})

    def _run(self, batch: Mapping[int, Tensor], received: Values, inputs: Values) -> tuple[Values, Values, Kept | None]:
        """(escaping, sent or passed on, what recomputation keeps)."""
        given, kept = StageInputs(self.store.store.step_inputs(), self._buffers, batch, received), None
        if self._has_backward and self._recompute is not None:
            escaping, sent, kept = self._recompute.forward(given, inputs)
        else:
            with torch.set_grad_enabled(self._has_backward):
                escaping, sent = self._program(given)
        passed_on = {v: received[v] for port in self._outgoing for v in port.channel.values if v in received}
        return escaping, {**passed_on, **sent}, kept

    def _find_roots(self, flight: _InFlight, escaping: Values, sent: Values) -> None:
        wanted = sorted({v for port in self._outgoing for v in port.channel.differentiable})
        flight.roots = {v: get_gradient_edge(sent[v]) for v in wanted if sent[v].requires_grad}
        flight.loss = self._loss_root(escaping)

    def _loss_root(self, escaping: Values) -> tuple[GradientEdge, Tensor] | None:
        if self._loss is None or not escaping[self._loss].requires_grad:
            return None
        loss = escaping[self._loss]
        return get_gradient_edge(loss), self._loss_scale.to(loss).expand_as(loss)

    # Backward

    def post_backward(self, microbatch: int) -> None:
        """Post the receives of a micro-batch's gradients, if they are not."""
        if not self._has_backward:
            return
        for port in self._outgoing:
            key = -1 - microbatch  # apart from a forward's
            if key not in port.arriving:
                port.arriving[key] = port.backward.receive(port.backward_tag(microbatch))

    def _arrived_grads(self, microbatch: int) -> Values:
        """Receive the gradients of the sent values; what several stages hand back is summed in the stages' order."""
        self.post_backward(microbatch)
        grads: Values = {}
        for port in self._outgoing:
            tensors = port.arriving.pop(-1 - microbatch).wait()
            for value, tensor in zip(port.channel.differentiable, tensors, strict=True):
                grads[value] = grads[value] + tensor if value in grads else tensor
        return grads

    def _root_grads(self, microbatch: int) -> None:
        """What the backward starts from."""
        grads = self._arrived_grads(microbatch)
        flight = self._in_flight[microbatch]
        pairs = [(edge, grads[value]) for value, edge in flight.roots.items()]
        if flight.loss is not None:
            pairs.append(flight.loss)
        flight.roots_used = [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def backward(self, microbatch: int) -> None:
        """The whole backward of a micro-batch: receive, differentiate, send back."""
        if self._recompute is not None:
            self.store.before_backward(self._num_microbatches)
            self._recomputed_backward(microbatch)
            return
        self._root_grads(microbatch)
        self.store.before_backward(self._num_microbatches)
        self._whole_backward(microbatch, self._in_flight.pop(microbatch))

    def _recomputed_backward(self, microbatch: int) -> None:
        assert self._recompute is not None
        self.post_backward(microbatch)
        kept = self._in_flight.pop(microbatch).kept
        assert kept is not None
        again = self._recompute.again(kept, self.store.store.step_inputs())  # while gradients are on their way
        grads = again.backward(self._arrived_grads(microbatch), self._loss_scale, self.store.store.hold)
        self._send_grads(microbatch, grads)

    def _whole_backward(self, microbatch: int, flight: _InFlight) -> None:
        assert flight.roots_used is not None
        roots, grads = flight.roots_used
        if roots:
            torch.autograd.backward(roots, grads)
        self._send_grads(microbatch, {v: leaf.grad for v, leaf in flight.inputs.items()})

    def backward_inputs(self, microbatch: int) -> None:
        """The first half of the backward, which other stages wait for."""
        if self._recompute is not None:  # what is recomputed is not kept for a later half
            self._recomputed_backward(microbatch)
            self._in_flight[microbatch] = _InFlight({}, roots_used=([], []))
            return
        self._root_grads(microbatch)
        flight = self._in_flight[microbatch]
        if not flight.inputs:
            return
        assert flight.roots_used is not None
        roots, grads = flight.roots_used
        if not roots:
            self._send_grads(microbatch, dict.fromkeys(flight.inputs))
            return
        flight.split = SplitBackward(roots, grads, list(flight.inputs.values()))
        found = flight.split.run_inputs()
        self._send_grads(microbatch, dict(zip(flight.inputs, found, strict=True)))

    def backward_weights(self, microbatch: int) -> None:
        """The second half: the weights' gradients."""
        flight = self._in_flight.pop(microbatch)
        self.store.before_backward(self._num_microbatches)
        assert flight.roots_used is not None
        if flight.split is not None:
            flight.split.run_weights()
        elif flight.roots_used[0]:
            torch.autograd.backward(*flight.roots_used)

    def _send_grads(self, microbatch: int, grads: Mapping[int, Tensor | None]) -> None:
        for port in self._incoming:
            tensors = [grads[value] for value in port.channel.differentiable]
            self._outbox.send(port.backward.send_ops(tensors, port.backward_tag(microbatch)))

    def reduce(self) -> None:
        """After the stage's last backward: reduce its parameters' gradients (with the last stage of the store)."""
        if self._has_backward:
            self.store.reduce()
