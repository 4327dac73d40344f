"""Pipeline: a whole step over all stages. Batch rows to the stages, the schedule, results to all ranks.

Every rank of the job makes the same `Pipeline` from the same `PipelineSpec` and calls `step` together; only `own`
(programs, parameters and meshes of the stages that this rank takes part in) differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm, message_groups
from alpa_strategy.comm.messages import Outbox, Transfer, exchange, first_sentence
from alpa_strategy.errors import LostRankError, RuntimeMismatchError
from alpa_strategy.inter_op.cross_mesh import Channel, StageSpec, plan_channels
from alpa_strategy.microbatch.microstep import Cut, cut, joined
from alpa_strategy.pipeline.exchange import Delivery, SharedSum
from alpa_strategy.pipeline.per_step_values import DerivedValues
from alpa_strategy.pipeline.recompute import Recompute
from alpa_strategy.pipeline.spec import PipelineSpec, StageProgram, Values
from alpa_strategy.pipeline.stage_worker import Parameters, SharedStore, StageWorker
from alpa_strategy.pipeline.torch_schedules import Schedule

FIRST_SHARED_TAG = 1 << 16  # deliveries of the batch before, channels after
FIRST_CHANNEL_TAG = 1 << 20


@dataclass
class OwnStage:
    """What this rank brings for one of its stages. Stages on one mesh may pass the same `store`.

    parameters: name -> the module's parameter, whose `.grad` a step makes (local storage shard).
    buffers: name -> tensor; entries are replaced when a micro-batch updates them.
    recompute: where the stage recomputes its activations, the program span by span.
    derived: what the program makes of the parameters once per step.
    """

    program: StageProgram
    store: Parameters
    mesh: MeshComm
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute | None = None
    derived: DerivedValues | None = None


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
        spec.check(self._rank, own, self._world)
        # How many ranks bring rows of their own, which follow each other in whole tensors.
        self._num_parts = 1 if any(t.on_every_rank for t in spec.batch) else self._world
        self.channels = plan_channels(spec.stages, spec.metas, spec.given, spec.cluster)
        self._outbox = Outbox()
        stores: dict[int, SharedStore] = {}
        self._workers: dict[int, StageWorker] = {}
        for index in sorted(own):
            store = stores.setdefault(id(own[index].store), SharedStore(own[index].store))
            stage = spec.stages[index]
            loss = spec.loss if spec.loss in stage.escaping and spec.loss not in stage.received else None
            self._workers[index] = StageWorker(
                index,
                stage,
                own[index].program,
                store,
                own[index].buffers,
                loss,
                spec.num_microbatches,
                self._outbox,
                own[index].recompute,
                own[index].derived,
            )
        self._stores = list(stores.values())
        self._connect()
        meshes = list(dict.fromkeys(stage.ranks for stage in spec.stages))
        self.schedule = None
        if spec.schedule is not None:
            workers = [self._workers[index] for index in sorted(own)]
            stage_meshes = [meshes.index(stage.ranks) for stage in spec.stages]
            self.schedule = Schedule(spec.schedule, workers, stage_meshes, spec.num_microbatches, device)
        self._deliveries = [Delivery(spec, ranks, self._rank, self._world, device) for ranks in meshes]
        self._parameters = tuple({id(p): p for o in own.values() for p in o.parameters.values()}.values())
        parameters = {index: o.parameters for index, o in own.items()}
        self._sums = [SharedSum(shared, spec, parameters, self._rank, device) for shared in spec.shared]

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

    def set_buffers(self, buffers: Mapping[str, Any]) -> None:
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
        # Parameters gathered under inference mode (validation) would be unfit for the training that goes on later.
        with torch.inference_mode(False), torch.no_grad():
            values = self._run(batch, given or {}, 1.0, has_backward=False)
        for index, buffers in before.items():
            self._own[index].buffers.update(buffers)
        return values

    def _run(self, batch: Sequence[Tensor], given: Values, loss_scale: float, has_backward: bool) -> Values:
        self._check_batch(batch)
        if missing := set(self.spec.given) - set(given):
            raise RuntimeMismatchError(f"values {sorted(missing)} are not given", "run the step's prologue first")
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
            self.schedule.run()
        else:
            self._run_forward()
        self._outbox.drain()
        return self._collect()

    def _run_forward(self) -> None:
        """All micro-batches of a stage, then those of the next: messages come in the order of the stages."""
        for index in sorted(self._workers):
            for microbatch in range(self.spec.num_microbatches):
                self._workers[index].forward(microbatch)

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
            shape = expected.rank_shape(self._rank, self._world)
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
        try:
            dist.broadcast(flat, src=stage.ranks[0])
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self._rank}: a rank of the job is gone: results of rank {stage.ranks[0]} did not reach all "
                f"({first_sentence(str(error))})",
                "look at the output of the rank that ended first",
            ) from error
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
