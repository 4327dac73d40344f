"""What all ranks of a pipeline exchange once per step: rows of the batch before it, shared gradients after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from alpa_strategy.comm.messages import Transfer
from alpa_strategy.ir.placement import Layout
from alpa_strategy.microbatch.microstep import Cut, cut
from alpa_strategy.pipeline.spec import PipelineSpec, SharedParameter
from alpa_strategy.sharding.cross_mesh import MeshSide, TransferPlan, plan_transfer


class Delivery:
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
                shape = (tensor.meta.shape[0] // spec.num_microbatches, *tensor.meta.shape[1:])  # [rows, ...]
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


class SharedSum:
    """The sum of one parameter's gradients over the meshes that use it: each hands its own to all others."""

    def __init__(
        self,
        shared: SharedParameter,
        spec: PipelineSpec,
        own: Mapping[int, Mapping[str, nn.Parameter]],
        rank: int,
        device: torch.device,
    ) -> None:
        uses = list({spec.stages[use[0]].ranks: use for use in shared.uses}.values())
        sides = [spec.stages[stage].side(layout) for stage, _, layout in uses]
        # Few meshes share a parameter (two, where embeddings are tied): all to all is one message each way.
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
                self._mine = (i, own[stage][name], tuple(stop - start for start, stop in box))

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
