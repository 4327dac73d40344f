"""Channels: which values go from which stage to which other, forward and back. Data for the pipeline's runtime.

A value that several stages need goes to each of them straight from the stage that makes it, over as many stages as lie
between; to a mesh that has it already for an earlier stage, it goes from that one. No process groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.cross_mesh import MeshSide, TransferPlan, best_transfer, plan_transfer
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import Layout


@dataclass(frozen=True)
class StageSpec:
    """What every rank knows of every stage.

    Attributes:
        ranks: global ranks, ascending; two stages have the same ranks or no rank in common.
        mesh_shape: logical mesh.
        received: value -> layout in which the stage wants it (`R`, `S<d>`): from an earlier stage, or given. The stage
            may have to pass it on to a later one on its mesh.
        sent: value -> layout in which the stage makes it.
        batch: index of a batch tensor -> layout in which the stage wants a micro-batch of it.
        escaping: values that leave the step from here, whole on every device of the stage.
        buffer_updates: buffer name -> escaping value that replaces it after each micro-batch.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    received: Mapping[int, Layout] = field(default_factory=dict)
    sent: Mapping[int, Layout] = field(default_factory=dict)
    batch: Mapping[int, Layout] = field(default_factory=dict)
    escaping: tuple[int, ...] = ()
    buffer_updates: Mapping[str, int] = field(default_factory=dict)

    def side(self, layout: Layout) -> MeshSide:
        """The stage's end of a transfer, where a value lies in `layout`."""
        return MeshSide(self.mesh_shape, self.ranks, layout)


@dataclass(frozen=True)
class Channel:
    """The values that stage `source` hands to stage `target` with every micro-batch, one bundle.

    `backward` holds the way back of the gradients of `differentiable`, those of `values` that have one.
    """

    source: int
    target: int
    values: tuple[int, ...]
    forward: tuple[TransferPlan, ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[int, ...]
    backward: tuple[TransferPlan, ...]
    grad_dtypes: tuple[torch.dtype, ...]


def plan_channels(
    stages: Sequence[StageSpec],
    metas: Mapping[int, TensorMeta],
    given: Collection[int] = (),
    cluster: ClusterSpec | None = None,
) -> tuple[Channel, ...]:
    """All channels, ordered by (source, target): the same on all ranks.

    Args:
        stages: in pipeline order.
        metas: value -> its metadata in one micro-batch, at global shapes.
        given: values that need no channel: every rank has them before the first micro-batch.
        cluster: where given, local all-gathers are used where they are faster on its links.

    Raises:
        PlanError: a stage needs a value that no earlier stage sends.
    """
    needs: dict[tuple[int, int], list[int]] = {}
    for target, stage in enumerate(stages):
        for value in stage.received:
            if value in given:
                continue
            source = _source(value, stages, target)
            if source is None:
                raise PlanError(f"stage {target} needs value {value}, which no earlier stage sends", "plan again")
            needs.setdefault((source, target), []).append(value)

    def plan(value: int, start: MeshSide, end: MeshSide) -> TransferPlan:
        meta = metas[value]
        if cluster is not None:
            return best_transfer(meta.shape, meta.dtype.itemsize, start, end, cluster)
        return plan_transfer(meta.shape, meta.dtype.itemsize, start, end)

    channels = []
    for source, target in sorted(needs):
        values = tuple(sorted(needs[source, target]))
        held = {**stages[source].received, **stages[source].sent}
        starts = {v: stages[source].side(held[v]) for v in values}
        ends = {v: stages[target].side(stages[target].received[v]) for v in values}
        differentiable = tuple(v for v in values if metas[v].requires_grad)
        channels.append(
            Channel(
                source,
                target,
                values,
                tuple(plan(v, starts[v], ends[v]) for v in values),
                tuple(metas[v].dtype for v in values),
                differentiable,
                tuple(plan(v, ends[v], starts[v]) for v in differentiable),
                tuple(metas[v].dtype for v in differentiable),
            )
        )
    return tuple(channels)


def _source(value: int, stages: Sequence[StageSpec], target: int) -> int | None:
    """The stage that hands `value` to stage `target`: its maker, or the first that got it on the target's mesh."""
    maker = next((s for s in reversed(range(target)) if value in stages[s].sent), None)
    if maker is None or stages[maker].ranks == stages[target].ranks:
        return maker
    between = range(maker + 1, target)
    on_mesh = (s for s in between if stages[s].ranks == stages[target].ranks and value in stages[s].received)
    return next(on_mesh, maker)
