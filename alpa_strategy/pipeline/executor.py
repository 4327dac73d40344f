"""Pipeline: a whole step over all stages. Batch rows to the stages, the schedule, results to all
ranks.

Every rank of the job makes the same `Pipeline` from the same `PipelineSpec` and calls `step`
together; only `own`
(programs, parameters and meshes of the stages that this rank takes part in) differs."""

from collections.abc import Callable, Mapping, Sequence
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
from alpa_strategy.pipeline.stage_worker import OwnStage, StageWorker, sends_of
from alpa_strategy.schedules import actions
from alpa_strategy.sharding.cross_mesh import (
    MeshSide,
    StageSpec,
    TransferPlan,
    plan_channels,
    plan_transfer,
)

LOOK_AHEAD = 2  # actions for which receives are posted before they are needed

# Messages' tags: from 0 on the batch's delivery, then the shared gradients, then a range per step
# with all channels.
FIRST_SHARED_TAG = 1 << 16
FIRST_CHANNEL_TAG = 1 << 20
LAST_TAG = (1 << 31) - 1  # of gloo


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that stages on different meshes use: its gradient is summed over them after the
    step.
    """

    shape: tuple[int, ...]  # of the whole parameter, in the dims of its storage layouts
    dtype: torch.dtype
    uses: tuple[
        tuple[int, str, Layout], ...
    ]  # (stage, name there, storage layout there); one per mesh is enough


@dataclass(frozen=True)
class PipelineSpec:
    """What every rank knows of the pipeline."""

    micro: (
        MicroStep  # values at global shapes; every rank has those of `given` whole before the step
    )
    stages: tuple[StageSpec, ...]  # in order
    schedule: str  # a name of `schedules.SCHEDULES`
    shared: tuple[SharedParameter, ...] = ()  # parameters used on several meshes
    cluster: ClusterSpec | None = None  # where given, cross-mesh transfers are chosen by its links


Gradients = tuple[tuple[nn.Parameter, Tensor], ...]


class Pipeline:
    """See the module's docstring. Collective over the whole job.

    Args:
        spec: the same on all ranks.
        own: stage index -> what this rank brings for it.
        device: of this rank's tensors.
        group: the ranks that run it; None: all of the job.

    Raises:
        PlanError: the schedule cannot run so many micro-batches on so many meshes.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        own: Mapping[int, OwnStage],
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.spec, self._own, self._device, self._group = spec, dict(own), device, group
        micro = spec.micro
        self._rank, self._world = rank_in(group), world_size(group)
        numbers = None if group is None else dist.get_process_group_ranks(group)
        self._transfer = partial(Transfer, rank=self._rank, device=device, ranks=numbers)
        # How many ranks bring rows of their own, which follow each other in whole tensors.
        self._num_parts = 1 if micro.graph.batch_scope == "global" else self._world
        self.channels = plan_channels(spec.stages, micro.graph.values, micro.given, spec.cluster)
        self._outbox, self._abandoned = Outbox(), list[Outbox]()
        self._workers = {
            index: StageWorker(index, spec.stages[index], own[index]) for index in sorted(own)
        }
        meshes = list(dict.fromkeys(stage.ranks for stage in spec.stages))
        self._mesh = meshes.index(spec.stages[min(own)].ranks)  # of all of this rank's stages
        orders = actions(
            spec.schedule, len(meshes), micro.num_microbatches, len(spec.stages) // len(meshes)
        )
        self._actions, self._sends = orders[self._mesh], sends_of(orders)
        last = {
            own[action.stage].store: place
            for place, action in enumerate(self._actions)
            if action.kind in "BW"
        }
        self._last_backward = {
            place: store for store, place in last.items()
        }  # of the stages that share a store
        self._num_steps = 0
        self._connect()
        self._deliveries = [Delivery(spec, ranks, self._world, self._transfer) for ranks in meshes]
        self._parameters = tuple(
            {id(p): p for o in own.values() for p in o.parameters.values()}.values()
        )
        self._sums = [
            SharedSum(shared, spec, own, self._rank, self._transfer) for shared in spec.shared
        ]

    def _connect(self) -> None:
        ranks = [stage.ranks for stage in self.spec.stages]
        meshes = {index: own.mesh for index, own in self._own.items()}
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
        """Values with which the next step starts; names that no own stage reads are passed over."""
        for own in self._own.values():
            own.buffers.update({name: buffers[name] for name in own.buffers if name in buffers})

    def step(
        self, batch: Sequence[Tensor], given: Values | None = None, loss_scale: float = 1.0
    ) -> tuple[Values, Gradients]:
        """Forward, backward and reduction of a step over the global batch: the escaping values, on
        every rank, and this rank's parameters with their new gradients. `.grad`s are left as they
        were.

        Args:
            batch: this rank's rows of the batch's tensors, in the order of the graph's `batch`.
            given: the values of `MicroStep.given` for the whole step, whole, on every rank.
            loss_scale: gradients are those of the loss times this.

        Raises:
            LostRankError: another rank is gone or hangs.
        """
        # `.grad` may hold what earlier batches have accumulated: it is put aside while this step
        # makes its own.
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            self._start_step(batch, given or {}, loss_scale)
            self._run_actions()
            self._outbox.drain()
            values = self._collect()
            for worker in self._workers.values():
                worker.finish_step()  # before more is received
            self._sum_shared()
            gradients = tuple((p, p.grad) for p in self._parameters if p.grad is not None)
        except BaseException:
            # The next step must not wait for messages that nobody fetches any more; their memory
            # stays theirs.
            self._abandoned.append(self._outbox)
            self._outbox = Outbox()
            for worker in self._workers.values():
                worker.finish_step()
            raise
        finally:
            for parameter, grad in zip(self._parameters, before, strict=True):
                parameter.grad = grad
        return values, gradients

    def _start_step(self, batch: Sequence[Tensor], given: Values, loss_scale: float) -> None:
        """Bring the batch's rows to the stages."""
        # Every step has tags of its own: messages of one that was broken off stay apart.
        num_tags = max(1, 2 * len(self.channels) * self.spec.micro.num_microbatches)
        first_tag = FIRST_CHANNEL_TAG + self._num_steps * num_tags % (
            LAST_TAG - FIRST_CHANNEL_TAG - num_tags
        )
        self._num_steps += 1
        deliveries = exchange([(d.transfer, d.sources(batch)) for d in self._deliveries], tag=0)
        # Made where it is used: a copy would hold up the host at every micro-batch.
        scale = torch.full((), loss_scale, dtype=torch.float64, device=self._device)
        for index, worker in self._workers.items():
            batches = self._deliveries[self._mesh].batches(index, deliveries[self._mesh], batch)
            given_values = self._given_values(index, given)
            worker.start_step(batches, given_values, scale, self._outbox, self._sends, first_tag)

    def _run_actions(self) -> None:
        """The schedule: this mesh's actions one after the other, whatever they are."""
        for reduced in self._last_backward.values():
            reduced.reducer.enabled = False
        for place, action in enumerate(self._actions):
            # gloo holds a message back until its receive is posted: two actions ahead, it travels
            # while we compute.
            first = place + LOOK_AHEAD if place else 0
            for ahead in self._actions[first : place + LOOK_AHEAD + 1]:
                self._workers[ahead.stage].post(ahead)
            store = self._last_backward.get(place)
            if (
                store is not None
            ):  # its gradients are complete with this action: reduced while they are made
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
        wanted = [
            pair
            for shared in self._sums
            for pair in zip(shared.transfers, shared.own_gradients(), strict=True)
        ]
        arrived = iter(exchange(wanted, tag=FIRST_SHARED_TAG))
        for shared in self._sums:
            shared.add([next(arrived) for _ in shared.transfers])

    def _given_values(self, index: int, given: Values) -> list[Values]:
        """Per micro-batch: this rank's parts of the given values that stage `index` reads."""
        stage, coordinate = self.spec.stages[index], self._own[index].mesh.coordinate
        result: list[Values] = []
        for m in range(self.spec.micro.num_microbatches):
            found = {}
            for value, layout in stage.received.items():
                if value not in self.spec.micro.given:
                    continue
                tensor, state = given[value], self.spec.micro.states[value]
                if state.kind == "rows":
                    tensor = cut(
                        tensor, state, self.spec.micro.num_microbatches, m, self._num_parts
                    )
                box = layout.slices(tensor.shape, stage.mesh_shape, coordinate)
                found[value] = tensor[tuple(slice(*ends) for ends in box)]
            result.append(found)
        return result

    def _collect(self) -> Values:
        """Escaping values of the whole step, from the first rank of the stage that makes them to
        all ranks.
        """
        results: Values = {}
        for index, stage in enumerate(self.spec.stages):
            worker = self._workers.get(index)
            own = (
                {}
                if worker is None
                else {v: self._combined(v, worker.escaped) for v in stage.escaping}
            )
            results.update(own if self._world == len(stage.ranks) else self._broadcast(stage, own))
        return results

    def _combined(self, value: int, escaped: Mapping[int, Values]) -> Tensor:
        parts = [escaped[m][value] for m in range(self.spec.micro.num_microbatches)]
        state = self.spec.micro.states.get(value, WHOLE)
        match state.kind:
            case "sum":
                return torch.stack(parts).sum(0, dtype=parts[0].dtype)
            case "rows":
                return joined(parts, state, self._num_parts)
            case _:  # the same of all, or a buffer's last value
                return list(escaped.values())[-1][value]

    def _broadcast(self, stage: StageSpec, own: Values) -> Values:
        """All of a stage's values together."""
        is_source = (
            self._rank == stage.ranks[0]
        )  # what escapes is whole on all of the stage's devices: one sends
        results: Values = {}
        for value in stage.escaping:
            meta, state = (
                self.spec.micro.graph.values[value],
                self.spec.micro.states.get(value, WHOLE),
            )
            shape = list(meta.shape)
            if state.kind == "rows":
                shape[state.dim] *= self.spec.micro.num_microbatches
            tensor = (
                own[value]
                if is_source
                else torch.empty(shape, dtype=meta.dtype, device=self._device)
            )
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
        return own or results


# What all ranks exchange once per step: rows of the batch before it, shared gradients after it


class Delivery:
    """The way of the batch's rows to all stages on one mesh, all micro-batches in one message per
    pair of ranks.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        ranks: tuple[int, ...],
        world: int,
        transfer: Callable[..., Transfer],
    ) -> None:
        self._spec = spec
        self._items: dict[
            tuple[int, tuple[int, ...], Layout], int
        ] = {}  # (tensor, mesh, layout) -> first plan
        self._tensors: list[int] = []  # plan -> tensor of the batch
        plans: list[TransferPlan] = []
        graph, count = spec.micro.graph, spec.micro.num_microbatches
        start = MeshSide(
            (world,),
            tuple(range(world)),
            Layout.parse("R" if graph.batch_scope == "global" else "S0"),
        )
        for stage in spec.stages:
            if stage.ranks != ranks:
                continue
            for position, layout in stage.batch.items():
                key = (position, stage.mesh_shape, layout)
                tensor = graph.batch[position]
                if tensor.batch_dim is None or key in self._items:
                    continue
                self._items[key] = len(plans)
                plan = plan_transfer(
                    tensor.meta.shape, tensor.meta.dtype, start, stage.side(layout)
                )
                plans += [plan] * count
                self._tensors += [position] * count
        self.transfer = transfer(plans)

    def sources(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """What this rank has of each transfer's tensor: a micro-batch's part of its own rows."""
        count = self._spec.micro.num_microbatches
        return [
            cut(batch[position], rows(0), count, i % count)
            for i, position in enumerate(self._tensors)
        ]

    def batches(
        self, index: int, tensors: list[Tensor], batch: Sequence[Tensor]
    ) -> list[dict[int, Tensor]]:
        """Micro-batch -> tensors of stage `index`; `batch` gives those that are the same
        everywhere.
        """
        stage = self._spec.stages[index]
        result: list[dict[int, Tensor]] = []
        for m in range(self._spec.micro.num_microbatches):
            found = {}
            for position, layout in stage.batch.items():
                first = self._items.get((position, stage.mesh_shape, layout))
                found[position] = batch[position] if first is None else tensors[first + m]
            result.append(found)
        return result


class SharedSum:
    """The sum of one parameter's gradients over the meshes that use it: each hands its own to all
    others.
    """

    def __init__(
        self,
        shared: SharedParameter,
        spec: PipelineSpec,
        own: Mapping[int, OwnStage],
        rank: int,
        transfer: Callable[..., Transfer],
    ) -> None:
        uses = list({spec.stages[use[0]].ranks: use for use in shared.uses}.values())
        sides = [spec.stages[stage].side(layout) for stage, _, layout in uses]
        # Few meshes share a parameter (two, where embeddings are tied): all to all is one message
        # each way.
        self._order = list(permutations(range(len(uses)), 2))  # (use that sends, use that receives)
        self.transfers = [
            transfer([plan_transfer(shared.shape, shared.dtype, sides[i], sides[j])])
            for i, j in self._order
        ]
        # This rank's use, its parameter, and the local shape in the dims of the storage layout.
        self._mine: tuple[int, nn.Parameter, tuple[int, ...]] | None = None
        for i, (stage, name, _) in enumerate(uses):
            if stage in own:
                box = sides[i].boxes(shared.shape)[rank]
                self._mine = (
                    i,
                    own[stage].parameters[name],
                    tuple(stop - start for start, stop in box),
                )

    def own_gradients(self) -> list[list[Tensor | None]]:
        """What this rank puts into each transfer."""
        grad = None
        if self._mine is not None and self._mine[1].grad is not None:
            grad = self._mine[1].grad.reshape(self._mine[2])
        return [[grad]] * len(self.transfers)

    def add(self, arrived: Sequence[list[Tensor]]) -> None:
        """Add up in the uses' order, the same on all meshes, so that the copies stay equal bit by
        bit.
        """
        if self._mine is None:
            return
        me, parameter, shape = self._mine
        parts = {me: parameter.grad.reshape(shape)} if parameter.grad is not None else {}
        for (sender, receiver), tensors in zip(self._order, arrived, strict=True):
            if receiver == me:
                parts[sender] = tensors[0]
        if parts:
            parameter.grad = reduce(torch.add, [parts[use] for use in sorted(parts)]).reshape(
                parameter.shape
            )
