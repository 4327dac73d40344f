"""Plan: how parameters lie (`ParameterPlan`), what one mesh of devices runs (`StagePlan`), and the
whole decision, as a small JSON file that a person can read and edit (docs/formulas.md#plan-file).

In the file, modes of a parameter are one text such as "R* S0" (one mode per mesh axis; fused
projections: "R* S0 in 3 segments"; what lies in host memory: "S0 R* on host"); strategies of an op
are one text per axis, joined by " | ". All else is written as the data classes have it. Reading
checks every field against its type and says what is wrong where.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from alpa_strategy.errors import PlanError, ShardingError
from alpa_strategy.files import BadFileError, read_json, write_json
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import (
    INVARIANT,
    REPLICATE,
    DualLayout,
    DualPlacement,
    Layout,
    dual_layout,
    dual_layout_to_str,
    shard,
)

_MODE = re.compile(r"(R\*?)|([SG])(\d+)")


class Storage(Enum):
    """How a parameter lies along one mesh axis, and when it is brought to where it is used."""

    INVARIANT = "R"  # whole; every device makes the whole gradient
    REPLICATE = "R*"  # whole; gradient summed once per step (data parallel)
    SHARD = "S"  # in shards; used so (tensor parallel), or gathered at each use (ZeRO-3)
    GATHER_ONCE = (
        "G"  # in shards; gathered, and the gradient reduce-scattered, once per step (ZeRO-1/2)
    )


@dataclass(frozen=True, eq=False)
class ParameterMode:
    """How a parameter is stored on one mesh axis. Made by `parse` alone, which gives one object of
    each: they are compared by identity, as planning hashes them by the million.

    Written `R`, `R*`, `S<dim>`, `G<dim>` in pins and plan files: `parse` and `str` are the only
    ways from and to text.
    """

    storage: Storage
    dim: int | None = None  # the dim that is cut, None where the parameter is whole

    @classmethod
    @cache
    def parse(cls, text: str) -> "ParameterMode":
        """Read `R`, `R*`, `S<dim>`, `G<dim>`; ValueError where it is none of these."""
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
        if not requires_grad or self.storage is Storage.INVARIANT:
            return INVARIANT
        return REPLICATE

    def shifted(self, by: int) -> "ParameterMode":
        """The mode for dims counted from another origin: `S1` shifted by -1 is `S0`; `R` and `R*`
        stay.
        """
        return (
            self
            if self.dim is None
            else ParameterMode.parse(f"{self.storage.value}{self.dim + by}")
        )


def parse_modes(text: str) -> tuple[ParameterMode, ...]:
    """Read one mode per mesh axis, such as `"R* S0"`; ValueError where one is none."""
    return tuple(map(ParameterMode.parse, text.split()))


def modes_text(modes: tuple[ParameterMode, ...]) -> str:
    """Inverse of `parse_modes`."""
    return " ".join(map(str, modes))


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is stored and brought to its uses; one mode per mesh axis.

    Dims are those that the step sees: where it sees a fused projection in `num_segments` segments
    (query, key and value
    in one weight: 3), one more than the module's own.
    """

    modes: tuple[ParameterMode, ...]
    num_segments: int = 1
    # what a device stores of it, its gradient and the optimizer's state lie in host memory
    on_host: bool = False
    sums_in_fp32: bool = (
        False  # its gradient is summed over devices in fp32 at least, however it was computed
    )

    @classmethod
    def parse(cls, text: str, num_segments: int = 1) -> "ParameterPlan":
        """From modes in the step's dims: `ParameterPlan.parse("R* S0")`."""
        return cls(parse_modes(text), num_segments)

    @property
    def layout(self) -> Layout:
        """Storage layout, in the step's dims."""
        return Layout(mode.stored for mode in self.modes)

    @property
    def module_modes(self) -> tuple[ParameterMode, ...]:
        """Modes in the dims of the module's parameter: what users read and write."""
        return (
            self.modes if self.num_segments == 1 else tuple(mode.shifted(-1) for mode in self.modes)
        )

    @property
    def is_whole(self) -> bool:
        """Whether every device stores all of the parameter."""
        return all(mode.is_whole for mode in self.modes)

    @property
    def uses_shards(self) -> bool:
        """Whether the step takes it in shards on some axis (tensor parallel, or gathered at each
        use: ZeRO-3).
        """
        return any(mode.is_shard for mode in self.modes)

    @property
    def is_gathered_once(self) -> bool:
        """Whether it is gathered once per step on some axis (ZeRO-1/2)."""
        return any(mode.is_gathered_once for mode in self.modes)

    @property
    def is_fetched(self) -> bool:
        """Whether it is copied from host memory for each use: its gradient is complete when
        autograd has made it. Else
        it comes once per step, as its gradient is reduced once per step."""
        return self.on_host and all(
            mode.storage in (Storage.INVARIANT, Storage.SHARD) for mode in self.modes
        )

    def step_layout(self, requires_grad: bool = True) -> DualLayout:
        """The dual layout in which the stored parameter enters the step and leaves its gradient."""
        return tuple(mode.step_placement(requires_grad) for mode in self.modes)


# 3: `bias_on_first` is the one name of ops whose first operand is added on the first device alone
FORMAT_VERSION = 3


@dataclass(frozen=True)
class Fingerprint:
    """What a plan was made for, part by part, so that a mismatch can be named. Each part is a short
    hash.
    """

    graph: str
    parameters: str
    batch: str
    cluster: str
    options: str
    format: str

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names of the parts that differ."""
        return [
            part
            for part in self.__dataclass_fields__
            if getattr(self, part) != getattr(other, part)
        ]

    @property
    def digest(self) -> str:
        """One hash over all parts: the plan's file name in the store."""
        parts = [f"{part}={getattr(self, part)}" for part in self.__dataclass_fields__]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind on one mesh axis; `count`, `num_bytes` and `seconds` are totals per
    step.
    """

    kind: str
    axis: int
    # `forward`, `backward` (both per micro-batch) or `step` (once per optimizer step; where
    # gradients are accumulated over several training steps, `seconds` is a training step's share)
    phase: str
    count: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Predicted:
    """Prediction for one step.

    step_seconds = compute + communication + optimizer + host + loop - hidden.
    """

    step_seconds: float
    peak_bytes: int
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    # of Python around the step's ops and the optimizer's update; 0 where it is not known
    host_seconds: float = 0.0
    # from the end of an optimizer's step to the next batch's ops, and to the backward: the
    # Trainer's loop, the loader, logging; 0 where it is not known
    loop_seconds: float = 0.0
    # what of the host's and the devices' time lies beside the other's
    hidden_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        """What the step takes where the host takes no time."""
        return self.step_seconds - self.host_seconds - self.loop_seconds + self.hidden_seconds


@dataclass(frozen=True)
class StagePlan:
    """One stage: a run of the graph's ops on a submesh."""

    submesh: tuple[int, int]  # (n_nodes, n_devices per node)
    first_device: (
        int  # place of the stage's first device in the job, whose meshes lie one after the other
    )
    logical_mesh: tuple[int, ...]  # shape of the grid
    ops: tuple[int, int]  # (first, last + 1) op indices of the stage
    parameter_plans: dict[str, ParameterPlan]  # parameter name -> ParameterPlan
    strategies: dict[str, tuple[AxisStrategy, ...]]  # op name -> one AxisStrategy per mesh axis
    collectives: tuple[Collective, ...]  # what the stage communicates per step
    predicted: Predicted  # the stage's own prediction
    remat: bool = False  # whether activations are recomputed in the backward
    shapes: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # parameter name -> shape in the module
    # value that an earlier stage (or a prologue) hands in -> dual layout in which it arrives: `R`
    # or even `S<d>`
    received: dict[int, DualLayout] = field(default_factory=dict)
    # value that later stages need -> dual layout in which it is handed on
    sent: dict[int, DualLayout] = field(default_factory=dict)
    # forward_seconds, backward_seconds: of one micro-batch (recomputation counts as backward); 0
    # where not known
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    # of one micro-batch's values to the next stage and their gradients back; 0 where not known
    boundary_seconds: float = 0.0
    layers: str = ""  # the modules whose ops it holds, for display: `embed to blocks.3`
    # op indices inside `ops`, ascending, that cut the stage into spans, recomputed one by one; ():
    # as a whole
    remat_cuts: tuple[int, ...] = ()
    # names of ops of a stage that keeps its activations whose results are not kept but made again
    recomputed: tuple[str, ...] = ()
    stored: tuple[
        str, ...
    ] = ()  # names of such ops whose results wait in host memory for the backward
    # whether what the stage makes of its parameters alone (casts to half precision) is made again
    # for every micro- batch, which takes less memory where activations are recomputed; else once
    # per step
    recompute_per_microbatch: bool = False
    # global ranks of the logical mesh, row-major, where links differ (`ClusterSpec.orders`); ():
    # from `first_device` on
    devices: tuple[int, ...] = ()
    # of parameters that are gathered before they are used (ZeRO-3), in the forward as in the
    # backward
    ahead_bytes: int = 0
    # product -> in how many parts its result is summed, one while the next is multiplied
    num_chunks: dict[str, int] = field(default_factory=dict)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) op indices of what is recomputed together."""
        first, last = self.ops
        return tuple(pairwise((first, *self.remat_cuts, last)))

    @property
    def recomputed_ops(self) -> tuple[str, ...]:
        """Names of the ops whose results a device does not keep for the backward: `recomputed` and
        `stored`.
        """
        return self.recomputed + self.stored

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return _written(StagePlan, self)

    @classmethod
    def from_dict(cls, data: Any) -> "StagePlan":
        """Inverse of `to_dict`; PlanError names the field that is missing or wrong."""
        stage = _read(StagePlan, data, "stage")
        _check_stage(stage, "stage")
        return stage

    @property
    def parameters(self) -> dict[str, Layout]:
        """Parameter name -> storage layout, in the dims of the module's parameter (every segment is
        cut).
        """
        layouts = {}
        for name, plan in self.parameter_plans.items():
            layouts[name] = Layout(mode.stored for mode in plan.module_modes)
        return layouts


def stage_ranks(stage: StagePlan) -> tuple[int, ...]:
    """Global ranks of a stage's mesh, row-major."""
    return stage.devices or tuple(
        range(stage.first_device, stage.first_device + stage.submesh[0] * stage.submesh[1])
    )


def job_ranks(stages: Iterable[StagePlan]) -> tuple[int, ...]:
    """Global ranks of all meshes, one mesh after the other."""
    meshes = dict.fromkeys(
        stage_ranks(stage) for stage in sorted(stages, key=lambda stage: stage.first_device)
    )
    return tuple(rank for ranks in meshes for rank in ranks)


@dataclass(frozen=True)
class PhaseCost:
    """What a phase of an iteration takes (`planner/phases.py`)."""

    name: str
    times: int
    layout: str  # its mesh, and how most of its parameters lie
    peak_bytes: int  # with all else that a device has
    seconds: float  # of each time
    moved_seconds: (
        float | None
    )  # of bringing parameters into this layout, once an iteration; None: they lie so
    staying_seconds: (
        float | None
    )  # of each time, with parameters as they lie without it; None: that does not fit

    @property
    def total_seconds(self) -> float:
        """Of an iteration."""
        return self.times * self.seconds + (self.moved_seconds or 0.0)


AS_WRITTEN = "as written"  # the schedule of a plan whose steps are not captured


@dataclass(frozen=True)
class Plan:
    """The whole decision. Frozen; `save` and `load` are inverse."""

    fingerprint: Fingerprint  # what it was made for
    stages: tuple[StagePlan, ...]  # in pipeline order
    predicted: Predicted  # for the whole step on the slowest device
    num_microbatches: int = 1
    # of a single stage; `AS_WRITTEN` where nothing but the storage of parameters is decided
    schedule: str = "none"
    # name -> predicted seconds per step of named alternatives under the same costs (None: does not
    # fit)
    baselines: dict[str, float | None] = field(default_factory=dict)
    # how far `predicted.step_seconds` is from a lower bound, as a share of it; 0.0 when proved
    # optimal. Of one stage, of all plans of one stage; else of all stages, meshes and layouts with
    # so many micro-batches.
    gap: float = 0.0
    notes: tuple[
        str, ...
    ] = ()  # things that a user should know (replicated ops, unproved optimality, ...)
    # of the notes, those on the step it was made for: another step has its own (`with_notes_of`)
    step_notes: tuple[str, ...] = ()
    solver_seconds: dict[str, float] = field(
        default_factory=dict
    )  # how long planning took, by phase
    cluster_name: str = ""  # for display
    phases: tuple[PhaseCost, ...] = ()  # of an iteration of which the plan's own step is one

    @property
    def is_pipelined(self) -> bool:
        """Whether it is more than one stage that runs the whole batch at once."""
        return (
            len(self.stages) > 1
            or self.num_microbatches > 1
            or any(stage.remat for stage in self.stages)
        )

    @property
    def is_eager(self) -> bool:
        """Whether every rank runs the user's own step, on its own batch."""
        return self.schedule == AS_WRITTEN

    @property
    def is_as_written(self) -> bool:
        """Deprecated name of `is_eager`."""
        return self.is_eager

    @property
    def iteration_seconds(self) -> float:
        """Of all phases, which are the step alone where there are none."""
        if self.phases:
            return sum(phase.total_seconds for phase in self.phases)
        return self.predicted.step_seconds

    def with_notes_of(self, step_notes: tuple[str, ...]) -> "Plan":
        """This plan for a step that has the notes `step_notes`; those on the plan itself stay."""
        replaced = {*self.step_notes, *step_notes}
        on_plan = [note for note in self.notes if note not in replaced]
        return replace(self, notes=(*step_notes, *on_plan), step_notes=step_notes)

    def collectives(self) -> list[Collective]:
        """Every kind of collective of every stage, with kind, mesh axis, bytes and times per
        step.
        """
        return [c for stage in self.stages for c in stage.collectives]

    def save(self, path: str | Path) -> None:
        """Write JSON atomically (temporary file in the same folder, then rename): a reader never
        sees half a plan.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan; PlanError when the file is unreadable, of another format version, or
        incomplete.
        """
        try:
            data = read_json(path)
        except OSError as error:
            raise PlanError(
                f"cannot read the plan file {path}: {error.strerror}", "check the path"
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
        """Plain data for JSON."""
        return {"format_version": FORMAT_VERSION, **_written(Plan, self)}

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """Inverse of `to_dict`; PlanError names the field that is missing or wrong."""
        version = _check(data, dict, "plan").get("format_version")
        if version != FORMAT_VERSION:
            raise PlanError(
                f"the plan has format version {version}, this package reads version"
                f" {FORMAT_VERSION}",
                _FIX,
            )
        plan = _read(Plan, data, "plan")
        if not plan.stages:
            raise PlanError("the plan has no stages", _FIX)
        if not 1 <= plan.num_microbatches <= MAX_MICROBATCHES:
            raise PlanError(
                f"plan.num_microbatches is {plan.num_microbatches}",
                f"write 1 to {MAX_MICROBATCHES}",
            )
        for number, stage in enumerate(plan.stages):
            _check_stage(stage, f"plan.stages[{number}]")
        return plan


AXIS_SEPARATOR = " | "
# More in a file is a mistake, and what is made of it would not fit into memory.
MAX_DEVICES = 1 << 24
MAX_MICROBATCHES = 1 << 14
_NUMBER = re.compile(r"[0-9]{1,18}")
_PLACED = re.compile(r"R|S[0-9]{1,9}")
_IN, _ON_HOST = " in ", " on host"
_IN_FP32 = ", summed in fp32"
_SEGMENTS = re.compile(r"([2-9]|[1-9][0-9]{1,8}) segments")
_KIND_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a bool",
}
_FIX = "correct the file by hand, or delete it: the run then makes a new plan"

_CLASSES = (Plan, PhaseCost, StagePlan, Fingerprint, Predicted, Collective)  # objects of the file
# Fields that the file calls otherwise.
_NAMES = {
    "parameter_plans": "parameters",
    "num_chunks": "in_parts",
    "recompute_per_microbatch": "derives_again",
}
# What older plans do not have.
_LATER = {"devices", "remat_cuts", "recomputed", "stored", "received", "sent", "layers"}
_LATER |= {
    "forward_seconds",
    "backward_seconds",
    "boundary_seconds",
    "ahead_bytes",
    "num_chunks",
    "phases",
    "host_seconds",
    "loop_seconds",
    "hidden_seconds",
    "step_notes",
}
_LARGE = (
    "predicted",
    "parameter_plans",
    "shapes",
    "collectives",
    "strategies",
    "received",
    "sent",
    "stages",
)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Field -> its type; the large ones come last in the file."""
    types = get_type_hints(kind)
    return {
        name: types[name]
        for name in sorted(types, key=lambda n: _LARGE.index(n) if n in _LARGE else -1)
    }


def _written(kind: Any, value: Any) -> Any:
    """A value of type `kind` as data for JSON."""
    if kind in _TEXTS:
        return _TEXTS[kind][0](value)
    if kind in _CLASSES:
        return {
            _NAMES.get(name, name): _written(of, getattr(value, name))
            for name, of in _types(kind).items()
        }
    if isinstance(value, dict):
        return {str(key): _written(get_args(kind)[1], each) for key, each in value.items()}
    return (
        [_written(get_args(kind)[0], each) for each in value] if isinstance(value, tuple) else value
    )


def _read(kind: Any, value: Any, where: str) -> Any:
    """Inverse of `_written`. where: the path of the field, which every complaint names."""
    if kind in _TEXTS:
        return _TEXTS[kind][1](_check(value, str, where), where)
    if kind in _CLASSES:
        return _read_fields(kind, _check(value, dict, where), where)
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        items = _check(value, dict, where).items()
        return {
            _key(args[0], key, where): _read(args[1], each, f"{where}[{key!r}]")
            for key, each in items
        }
    if origin is tuple:
        values = _check(value, list, where)
        if args[-1] is not Ellipsis and len(values) != len(args):
            raise PlanError(f"{where} has {len(values)} numbers, expected {len(args)}", _FIX)
        return tuple(_read(args[0], each, f"{where}[{i}]") for i, each in enumerate(values))
    if origin is UnionType:  # a number, or null
        return None if value is None else _read(args[0], value, where)
    found = _check(value, kind, where)
    if kind in (int, float) and found < 0:  # seconds, bytes, counts
        raise PlanError(f"{where} is {found!r}, which cannot be below 0", _FIX)
    return found


def _read_fields(kind: Any, data: dict[str, Any], where: str) -> Any:
    """A data class of type `kind`."""
    given = {}
    for name, of in _types(kind).items():
        written = _NAMES.get(name, name)
        if written in data:
            given[name] = _read(of, data[written], f"{where}.{written}")
        elif name not in _LATER:
            raise PlanError(f"the field {where}.{written} is missing", _FIX)
    return kind(**given)


def _key(kind: type, key: str, where: str) -> Any:
    """A key; JSON knows texts only."""
    if kind is int and not _NUMBER.fullmatch(key):
        raise PlanError(f"{where}: {key!r} is not the number of a value", _FIX)
    return kind(key)


def _check(value: Any, kind: type, where: str) -> Any:
    """`value` if it is of JSON type `kind` (whole numbers count as floats), else PlanError."""
    # JSON writes 1.0 as 1, and to Python `true` is a whole number.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise PlanError(f"{where} is {value!r:.60}, expected {_KIND_NAMES[kind]}", _FIX)
    return value


def _check_stage(stage: StagePlan, where: str) -> None:
    """PlanError where fields of a stage do not fit one another."""
    for name, sizes in (("submesh", stage.submesh), ("logical_mesh", stage.logical_mesh)):
        if not sizes:
            raise PlanError(f"{where}.{name} has 0 numbers, expected at least 1", _FIX)
        if min(sizes) < 1 or math.prod(sizes) > MAX_DEVICES:
            raise PlanError(f"{where}.{name} is {list(sizes)}, which is no shape of a mesh", _FIX)
    num_axes = len(stage.logical_mesh)
    modes = {name: plan.modes for name, plan in stage.parameter_plans.items()}
    per_axis: dict[str, Any] = {"parameters": modes, "strategies": stage.strategies}
    per_axis |= {"received": stage.received, "sent": stage.sent}
    for name, entries in per_axis.items():
        for key, entry in entries.items():
            if len(entry) != num_axes:
                raise PlanError(
                    f"{where}.{name}[{key!r}] has {len(entry)} entries for {num_axes} mesh axes",
                    _FIX,
                )
    first, last = stage.ops
    if stage.remat_cuts and not all(a < b for a, b in pairwise((first, *stage.remat_cuts, last))):
        raise PlanError(f"{where}.remat_cuts must ascend between {first} and {last}", _FIX)
    if stage.remat_cuts and not stage.remat:
        raise PlanError(f"{where}.remat_cuts cuts a stage that does not recompute", _FIX)


def _parameter_text(plan: ParameterPlan) -> str:
    segments = f"{_IN}{plan.num_segments} segments" * (plan.num_segments != 1)
    return (
        modes_text(plan.module_modes)
        + segments
        + _ON_HOST * plan.on_host
        + _IN_FP32 * plan.sums_in_fp32
    )


def _read_parameter(text: str, where: str) -> ParameterPlan:
    stored = text.removesuffix(_IN_FP32)
    shown, _, segments_text = stored.removesuffix(_ON_HOST).partition(_IN)
    try:
        modes = parse_modes(shown)
    except ValueError as error:
        raise PlanError(
            f"{where}: {error}", "write R, R*, S<dim> or G<dim>, one per mesh axis"
        ) from error
    match = _SEGMENTS.fullmatch(segments_text)
    if segments_text and match is None:
        raise PlanError(
            f"{where}: {text!r} is not a plan",
            "write the modes, then `in N segments` where there are",
        )
    num_segments = int(match[1]) if match else 1
    # Files count the module's dims; the step sees segments as one more dim before them.
    modes = tuple(mode.shifted(int(num_segments > 1)) for mode in modes)
    return ParameterPlan(modes, num_segments, stored.endswith(_ON_HOST), stored != text)


def _read_boundary(text: str, where: str) -> DualLayout:
    if not all(_PLACED.fullmatch(part) for part in text.split()):
        raise PlanError(
            f"{where}: {text!r} is not a layout of a boundary",
            "write R or S<dim>, one per mesh axis",
        )
    return dual_layout(text)


def _read_strategies(text: str, where: str) -> tuple[AxisStrategy, ...]:
    return tuple(_read_strategy(part, where) for part in text.split(AXIS_SEPARATOR))


def _read_strategy(text: str, where: str) -> AxisStrategy:
    try:
        strategy = AxisStrategy.parse(text)
        # What would be written back differently was not understood.
        if str(strategy) == text and "->" in text:
            return strategy
    except (ShardingError, ValueError, AttributeError):
        pass  # said below
    raise PlanError(
        f"{where}: {text!r} is not a strategy", "write it as in `S0,R*,R*->S0`, ` | ` between axes"
    )


# What is a text in the file: how it is written, and how it is read.
_TEXTS: dict[Any, tuple[Any, Any]] = {
    ParameterPlan: (_parameter_text, _read_parameter),
    tuple[AxisStrategy, ...]: (
        lambda strategies: AXIS_SEPARATOR.join(map(str, strategies)),
        _read_strategies,
    ),
    DualLayout: (dual_layout_to_str, _read_boundary),
}
