"""StageWorker: what one stage does with a micro-batch on this device, forward and backward. Knows
no schedule.

The executor calls `forward`, then `backward`, of the inputs alone before `backward_weights`, for
every micro-batch in its schedule's order. Between the two the worker keeps what the backward needs,
and nothing more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.messages import Outbox, Receipt, Transfer
from alpa_strategy.pipeline.per_step_values import PerStepValues
from alpa_strategy.pipeline.stage_program import StageInputs, StageProgram, StageRun, Values
from alpa_strategy.runtime.mesh_parameters import MeshParameters
from alpa_strategy.schedules import Action, Orders
from alpa_strategy.sharding.cross_mesh import Channel, StageSpec

# (stage, `F` or `B`) -> micro-batches in the order in which the stage sends what it makes forward,
# or back.
Sends = Mapping[tuple[int, str], Sequence[int]]


def sends_of(orders: Orders) -> Sends:
    """What all stages send where the meshes work in these orders."""
    sends: dict[tuple[int, str], list[int]] = defaultdict(list)
    for action in (action for order in orders for action in order if action.kind != "W"):
        sends[action.stage, "F" if action.kind == "F" else "B"].append(action.microbatch)
    return sends


@dataclass
class OwnStage:
    """What this rank brings for one of its stages. Stages on one mesh may pass the same `store`."""

    program: StageProgram
    store: MeshParameters
    mesh: MeshComm
    parameters: Mapping[
        str, nn.Parameter
    ]  # by name; a step makes their `.grad`s (local storage shards)
    buffers: dict[str, Any]  # by name; entries are replaced when a micro-batch updates them
    per_step: PerStepValues  # what the program makes of the parameters once per step


class ChannelEnd:
    """A channel's end at a stage of this device: with every micro-batch one bundle comes in and one
    goes out.

    Args:
        is_source: values go out here and gradients come in; else the other way round.
        offset: of the channel's tags among those of the pipeline.
    """

    def __init__(
        self, channel: Channel, is_source: bool, forward: Transfer, backward: Transfer, offset: int
    ) -> None:
        self.values, self.differentiable = channel.values, channel.differentiable
        self.peer = channel.target if is_source else channel.source
        self._inbound, self._outbound = (backward, forward) if is_source else (forward, backward)
        self._is_source, self._offset = is_source, offset
        self._posted: dict[int, Receipt] = {}
        self._abandoned: list[
            dict[int, Receipt]
        ] = []  # of steps that were broken off: gloo may still write into them

    def start_step(self, sent: Sequence[int], first_tag: int) -> None:
        """Forget the step before. sent: micro-batches in the order in which the other end sends
        them.
        """
        if self._posted:
            self._abandoned.append(self._posted)
        self._coming, self._posted = iter(sent), {}
        tag = (
            first_tag + self._offset
        )  # micro-batch m: values at tag + 2 m, gradients at tag + 2 m + 1
        self._tag_in, self._tag_out = (tag + 1, tag) if self._is_source else (tag, tag + 1)
        self._inbound.forget()
        self._outbound.forget()

    def post(self, microbatch: int) -> None:
        """Post its receive, after those of what is sent before it: NCCL pairs messages by their
        order alone.
        """
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


class StageWorker:
    """One stage on this device.

    Args:
        own: what it runs and on what; its buffers are updated in place.
    """

    def __init__(self, index: int, spec: StageSpec, own: OwnStage) -> None:
        self.index, self.spec, self._own = index, spec, own
        self._incoming: list[ChannelEnd] = []  # of channels from earlier stages
        self._outgoing: list[ChannelEnd] = []  # of channels to later ones
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
        self._batches, self._given, self._loss_scale, self._outbox = (
            batches,
            given,
            loss_scale,
            outbox,
        )
        for end in self._incoming:
            end.start_step(sends[end.peer, "F"], first_tag)
        for end in self._outgoing:
            end.start_step(sends[end.peer, "B"], first_tag)

    def finish_step(self) -> None:
        """Let go of all tensors, of a step that was broken off too."""
        self._batches, self._given = [], []
        self.escaped: dict[int, Values] = {}  # by micro-batch, in the order of the forwards
        self._in_flight: dict[
            int, StageRun
        ] = {}  # micro-batches between their forward and their last backward
        self._own.per_step.forget()

    def post(self, action: Action) -> None:
        """Post the receives that an action waits for."""
        if action.kind != "W":
            for end in self._incoming if action.kind == "F" else self._outgoing:
                end.post(action.microbatch)

    def forward(self, microbatch: int) -> None:
        """Receive, run, send on."""
        received = dict(self._given[microbatch])
        for end in self._incoming:
            received |= zip(end.values, end.take(microbatch), strict=True)
        run = StageRun(
            self._own.program, {value for end in self._incoming for value in end.differentiable}
        )
        inputs = StageInputs(
            self._own.store.step_inputs(), self._own.buffers, self._batches[microbatch], received
        )
        escaping, sent = run.forward(inputs)
        sent = received | sent  # some are only passed on
        for end in self._outgoing:
            end.send(self._outbox, [sent[value] for value in end.values], microbatch)
        self._in_flight[microbatch] = run
        for name, value in self.spec.buffer_updates.items():
            self._own.buffers[name] = escaping[value].detach()
        self.escaped[microbatch] = {value: escaping[value].detach() for value in self.spec.escaping}

    def backward(self, microbatch: int, in_halves: bool) -> None:
        """The backward of a micro-batch, or (`in_halves`) what others wait for of it: receive,
        differentiate, send.
        """
        run = self._in_flight[microbatch] if in_halves else self._in_flight.pop(microbatch)
        receive = partial(self._arrived_grads, microbatch)
        grads = run.backward(receive, self._loss_scale, self._own.store.hold, in_halves)
        for end in self._incoming:
            end.send(self._outbox, [grads[value] for value in end.differentiable], microbatch)

    def backward_weights(self, microbatch: int) -> None:
        """The second half: the weights' gradients."""
        self._in_flight.pop(microbatch).weights()

    def _arrived_grads(self, microbatch: int) -> Values:
        """Receive the gradients of the sent values; what several stages hand back is summed in the
        stages' order.
        """
        grads: Values = {}
        for end in self._outgoing:
            for value, tensor in zip(end.differentiable, end.take(microbatch), strict=True):
                grads[value] = grads[value] + tensor if value in grads else tensor
        return grads
