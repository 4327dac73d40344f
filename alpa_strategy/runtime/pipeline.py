"""Pipeline: a whole step over all stages. Batch rows to the stages, the schedule, results to all ranks.

Every rank of the job makes the same `Pipeline` from the same `PipelineSpec` and calls `step` together; only `own`
(programs, parameters and meshes of the stages that this rank takes part in) differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError, RuntimeMismatchError
from alpa_strategy.inter_op.channels import Channel, StageSpec, plan_channels
from alpa_strategy.inter_op.cross_mesh import MeshSide, TransferPlan, plan_transfer
from alpa_strategy.inter_op.microbatch_run import cut, joined
from alpa_strategy.inter_op.stage import Combine, Cut
from alpa_strategy.runtime.comm import MeshComm
from alpa_strategy.runtime.pipeline_stage import Schedule
from alpa_strategy.runtime.stage_worker import Parameters, SharedStore, StageProgram, StageWorker, Values
from alpa_strategy.runtime.torch_comm import message_groups
from alpa_strategy.runtime.transfer import Outbox, Transfer, exchange
from alpa_strategy.sharding.layout import Layout
from alpa_strategy.sharding.op import TensorMeta

FIRST_SHARED_TAG = 1 << 16  # deliveries of the batch before, channels after
FIRST_CHANNEL_TAG = 1 << 20


@dataclass(frozen=True)
class BatchTensor:
    """A tensor of the batch: metadata of the global batch. `batch_dim` 0: rows; None: the same on every rank.

    `on_every_rank`: each rank brings all rows (`batch_scope="global"`), not only its own.
    """

    meta: TensorMeta
    batch_dim: int | None = 0
    on_every_rank: bool = False


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that stages on different meshes use: its gradient is summed over them after the step.

    shape: of the whole parameter, in the dims of its storage layouts.
    uses: (stage, the parameter's name there, storage layout there); one per mesh is enough.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    uses: tuple[tuple[int, str, Layout], ...]


@dataclass(frozen=True)
class PipelineSpec:
    """What every rank knows of the pipeline.

    Attributes:
        stages: in order.
        metas: value -> metadata in one micro-batch at global shapes, for all values that are received or escape.
        batch: tensors of the global batch.
        num_microbatches: micro-batch m is made of the m-th part of every rank's rows (`inter_op.microbatch`).
        schedule: as in `torch.distributed.pipelining`, any case.
        loss: value index of the loss, a summand of each micro-batch.
        combine: escaping value -> how the micro-batches' make up the step's (`MicroStep.combine`; default `same`).
        cuts: value -> how micro-batches have their parts of it (`MicroStep.cuts`): `cat` values, given values by rows.
        given: received values that no stage makes (a prologue's): every rank has them whole before the step.
        shared: parameters used on several meshes.
        cluster: where given, cross-mesh transfers are chosen by its links.
    """

    stages: tuple[StageSpec, ...]
    metas: Mapping[int, TensorMeta]
    batch: tuple[BatchTensor, ...]
    num_microbatches: int
    schedule: str
    loss: int
    combine: Mapping[int, Combine] = field(default_factory=dict)
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    given: tuple[int, ...] = ()
    shared: tuple[SharedParameter, ...] = ()
    cluster: ClusterSpec | None = None


@dataclass
class OwnStage:
    """What this rank brings for one of its stages. Stages on one mesh may pass the same `store`.

    parameters: name -> the module's parameter, whose `.grad` a step makes (local storage shard).
    buffers: name -> tensor; entries are replaced when a micro-batch updates them.
    """

    program: StageProgram
    store: Parameters
    mesh: MeshComm
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """values: escaping value -> the step's, on every rank. gradients: this rank's parameters and new gradients."""

    values: Values
    gradients: tuple[tuple[nn.Parameter, Tensor], ...]


class Pipeline:
    """See the module's docstring. Collective over the whole job.

    Args:
        spec: the same on all ranks.
        own: stage index -> what this rank brings for it.
        device: of this rank's tensors.

    Raises:
        PlanError: the schedule cannot run these stages, or the batch cannot be cut into micro-batches.
    """

    def __init__(self, spec: PipelineSpec, own: Mapping[int, OwnStage], device: torch.device) -> None:
        self.spec, self._own, self._device = spec, dict(own), device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        _check(spec, own, self._rank, self._world)
        # How many ranks bring rows of their own, which follow each other in whole tensors.
        self._num_parts = 1 if any(t.on_every_rank for t in spec.batch) else self._world
        self.channels = plan_channels(spec.stages, spec.metas, spec.given, spec.cluster)
        self._outbox = Outbox()
        stores: dict[int, SharedStore] = {}
        self._workers: dict[int, StageWorker] = {}
        for index in sorted(own):
            store = stores.setdefault(id(own[index].store), SharedStore(own[index].store))
            stage = spec.stages[index]
            loss = spec.loss if spec.loss in stage.escaping else None
            self._workers[index] = StageWorker(
                index, stage, own[index].program, store, own[index].buffers, loss, spec.num_microbatches, self._outbox
            )
        self._stores = list(stores.values())
        self._connect()
        meshes = list(dict.fromkeys(stage.ranks for stage in spec.stages))
        self.schedule = Schedule(
            spec.schedule,
            [self._workers[index] for index in sorted(own)],
            [meshes.index(stage.ranks) for stage in spec.stages],
            spec.num_microbatches,
            device,
        )
        self._deliveries = [_Delivery(spec, ranks, self._rank, self._world, device) for ranks in meshes]
        self._parameters = tuple({id(p): p for o in own.values() for p in o.parameters.values()}.values())
        self._sums = [_SharedSum(shared, spec, own, self._rank, device) for shared in spec.shared]

    def _connect(self) -> None:
        groups = message_groups([self._members(channel) for channel in self.channels])
        for number, (channel, (ahead, back)) in enumerate(zip(self.channels, groups, strict=True)):
            ends = [index for index in (channel.source, channel.target) if index in self._workers]
            if not ends:
                continue
            there = self._own[channel.target].mesh if channel.target in self._own else None
            here = self._own[channel.source].mesh if channel.source in self._own else None
            forward = Transfer(channel.forward, channel.dtypes, self._rank, self._device, there, ahead)
            backward = Transfer(channel.backward, channel.grad_dtypes, self._rank, self._device, here, back)
            # Tags: 0 and on for what all ranks do together, then a range per channel.
            first_tag = FIRST_CHANNEL_TAG + 2 * number * self.spec.num_microbatches
            for index in ends:
                self._workers[index].connect(channel, forward, backward, first_tag)

    def _members(self, channel: Channel) -> tuple[int, ...]:
        stages = self.spec.stages
        return tuple(sorted({*stages[channel.source].ranks, *stages[channel.target].ranks}))

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Values with which the next step starts; names that no own stage reads are passed over."""
        for own in self._own.values():
            own.buffers.update({name: buffers[name] for name in own.buffers if name in buffers})

    def step(self, batch: Sequence[Tensor], given: Values | None = None, loss_scale: float = 1.0) -> StepResult:
        """Forward, backward and reduction of a step over the global batch. `.grad`s are left as they were.

        Args:
            batch: this rank's rows of the batch's tensors, in `spec.batch` order.
            given: the values of `spec.given` for the whole step, whole, on every rank.
            loss_scale: gradients are those of the loss times this.

        Raises:
            RuntimeMismatchError: the batch has other shapes than planned.
            LostRankError: another rank is gone or hangs.
        """
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            values = self._run(batch, given or {}, loss_scale, has_backward=True)
            self._sum_shared()
            gradients = tuple((p, p.grad) for p in self._parameters if p.grad is not None)
        finally:
            for parameter, grad in zip(self._parameters, before, strict=True):
                parameter.grad = grad
        return StepResult(values, gradients)

    def evaluate(self, batch: Sequence[Tensor], given: Values | None = None) -> Values:
        """The escaping values alone: no graph is kept, no gradient made, no buffer changed."""
        before = {index: dict(own.buffers) for index, own in self._own.items()}
        values = self._run(batch, given or {}, 1.0, has_backward=False)
        for index, buffers in before.items():
            self._own[index].buffers.update(buffers)
        return values

    def _run(self, batch: Sequence[Tensor], given: Values, loss_scale: float, has_backward: bool) -> Values:
        self._check_batch(batch)
        deliveries = exchange([(d.transfer, d.sources(batch)) for d in self._deliveries], tag=0)
        scale = torch.tensor(loss_scale, dtype=torch.float64)
        for delivery, tensors in zip(self._deliveries, deliveries, strict=True):
            for index, worker in self._workers.items():
                if self.spec.stages[index].ranks == delivery.ranks:
                    batches = delivery.batches(index, tensors, batch)
                    worker.start_step(batches, self._given_values(index, given), scale, has_backward)
        del deliveries
        if has_backward:
            for store in self._stores:
                store.start_step()
        self.schedule.run(has_backward)
        self._outbox.drain()
        return self._collect()

    def _sum_shared(self) -> None:
        """Complete the gradients of parameters used on several meshes, all in one exchange."""
        if not self._sums:
            return
        wanted = [pair for shared in self._sums for pair in zip(shared.transfers, shared.own_gradients(), strict=True)]
        arrived = iter(exchange(wanted, tag=FIRST_SHARED_TAG))
        for shared in self._sums:
            shared.add([next(arrived) for _ in shared.transfers])

    def _given_values(self, index: int, given: Values) -> list[Values]:
        """Per micro-batch: this rank's parts of the given values that stage `index` reads."""
        stage = self.spec.stages[index]
        place = stage.ranks.index(self._rank)
        coordinate = tuple(int(i) for i in np.unravel_index(place, stage.mesh_shape))
        result: list[Values] = []
        for m in range(self.spec.num_microbatches):
            found = {}
            for value, layout in stage.received.items():
                if value not in self.spec.given:
                    continue
                tensor, how = given[value], self.spec.cuts.get(value)
                if how is not None:
                    tensor = cut(tensor, how, self.spec.num_microbatches, m, self._num_parts)
                box = layout.slices(tensor.shape, stage.mesh_shape, coordinate)
                found[value] = tensor[tuple(slice(*ends) for ends in box)]
            result.append(found)
        return result

    def _check_batch(self, batch: Sequence[Tensor]) -> None:
        for position, (tensor, expected) in enumerate(zip(batch, self.spec.batch, strict=True)):
            shape = _rank_shape(expected, self._rank, self._world)
            if tuple(tensor.shape) != shape:
                raise RuntimeMismatchError(
                    f"tensor {position} of the batch has shape {list(tensor.shape)}, planned was {list(shape)}",
                    "let every rank load equally many rows (drop_last=True drops a shorter last batch)",
                )

    def _collect(self) -> Values:
        """Escaping values of the whole step, from the first rank of the stage that makes them to all ranks."""
        results: Values = {}
        for index, stage in enumerate(self.spec.stages):
            if not stage.escaping:
                continue
            worker = self._workers.get(index)
            own = {} if worker is None else {v: self._combined(v, worker.escaped) for v in stage.escaping}
            if self._world == len(stage.ranks):
                results.update(own)
                continue
            results.update(self._broadcast(stage, own))
        for worker in self._workers.values():
            worker.start_step([], [], torch.ones(()), False)
        return results

    def _combined(self, value: int, escaped: list[Values]) -> Tensor:
        parts = [values[value] for values in escaped]
        match self.spec.combine.get(value, "same"):
            case "sum":
                return torch.stack(parts).sum(0, dtype=parts[0].dtype)
            case "cat":
                return joined(parts, self.spec.cuts.get(value, Cut()), self._num_parts)
            case _:
                return parts[-1]

    def _broadcast(self, stage: StageSpec, own: Values) -> Values:
        """All of a stage's values in one message."""
        is_source = self._rank == stage.ranks[0]
        pieces = []
        for value in stage.escaping:
            meta = self.spec.metas[value]
            shape = list(meta.shape)
            if self.spec.combine.get(value) == "cat":
                shape[self.spec.cuts.get(value, Cut()).dim] *= self.spec.num_microbatches
            tensor = own[value] if is_source else torch.empty(shape, dtype=meta.dtype, device=self._device)
            if list(tensor.shape) != shape or tensor.dtype != meta.dtype:
                raise RuntimeMismatchError(
                    f"value {value} is {list(tensor.shape)} {tensor.dtype}, planned was {shape} {meta.dtype}",
                    "plan again for this step",
                )
            pieces.append(tensor.contiguous())
        flat = torch.cat([piece.view(-1).view(torch.uint8) for piece in pieces])
        dist.broadcast(flat, src=stage.ranks[0])
        if own:
            return own
        sizes = [piece.numel() * piece.dtype.itemsize for piece in pieces]
        for piece, part in zip(pieces, flat.split(sizes), strict=True):
            piece.view(-1).view(torch.uint8).copy_(part)
        return dict(zip(stage.escaping, pieces, strict=True))

    @property
    def max_in_flight(self) -> int:
        """The most (stage, micro-batch) pairs whose activations this rank held at once, over all steps so far."""
        return max(store.max_in_flight for store in self._stores)

    def close(self) -> None:
        """End what runs beside the main thread."""
        self._outbox.close()


class _Delivery:
    """The way of the batch's rows to all stages on one mesh, all micro-batches in one message per pair of ranks."""

    def __init__(self, spec: PipelineSpec, ranks: tuple[int, ...], rank: int, world: int, device: torch.device) -> None:
        self.ranks = ranks
        self._spec = spec
        self._items: dict[tuple[int, tuple[int, ...], Layout], int] = {}  # (tensor, mesh, layout) -> first plan
        self._tensors: list[int] = []  # plan -> tensor of the batch
        plans: list[TransferPlan] = []
        everyone = tuple(range(world))
        for stage in spec.stages:
            if stage.ranks != ranks:
                continue
            for position, layout in stage.batch.items():
                key = (position, stage.mesh_shape, layout)
                tensor = spec.batch[position]
                if tensor.batch_dim is None or key in self._items:
                    continue
                self._items[key] = len(plans)
                shape = (tensor.meta.shape[0] // spec.num_microbatches, *tensor.meta.shape[1:])
                start = MeshSide((world,), everyone, Layout.parse("R" if tensor.on_every_rank else "S0"))
                plan = plan_transfer(shape, tensor.meta.dtype.itemsize, start, stage.side(layout))
                plans += [plan] * spec.num_microbatches
                self._tensors += [position] * spec.num_microbatches
        dtypes = [spec.batch[position].meta.dtype for position in self._tensors]
        self.transfer = Transfer(plans, dtypes, rank, device)

    def sources(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """What this rank has of each transfer's tensor: a micro-batch's part of its own rows."""
        count = self._spec.num_microbatches
        return [cut(batch[position], Cut(), count, i % count) for i, position in enumerate(self._tensors)]

    def batches(self, index: int, tensors: list[Tensor], batch: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """Micro-batch -> tensors of stage `index`; `batch` gives those that are the same everywhere."""
        stage = self._spec.stages[index]
        result: list[dict[int, Tensor]] = []
        for m in range(self._spec.num_microbatches):
            found = {}
            for position, layout in stage.batch.items():
                first = self._items.get((position, stage.mesh_shape, layout))
                found[position] = batch[position] if first is None else tensors[first + m]
            result.append(found)
        return result


class _SharedSum:
    """The sum of one parameter's gradients over the meshes that use it: each hands its own to all others."""

    def __init__(
        self,
        shared: SharedParameter,
        spec: PipelineSpec,
        own: Mapping[int, OwnStage],
        rank: int,
        device: torch.device,
    ) -> None:
        uses = list({spec.stages[use[0]].ranks: use for use in shared.uses}.values())
        sides = [spec.stages[stage].side(layout) for stage, _, layout in uses]
        self._order = list(permutations(range(len(uses)), 2))  # (use that sends, use that receives)
        self.transfers = [
            Transfer(
                [plan_transfer(shared.shape, shared.dtype.itemsize, sides[i], sides[j])], [shared.dtype], rank, device
            )
            for i, j in self._order
        ]
        # This rank's use, its parameter, and the local shape in the dims of the storage layout.
        self._mine: tuple[int, nn.Parameter, tuple[int, ...]] | None = None
        for i, (stage, name, _) in enumerate(uses):
            if stage in own:
                box = sides[i].boxes(shared.shape)[rank]
                self._mine = (i, own[stage].parameters[name], tuple(stop - start for start, stop in box))

    def own_gradients(self) -> list[list[Tensor | None]]:
        """What this rank puts into each transfer."""
        grad = None
        if self._mine is not None and self._mine[1].grad is not None:
            grad = self._mine[1].grad.reshape(self._mine[2])
        return [[grad]] * len(self.transfers)

    def add(self, arrived: Sequence[list[Tensor]]) -> None:
        """Add up in the uses' order, the same on all meshes, so that the copies stay equal bit by bit."""
        if self._mine is None:
            return
        me, parameter, shape = self._mine
        parts = {me: parameter.grad.reshape(shape)} if parameter.grad is not None else {}
        for (sender, receiver), tensors in zip(self._order, arrived, strict=True):
            if receiver == me:
                parts[sender] = tensors[0]
        total: Tensor | None = None
        for use in sorted(parts):
            total = parts[use] if total is None else total + parts[use]
        if total is not None:
            parameter.grad = total.reshape(parameter.shape)


def _rank_shape(tensor: BatchTensor, rank: int, world: int) -> tuple[int, ...]:
    """Shape of a batch tensor on `rank`."""
    shape = tensor.meta.shape
    if tensor.batch_dim is None or tensor.on_every_rank:
        return tuple(shape)
    return Layout.parse("S0").local_shape(shape, (world,), (rank,))


def _check(spec: PipelineSpec, own: Mapping[int, OwnStage], rank: int, world: int) -> None:
    for a in spec.stages:
        for b in spec.stages:
            if a.ranks != b.ranks and set(a.ranks) & set(b.ranks):
                raise PlanError(f"stages on ranks {a.ranks} and {b.ranks} overlap", "share all ranks or none")
    expected = {index for index, stage in enumerate(spec.stages) if rank in stage.ranks}
    if expected != set(own) or not own:
        raise PlanError(f"rank {rank} has stages {sorted(expected)} but brings {sorted(own)}", "plan for all ranks")
    for position, tensor in enumerate(spec.batch):
        parts = spec.num_microbatches * (1 if tensor.on_every_rank else world)
        if tensor.batch_dim is not None and tensor.meta.shape[0] % parts:
            whose = "" if tensor.on_every_rank else f" that {world} ranks bring"
            raise PlanError(
                f"the {tensor.meta.shape[0]} rows{whose} (tensor {position} of the batch) cannot be cut into "
                f"{spec.num_microbatches} equal micro-batches",
                "choose a number of micro-batches that divides the rows of each rank",
            )
