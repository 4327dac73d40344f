"""What planning decides: everything (`Plan`), the work of one mesh of devices (`StagePlan`),
and the predictions that go with them.

`Plan.save` and `Plan.load` write and read a small JSON file that users can read and edit. Its texts
are in `ir/plan_file.py`, how parameters are stored in `ir/parameter_plan.py`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from alpa_strategy.errors import PlanError
from alpa_strategy.files import BadFileError, read_json, write_json
from alpa_strategy.ir import plan_file
from alpa_strategy.ir.execution import Execution
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.parameter_plan import (
    ParameterMode,
    ParameterPlan,
    Storage,
    modes_text,
    parse_modes,
)
from alpa_strategy.ir.placement import DualLayout, Layout
from alpa_strategy.ir.task_figures import TaskFigures
from alpa_strategy.schedules import splits_backward

# Other packages import all nouns of a plan from here.
__all__ = [
    "EAGER_SCHEDULE",
    "FORMAT_VERSION",
    "MEMORY_PARTS",
    "Collective",
    "Execution",
    "Fingerprint",
    "ParameterMode",
    "ParameterPlan",
    "PhaseCost",
    "Plan",
    "Predicted",
    "StagePlan",
    "Storage",
    "TaskFigures",
    "job_ranks",
    "modes_text",
    "parse_modes",
    "stage_ranks",
]

# Of the plan file. 3: `bias_on_first` is the one name of ops whose first operand is added on the
# first device alone.
FORMAT_VERSION = 3

# The `schedule` of a plan whose steps run eagerly. Plan files have this word.
EAGER_SCHEDULE = "as written"

# Attribute of a plan with its task.
_EXPLAINED_BY = "_explained_by"

# `Plan.gap` of a plan of which no bound is known.
NO_BOUND = 1.0

# What a device's memory has at its peak. Weights include gathered copies and casts, gradients those
# before they are scattered. Temporary are the largest op's workspace and gradients, prefetched
# parameters and the optimizer's.
MEMORY_PARTS = ("weights", "gradients", "state", "activations", "temporary")

# Larger numbers in a file are mistakes: the structures made from them would not fit into memory.
MAX_DEVICES = 1 << 24
MAX_MICROBATCHES = 1 << 14


@dataclass(frozen=True)
class Fingerprint:
    """The inputs that a plan was made for, one short hash each, so that a mismatch can be named."""

    graph: str
    parameters: str
    batch: str
    cluster: str
    options: str
    format: str

    def differences(self, other: "Fingerprint") -> list[str]:
        """Return the names of the inputs that differ."""
        names = []
        for name in self.__dataclass_fields__:
            if getattr(self, name) != getattr(other, name):
                names.append(name)
        return names

    @property
    def digest(self) -> str:
        """One hash over all inputs: the plan's file name in the store."""
        lines = [f"{name}={getattr(self, name)}" for name in self.__dataclass_fields__]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind on one mesh axis; the numbers are totals per step."""

    # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    kind: str

    # The mesh axis.
    axis: int

    # `forward` or `backward` (both per micro-batch), or `step` (once per optimizer step). If
    # gradients are accumulated over several training steps, `seconds` is one training step's share.
    phase: str

    count: int
    num_bytes: int
    seconds: float

    # For display: the tensors that most of the bytes belong to; "" if they are not known.
    largest: str = ""


@dataclass(frozen=True)
class Predicted:
    """The prediction for one step.

    step_seconds = compute + communication + optimizer + host + loop - hidden.
    """

    step_seconds: float

    # Peak device memory.
    peak_bytes: int

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    # Python around the step's ops and the optimizer's update; 0 if it is not known.
    host_seconds: float = 0.0

    # The Trainer's loop, the loader and logging: from the end of an optimizer step to the next
    # batch's ops, and from there to the backward. 0 if it is not known.
    loop_seconds: float = 0.0

    # Time in which the host and the devices work at the same time.
    hidden_seconds: float = 0.0

    # Part of `peak_bytes` -> its bytes (`MEMORY_PARTS`); empty if they are not known.
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def device_seconds(self) -> float:
        """Seconds of the step if the host took no time."""
        return self.step_seconds - self.host_seconds - self.loop_seconds + self.hidden_seconds


@dataclass(frozen=True)
class StagePlan:
    """One stage: consecutive ops of the graph on a submesh."""

    # (number of nodes, devices per node)
    submesh: tuple[int, int]

    # Index of the stage's first device in the job; the meshes of all stages follow one another.
    first_device: int

    # Shape of the device grid, one size per mesh axis.
    logical_mesh: tuple[int, ...]

    # (first, last + 1) op indices of the stage.
    ops: tuple[int, int]

    # Parameter name -> how it is stored.
    parameter_plans: dict[str, ParameterPlan]

    # Op name -> one AxisStrategy per mesh axis.
    strategies: dict[str, tuple[AxisStrategy, ...]]

    # The stage's communication per step.
    collectives: tuple[Collective, ...]

    # The prediction for this stage alone.
    predicted: Predicted

    # Whether activations are recomputed in the backward.
    remat: bool = False

    # Parameter name -> shape in the module.
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    # Value from an earlier stage (or a prologue) -> the dual layout in which it arrives: `R` or
    # even `S<d>`.
    received: dict[int, DualLayout] = field(default_factory=dict)

    # Value for later stages -> the dual layout in which it is sent.
    sent: dict[int, DualLayout] = field(default_factory=dict)

    # Of one micro-batch; recomputation counts as backward. 0 if not known.
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    # One micro-batch's values to the next stage and their gradients back; 0 if not known.
    boundary_seconds: float = 0.0

    # Bytes of the same values and gradients, of all devices together; None: not known, or no
    # messages.
    boundary_bytes: int | None = None

    # The modules of its ops, for display: `embed to blocks.3`.
    layers: str = ""

    # Op indices inside `ops`, ascending, that split the stage into recompute segments. (): the
    # stage is one segment.
    recompute_splits: tuple[int, ...] = ()

    # Names of single ops that are recomputed, in a stage that stores its activations.
    recomputed: tuple[str, ...] = ()

    # Names of ops in such a stage whose results are stored in host memory until the backward.
    stored: tuple[str, ...] = ()

    # Whether values made of parameters alone (casts to half precision) are recomputed for every
    # micro-batch instead of once per step. That takes less memory if activations are recomputed.
    recompute_per_microbatch: bool = False

    # Global ranks of the logical mesh, row-major, if links differ (`ClusterSpec.orders`). (): from
    # `first_device` on.
    devices: tuple[int, ...] = ()

    # Bytes of parameters that are gathered before their use (ZeRO-3), in the forward as in the
    # backward.
    prefetched_bytes: int = 0

    # Matmul -> number of chunks of its result: one is summed over devices while the next is
    # multiplied.
    num_chunks: dict[str, int] = field(default_factory=dict)

    # What its program does besides; None: the plan file is of a version that did not have it.
    execution: Execution | None = None

    @property
    def remat_cuts(self) -> tuple[int, ...]:
        """Deprecated name of `recompute_splits`."""
        return self.recompute_splits

    @property
    def ahead_bytes(self) -> int:
        """Deprecated name of `prefetched_bytes`."""
        return self.prefetched_bytes

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) op indices of each recompute segment."""
        first, last = self.ops
        return tuple(pairwise((first, *self.recompute_splits, last)))

    @property
    def recomputed_ops(self) -> tuple[str, ...]:
        """Names of the ops whose results no device saves for the backward.

        These are `recomputed` and `stored`.
        """
        return self.recomputed + self.stored

    @property
    def parameters(self) -> dict[str, Layout]:
        """Parameter name -> storage layout, in the dims of the module's parameter.

        A shard of a fused projection has a shard of every segment.
        """
        layouts = {}
        for name, plan in self.parameter_plans.items():
            layouts[name] = Layout(mode.stored for mode in plan.module_modes)
        return layouts

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return plan_file.to_json_data(StagePlan, self)

    @classmethod
    def from_dict(cls, data: Any) -> "StagePlan":
        """Return the stage that `data` describes; the inverse of `to_dict`.

        Raises:
            PlanError: a field is missing or wrong. The message names it.
        """
        stage = plan_file.from_json_data(StagePlan, data, "stage")
        _check_stage(stage, "stage")
        return stage


def stage_ranks(stage: StagePlan) -> tuple[int, ...]:
    """Return the global ranks of a stage's mesh, row-major."""
    if stage.devices:
        return stage.devices
    num_nodes, num_devices_per_node = stage.submesh
    num_devices = num_nodes * num_devices_per_node
    return tuple(range(stage.first_device, stage.first_device + num_devices))


def stages_by_devices(plan: "Plan") -> list[list[int]]:
    """Return the indices of the stages on each group of devices, in order of their first stage."""
    groups: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        groups.setdefault(stage.first_device, []).append(index)
    return list(groups.values())


def stages_split_backward(
    schedule: str, stages: Sequence[StagePlan], num_microbatches: int
) -> bool:
    """Whether a schedule computes the weights' gradients of these stages separately."""
    num_meshes = len({stage_ranks(stage) for stage in stages})
    return splits_backward(schedule, num_meshes, num_microbatches, len(stages) // num_meshes)


def memory_by_mesh(plan: "Plan") -> dict[int, Counter[str]]:
    """Return bytes of a device by part, by the first device of each mesh.

    Stages on one mesh share its memory.
    """
    of_meshes: dict[int, Counter[str]] = {}
    for stage in plan.stages:
        of_meshes.setdefault(stage.first_device, Counter()).update(stage.predicted.memory)
    return of_meshes


def job_ranks(stages: Iterable[StagePlan]) -> tuple[int, ...]:
    """Return the global ranks of all meshes, one mesh after the other."""
    in_order = sorted(stages, key=lambda stage: stage.first_device)
    # Several stages may run on one mesh.
    meshes = dict.fromkeys(stage_ranks(stage) for stage in in_order)
    return tuple(rank for ranks in meshes for rank in ranks)


@dataclass(frozen=True)
class PhaseCost:
    """The predicted cost of one phase of an iteration (`extras/iteration_phases.py`)."""

    name: str

    # How often it runs in an iteration.
    times: int

    # Its mesh and the layout of most parameters, for display.
    layout: str

    # Including everything else that a device stores.
    peak_bytes: int

    # Each time.
    seconds: float

    # Moving parameters to this layout, once per iteration; None if they have it already.
    moved_seconds: float | None

    # Each time, if parameters kept the training step's layout; None if that does not fit.
    staying_seconds: float | None

    @property
    def total_seconds(self) -> float:
        """Seconds per iteration, moving included."""
        return self.times * self.seconds + (self.moved_seconds or 0.0)


@dataclass(frozen=True)
class Plan:
    """The whole decision. `save` and `load` are inverse."""

    # The inputs it was made for.
    fingerprint: Fingerprint

    # In pipeline order.
    stages: tuple[StagePlan, ...]

    # For the full step, on the slowest device.
    predicted: Predicted

    num_microbatches: int = 1

    # "none" for a single stage; `EAGER_SCHEDULE` if steps run eagerly and the plan decides only how
    # parameters are stored.
    schedule: str = "none"

    # Name of an alternative plan -> its predicted seconds per step under the same costs; None if
    # it does not fit.
    baselines: dict[str, float | None] = field(default_factory=dict)

    # 1 - lower bound / predicted.step_seconds: a step may be shorter by this share at most. 0.0 if
    # proved optimal; `NO_BOUND` if no bound is known. The bound of a single stage holds for all
    # plans of one stage. The bound of a pipeline holds for all stages, meshes and layouts with this
    # number of micro-batches.
    gap: float = 0.0

    # Lines for the user: replicated ops, unproved optimality, ...
    notes: tuple[str, ...] = ()

    # The lines of `notes` about the step it was made for. A step that uses the stored plan later
    # has its own (`with_notes_of`).
    step_notes: tuple[str, ...] = ()

    # Phase of planning -> its seconds.
    solver_seconds: dict[str, float] = field(default_factory=dict)

    # For display.
    cluster_name: str = ""

    # Of the step that it was made for; None: not known.
    figures: TaskFigures | None = None

    # The phases of an iteration that includes the plan's step.
    phases: tuple[PhaseCost, ...] = ()

    @property
    def is_pipelined(self) -> bool:
        """Whether a pipeline executes it: several stages or micro-batches, or recomputation."""
        recomputes = any(stage.remat for stage in self.stages)
        return len(self.stages) > 1 or self.num_microbatches > 1 or recomputes

    @property
    def is_eager(self) -> bool:
        """Whether every rank runs the user's step eagerly, on its local batch."""
        return self.schedule == EAGER_SCHEDULE

    @property
    def is_as_written(self) -> bool:
        """Deprecated name of `is_eager`."""
        return self.is_eager

    @property
    def iteration_seconds(self) -> float:
        """Predicted seconds of all phases; of the step if there are no phases."""
        if self.phases:
            return sum(phase.total_seconds for phase in self.phases)
        return self.predicted.step_seconds

    def with_notes_of(self, step_notes: tuple[str, ...]) -> "Plan":
        """Return this plan with `step_notes` in place of the notes about its former step.

        Notes about the plan itself stay.
        """
        replaced = {*self.step_notes, *step_notes}
        on_plan = [note for note in self.notes if note not in replaced]
        return replace(self, notes=(*step_notes, *on_plan), step_notes=step_notes)

    def explain(self, name: str) -> Any:
        """Return the next best layouts of a parameter or op, each with its seconds and bytes, and
        what binds it (`ir/plan_details.Explanation`).

        Args:
            name: as the plan has it.

        Raises:
            PlanError: there is no such parameter or op, or the plan was read from a file, without
                the step that it was made for.
        """
        answer = vars(self).get(_EXPLAINED_BY)
        if answer is None:
            raise PlanError(
                "the step that this plan was made for is not known here",
                "ask the plan that make_plan returned, or a stored one with `alpa why`",
            )
        return answer(self, name)

    def explained_by(self, answer: Callable[["Plan", str], Any]) -> "Plan":
        """Return this plan with a function of (plan, name) that `explain` calls.

        It is no field: a plan that is stored, sent or changed has none.
        """
        plan = replace(self)
        object.__setattr__(plan, _EXPLAINED_BY, answer)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _EXPLAINED_BY}

    def collectives(self) -> list[Collective]:
        """Return the collectives of all stages."""
        return [collective for stage in self.stages for collective in stage.collectives]

    def save(self, path: str | Path) -> None:
        """Write the plan file.

        The write is atomic (temporary file in the same folder, then rename): no reader sees half a
        plan.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Raises:
            PlanError: the file is unreadable, of another format version, or has a wrong field.
        """
        try:
            data = read_json(path)
        except OSError as error:
            raise PlanError(
                f"cannot read the plan file {path}: {error.strerror or error}", "check the path"
            ) from error
        except BadFileError as error:
            raise PlanError(
                f"the plan file {path} {error}", "give a plan file, as `alpa plan -o` writes it"
            ) from error

        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(
                f"the plan file {path} cannot be used: {error.problem}", error.fix
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format_version": FORMAT_VERSION, **plan_file.to_json_data(Plan, self)}

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """Return the plan that `data` describes; the inverse of `to_dict`.

        Raises:
            PlanError: another format version, or a field is missing or wrong. The message names
                the field.
        """
        version = plan_file.checked(data, dict, "plan").get("format_version")
        if version != FORMAT_VERSION:
            raise PlanError(
                f"the plan has format version {version}, this package reads version"
                f" {FORMAT_VERSION}",
                plan_file.FIX,
            )

        plan = plan_file.from_json_data(Plan, data, "plan")
        _check_plan(plan)
        return plan


def _check_plan(plan: Plan) -> None:
    """Raise PlanError if fields of the plan contradict each other."""
    if not plan.stages:
        raise PlanError("the plan has no stages", plan_file.FIX)
    if not 1 <= plan.num_microbatches <= MAX_MICROBATCHES:
        raise PlanError(
            f"plan.num_microbatches is {plan.num_microbatches}",
            f"write 1 to {MAX_MICROBATCHES}",
        )
    for number, stage in enumerate(plan.stages):
        _check_stage(stage, f"plan.stages[{number}]")


def _check_stage(stage: StagePlan, path: str) -> None:
    """Raise PlanError if fields of a stage contradict each other. `path` is the stage's path."""
    _check_mesh_shape(stage.submesh, f"{path}.submesh")
    _check_mesh_shape(stage.logical_mesh, f"{path}.logical_mesh")

    modes = {name: plan.modes for name, plan in stage.parameter_plans.items()}
    per_axis: dict[str, Any] = {
        "parameters": modes,
        "strategies": stage.strategies,
        "received": stage.received,
        "sent": stage.sent,
    }
    num_axes = len(stage.logical_mesh)
    for name, entries in per_axis.items():
        for key, entry in entries.items():
            if len(entry) != num_axes:
                raise PlanError(
                    f"{path}.{name}[{key!r}] has {len(entry)} entries for {num_axes} mesh axes",
                    plan_file.FIX,
                )

    if not stage.recompute_splits:
        return
    if not all(start < end for start, end in stage.spans):
        first, last = stage.ops
        raise PlanError(f"{path}.remat_cuts must ascend between {first} and {last}", plan_file.FIX)
    if not stage.remat:
        raise PlanError(f"{path}.remat_cuts cuts a stage that does not recompute", plan_file.FIX)


def _check_mesh_shape(shape: tuple[int, ...], path: str) -> None:
    """Check a mesh shape that was read from a file.

    Raises:
        PlanError: it is empty, a size is below 1, or there are more than `MAX_DEVICES` devices;
            `path` names the place in the file.
    """
    if not shape:
        raise PlanError(f"{path} has 0 numbers, expected at least 1", plan_file.FIX)
    if min(shape) < 1 or math.prod(shape) > MAX_DEVICES:
        raise PlanError(f"{path} is {list(shape)}, which is no shape of a mesh", plan_file.FIX)
