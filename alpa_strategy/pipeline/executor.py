"""Pipeline: a step over all stages. It sends the batch's samples to the stages, runs the schedule,
and sends the results to all ranks.

Every rank of the job makes the same `Pipeline` from the same `PipelineSpec`, and all call `step`
together. Only `own` differs: programs, parameters and meshes of the stages on this rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import broadcast_tensors, rank_in, world_size
from alpa_strategy.comm.mesh import message_groups
from alpa_strategy.comm.messages import Outbox, Transfer, exchange, first_sentence
from alpa_strategy.errors import LostRankError
from alpa_strategy.ir.placement import Layout
from alpa_strategy.microbatch.rules import WHOLE, cut, joined, rows
from alpa_strategy.microbatch.transform import MicroStep
from alpa_strategy.pipeline.stage_program import Values
from alpa_strategy.pipeline.stage_worker import LocalStage, StageWorker, sends_of
from alpa_strategy.runtime.mesh_parameters import MeshParameters
from alpa_strategy.schedules import actions
from alpa_strategy.sharding.cross_mesh import (
    MeshSide,
    StageSpec,
    TransferPlan,
    plan_channels,
    plan_transfer,
)

# Receives are posted this many actions before they are needed.
LOOK_AHEAD = 2

# Tags of messages: from 0 on the delivery of the batch, then the shared gradients, then a range per
# step with all channels. The last one is gloo's limit.
FIRST_SHARED_TAG = 1 << 16
FIRST_CHANNEL_TAG = 1 << 20
LAST_TAG = (1 << 31) - 1


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that stages on different meshes use: its gradient is summed over them after the
    step.
    """

    # Full shape, with the dims of its storage layouts.
    shape: tuple[int, ...]

    dtype: torch.dtype

    # (stage, name there, storage layout there). One stage per mesh counts.
    uses: tuple[tuple[int, str, Layout], ...]


@dataclass(frozen=True)
class PipelineSpec:
    """The description of a pipeline, the same on every rank."""

    # The step of a micro-batch, at global shapes. Every rank has the full values of
    # `from_prologue` before the step.
    micro: MicroStep

    # In order.
    stages: tuple[StageSpec, ...]

    # A name of `schedules.SCHEDULES`.
    schedule: str

    # Parameters used on several meshes.
    shared: tuple[SharedParameter, ...] = ()

    # By whose links cross-mesh transfers are chosen; None: without their costs.
    cluster: ClusterSpec | None = None


# Parameters of this rank with their gradients.
Gradients = tuple[tuple[nn.Parameter, Tensor], ...]


class Pipeline:
    """Runs steps over all stages. Collective over all ranks that run it.

    Args:
        spec: the same on all ranks.
        local_stages: stage index -> programs, parameters and mesh, for the stages on this rank.
        device: of this rank's tensors.
        group: the ranks that run it; None: all of the job.

    Raises:
        PlanError: the schedule cannot run this number of micro-batches on these meshes.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        local_stages: Mapping[int, LocalStage],
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.spec = spec
        self._local_stages = dict(local_stages)
        self._device = device
        self._group = group
        self._rank = rank_in(group)
        self._world = world_size(group)
        micro = spec.micro

        job_ranks = None if group is None else dist.get_process_group_ranks(group)
        self._transfer = partial(Transfer, rank=self._rank, device=device, ranks=job_ranks)

        self.channels = plan_channels(
            spec.stages, micro.graph.values, micro.from_prologue, spec.cluster
        )

        # Messages of this step, and of steps that have failed.
        self._outbox = Outbox()
        self._abandoned: list[Outbox] = []

        self._workers = {
            index: StageWorker(index, spec.stages[index], local_stages[index])
            for index in sorted(local_stages)
        }

        # All of this rank's stages are on one mesh.
        meshes = list(dict.fromkeys(stage.ranks for stage in spec.stages))
        self._mesh = meshes.index(spec.stages[min(local_stages)].ranks)
        stages_per_mesh = len(spec.stages) // len(meshes)
        orders = actions(spec.schedule, len(meshes), micro.num_microbatches, stages_per_mesh)
        self._actions = orders[self._mesh]
        self._sends = sends_of(orders)

        # Index of the last backward action of stages that share a store -> this store.
        last_index: dict[MeshParameters, int] = {}
        for index, action in enumerate(self._actions):
            if action.kind in "BW":
                last_index[local_stages[action.stage].store] = index
        self._last_backward = {index: store for store, index in last_index.items()}

        self._num_steps = 0
        self._connect()
        self._deliveries = [Delivery(spec, ranks, self._world, self._transfer) for ranks in meshes]

        self._parameters = _distinct_parameters(local_stages.values())
        self._sums = [
            SharedSum(shared, spec, local_stages, self._rank, self._transfer)
            for shared in spec.shared
        ]

    def _connect(self) -> None:
        """Make the groups of all channels between stages, and connect this rank's workers.
        Collective.
        """
        ranks = [stage.ranks for stage in self.spec.stages]
        meshes = {index: local_stage.mesh for index, local_stage in self._local_stages.items()}
        channels = [tuple(sorted({*ranks[c.source], *ranks[c.target]})) for c in self.channels]
        groups = message_groups(channels, self._group)
        for number, (channel, (ahead, back)) in enumerate(zip(self.channels, groups, strict=True)):
            ends = [index for index in (channel.source, channel.target) if index in self._workers]
            if not ends:
                continue
            forward = self._transfer(channel.forward, mesh=meshes.get(channel.target), group=ahead)
            backward = self._transfer(channel.backward, mesh=meshes.get(channel.source), group=back)
            for index in ends:
                self._workers[index].connect(
                    channel, forward, backward, 2 * number * self.spec.micro.num_microbatches
                )

    def set_buffers(self, buffers: Mapping[str, Any]) -> None:
        """Set the values with which the next step starts.

        Args:
            buffers: by name; names that no stage on this rank reads are ignored.
        """
        for local_stage in self._local_stages.values():
            local_stage.buffers.update(
                {name: buffers[name] for name in local_stage.buffers if name in buffers}
            )

    def step(
        self, batch: Sequence[Tensor], received: Values | None = None, loss_scale: float = 1.0
    ) -> tuple[Values, Gradients]:
        """Run forward, backward and reduction of a step over the global batch.

        Args:
            batch: this rank's samples of the batch's tensors, in the order of the graph's `batch`.
            received: the full values of `MicroStep.from_prologue` for the step, on every rank.
            loss_scale: gradients are those of the loss times this.

        Returns:
            The escaping values, on every rank, and those of this rank's parameters that got a
            gradient, with it. The parameters' `.grad`s are unchanged.

        Raises:
            LostRankError: another rank is gone or hangs.
        """
        # `.grad` may have the accumulated gradients of earlier batches: it is set aside.
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            self._start_step(batch, received or {}, loss_scale)
            self._run_actions()
            self._outbox.drain()
            values = self._collect()
            # Memory is freed before more is received.
            for worker in self._workers.values():
                worker.finish_step()
            self._sum_shared()
            gradients = tuple((p, p.grad) for p in self._parameters if p.grad is not None)
        except BaseException:
            # The next step must not wait for messages that no rank receives any more, nor free
            # their memory.
            self._abandoned.append(self._outbox)
            self._outbox = Outbox()
            for worker in self._workers.values():
                worker.finish_step()
            raise
        finally:
            for parameter, grad in zip(self._parameters, before, strict=True):
                parameter.grad = grad
        return values, gradients

    def _start_step(self, batch: Sequence[Tensor], received: Values, loss_scale: float) -> None:
        """Send the batch's samples to the stages, and start the step of this rank's workers.

        Args:
            batch: tensors that this rank has loaded.
            received: values that the prologue passes in.
            loss_scale: gradients are those of the loss times this.
        """
        # Every step has tags of its own, apart from those of a step that has failed.
        num_tags = max(1, 2 * len(self.channels) * self.spec.micro.num_microbatches)
        num_available = LAST_TAG - FIRST_CHANNEL_TAG - num_tags
        first_tag = FIRST_CHANNEL_TAG + self._num_steps * num_tags % num_available
        self._num_steps += 1
        deliveries = exchange([(d.transfer, d.sources(batch)) for d in self._deliveries], tag=0)

        # Made on the device: a copy from the host would block at every micro-batch.
        scale = torch.full((), loss_scale, dtype=torch.float64, device=self._device)
        for index, worker in self._workers.items():
            batches = self._deliveries[self._mesh].batches(index, deliveries[self._mesh], batch)
            given_values = self._given_values(index, received)
            worker.start_step(batches, given_values, scale, self._outbox, self._sends, first_tag)

    def _run_actions(self) -> None:
        """Run this mesh's actions of the schedule one after another."""
        for reduced in self._last_backward.values():
            reduced.reducer.enabled = False

        for index, action in enumerate(self._actions):
            # gloo delays a message until its receive is posted. Posted two actions ahead, the
            # message overlaps with computation.
            first = index + LOOK_AHEAD if index else 0
            for ahead in self._actions[first : index + LOOK_AHEAD + 1]:
                self._workers[ahead.stage].post(ahead)

            store = self._last_backward.get(index)
            if store is not None:
                # Its gradients are complete with this action, and reduced while they are made.
                store.reducer.enabled = True

            worker = self._workers[action.stage]
            match action.kind:
                case "F":
                    worker.forward(action.microbatch)
                case "B" | "I":
                    worker.backward(action.microbatch, in_halves=action.kind == "I")
                case "W":
                    worker.backward_weights(action.microbatch)
            if store is not None:
                store.finish_backward()

    def _sum_shared(self) -> None:
        """Complete the gradients of parameters used on several meshes, all in one exchange."""
        messages: list[tuple[Transfer, Sequence[Tensor | None]]] = []
        for shared in self._sums:
            messages += zip(shared.transfers, shared.own_gradients(), strict=True)
        arrived = iter(exchange(messages, tag=FIRST_SHARED_TAG))
        for shared in self._sums:
            shared.add([next(arrived) for _ in shared.transfers])

    def _given_values(self, index: int, received: Values) -> list[Values]:
        """Return by micro-batch this rank's shards of the prologue's values that stage `index`
        reads. Values by rows are cut into micro-batches; others are the same for all.

        Args:
            received: the values in full, of the whole batch.
        """
        stage = self.spec.stages[index]
        coordinate = self._local_stages[index].mesh.coordinate
        num_microbatches = self.spec.micro.num_microbatches
        result: list[Values] = []
        for number in range(num_microbatches):
            shards = {}
            for value, layout in stage.received.items():
                if value not in self.spec.micro.from_prologue:
                    continue
                tensor = received[value]
                state = self.spec.micro.states[value]
                if state.kind == "rows":
                    tensor = cut(tensor, state, num_microbatches, number)
                box = layout.slices(tensor.shape, stage.mesh_shape, coordinate)
                shards[value] = tensor[tuple(slice(*ends) for ends in box)]
            result.append(shards)
        return result

    def _collect(self) -> Values:
        """Return the escaping values of the step on all ranks; the stage that makes one sends it.
        LostRankError: as of `_broadcast`.
        """
        results: Values = {}
        for index, stage in enumerate(self.spec.stages):
            worker = self._workers.get(index)
            local: Values = {}
            if worker is not None:
                local = {v: self._combined(v, worker.escaped) for v in stage.escaping}
            is_everywhere = self._world == len(stage.ranks)
            results.update(local if is_everywhere else self._broadcast(stage, local))
        return results

    def _combined(self, value: int, escaped: Mapping[int, Values]) -> Tensor:
        """Combine the values of all micro-batches: their sum, their samples in one tensor, or else
        the last one's value.

        Args:
            value: an escaping value.
            escaped: by micro-batch, in the order of the forwards.
        """
        pieces = [escaped[number][value] for number in range(self.spec.micro.num_microbatches)]
        state = self.spec.micro.states.get(value, WHOLE)
        match state.kind:
            case "sum":
                return torch.stack(pieces).sum(0, dtype=pieces[0].dtype)
            case "rows":
                return joined(pieces, state)
            case _:
                # Equal in all micro-batches, or a buffer's last value.
                return list(escaped.values())[-1][value]

    def _broadcast(self, stage: StageSpec, local: Values) -> Values:
        """Return the escaping values of a stage on all ranks.

        Args:
            stage: which has the values in full on all of its devices; the first one sends them.
            local: the values, on ranks of the stage.

        Raises:
            LostRankError: another rank is gone.
        """
        is_source = self._rank == stage.ranks[0]
        results: Values = {}
        for value in stage.escaping:
            meta = self.spec.micro.graph.values[value]
            state = self.spec.micro.states.get(value, WHOLE)
            shape = list(meta.shape)
            if state.kind == "rows":
                shape[state.dim] *= self.spec.micro.num_microbatches
            if is_source:
                tensor = local[value]
            else:
                tensor = torch.empty(shape, dtype=meta.dtype, device=self._device)
            results[value] = tensor.contiguous()
        try:
            broadcast_tensors(results.values(), stage.ranks[0], self._group)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self._rank}: a rank of the job is gone: results of rank {stage.ranks[0]}"
                " did not reach all "
                f"({first_sentence(str(error))})",
                "look at the output of the rank that ended first",
            ) from error
        return local or results


# Exchanges of all ranks once per step: samples of the batch before it, shared gradients after it


class Delivery:
    """Sends the batch's samples to all stages on one mesh, all micro-batches in one message per
    pair of ranks.

    Args:
        spec: of the pipeline.
        ranks: of the mesh.
        world: number of ranks that run the pipeline.
        transfer: makes a `Transfer` of plans.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        ranks: tuple[int, ...],
        world: int,
        transfer: Callable[..., Transfer],
    ) -> None:
        self._spec = spec
        self._world = world

        # (index of a tensor in the batch, mesh shape, layout) -> its first plan, which is that of
        # micro-batch 0.
        self._items: dict[tuple[int, tuple[int, ...], Layout], int] = {}

        # Plan -> index of its tensor in the batch.
        self._tensors: list[int] = []

        plans: list[TransferPlan] = []
        graph = spec.micro.graph
        count = spec.micro.num_microbatches
        for stage in spec.stages:
            if stage.ranks != ranks:
                continue
            for position, layout in stage.batch.items():
                key = (position, stage.mesh_shape, layout)
                tensor = graph.batch[position]
                if tensor.batch_dim is None or key in self._items:
                    continue
                self._items[key] = len(plans)
                end = stage.side(layout)
                for number in range(count):
                    start = self._loaders(number, position)
                    plans.append(plan_transfer(tensor.meta.shape, tensor.meta.dtype, start, end))
                self._tensors += [position] * count
        self.transfer = transfer(plans)

    def sources(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Return for each plan this rank's samples of the micro-batch; the full tensor if it is not
        split, or if micro-batches have whole ranks.
        """
        micro = self._spec.micro
        sources = []
        for index, position in enumerate(self._tensors):
            tensor = batch[position]
            if micro.graph.batch[position].is_split and not self._has_whole_ranks:
                number = index % micro.num_microbatches
                tensor = cut(tensor, rows(0), micro.num_microbatches, number)
            sources.append(tensor)
        return sources

    @property
    def _has_whole_ranks(self) -> bool:
        """Whether a micro-batch has all samples of some ranks."""
        micro = self._spec.micro
        return micro.graph.batch_scope == "rank" and micro.num_runs < self._world

    def _loaders(self, number: int, position: int) -> MeshSide:
        """Return the ranks that have the samples of a micro-batch, and their layout.

        Args:
            number: of the micro-batch.
            position: of the tensor in the batch.
        """
        micro = self._spec.micro
        ranks = tuple(range(self._world))
        if micro.graph.batch_scope == "global":
            return MeshSide((self._world,), ranks, Layout.parse("R"))
        if self._has_whole_ranks and micro.graph.batch[position].is_split:
            size = self._world // micro.num_microbatches
            ranks = ranks[number * size : (number + 1) * size]
        return MeshSide((len(ranks),), ranks, Layout.parse("S0"))

    def batches(
        self, index: int, tensors: list[Tensor], batch: Sequence[Tensor]
    ) -> list[dict[int, Tensor]]:
        """Return by micro-batch the tensors of a stage, by their index in the batch.

        Args:
            index: of the stage.
            tensors: that have arrived, one per plan.
            batch: of this rank; tensors without a batch dim are taken from it.
        """
        stage = self._spec.stages[index]
        result: list[dict[int, Tensor]] = []
        for number in range(self._spec.micro.num_microbatches):
            stage_batch = {}
            for position, layout in stage.batch.items():
                first = self._items.get((position, stage.mesh_shape, layout))
                tensor = batch[position] if first is None else tensors[first + number]
                stage_batch[position] = tensor
            result.append(stage_batch)
        return result


def _distinct_parameters(stages: Iterable[LocalStage]) -> tuple[nn.Parameter, ...]:
    """Return the parameters of all stages, each once."""
    parameters: dict[int, nn.Parameter] = {}
    for stage in stages:
        for parameter in stage.parameters.values():
            parameters[id(parameter)] = parameter
    return tuple(parameters.values())


class SharedSum:
    """Sums one parameter's gradients over the meshes that use it: each sends its own to all others.

    Args:
        shared: the parameter.
        spec: of the pipeline.
        local_stages: the stages on this rank, by index.
        rank: this one.
        transfer: makes a `Transfer` of plans.
    """

    def __init__(
        self,
        shared: SharedParameter,
        spec: PipelineSpec,
        local_stages: Mapping[int, LocalStage],
        rank: int,
        transfer: Callable[..., Transfer],
    ) -> None:
        uses = list({spec.stages[use[0]].ranks: use for use in shared.uses}.values())
        sides = [spec.stages[stage].side(layout) for stage, _, layout in uses]
        # (use that sends, use that receives). Few meshes share a parameter (two, if embeddings are
        # tied): all to all is one message each way.
        self._order = list(permutations(range(len(uses)), 2))
        self.transfers = [
            transfer([plan_transfer(shared.shape, shared.dtype, sides[sender], sides[receiver])])
            for sender, receiver in self._order
        ]

        # Index of this rank's use, its parameter, and the local shape with the dims of the storage
        # layout.
        self._local: tuple[int, nn.Parameter, tuple[int, ...]] | None = None
        for index, (stage, name, _) in enumerate(uses):
            if stage in local_stages:
                box = sides[index].boxes(shared.shape)[rank]
                local_shape = tuple(stop - start for start, stop in box)
                self._local = (index, local_stages[stage].parameters[name], local_shape)

    def own_gradients(self) -> list[list[Tensor | None]]:
        """Return this rank's tensors for each transfer: its gradient, None if it has none."""
        grad = None
        if self._local is not None:
            _, parameter, shape = self._local
            if parameter.grad is not None:
                grad = parameter.grad.reshape(shape)
        return [[grad]] * len(self.transfers)

    def add(self, arrived: Sequence[list[Tensor]]) -> None:
        """Set `.grad` of this rank's parameter, if it has one, to the sum of all gradients.

        They are added in the order of the uses, the same on all meshes, so that the copies of the
        parameter stay equal bit by bit.

        Args:
            arrived: the tensors of each transfer.
        """
        if self._local is None:
            return
        local_use, parameter, shape = self._local
        gradients: dict[int, Tensor] = {}
        if parameter.grad is not None:
            gradients[local_use] = parameter.grad.reshape(shape)
        for (sender, receiver), tensors in zip(self._order, arrived, strict=True):
            if receiver == local_use:
                gradients[sender] = tensors[0]
        if gradients:
            total = reduce(torch.add, [gradients[use] for use in sorted(gradients)])
            parameter.grad = total.reshape(parameter.shape)
