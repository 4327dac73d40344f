"""Plan: what was decided, as a small JSON file that a person can read and edit (docs/formulas.md#plan-file)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, DualLayout, Layout, shard

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
class ParameterPlan:
    """How one parameter is stored and brought to its uses; one mode per mesh axis.

    Modes: `R` replicated, gradient complete on every device; `R*` replicated, gradient summed once per step (data
    parallel); `S<d>` stored in shards of dim d, gathered at each use that needs it whole (ZeRO-3, or used as it is:
    tensor parallel); `G<d>` stored in shards of dim d, gathered once per step, gradient reduce-scattered once per step
    (ZeRO-1/2).

    Dims are those that the step sees: where it sees a fused projection in `num_segments` segments
    (capture/rewrites.py), one more than the module's own.
    """

    modes: tuple[str, ...]
    num_segments: int = 1

    @property
    def layout(self) -> Layout:
        """Storage layout, in the step's dims."""
        return _storage_layout(self.modes)

    @property
    def module_modes(self) -> tuple[str, ...]:
        """Modes in the dims of the module's parameter: what users read and write."""
        return self.modes if self.num_segments == 1 else tuple(shift_mode(mode, -1) for mode in self.modes)

    @property
    def module_layout(self) -> Layout:
        """Storage layout in the dims of the module's parameter (every segment is cut where there are several)."""
        return _storage_layout(self.module_modes)


def source_layout(plan: ParameterPlan, requires_grad: bool = True) -> DualLayout:
    """The dual layout in which a stored parameter enters the step and leaves its gradient (see `ParameterPlan`)."""
    sources = []
    for mode in plan.modes:
        if mode[0] == "S":
            sources.append(shard(int(mode[1:])))
        else:
            sources.append(REPLICATE if requires_grad and mode != "R" else INVARIANT)
    return tuple(sources)


def shift_mode(mode: str, by: int) -> str:
    """The mode for dims counted from another origin: `shift_mode("S1", -1)` is `S0`; R and R* stay."""
    return mode if mode[0] == "R" else f"{mode[0]}{int(mode[1:]) + by}"


def _storage_layout(modes: tuple[str, ...]) -> Layout:
    return Layout.parse(" ".join("R" if mode[0] == "R" else f"S{mode[1:]}" for mode in modes))


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
        strategies: op name -> one AxisStrategy text per mesh axis.
        collectives: what the stage communicates per step.
        predicted: the stage's own prediction.
        remat: whether activations are recomputed in the backward.
        remat_cuts: op indices, ascending and inside `ops`, that cut the stage into the spans which are recomputed one
            by one; (): as a whole.
        derives_again: whether what the stage makes of its parameters alone (casts to half precision) is made again for
            every micro-batch, which takes less memory where activations are recomputed; else once per step.
        steps_in_backward: whether parameters are updated within the backward, so that gradients need little memory.
        received: value that an earlier stage (or a prologue) hands in -> dual layout in which it arrives, such as
            "S0 R". Only `R` and `S<d>` with even chunks occur, here and in `sent`.
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
    strategies: dict[str, tuple[str, ...]]
    collectives: tuple[Collective, ...]
    predicted: Predicted
    remat: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received: dict[int, str] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    boundary_seconds: float = 0.0
    layers: str = ""
    remat_cuts: tuple[int, ...] = ()
    steps_in_backward: bool = False
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


def stage_parameters(parameters: Sequence[ParameterInput], stage: StagePlan) -> list[ParameterInput]:
    """Those of a step's parameters that a stage holds."""
    return [given for given in parameters if given.name in stage.parameter_plans]


@dataclass(frozen=True)
class Plan:
    """The whole decision. Frozen; `save` and `load` are inverse.

    Attributes:
        fingerprint: what it was made for.
        stages: in pipeline order (one for now).
        num_microbatches, schedule: 1 and "none" for a single stage.
        predicted: prediction for the whole step on the slowest device.
        baselines: name -> predicted seconds per step of named alternatives under the same costs (None: does not fit).
        gap: proved optimality gap of the solution, 0.0 when proved optimal.
        notes: things that a user should know (replicated ops, unproved optimality, ...).
        solver_seconds: how long planning took, by phase.
        cluster_name: for display.
    """

    fingerprint: Fingerprint
    stages: tuple[StagePlan, ...]
    predicted: Predicted
    num_microbatches: int = 1
    schedule: str = "none"
    baselines: dict[str, float | None] = field(default_factory=dict)
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    solver_seconds: dict[str, float] = field(default_factory=dict)
    cluster_name: str = ""

    @property
    def is_pipelined(self) -> bool:
        """Whether it is more than one stage that runs the whole batch at once."""
        return len(self.stages) > 1 or self.num_microbatches > 1 or any(stage.remat for stage in self.stages)

    def collectives(self) -> list[Collective]:
        """Every kind of collective of every stage, with kind, mesh axis, bytes and times per step."""
        return [c for stage in self.stages for c in stage.collectives]

    def save(self, path: str | Path) -> None:
        """Write JSON atomically (temporary file in the same folder, then rename): a reader never sees half a plan."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; PlanError when the file is unreadable, of another format version, or incomplete."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read the plan file {path}: {error.strerror}", "check the path") from error
        except ValueError as error:
            raise PlanError(f"the plan file {path} is not JSON: {error}", "delete it, or give another one") from error
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"the plan file {path} cannot be used: {error.problem}", error.fix) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from alpa_strategy.ir.plan_file import plan_to_data

        return plan_to_data(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Inverse of `to_dict`; PlanError names the field that is missing or wrong."""
        from alpa_strategy.ir.plan_file import plan_from_data

        return plan_from_data(data)
