"""StagePlan: what was decided for one stage of the pipeline (all of the step where there is one), and its figures."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise

from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.parameter_plan import ParameterPlan
from alpa_strategy.ir.placement import DualLayout, Layout

FORMAT_VERSION = 2  # 2: what a stage makes of its parameters alone is made once per step


@dataclass(frozen=True)
class Fingerprint:
    """What a plan was made for, part by part, so that a mismatch can be named. Each part is a short hash."""

    graph: str
    parameters: str
    batch: str
    cluster: str
    options: str
    format: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts that differ."""
        return [part for part in self.__dataclass_fields__ if getattr(self, part) != getattr(other, part)]

    @property
    def digest(self) -> str:
        """One hash over all parts: the plan's file name in the store."""
        parts = [f"{part}={getattr(self, part)}" for part in self.__dataclass_fields__]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind on one mesh axis: `num_bytes` and `seconds` are totals per step, `count` calls per step.

    phase: `forward`, `backward` (both per micro-batch) or `step` (once per optimizer step; where gradients are
    accumulated over several training steps, `seconds` is a training step's share).
    """

    kind: str
    axis: int
    phase: str
    count: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Predicted:
    """Prediction for one step. step_seconds = compute + communication + optimizer."""

    step_seconds: float
    peak_bytes: int
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class StagePlan:
    """One stage: a run of the graph's ops on a submesh.

    Attributes:
        submesh: (n_nodes, n_devices per node).
        first_device: global rank of the stage's first device; devices are contiguous.
        logical_mesh: shape of the grid.
        ops: (first, last + 1) op indices of the stage.
        parameter_plans: parameter name -> ParameterPlan.
        shapes: parameter name -> shape in the module.
        strategies: op name -> one AxisStrategy per mesh axis.
        collectives: what the stage communicates per step.
        predicted: the stage's own prediction.
        remat: whether activations are recomputed in the backward.
        remat_cuts: op indices, ascending and inside `ops`, that cut the stage into the spans which are recomputed one
            by one; (): as a whole.
        recomputed: names of ops of a stage that keeps its activations whose results are not kept but made again.
        derives_again: whether what the stage makes of its parameters alone (casts to half precision) is made again for
            every micro-batch, which takes less memory where activations are recomputed; else once per step.
        received: value that an earlier stage (or a prologue) hands in -> dual layout in which it arrives. Only `R` and
            `S<d>` with even chunks occur, here and in `sent`.
        sent: value that later stages need -> dual layout in which it is handed on.
        forward_seconds, backward_seconds: of one micro-batch (recomputation counts as backward); 0 where not known.
        boundary_seconds: of one micro-batch's values to the next stage and their gradients back; 0 where not known.
        layers: the modules whose ops it holds, for display: `embed to blocks.3`.
    """

    submesh: tuple[int, int]
    first_device: int
    logical_mesh: tuple[int, ...]
    ops: tuple[int, int]
    parameter_plans: dict[str, ParameterPlan]
    strategies: dict[str, tuple[AxisStrategy, ...]]
    collectives: tuple[Collective, ...]
    predicted: Predicted
    remat: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received: dict[int, DualLayout] = field(default_factory=dict)
    sent: dict[int, DualLayout] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    boundary_seconds: float = 0.0
    layers: str = ""
    remat_cuts: tuple[int, ...] = ()
    recomputed: tuple[str, ...] = ()
    derives_again: bool = False

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) op indices of what is recomputed together."""
        first, last = self.ops
        return tuple(pairwise((first, *self.remat_cuts, last)))

    @property
    def parameters(self) -> dict[str, Layout]:
        """Parameter name -> storage layout, in the dims of the module's parameter."""
        return {name: plan.module_layout for name, plan in self.parameter_plans.items()}


def stage_ranks(stage: StagePlan) -> tuple[int, ...]:
    """Global ranks of a stage."""
    return tuple(range(stage.first_device, stage.first_device + stage.submesh[0] * stage.submesh[1]))
