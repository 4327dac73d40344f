"""What every rank knows of a pipeline, as data (`pipeline/build.py` makes it from a plan), and of a stage's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.graph import BatchInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import Layout
from alpa_strategy.microbatch.microstep import Combine, Cut
from alpa_strategy.sharding.cross_mesh import StageSpec


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that stages on different meshes use: its gradient is summed over them after the step."""

    shape: tuple[int, ...]  # of the whole parameter, in the dims of its storage layouts
    dtype: torch.dtype
    uses: tuple[tuple[int, str, Layout], ...]  # (stage, name there, storage layout there); one per mesh is enough


@dataclass(frozen=True)
class PipelineSpec:
    """What every rank knows of the pipeline."""

    stages: tuple[StageSpec, ...]  # in order
    metas: Mapping[int, TensorMeta]  # of all values that are received or escape: in one micro-batch, at global shapes
    batch: tuple[BatchInput, ...]  # tensors of a micro-batch of all ranks
    num_microbatches: int  # micro-batch m is made of the m-th part of every rank's rows (`microbatch/`)
    schedule: str  # a name of `schedules.SCHEDULES`
    loss: int  # value index of the loss, a summand of each micro-batch
    whole_batch: bool = False  # each rank brings all rows (`batch_scope="global"`), not only its own
    # Escaping value -> how the micro-batches' make up the step's (`MicroStep.combine`; default `same`).
    combine: Mapping[int, Combine] = field(default_factory=dict)
    # Value -> how micro-batches have their parts of it (`MicroStep.cuts`): `cat` values, given values by rows.
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    # Received values that no stage makes (a prologue's): every rank has them whole before the step.
    given: tuple[int, ...] = ()
    shared: tuple[SharedParameter, ...] = ()  # parameters used on several meshes
    cluster: ClusterSpec | None = None  # where given, cross-mesh transfers are chosen by its links


Values = dict[int, Tensor]  # by value index of the micro-batched step


@dataclass(frozen=True)
class StageInputs:
    """One micro-batch's local tensors."""

    parameters: Mapping[str, Tensor]  # by name
    buffers: Mapping[str, Any]  # by name; the counters under `COUNTERS`
    batch: Mapping[int, Tensor]  # by place in the step's batch
    received: Mapping[int, Tensor]  # what other stages made, and earlier spans of this one, by value


# Gives (escaping values, whole on every device of the stage; values sent to other stages, in the stage's layouts).
StageProgram = Callable[[StageInputs], tuple[Values, Values]]
# Gives the same, and the values made for later spans, as they are made.
SpanProgram = Callable[[StageInputs], tuple[Values, Values, Values]]
