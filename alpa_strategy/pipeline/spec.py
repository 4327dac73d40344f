"""What every rank knows of a pipeline, as data (`pipeline/build.py` makes it from a plan), and of a stage's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.placement import Layout
from alpa_strategy.microbatch.microstep import MicroStep
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

    micro: MicroStep  # values at global shapes; every rank has those of `given` whole before the step
    stages: tuple[StageSpec, ...]  # in order
    schedule: str  # a name of `schedules.SCHEDULES`
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
