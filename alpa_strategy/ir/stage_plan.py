"""How parameters lie in one stage (`ParameterPlan`), and the stage: what one mesh of devices runs (`StagePlan`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, DualLayout, DualPlacement, Layout, shard

_MODE = re.compile(r"(R\*?)|([SG])(\d+)")


class Storage(Enum):
    """How a parameter lies along one mesh axis, and when it is brought to where it is used."""

    INVARIANT = "R"  # whole; every device makes the whole gradient
    REPLICATE = "R*"  # whole; gradient summed once per step (data parallel)
    SHARD = "S"  # in shards; used so (tensor parallel), or gathered at each use (ZeRO-3)
    GATHER_ONCE = "G"  # in shards; gathered, and the gradient reduce-scattered, once per step (ZeRO-1/2)


@dataclass(frozen=True, eq=False)
class ParameterMode:
    """How a parameter is stored on one mesh axis. Made by `parse` alone, which gives one object of each: they are
    compared by identity, as planning hashes them by the million.

    Written `R`, `R*`, `S<dim>`, `G<dim>` in pins and plan files: `parse` and `str` are the only ways from and to text.
    """

    storage: Storage
    dim: int | None = None  # the dim that is cut, None where the parameter is whole

    @classmethod
    @cache
    def parse(cls, text: str) -> ParameterMode:
        """Read `R`, `R*`, `S<dim>`, `G<dim>`.

        Raises:
            ValueError: it is none of these.
        """
        match = _MODE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a mode")
        return cls(Storage(match[1])) if match[1] else cls(Storage(match[2]), int(match[3]))

    def __str__(self) -> str:
        return self.storage.value if self.dim is None else f"{self.storage.value}{self.dim}"

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterMode.parse, (str(self),)

    @property
    def is_whole(self) -> bool:
        """Whether every device of the axis stores all of the parameter (`R`, `R*`)."""
        return self.dim is None

    @property
    def is_shard(self) -> bool:
        """Whether it is stored in shards that the step takes as they are (`S<dim>`)."""
        return self.storage is Storage.SHARD

    @property
    def is_gathered_once(self) -> bool:
        """Whether it is stored in shards that are gathered once per step (`G<dim>`)."""
        return self.storage is Storage.GATHER_ONCE

    @property
    def stored(self) -> Placement:
        """Where the stored values lie."""
        return Replicate() if self.dim is None else Shard(self.dim)

    def step_placement(self, requires_grad: bool = True) -> DualPlacement:
        """The dual placement in which the parameter enters the step and leaves its gradient."""
        if self.is_shard and self.dim is not None:
            return shard(self.dim)
        return REPLICATE if requires_grad and self.storage is not Storage.INVARIANT else INVARIANT

    def shifted(self, by: int) -> ParameterMode:
        """The mode for dims counted from another origin: `S1` shifted by -1 is `S0`; `R` and `R*` stay."""
        return self if self.dim is None else ParameterMode.parse(f"{self.storage.value}{self.dim + by}")


def parse_modes(text: str) -> tuple[ParameterMode, ...]:
    """Read one mode per mesh axis, such as `"R* S0"`; ValueError where one is none."""
    return tuple(map(ParameterMode.parse, text.split()))


def modes_text(modes: tuple[ParameterMode, ...]) -> str:
    """Inverse of `parse_modes`."""
    return " ".join(map(str, modes))


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is stored and brought to its uses; one mode per mesh axis.

    Dims are those that the step sees: where it sees a fused projection in `num_segments` segments (query, key and value
    in one weight: 3), one more than the module's own.

    on_host: what a device stores of it, its gradient and the optimizer's state lie in host memory.
    sums_in_fp32: its gradient is summed over devices in fp32 at least, however it was computed.
    """

    modes: tuple[ParameterMode, ...]
    num_segments: int = 1
    on_host: bool = False
    sums_in_fp32: bool = False

    @classmethod
    def parse(cls, text: str, num_segments: int = 1) -> ParameterPlan:
        """From modes in the step's dims: `ParameterPlan.parse("R* S0")`."""
        return cls(parse_modes(text), num_segments)

    @property
    def layout(self) -> Layout:
        """Storage layout, in the step's dims."""
        return Layout(mode.stored for mode in self.modes)

    @property
    def module_modes(self) -> tuple[ParameterMode, ...]:
        """Modes in the dims of the module's parameter: what users read and write."""
        return self.modes if self.num_segments == 1 else tuple(mode.shifted(-1) for mode in self.modes)

    @property
    def is_whole(self) -> bool:
        """Whether every device stores all of the parameter."""
        return all(mode.is_whole for mode in self.modes)

    @property
    def uses_shards(self) -> bool:
        """Whether the step takes it in shards on some axis (tensor parallel, or gathered at each use: ZeRO-3)."""
        return any(mode.is_shard for mode in self.modes)

    @property
    def is_gathered_once(self) -> bool:
        """Whether it is gathered once per step on some axis (ZeRO-1/2)."""
        return any(mode.is_gathered_once for mode in self.modes)

    @property
    def is_fetched(self) -> bool:
        """Whether it is copied from host memory for each use: its gradient is complete when autograd has made it. Else
        it comes once per step, as its gradient is reduced once per step."""
        return self.on_host and all(mode.storage in (Storage.INVARIANT, Storage.SHARD) for mode in self.modes)

    def step_layout(self, requires_grad: bool = True) -> DualLayout:
        """The dual layout in which the stored parameter enters the step and leaves its gradient."""
        return tuple(mode.step_placement(requires_grad) for mode in self.modes)


FORMAT_VERSION = 3  # 3: `bias_on_first` is the one name of ops whose first operand is added on the first device alone


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
        first_device: place of the stage's first device in the job, whose meshes lie one after the other.
        devices: global ranks of the logical mesh, row-major, where links differ (`ClusterSpec.orders`); (): as many
            as there are, from `first_device` on.
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
        stored: names of such ops whose results wait in host memory for the backward.
        derives_again: whether what the stage makes of its parameters alone (casts to half precision) is made again for
            every micro-batch, which takes less memory where activations are recomputed; else once per step.
        ahead_bytes: of parameters that are gathered before they are used (ZeRO-3), in the forward as in the backward.
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
    stored: tuple[str, ...] = ()
    derives_again: bool = False
    devices: tuple[int, ...] = ()
    ahead_bytes: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) op indices of what is recomputed together."""
        first, last = self.ops
        return tuple(pairwise((first, *self.remat_cuts, last)))

    @property
    def not_kept(self) -> tuple[str, ...]:
        """Names of the ops whose results a device does not keep for the backward: `recomputed` and `stored`."""
        return self.recomputed + self.stored

    @property
    def parameters(self) -> dict[str, Layout]:
        """Parameter name -> storage layout, in the dims of the module's parameter (every segment is cut)."""
        modes = {name: plan.module_modes for name, plan in self.parameter_plans.items()}
        return {name: Layout(mode.stored for mode in each) for name, each in modes.items()}


def stage_ranks(stage: StagePlan) -> tuple[int, ...]:
    """Global ranks of a stage's mesh, row-major."""
    return stage.devices or tuple(range(stage.first_device, stage.first_device + stage.submesh[0] * stage.submesh[1]))


def job_ranks(stages: Iterable[StagePlan]) -> tuple[int, ...]:
    """Global ranks of all meshes, one mesh after the other."""
    meshes = dict.fromkeys(stage_ranks(stage) for stage in sorted(stages, key=lambda stage: stage.first_device))
    return tuple(rank for ranks in meshes for rank in ranks)
