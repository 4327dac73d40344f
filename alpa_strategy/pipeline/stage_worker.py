"""StageWorker: one stage's work on a micro-batch on this device: receive, run forward or backward,
send.

The executor calls `forward`, then `backward` (of the inputs alone if `backward_weights` follows),
for every micro-batch in its schedule's order. Between the two the worker stores only what the
backward needs. This file knows no schedule.
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

# (stage, `F` or `B`) -> micro-batches in the order in which the stage sends the results of its
# forwards, or the gradients of its backwards.
Sends = Mapping[tuple[int, str], Sequence[int]]


def sends_of(orders: Orders) -> Sends:
    """Return (stage, "F" or "B") -> its micro-batches in the order in which it sends them, if the
    meshes run their actions in `orders`.
    """
    sends: dict[tuple[int, str], list[int]] = defaultdict(list)
    for order in orders:
        for action in order:
            if action.kind != "W":
                direction = "F" if action.kind == "F" else "B"
                sends[action.stage, direction].append(action.microbatch)
    return sends


@dataclass
class LocalStage:
    """A stage on this rank. Stages on one mesh may have the same `store`."""

    program: StageProgram
    store: MeshParameters
    mesh: MeshComm

    # By name; a step makes their `.grad`s (local storage shards).
    parameters: Mapping[str, nn.Parameter]

    # By name; entries are replaced when a micro-batch updates them.
    buffers: dict[str, Any]

    # Values that the program computes from the parameters once per step.
    per_step: PerStepValues


class ChannelEnd:
    """A channel's end at a stage on this device. Per micro-batch one bundle of tensors is received
    and one is sent.

    Args:
        channel: between two stages.
        is_source: whether values are sent here and gradients received; else the other way round.
        forward: of the values.
        backward: of the gradients.
        offset: of the channel's tags among those of the pipeline.
    """

    def __init__(
        self, channel: Channel, is_source: bool, forward: Transfer, backward: Transfer, offset: int
    ) -> None:
        self.values = channel.values
        self.differentiable = channel.differentiable
        self.stage = channel.source if is_source else channel.target
        self.peer = channel.target if is_source else channel.source
        self._inbound = backward if is_source else forward
        self._outbound = forward if is_source else backward
        self.is_source = is_source
        self._offset = offset

        # By micro-batch.
        self._posted: dict[int, Receipt] = {}

        # Of steps that have failed: gloo may still write into these.
        self._abandoned: list[dict[int, Receipt]] = []

    def start_step(self, sent: Sequence[int], first_tag: int) -> None:
        """Drop the previous step's messages, and start another step.

        Args:
            sent: micro-batches in the order in which the other end sends them.
            first_tag: of the step's messages.
        """
        if self._posted:
            self._abandoned.append(self._posted)
        self._expected = iter(sent)
        self._posted = {}

        # Of micro-batch m the values have tag + 2 m, the gradients tag + 2 m + 1.
        tag = first_tag + self._offset
        self._tag_in = tag + 1 if self.is_source else tag
        self._tag_out = tag if self.is_source else tag + 1
        self._inbound.forget()
        self._outbound.forget()

    def post(self, microbatch: int) -> None:
        """Post the receive of a micro-batch, unless it is posted, and before it those of all that
        are sent earlier: NCCL matches messages by their order alone.
        """
        while microbatch not in self._posted:
            first = next(self._expected)
            self._posted[first] = self._inbound.receive(self._tag_in + 2 * first)

    def take(self, microbatch: int) -> list[Tensor]:
        """Wait for a micro-batch's tensors, and return them."""
        self.post(microbatch)
        return self._posted.pop(microbatch).wait()

    def send(self, outbox: Outbox, tensors: Sequence[Tensor | None], microbatch: int) -> None:
        """Start to send a micro-batch's tensors; None stands for zeros."""
        outbox.send(self._outbound.send_ops(tensors, self._tag_out + 2 * microbatch))


class StageWorker:
    """One stage on this device.

    Args:
        index: of the stage.
        spec: of the stage.
        local_stage: its program, parameters and mesh; its buffers are updated in place.
    """

    def __init__(self, index: int, spec: StageSpec, local_stage: LocalStage) -> None:
        self.index = index
        self.spec = spec
        self._local_stage = local_stage

        # Ends of channels from earlier stages, and to later ones.
        self._incoming: list[ChannelEnd] = []
        self._outgoing: list[ChannelEnd] = []
        self.finish_step()

    def connect(self, channel: Channel, forward: Transfer, backward: Transfer, offset: int) -> None:
        """Attach a channel from or to this stage. Args: as of `ChannelEnd`. To be called in the
        order of the channels.
        """
        is_source = channel.source == self.index
        end = ChannelEnd(channel, is_source, forward, backward, offset)
        (self._outgoing if is_source else self._incoming).append(end)

    def start_step(
        self,
        batches: Sequence[Mapping[int, Tensor]],
        external_values: Sequence[Values],
        loss_scale: Tensor,
        outbox: Outbox,
        sends: Sends,
        first_tag: int,
    ) -> None:
        """Prepare for a step's first micro-batch.

        Args:
            batches: by micro-batch the stage's tensors of the batch.
            external_values: by micro-batch the received values that no stage makes.
            loss_scale: gradients are those of the loss times this.
            outbox: of the messages that are sent.
            sends: the order in which the stages send.
            first_tag: of the step's messages.
        """
        self._batches = batches
        self._given = external_values
        self._loss_scale = loss_scale
        self._outbox = outbox
        for end in self._incoming:
            end.start_step(sends[end.peer, "F"], first_tag)
        for end in self._outgoing:
            end.start_step(sends[end.peer, "B"], first_tag)

    def finish_step(self) -> None:
        """Free all tensors, also of a step that has failed."""
        self._batches = []
        self._given = []

        # Escaping values by micro-batch, in the order of the forwards.
        self.escaped: dict[int, Values] = {}

        # Micro-batches between their forward and their last backward.
        self._in_flight: dict[int, StageRun] = {}
        self._local_stage.per_step.forget()

    def post(self, action: Action) -> None:
        """Post the receives that an action waits for."""
        if action.kind == "W":
            return
        ends = self._incoming if action.kind == "F" else self._outgoing
        for end in ends:
            end.post(action.microbatch)

    def forward(self, microbatch: int) -> None:
        """Receive the values of micro-batch number `microbatch`, run the forward, send its results
        and update the buffers. Results for the step are in `self.escaped` then.
        """
        received = dict(self._given[microbatch])
        for end in self._incoming:
            received |= zip(end.values, end.take(microbatch), strict=True)
        wanted = {value for end in self._incoming for value in end.differentiable}
        run = StageRun(self._local_stage.program, wanted)
        inputs = StageInputs(
            self._local_stage.store.step_inputs(),
            self._local_stage.buffers,
            self._batches[microbatch],
            received,
        )
        escaping, sent = run.forward(inputs)

        # Received values may only be passed on.
        sent = received | sent
        for end in self._outgoing:
            end.send(self._outbox, [sent[value] for value in end.values], microbatch)
        self._in_flight[microbatch] = run
        for name, value in self.spec.buffer_updates.items():
            self._local_stage.buffers[name] = escaping[value].detach()
        self.escaped[microbatch] = {value: escaping[value].detach() for value in self.spec.escaping}

    def backward(self, microbatch: int, in_halves: bool) -> None:
        """Receive gradients, run the backward of a micro-batch, and send the inputs' gradients.

        Args:
            microbatch: number of the micro-batch.
            in_halves: whether `backward_weights` computes the weights' gradients later.
        """
        run = self._in_flight[microbatch] if in_halves else self._in_flight.pop(microbatch)
        receive = partial(self._arrived_grads, microbatch)
        grads = run.backward(receive, self._loss_scale, self._local_stage.store.hold, in_halves)
        for end in self._incoming:
            end.send(self._outbox, [grads[value] for value in end.differentiable], microbatch)

    def backward_weights(self, microbatch: int) -> None:
        """Run the second half of a backward: the weights' gradients."""
        self._in_flight.pop(microbatch).weights()

    def _arrived_grads(self, microbatch: int) -> Values:
        """Receive the gradients of the sent values, summed in the order of the stages that send
        them.
        """
        grads: Values = {}
        for end in self._outgoing:
            for value, tensor in zip(end.differentiable, end.take(microbatch), strict=True):
                grads[value] = grads[value] + tensor if value in grads else tensor
        return grads
