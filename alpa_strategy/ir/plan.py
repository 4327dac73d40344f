"""Plan: the whole decision, as a small JSON file that a person can read and edit (docs/formulas.md#plan-file).

In the file, modes of a parameter are one text such as "R* S0" (one mode per mesh axis; fused projections: "R* S0 in 3
segments"); strategies of an op are one text per axis, joined by " | ". Reading checks every field and says where and
what is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from alpa_strategy.errors import PlanError, ShardingError
from alpa_strategy.files import BadFileError, read_json, write_json
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import DualLayout, dual_layout, dual_layout_to_str
from alpa_strategy.ir.stage_plan import (
    FORMAT_VERSION,
    Collective,
    Fingerprint,
    ParameterPlan,
    Predicted,
    StagePlan,
    modes_text,
    parse_modes,
)

AS_WRITTEN = "as written"  # the schedule of a plan whose steps are not captured


@dataclass(frozen=True)
class Plan:
    """The whole decision. Frozen; `save` and `load` are inverse.

    Attributes:
        fingerprint: what it was made for.
        stages: in pipeline order (one for now).
        num_microbatches, schedule: 1 and "none" for a single stage; `AS_WRITTEN` where nothing but the storage of
            parameters is decided.
        predicted: prediction for the whole step on the slowest device.
        baselines: name -> predicted seconds per step of named alternatives under the same costs (None: does not fit).
        gap: how far `predicted.step_seconds` is from a lower bound, as a share of it; 0.0 when proved optimal. Of one
            stage, of all plans of one stage; else of all stages, meshes and layouts with so many micro-batches.
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

    @property
    def is_as_written(self) -> bool:
        """Whether every rank runs the user's own step, on its own batch."""
        return self.schedule == AS_WRITTEN

    def collectives(self) -> list[Collective]:
        """Every kind of collective of every stage, with kind, mesh axis, bytes and times per step."""
        return [c for stage in self.stages for c in stage.collectives]

    def save(self, path: str | Path) -> None:
        """Write JSON atomically (temporary file in the same folder, then rename): a reader never sees half a plan."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; PlanError when the file is unreadable, of another format version, or incomplete."""
        try:
            data = read_json(path)
        except OSError as error:
            raise PlanError(f"cannot read the plan file {path}: {error.strerror}", "check the path") from error
        except BadFileError as error:
            raise PlanError(f"the plan file {path} {error}", "delete it, or give another one") from error
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"the plan file {path} cannot be used: {error.problem}", error.fix) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "cluster_name": self.cluster_name,
            "fingerprint": dict(vars(self.fingerprint)),
            "predicted": dict(vars(self.predicted)),
            "baselines": dict(self.baselines),
            "gap": self.gap,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "notes": list(self.notes),
            "solver_seconds": dict(self.solver_seconds),
            "stages": [_stage_to_data(stage) for stage in self.stages],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Inverse of `to_dict`; PlanError names the field that is missing or wrong."""
        top = _Fields(data, "plan")
        version = top.get("format_version", int)
        if version != FORMAT_VERSION:
            raise PlanError(f"the plan has format version {version}, this package reads version {FORMAT_VERSION}", _FIX)
        stages = tuple(_stage_from_data(_Fields(s, f"stages[{i}]")) for i, s in enumerate(top.get("stages", list)))
        if not stages:
            raise PlanError("the plan has no stages", _FIX)
        baselines = {
            name: None if seconds is None else _check(seconds, float, f"baselines.{name}")
            for name, seconds in top.get("baselines", dict).items()
        }
        num_microbatches = top.amount("num_microbatches", int)
        if not 1 <= num_microbatches <= MAX_MICROBATCHES:
            raise PlanError(f"plan.num_microbatches is {num_microbatches}", f"write 1 to {MAX_MICROBATCHES}")
        return cls(
            fingerprint=top.sub("fingerprint").record(Fingerprint),
            stages=stages,
            predicted=top.sub("predicted").record(Predicted),
            num_microbatches=num_microbatches,
            schedule=top.get("schedule", str),
            baselines=baselines,
            gap=top.amount("gap", float),
            notes=tuple(_check(note, str, "notes") for note in top.get("notes", list)),
            solver_seconds={k: _check(v, float, "solver_seconds") for k, v in top.get("solver_seconds", dict).items()},
            cluster_name=top.get("cluster_name", str),
        )


T = TypeVar("T")
_REQUIRED: Any = object()  # no default
AXIS_SEPARATOR = " | "
# More in a file is a mistake, and what is made of it would not fit into memory.
MAX_DEVICES = 1 << 24
MAX_MICROBATCHES = 1 << 14
_PLACED = re.compile(r"R|S\d+")
_IN = " in "
_SEGMENTS = re.compile(r"([2-9]|[1-9]\d+) segments")
_KIND_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a bool",
}
_FIX = "correct the file by hand, or delete it: the run then makes a new plan"


class _Fields:
    """Typed access to one object of the file; every complaint names the path of the field."""

    def __init__(self, data: Any, where: str) -> None:
        self._data = _check(data, dict, where)
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}"

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        if name not in self._data:
            if default is not _REQUIRED:  # a field that older plans do not have
                return default
            raise PlanError(f"the field {self.path(name)} is missing", _FIX)
        return _check(self._data[name], kind, self.path(name))

    def sub(self, name: str) -> _Fields:
        return _Fields(self.get(name, dict), self.path(name))

    def record(self, kind: type[T]) -> T:
        """A dataclass of texts and amounts."""
        types = get_type_hints(kind)
        return kind(**{n: self.get(n, str) if t is str else self.amount(n, t) for n, t in types.items()})

    def counts(self, name: str, length: int | None = None) -> tuple[int, ...]:
        """Sizes of a mesh: from 1 on, and no more devices in all than there are anywhere."""
        values = self.ints(name, length)
        if min(values) < 1 or math.prod(values) > MAX_DEVICES:
            raise PlanError(f"{self.path(name)} is {list(values)}, which is no shape of a mesh", _FIX)
        return values

    def pair(self, name: str) -> tuple[int, int]:
        first, second = self.ints(name, 2)
        return first, second

    def amount(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Seconds, bytes or a count: never below 0."""
        value = self.get(name, kind, default)
        if value < 0:
            raise PlanError(f"{self.path(name)} is {value!r}, which cannot be below 0", _FIX)
        return value

    def ints(self, name: str, length: int | None = None, allow_empty: bool = False) -> tuple[int, ...]:
        given = self.get(name, list, () if allow_empty else _REQUIRED)
        values = tuple(_check(v, int, self.path(name)) for v in given)
        if (length is not None and len(values) != length) or not (values or allow_empty):
            raise PlanError(f"{self.path(name)} has {len(values)} numbers, expected {length or 'at least 1'}", _FIX)
        return values

    def mapping(
        self, name: str, read: Callable[[str, str], tuple[T, ...]], num_axes: int, default: Any = _REQUIRED
    ) -> dict[str, tuple[T, ...]]:
        """name -> what `read(text, where)` gives, one thing per mesh axis."""
        result = {}
        for key, text in self.get(name, dict, default).items():
            where = f"{self.path(name)}[{key!r}]"
            result[key] = read(_check(text, str, where), where)
            if len(result[key]) != num_axes:
                raise PlanError(f"{where} has {len(result[key])} entries for {num_axes} mesh axes", _FIX)
        return result


def _check(value: Any, kind: type, where: str) -> Any:
    """`value` if it is of JSON type `kind` (whole numbers count as floats), else PlanError."""
    # JSON writes 1.0 as 1, and to Python `true` is a whole number.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise PlanError(f"{where} is {value!r:.60}, expected {_KIND_NAMES[kind]}", _FIX)
    return value


def _stage_to_data(stage: StagePlan) -> dict[str, Any]:
    large = ("parameter_plans", "shapes", "collectives", "strategies", "received", "sent")  # come after the others
    first = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(stage).items() if name not in large}
    if not stage.devices:
        del first["devices"]
    return first | {
        "predicted": dict(vars(stage.predicted)),
        "parameters": {
            name: modes_text(plan.module_modes) + f"{_IN}{plan.num_segments} segments" * (plan.num_segments != 1)
            for name, plan in stage.parameter_plans.items()
        },
        "shapes": {name: list(shape) for name, shape in stage.shapes.items()},
        "collectives": [dict(vars(collective)) for collective in stage.collectives],
        "strategies": {op: AXIS_SEPARATOR.join(map(str, each)) for op, each in stage.strategies.items()},
        "received": {str(value): dual_layout_to_str(layout) for value, layout in stage.received.items()},
        "sent": {str(value): dual_layout_to_str(layout) for value, layout in stage.sent.items()},
    }


def _stage_from_data(fields: _Fields) -> StagePlan:
    mesh = fields.counts("logical_mesh")
    shapes = fields.sub("shapes")
    num_nodes, per_node = fields.counts("submesh", 2)
    return StagePlan(
        submesh=(num_nodes, per_node),
        first_device=fields.amount("first_device", int),
        logical_mesh=mesh,
        devices=fields.ints("devices", allow_empty=True),
        ops=fields.pair("ops"),
        parameter_plans=_parameters_from_data(fields, len(mesh)),
        shapes={name: shapes.ints(name, allow_empty=True) for name in fields.get("shapes", dict)},
        strategies=fields.mapping("strategies", _read_strategies, len(mesh)),
        collectives=tuple(
            _Fields(c, f"{fields.path('collectives')}[{i}]").record(Collective)
            for i, c in enumerate(fields.get("collectives", list))
        ),
        predicted=fields.sub("predicted").record(Predicted),
        remat=fields.get("remat", bool),
        remat_cuts=_cuts_from_data(fields),
        recomputed=tuple(map(str, fields.get("recomputed", list, []))),
        received=_boundary_from_data(fields, "received", len(mesh)),
        sent=_boundary_from_data(fields, "sent", len(mesh)),
        **{n: fields.amount(n, float, 0.0) for n in ("forward_seconds", "backward_seconds", "boundary_seconds")},
        layers=fields.get("layers", str, ""),
        steps_in_backward=fields.get("steps_in_backward", bool, False),
        derives_again=fields.get("derives_again", bool),
    )


def _cuts_from_data(fields: _Fields) -> tuple[int, ...]:
    """Positions inside the stage's ops, ascending."""
    cuts = fields.ints("remat_cuts", allow_empty=True)
    positions = (fields.ints("ops", 2)[0], *cuts, fields.ints("ops", 2)[1])
    if cuts and not all(a < b for a, b in pairwise(positions)):
        raise PlanError(f"{fields.path('remat_cuts')} must ascend between {positions[0]} and {positions[-1]}", _FIX)
    if cuts and not fields.get("remat", bool):
        raise PlanError(f"{fields.path('remat_cuts')} cuts a stage that does not recompute", _FIX)
    return cuts


def _parameters_from_data(fields: _Fields, num_axes: int) -> dict[str, ParameterPlan]:
    found = {}
    for name, text in fields.get("parameters", dict).items():
        where = f"{fields.path('parameters')}[{name!r}]"
        shown, _, segments_text = _check(text, str, where).partition(_IN)
        try:
            modes = parse_modes(shown)
        except ValueError as error:
            raise PlanError(f"{where}: {error}", "write R, R*, S<dim> or G<dim>, one per mesh axis") from error
        if len(modes) != num_axes:
            raise PlanError(f"{where} has {len(modes)} entries for {num_axes} mesh axes", _FIX)
        match = _SEGMENTS.fullmatch(segments_text)
        if segments_text and match is None:
            raise PlanError(f"{where}: {text!r} is not a plan", "write the modes, then `in N segments` where there are")
        num_segments = int(match[1]) if match else 1
        # Files count the module's dims; the step sees segments as one more dim before them.
        shift = 0 if num_segments == 1 else 1
        found[name] = ParameterPlan(tuple(mode.shifted(shift) for mode in modes), num_segments)
    return found


def _boundary_from_data(fields: _Fields, name: str, num_axes: int) -> dict[int, DualLayout]:
    """Value -> dual layout."""
    found = fields.mapping(name, _read_boundary, num_axes, default={})
    for key in found:
        if not key.isdigit():
            raise PlanError(f"{fields.path(name)}: {key!r} is not the number of a value", _FIX)
    # JSON knows texts as keys only.
    return {int(key): layout for key, layout in found.items()}


def _read_boundary(text: str, where: str) -> DualLayout:
    if not all(_PLACED.fullmatch(part) for part in text.split()):
        raise PlanError(f"{where}: {text!r} is not a layout of a boundary", "write R or S<dim>, one per mesh axis")
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
    raise PlanError(f"{where}: {text!r} is not a strategy", "write it as in `S0,R*,R*->S0`, ` | ` between axes")
