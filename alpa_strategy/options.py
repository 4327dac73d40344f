"""Everything that a user may pin or tune. All defaults mean "solve it"."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from alpa_strategy.errors import OptionError, check_names
from alpa_strategy.schedules import SCHEDULES, Schedule, register_schedule

PARALLEL_NAMES = ("auto", "data", "zero1", "zero2", "zero3", "tensor")
SELECTIVE = "selective"  # a value of `remat`
BATCH_SCOPES = ("auto", "rank", "global", "replica")
CAPTURES = ("auto", "require", "never")
COMPILE_NAMES = ("backend", "mode", "options")  # of torch.compile's arguments; the others follow from what is compiled
BUCKET_BYTES = 25 * 2**20  # gradients reduced at once; costs are worked out for this size
CHECK_REPLICAS_EVERY = 50  # steps: a digest of a training's parameters costs a thousandth of them or less
# Even a small model's gradients are reduced while its backward runs: in several buckets, none below this size.
SEVERAL_BUCKETS, LEAST_BUCKET_BYTES = 8, 2**20


class NamedCosts(Protocol):
    """A cost model as far as options know it: plans are stored under its name. In full: `cost.model.OpCosts`."""

    @property
    def name(self) -> str:
        """Two models of one name give the same costs."""
        ...


@dataclass(frozen=True)
class PlanOptions:
    """What planning depends on (part of the fingerprint).

    Attributes:
        parallel: one name for every mesh axis, or one per axis of `logical_mesh`: `auto` (solved), `data`,
            `zero1` / `zero2`, `zero3`, `tensor`. Restricts the space; what is left open is solved.
        logical_mesh: shape of the device grid, or None to try all.
        placements: glob pattern of parameter names -> modes on the mesh axes such as `"S0"` or `"R S1"`
            (see `ParameterPlan`). Later patterns win.
        memory_limit: bytes per device, None for the device's own memory; `float("inf")` switches the limit off.
        memory_fraction: share of the device's memory that a plan may use when `memory_limit` is None.
        batch_scope: whose batch a step computes. `rank`: every rank loads its own rows (as under DDP), and the step is
            that of one device on all of them; `global`: the same, and the loader yields the whole batch on every rank;
            `replica`: every rank steps on its own batch, and gradients are averaged (DDP's contract); `auto`: `rank`
            where the step can be captured, else `replica`.
        solver_seconds: time limit of one ILP solve; the gap is reported when it strikes.
        accumulate_grad_batches: training steps per optimizer step; what happens once per optimizer step is shared by
            them (the Trainer's own setting, filled in by the strategy).
        baselines: also predict data, zero2, zero3 and tensor plans for comparison (data is always predicted).
        num_microbatches, num_stages: whole numbers to pin, None to solve.
        stages: what every stage holds, by names of modules: `"embed, blocks.0-11"`. What no stage names joins a stage
            beside it; empty: solved.
        schedule: a name to pin (see schedules.py), for at least two stages; None to solve. `from_user` also takes a
            `Schedule`, or a function that writes its orders, and registers it.
        remat: whether stages recompute their activations in the backward, span by span; None: solved stage by stage.
            Or names: results of these ops and modules (glob patterns) are made again one by one and all others kept;
            "selective": of norms and pointwise ops, not of products, convolutions and attention.
        compile: whether stages run compiled: chains of pointwise ops are one kernel then. `from_user` takes
            AlpaStrategy's `compile`.
        costs: a cost model of your own (`alpa_strategy.OpCosts`); None: measured op times where the cluster is
            measured, else the roofline of its device.
    """

    parallel: str | tuple[str, ...] = "auto"
    logical_mesh: tuple[int, ...] | None = None
    placements: tuple[tuple[str, str], ...] = ()
    memory_limit: float | None = None
    memory_fraction: float = 0.9
    batch_scope: str = "auto"
    solver_seconds: float = 20.0
    accumulate_grad_batches: int = 1
    baselines: bool = False
    num_microbatches: int | None = None
    schedule: str | None = None
    num_stages: int | None = None
    stages: tuple[str, ...] = ()
    remat: bool | tuple[str, ...] | None = None
    costs: NamedCosts | None = None
    compile: bool = False

    @classmethod
    def from_user(
        cls,
        *,
        parallel: str | Sequence[str] = "auto",
        logical_mesh: Sequence[int] | None = None,
        placements: Mapping[str, str] | None = None,
        **rest: object,
    ) -> PlanOptions:
        """Validate and freeze what a user wrote; OptionError names the option, the value and the allowed ones.

        `memory_limit` may also be written as a text such as `"16GB"` or `"80GiB"`.
        """
        check_names(rest, [f.name for f in fields(cls)], "unknown option")
        mesh = None if logical_mesh is None else _mesh(logical_mesh)
        values: dict[str, Any] = {
            "parallel": _parallel(parallel, mesh),
            "logical_mesh": mesh,
            "placements": _placements(placements or {}, mesh),
            **{name: _CHECKS[name](name, value) for name, value in rest.items()},
        }
        if values.get("stages"):
            count = len(values["stages"])
            if values.get("num_stages") not in (None, count):
                raise OptionError(
                    f"num_stages={values['num_stages']}, but stages has {count} entries", "leave num_stages out"
                )
            values["num_stages"] = count
        if values.get("num_stages") == 1 and values.get("schedule") is not None:
            raise OptionError(
                f"num_stages=1 leaves nothing for schedule={values['schedule']!r} to order",
                "leave one of them out, or ask for at least 2 stages",
            )
        if values.get("compile") and isinstance(values.get("remat"), tuple):
            raise OptionError(
                f"remat={list(values['remat'])} names ops, and compiled programs decide by themselves what they keep",
                "leave one of remat and compile out, or write remat=True",
            )
        return cls(**values)

    @property
    def asks_for_pipeline(self) -> bool:
        """Whether something is pinned that only a pipeline (or micro-batches) can meet."""
        return (
            (self.num_stages or 1) > 1
            or (self.num_microbatches or 1) > 1
            or self.schedule is not None
            or self.remat is True
        )

    @property
    def recomputes_stages(self) -> bool | None:
        """Whether whole stages recompute, span by span; None: solved."""
        return False if isinstance(self.remat, tuple) else self.remat

    @property
    def rows(self) -> str:
        """Which rows of a captured step a rank brings: its own (`rank`), or all (`global`)."""
        return "global" if self.batch_scope == "global" else "rank"

    def usable_bytes(self, device_bytes: float) -> float:
        """Bytes of a device of `device_bytes` that a plan may use."""
        return device_bytes * self.memory_fraction if self.memory_limit is None else self.memory_limit

    def digest(self) -> str:
        """Hash of every option: two option sets with the same digest ask for the same plan."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("costs", "compile", "stages")}
        rows = list({**given, "batch_scope": self.rows}.items())  # a plan is for rows, whatever else may come
        # Plans of those who use none of these keep the digest that they had.
        if self.stages:
            rows.append(("stages", self.stages))
        if self.costs is not None:
            rows.append(("costs", self.costs.name))
        if self.compile:
            rows.append(("compile", True))
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def compile_options(value: object) -> dict[str, Any] | None:
    """What `compile=` says as keyword arguments of `torch.compile`, None where nothing is to be compiled.

    Raises:
        OptionError: it is neither true, false, None nor a dict of such arguments.
    """
    if value is None or isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise OptionError(
            f"compile={value!r} is not known",
            "write true, false, or arguments of torch.compile: {'mode': 'max-autotune-no-cudagraphs'}",
        )
    check_names(value, COMPILE_NAMES, "unknown option of compile")
    if value.get("mode") in ("reduce-overhead", "max-autotune"):  # a replay may overwrite what is still being sent
        raise OptionError(
            f"compile's mode {value['mode']!r} records CUDA graphs, whose results do not outlive the next call",
            "use 'max-autotune-no-cudagraphs', or none",
        )
    return dict(value)


def waiting_limit(total_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Bytes of complete gradients that wait for an update within the backward, where all have `total_bytes`."""
    return min(bucket_bytes, max(total_bytes // SEVERAL_BUCKETS, 1))


def bucket_limit(total_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Bytes at which a bucket is closed where all gradients have `total_bytes`."""
    return min(bucket_bytes, max(total_bytes // SEVERAL_BUCKETS, LEAST_BUCKET_BYTES))


def _parallel(value: object, mesh: tuple[int, ...] | None) -> str | tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if not names or not all(isinstance(name, str) and name in PARALLEL_NAMES for name in names):
        raise OptionError(f"parallel={value!r} is not known", f"use {_one_of(PARALLEL_NAMES)}, or one per mesh axis")
    if isinstance(value, str):
        return value
    if mesh is not None and len(names) != len(mesh):
        raise OptionError(
            f"parallel={list(names)} names {len(names)} mesh axes, logical_mesh={list(mesh)} has {len(mesh)}",
            "give one name per mesh axis, or a single name for all",
        )
    if mesh is None and len(names) > 1:
        raise OptionError(f"parallel={list(names)} needs a mesh to lie on", "give logical_mesh as well, such as [2, 2]")
    return names


def _mesh(value: object) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if not 1 <= len(sizes) <= 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise OptionError(
            f"logical_mesh={value!r} is not a mesh shape", "give one or two whole numbers, such as [2, 4]"
        )
    return sizes


def _placements(value: object, mesh: tuple[int, ...] | None) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise OptionError(
            f"placements={value!r} is not a mapping", 'write {"pattern": "modes"}, as in {"*.bias": "R*"}'
        )
    for pattern, modes in value.items():
        parts = modes.split() if isinstance(modes, str) else []
        if not parts or not all(_MODE.fullmatch(part) for part in parts):
            raise OptionError(
                f"placements[{pattern!r}]={modes!r} is not a placement",
                "write one mode per mesh axis: R, R*, S<dim> or G<dim>, such as 'R* S0'",
            )
        if mesh is not None and len(parts) != len(mesh):
            raise OptionError(
                f"placements[{pattern!r}]={modes!r} has {len(parts)} modes, logical_mesh={list(mesh)} {len(mesh)} axes",
                "write one mode per mesh axis",
            )
    return tuple((str(pattern), " ".join(modes.split())) for pattern, modes in value.items())


def _memory_limit(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        match = _BYTES.fullmatch(value.strip())
        if match:
            return float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise OptionError(
        f"{name}={value!r} is not a size", "give bytes, a text such as '16GB' or '80GiB', or inf for none"
    )


def _number_in(low: float, high: float) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise OptionError(f"{name}={value!r} cannot be", f"give a number above {low:g} and at most {high:g}")
        return float(value)

    return check


def _whole_from(low: int, fix: str) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise OptionError(f"{name}={value!r} cannot be", fix)
        return value

    return check


def _maybe_count(name: str, value: object) -> int | None:
    fix = "give a whole number from 1, or None to have it solved"
    return None if value is None else _whole_from(1, fix)(name, value)


def _stages(name: str, value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    names = [text for text in texts if isinstance(text, str) and text.strip(", ")]
    if value is not None and (len(names) < 2 or len(names) < len(texts)):
        raise OptionError(
            f"{name}={value!r} is no list of stages",
            'name the modules of each of at least two stages, such as ["embed, blocks.0-11", "blocks.12-23"]',
        )
    return tuple(names)


def _schedule(name: str, value: object) -> str | None:
    if value is None or isinstance(value, Schedule):
        return None if value is None else register_schedule(value).name
    if callable(value):
        return register_schedule(value).name
    known = {text.lower(): text for text in SCHEDULES}
    if not isinstance(value, str) or value.lower() not in known:
        known_ones = _one_of(tuple(SCHEDULES))
        raise OptionError(
            f"{name}={value!r} is not known", f"use {known_ones}, a function of your own, or None to have it solved"
        )
    return known[value.lower()]


def _costs(name: str, value: Any) -> NamedCosts | None:
    missing = [n for n in ("op_seconds", "saved", "optimizer_seconds") if not callable(getattr(value, n, None))]
    missing += [] if isinstance(getattr(value, "name", None), str) else ["name"]
    if value is not None and missing:
        raise OptionError(
            f"{name}={value!r} is no cost model: it lacks {', '.join(missing)}",
            "give an object with what alpa_strategy.OpCosts has, such as a class derived from RooflineCosts",
        )
    return value


def _remat(name: str, value: object) -> bool | tuple[str, ...] | None:
    if value is None or isinstance(value, bool):
        return value
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not names or not all(isinstance(each, str) for each in names):
        raise OptionError(
            f"{name}={value!r} says neither whether nor what",
            'write true, false, "selective", or names of ops or modules',
        )
    return names


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is neither true nor false", "write true or false")
    return value


def _name_in(known: tuple[str, ...]) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if value not in known:
            raise OptionError(f"{name}={value!r} is not known", f"use {_one_of(known)}")
        return str(value)

    return check


def _one_of(names: Sequence[str]) -> str:
    return "one of " + ", ".join(names)


# One mode of a parameter on a mesh axis, as in plan files; ir/stage_plan.py says what they mean.
_MODE = re.compile(r"R\*?|[SG]\d+")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?i?b)", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "memory_limit": _memory_limit,
    "memory_fraction": _number_in(0.0, 1.0),
    "batch_scope": _name_in(BATCH_SCOPES),
    "solver_seconds": _number_in(0.0, float("inf")),
    "accumulate_grad_batches": _whole_from(1, "give a whole number of at least 1"),
    "baselines": _bool,
    "num_microbatches": _maybe_count,
    "schedule": _schedule,
    "num_stages": _maybe_count,
    "stages": _stages,
    "remat": _remat,
    "costs": _costs,
    "compile": lambda name, value: compile_options(value) is not None,
    "plan_timeout_seconds": _number_in(0.0, float("inf")),
    "collective_timeout_seconds": _number_in(0.0, float("inf")),
    "bucket_bytes": lambda name, value: int(_number_in(0.0, 1e18)(name, value)),
    "capture": _name_in(CAPTURES),
    "check_replicas_every": _whole_from(0, "give a number of steps; 0: no checks"),
    "check_gradients": _bool,
}


@dataclass(frozen=True)
class OptimizerInfo:
    """What planning needs to know of the optimizer.

    Attributes:
        state_bytes: bytes of optimizer state per parameter element, for parameters of the dtype that the optimizer has
            (Adam on fp32: 8, on bf16: 4).
        element_wise: True when its update of a shard equals the shard of its update.
        name: class name, for messages.
        parameter_wise: True when it updates every parameter by its own gradient alone: a stage of a pipeline has only
            its own parameters.
        against_early_step: what stands against a plan that updates each parameter as soon as its gradient is there,
            within the backward; None where nothing does: such a plan is made where no other fits.
        steps_in_backward: True while such a plan is made (and run).
        gradient_itemsize: bytes of a gradient's element where it is reduced and accumulated; None: the parameter's own.
    """

    state_bytes: float = 8.0
    element_wise: bool = True
    name: str = "Adam"
    parameter_wise: bool = True
    against_early_step: str | None = "it is not known what looks at gradients before the optimizer's step"
    steps_in_backward: bool = False
    gradient_itemsize: int | None = None

    def gradient_scale(self, itemsize: int) -> float:
        """Bytes of a gradient per byte of its parameter, whose elements have `itemsize`."""
        return 1.0 if self.gradient_itemsize is None else self.gradient_itemsize / itemsize


@dataclass(frozen=True)
class Limits:
    """Runtime knobs that no plan depends on: see `AlpaStrategy`."""

    plan_timeout_seconds: float = 3600.0
    collective_timeout_seconds: float = 1800.0
    bucket_bytes: int = BUCKET_BYTES
    capture: str = "auto"  # one of CAPTURES: whether steps that cannot be captured run as they are written
    check_replicas_every: int = CHECK_REPLICAS_EVERY
    check_gradients: bool = False

    @classmethod
    def from_user(cls, **given: Any) -> Limits:
        """Validated; OptionError as of `PlanOptions.from_user`."""
        return cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})
