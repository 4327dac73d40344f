"""Everything that a user may pin or tune. All defaults mean "solve it"."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from alpa_strategy.errors import OptionError, check_names
from alpa_strategy.schedules import SCHEDULES, Schedule, register_schedule

if TYPE_CHECKING:
    from alpa_strategy.cost.model import OpCosts

PARALLEL_NAMES = ("auto", "data", "zero1", "zero2", "zero3", "tensor")
# A value of `remat`.
SELECTIVE = "selective"
ILP, PROPAGATION = SOLVERS = ("ilp", "propagation")
BATCH_SCOPES = ("auto", "rank", "global", "replica")
CAPTURES = ("auto", "require", "never", "submodules")
# Of torch.compile's arguments; the others follow from what is compiled.
COMPILE_NAMES = (
    "backend",
    "mode",
    "options",
)
# Gradients reduced at once; costs are worked out for this size.
BUCKET_BYTES = 25 * 2**20
# Steps: a digest of a training's parameters costs a thousandth of them or less.
CHECK_REPLICAS_EVERY = 50
# Even a small model's gradients are reduced while its backward runs: in several buckets, none below
# this size.
SEVERAL_BUCKETS, LEAST_BUCKET_BYTES = 8, 2**20


@dataclass(frozen=True)
class PlanOptions:
    """What planning depends on (part of the fingerprint).

    Attributes:
        parallel: one name for every mesh axis, or one per axis of `logical_mesh`: `auto` (solved),
            `data`,
            `zero1` / `zero2`, `zero3`, `tensor`. Restricts the space; what is left open is solved.
        logical_mesh: shape of the device grid, or None to try all.
        placements: glob pattern of parameter names -> modes on the mesh axes such as `"S0"` or `"R
            S1"` (see `ParameterPlan`). Later patterns win.
        device_map: glob pattern of parameter names -> ranks: every stage that uses such a parameter
            lies on exactly these devices. Later patterns win. Where links differ, devices are then
            in the order of their numbers.
        solver: of layouts: `ilp`, or `propagation`: op by op, the cheapest strategy as its operands
            lie; a parameter that nothing pins lies as is cheapest for its first use.
        memory_limit: bytes per device, None for the device's own memory; `float("inf")` switches
            the limit off.
        memory_fraction: share of the device's memory that a plan may use when `memory_limit` is
            None.
        batch_scope: whose batch a step computes. `rank`: every rank loads its own rows (as under
            DDP), and the step is that of one device on all of them; `global`: the same, and the
            loader yields the whole batch on every rank;
            `replica`: every rank steps on its own batch, and gradients are averaged (DDP's
            contract); `auto`: `rank` where the step can be captured, else `replica`.
        solver_seconds: time limit of one ILP solve; the gap is reported when it strikes.
        accumulate_grad_batches: training steps per optimizer step; what happens once per optimizer
            step is shared by them (the Trainer's own setting, filled in by the strategy).
        baselines: also predict data, zero2, zero3 and tensor plans for comparison (data is always
            predicted).
        num_microbatches, num_stages: whole numbers to pin, None to solve.
        stages: what every stage holds, by modules: `"embed, blocks.0-11"`; others join a stage
            beside. Empty: solved.
        schedule: a name to pin (see schedules.py), for at least two stages; None to solve.
            `from_user` also takes a
            `Schedule`, or a function that writes its orders, and registers it.
        remat: whether stages recompute their activations in the backward, span by span; None:
            solved stage by stage.
            Or names: results of these ops and modules (glob patterns) are made again one by one and
                all others kept;
            "selective": of norms and pointwise ops, not of products, convolutions and attention. In
            a step that runs
            as it is written whole modules are made again: those named, or the items of their lists,
                the first ones.
        compile: whether stages run compiled: chains of pointwise ops are one kernel. `from_user`:
            as AlpaStrategy's.
        offload: whether parameters, with their gradients and optimizer state, lie in host memory:
            all of them, none, or those that names (glob patterns) say. None: solved where not
            everything fits and the cluster has a `host`.
        costs: a cost model of your own (`alpa_strategy.OpCosts`); None: measured op times where the
            cluster is measured, else the roofline of its device.
        fp32_reduction: whether gradients are summed over devices in fp32 at least, where steps
            compute in bf16 or fp16: twice the bytes. Else they are summed in the precision in which
            their parameters are gathered.
        completes: gradients are to be complete when the backward has made them: parameters are
            whole, with the same work on all devices, or in shards (`R`, `S<dim>`; filled in for
            calls of submodules).
        kept_whole: names of parameters that stay whole, in the memory where they are (filled in by
            a running job).
    """

    parallel: str | tuple[str, ...] = "auto"
    logical_mesh: tuple[int, ...] | None = None
    placements: tuple[tuple[str, str], ...] = ()
    device_map: tuple[tuple[str, tuple[int, ...]], ...] = ()
    solver: str = ILP
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
    offload: bool | tuple[str, ...] | None = None
    costs: "OpCosts | None" = None
    compile: bool = False
    fp32_reduction: bool = False
    completes: bool = False
    kept_whole: tuple[str, ...] = ()

    @classmethod
    def from_user(cls, **given: object) -> "PlanOptions":
        """Validate and freeze what a user wrote; OptionError names the option, the value and the
        allowed ones.

        `memory_limit` may also be written as a text such as `"16GB"` or `"80GiB"`.
        """
        check_names(given, [f.name for f in fields(cls)], "unknown option")
        options = cls(**{name: _read(name, value) for name, value in given.items()})
        for problem, fix in _contradictions(options):
            raise OptionError(problem, fix)
        return replace(options, num_stages=len(options.stages) or options.num_stages)

    @property
    def asks_for_pipeline(self) -> bool:
        """Whether something is pinned that only a pipeline (or micro-batches) can meet."""
        return (
            (self.num_stages or 1) > 1
            or (self.num_microbatches or 1) > 1
            or self.schedule is not None
        )

    @property
    def rows(self) -> str:
        """Which rows of a captured step a rank brings: its own (`rank`), or all (`global`)."""
        return "global" if self.batch_scope == "global" else "rank"

    def usable_bytes(self, device_bytes: float) -> float:
        """Bytes of a device of `device_bytes` that a plan may use."""
        return (
            device_bytes * self.memory_fraction if self.memory_limit is None else self.memory_limit
        )

    def digest(self) -> str:
        """Hash of every option: two option sets with the same digest ask for the same plan."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        # A plan is for rows, whatever else may come.
        given["batch_scope"] = self.rows
        given["costs"] = None if self.costs is None else self.costs.name
        # As before there were the last two.
        given = {
            name: value
            for name, value in given.items()
            if value or name not in ("completes", "kept_whole")
        }
        return hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]


def compile_options(value: object) -> dict[str, Any] | None:
    """What `compile=` says as keyword arguments of `torch.compile`, None where nothing is to be
    compiled.

    Raises:
        OptionError: it is neither true, false, None nor a dict of such arguments.
    """
    if value is None or isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise OptionError(
            f"compile={value!r} is not known",
            "write true, false, or arguments of torch.compile: {'mode':"
            " 'max-autotune-no-cudagraphs'}",
        )
    check_names(value, COMPILE_NAMES, "unknown option of compile")
    # A replay may overwrite what is still being sent.
    if value.get("mode") in (
        "reduce-overhead",
        "max-autotune",
    ):
        raise OptionError(
            f"compile's mode {value['mode']!r} records CUDA graphs, whose results do not outlive"
            " the next call",
            "use 'max-autotune-no-cudagraphs', or none",
        )
    for name in value:
        try:
            # Nothing is compiled yet.
            torch.compile(
                bucket_limit, **{"backend": value.get("backend", "inductor"), name: value[name]}
            )
        # Of many kinds; Inductor's goes on with the hundreds of options that it knows.
        except Exception as error:
            said = str(error).partition("\n")[0].partition(", known options")[0]
            raise OptionError(
                f"compile={dict(value)!r}: {said}", "give what torch.compile takes"
            ) from None
    return dict(value)


def bucket_limit(total_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Bytes at which a bucket is closed where all gradients have `total_bytes`."""
    return min(bucket_bytes, max(total_bytes // SEVERAL_BUCKETS, LEAST_BUCKET_BYTES))


def _contradictions(options: PlanOptions) -> Iterator[tuple[str, str]]:
    """What options ask for that others of them rule out, and what to do."""
    mesh, parallel, stages = options.logical_mesh, options.parallel, options.stages
    if isinstance(parallel, tuple) and mesh is not None and len(parallel) != len(mesh):
        problem = f"parallel={list(parallel)} names {len(parallel)} mesh axes, logical_mesh={list(mesh)} has others"
        yield problem, "give one name per mesh axis, or a single name for all"
    if isinstance(parallel, tuple) and mesh is None and len(parallel) > 1:
        yield (
            f"parallel={list(parallel)} needs a mesh to lie on",
            "give logical_mesh as well, such as [2, 2]",
        )
    for pattern, modes in options.placements if mesh is not None else ():
        if (count := len(modes.split())) != len(mesh or ()):
            problem = f"placements[{pattern!r}]={modes!r} has {count} modes, logical_mesh={list(mesh or ())} other axes"
            yield problem, "write one mode per mesh axis"
    if stages and options.num_stages not in (None, len(stages)):
        yield (
            f"num_stages={options.num_stages}, but stages has {len(stages)} entries",
            "leave num_stages out",
        )
    if options.num_stages == 1 and options.schedule is not None:
        problem = f"num_stages=1 leaves nothing for schedule={options.schedule!r} to order"
        yield problem, "leave one of them out, or ask for at least 2 stages"
    if options.compile and isinstance(options.remat, tuple):
        problem = f"remat={list(options.remat)} names ops, and compiled programs decide by themselves what they keep"
        yield problem, "leave one of remat and compile out, or write remat=True"


# What each option may be: a function that gives its frozen value, or raises; what is wrong then,
# and what to write


def _read(name: str, value: object) -> Any:
    """The value of an option as it is kept; None stands for itself where it means "solve it"."""
    if value is None and name in _SOLVED:
        return None
    read, problem, fix = _KINDS[name]
    try:
        return read(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OptionError(f"{name}={value!r} {problem}", fix) from None


def _if(holds: bool, value: Any) -> Any:
    if not holds:
        raise ValueError
    return value


def _number(value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(_if(is_number and low < value <= high, value))


def _whole(value: Any, low: int) -> int:
    return _if(type(value) is int and value >= low, value)


def _texts(value: Any) -> tuple[str, ...]:
    """One text or several."""
    texts = (value,) if isinstance(value, str) else tuple(_if(isinstance(value, Sequence), value))
    return _if(bool(texts) and all(isinstance(text, str) for text in texts), texts)


def _parallel(value: Any) -> str | tuple[str, ...]:
    names = _texts(value)
    return _if(set(names) <= set(PARALLEL_NAMES), value if isinstance(value, str) else names)


def _mesh(value: Any) -> tuple[int, ...]:
    sizes = tuple(_whole(size, 1) for size in _if(isinstance(value, Sequence), value))
    return _if(1 <= len(sizes) <= 2, sizes)


def _placements(value: Any) -> tuple[tuple[str, str], ...]:
    given = (
        {} if value is None else {str(pattern): modes.split() for pattern, modes in value.items()}
    )
    for pattern, modes in given.items():
        if not modes or not all(map(_MODE.fullmatch, modes)):
            fix = "write one mode per mesh axis: R, R*, S<dim> or G<dim>, such as 'R* S0'"
            raise OptionError(
                f"placements[{pattern!r}]={' '.join(modes)!r} is not a placement", fix
            )
    return tuple((pattern, " ".join(modes)) for pattern, modes in given.items())


def _ranks(value: Any) -> tuple[int, ...]:
    """Of a number, several numbers, or a text such as `0-3, 8-11`; ascending."""
    if isinstance(value, str):
        ends = [
            (int(first), int(last or first))
            for first, _, last in (p.partition("-") for p in value.split(","))
        ]
        value = [
            rank for first, last in ends for rank in range(first, _if(last <= MAX_RANK, last) + 1)
        ]
    ranks = {_whole(rank, 0) for rank in ([value] if isinstance(value, int) else value)}
    return _if(bool(ranks), tuple(sorted(ranks)))


def _memory_limit(value: Any) -> float:
    if not isinstance(value, str):
        return _number(value, 0.0, float("inf"))
    match = _BYTES.fullmatch(value.strip())
    number, unit = _if(match is not None, match).groups()
    return float(number) * _UNITS[unit.lower()]


def _stages(value: Any) -> tuple[str, ...]:
    names = () if value is None else _texts(_if(not isinstance(value, str), value))
    return _if(value is None or (len(names) > 1 and all(name.strip(", ") for name in names)), names)


def _schedule(value: Any) -> str:
    if isinstance(value, Schedule) or callable(value):
        return register_schedule(value).name
    known = {text.lower(): text for text in SCHEDULES}
    if not isinstance(value, str) or value.lower() not in known:
        fix = (
            f"use one of {', '.join(SCHEDULES)}, a function of your own, or None to have it solved"
        )
        raise OptionError(f"schedule={value!r} is not known", fix)
    return known[value.lower()]


def _costs(value: Any) -> "OpCosts":
    missing = [
        n
        for n in ("op_seconds", "saved", "optimizer_seconds")
        if not callable(getattr(value, n, None))
    ]
    missing += [] if isinstance(getattr(value, "name", None), str) else ["name"]
    if missing:
        raise OptionError(
            f"costs={value!r} is no cost model: it lacks {', '.join(missing)}",
            "give an object with what alpa_strategy.OpCosts has, such as a class derived from"
            " RooflineCosts",
        )
    return value


def _name_in(known: Sequence[str]) -> tuple[Callable[[Any], Any], str, str]:
    return (
        lambda value: _if(value in known, value),
        "is not known",
        f"use one of {', '.join(known)}",
    )


# One mode of a parameter on a mesh axis, as in plan files; ir/plan.py says what they mean.
_MODE = re.compile(r"R\*?|[SG]\d+")
MAX_RANK = 1 << 20
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?i?b)", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_COUNT = (
    partial(_whole, low=1),
    "cannot be",
    "give a whole number from 1, or None to have it solved",
)
_FLAG = (
    lambda value: _if(isinstance(value, bool), value),
    "is neither true nor false",
    "write true or false",
)
_SECONDS = (partial(_number, low=0.0, high=float("inf")), "cannot be", "give a number above 0")
_KINDS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "parallel": (
        _parallel,
        "is not known",
        f"use one of {', '.join(PARALLEL_NAMES)}, or one per mesh axis",
    ),
    "logical_mesh": (_mesh, "is not a mesh shape", "give one or two whole numbers, such as [2, 4]"),
    "placements": (
        _placements,
        "is not a mapping",
        """write {"pattern": "modes"}, as in {"*.bias": "R*"}""",
    ),
    "device_map": (
        lambda value: tuple(
            (str(p), _ranks(given)) for p, given in ({} if value is None else value).items()
        ),
        "is no mapping of parameters to devices",
        """write {"pattern": devices}, as in {"embed.*": "0-3", "head.*": [4, 5]}""",
    ),
    "solver": _name_in(SOLVERS),
    "memory_limit": (
        _memory_limit,
        "is not a size",
        "give bytes, a text such as '16GB' or '80GiB', or inf for none",
    ),
    "memory_fraction": (
        partial(_number, low=0.0, high=1.0),
        "cannot be",
        "give a number above 0 and at most 1",
    ),
    "batch_scope": _name_in(BATCH_SCOPES),
    "solver_seconds": _SECONDS,
    "accumulate_grad_batches": (
        partial(_whole, low=1),
        "cannot be",
        "give a whole number of at least 1",
    ),
    "baselines": _FLAG,
    "num_microbatches": _COUNT,
    "schedule": (_schedule, "", ""),
    "num_stages": _COUNT,
    "stages": (
        _stages,
        "is no list of stages",
        'name the modules of each of at least two stages, such as ["embed, blocks.0-11",'
        ' "blocks.12-23"]',
    ),
    "remat": (
        lambda value: value if isinstance(value, bool) else _texts(value),
        "says neither whether nor what",
        'write true, false, "selective", or names of ops or modules',
    ),
    "offload": (
        lambda value: (
            None if value == "auto" else value if isinstance(value, bool) else _texts(value)
        ),
        "says neither whether nor what",
        "write true, false, or names of parameters",
    ),
    "costs": (_costs, "", ""),
    "compile": (lambda value: compile_options(value) is not None, "", ""),
    "fp32_reduction": _FLAG,
    "master_weights": _FLAG,
    "plan_timeout_seconds": _SECONDS,
    "collective_timeout_seconds": _SECONDS,
    "bucket_bytes": (
        lambda value: int(_number(value, 0.0, 1e18)),
        "cannot be",
        "give a number of bytes",
    ),
    "capture": _name_in(CAPTURES),
    "check_replicas_every": (
        partial(_whole, low=0),
        "cannot be",
        "give a number of steps; 0: no checks",
    ),
    "check_gradients": _FLAG,
    "verbose": _FLAG,
    "async_checkpoint": _FLAG,
    "replicas": (lambda value: None if value is None else _whole(value, 1), *_COUNT[1:]),
}
_SOLVED = {f.name for f in fields(PlanOptions) if f.default is None}


@dataclass(frozen=True)
class OptimizerInfo:
    """What planning needs to know of the optimizer."""

    # bytes of optimizer state per parameter element, in the dtype that the optimizer has (Adam on
    # fp32: 8, on bf16: 4)
    state_bytes: float = 8.0
    # True when its update of a shard equals the shard of its update.
    element_wise: bool = True
    # Class name, for messages.
    name: str = "Adam"
    # True when it updates every parameter by its own gradient alone: a stage of a pipeline has only
    # its own parameters
    parameter_wise: bool = True
    # bytes of a gradient's element where it is reduced and accumulated; None: the parameter's own
    gradient_itemsize: int | None = None
    # That a step reads and writes per element; None: all once, as fused kernels do.
    moved_bytes: float | None = None
    # bytes per byte of gradient that a step of all parameters at once makes (`foreach` on GPUs)
    scratch: float = 0.0
    # seconds of its Python in a step, and for each parameter in it, beside what it moves; 0 where
    # they were not measured. No plan depends on them, so no key may: keys hash the text (repr).
    step_seconds: float = field(default=0.0, compare=False, repr=False)
    parameter_seconds: float = field(default=0.0, compare=False, repr=False)

    def update_bytes(self, itemsize: int) -> float:
        """Bytes that a step reads and writes per element of a parameter, whose elements have
        `itemsize`.
        """
        return 3 * itemsize + 2 * self.state_bytes if self.moved_bytes is None else self.moved_bytes

    def gradient_scale(self, itemsize: int) -> float:
        """Bytes of a gradient per byte of its parameter, whose elements have `itemsize`."""
        return 1.0 if self.gradient_itemsize is None else self.gradient_itemsize / itemsize


@dataclass(frozen=True)
class Limits:
    """Runtime knobs that no plan depends on: see `AlpaStrategy`."""

    plan_timeout_seconds: float = 3600.0
    collective_timeout_seconds: float = 1800.0
    bucket_bytes: int = BUCKET_BYTES
    # One of CAPTURES: whether steps that cannot be captured run as they are written.
    capture: str = "auto"
    check_replicas_every: int = CHECK_REPLICAS_EVERY
    check_gradients: bool = False
    verbose: bool = True
    async_checkpoint: bool = False
    # That the devices are divided into; None: each is one, whose steps run as written.
    replicas: int | None = None
    master_weights: bool = False

    @classmethod
    def from_user(cls, **given: Any) -> "Limits":
        """Validated; OptionError as of `PlanOptions.from_user`."""
        return cls(**{name: _read(name, value) for name, value in given.items()})
