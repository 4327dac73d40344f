"""Readers of option values: each validates and freezes what a user wrote for one option.

A reader raises a TypeError, ValueError, KeyError or AttributeError for a value that its option
cannot have. `read_option` turns these into an OptionError.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from alpa_strategy.errors import OptionError, check_names, did_you_mean
from alpa_strategy.schedules import SCHEDULES, Schedule, register_schedule

if TYPE_CHECKING:
    from alpa_strategy.cost.model import OpCosts

PARALLEL_NAMES = ("auto", "data", "zero1", "zero2", "zero3", "tensor")

ILP = "ilp"
PROPAGATION = "propagation"
SOLVERS = (ILP, PROPAGATION)

BATCH_SCOPES = ("auto", "rank", "global", "replica")
CAPTURES = ("auto", "require", "never", "submodules")

# The arguments of torch.compile that a user may set; the others follow from the program.
COMPILE_NAMES = ("backend", "mode", "options")


def read_option(name: str, value: object) -> Any:
    """Return the frozen value of the option `name`.

    Raises:
        OptionError: the option cannot have this value.
    """
    read, problem, fix = _KINDS[name]
    try:
        return read(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OptionError(f"{name}={value!r} {problem}", fix) from None


def compile_options(value: object) -> dict[str, Any] | None:
    """Return the keyword arguments of `torch.compile` for a value of the option `compile`.

    Returns:
        A dict of arguments, empty for `compile=True`; None if nothing is to be compiled.

    Raises:
        OptionError: `value` is neither true, false, None nor a dict of arguments that
            `torch.compile` accepts, or its mode records CUDA graphs.
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
    # The replay of a CUDA graph may overwrite a result whose transfer is still in flight.
    if value.get("mode") in ("reduce-overhead", "max-autotune"):
        raise OptionError(
            f"compile's mode {value['mode']!r} records CUDA graphs, whose results do not outlive"
            " the next call",
            "use 'max-autotune-no-cudagraphs', or none",
        )

    backend = value.get("backend", "inductor")
    for name in value:
        arguments = {"backend": backend, name: value[name]}
        try:
            # Only checks the arguments: a function is compiled at its first call.
            torch.compile(read_option, **arguments)
        # torch.compile raises errors of many types.
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            # Inductor lists the hundreds of options that it knows.
            reason = first_line.partition(", known options")[0]
            problem = f"compile={dict(value)!r}: {reason}"
            raise OptionError(problem, "give what torch.compile takes") from None

    return dict(value)


def _require(is_valid: bool) -> None:
    """Raise a ValueError unless the value that is read is valid."""
    if not is_valid:
        raise ValueError


def _flag(value: Any) -> bool:
    _require(isinstance(value, bool))
    return value


def _number(value: Any, low: float, high: float) -> float:
    """Return a number above `low` and at most `high` as a float; ValueError for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number and low < value <= high)
    return float(value)


def _integer(value: Any, low: int) -> int:
    """Return an integer of at least `low`."""
    _require(type(value) is int and value >= low)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """Return one text, or a sequence of at least one, as a tuple of texts; ValueError for other
    values.
    """
    if isinstance(value, str):
        return (value,)

    _require(isinstance(value, Sequence))
    texts = tuple(value)
    are_texts = all(isinstance(text, str) for text in texts)
    _require(bool(texts) and are_texts)
    return texts


def _parallel(value: Any) -> str | tuple[str, ...]:
    """Return the option `parallel`, a name or a tuple of several; ValueError if one is unknown."""
    names = _texts(value)
    _require(set(names) <= set(PARALLEL_NAMES))
    return value if isinstance(value, str) else names


def _mesh(value: Any) -> tuple[int, ...]:
    """Return the option `logical_mesh`, one or two positive sizes; ValueError or TypeError for
    other values.
    """
    _require(isinstance(value, Sequence))
    sizes = tuple(_integer(size, 1) for size in value)
    _require(1 <= len(sizes) <= 2)
    return sizes


def _placements(value: Any) -> tuple[tuple[str, str], ...]:
    """Return (pattern, placements) pairs of the option `placements`.

    Raises:
        OptionError: a placement is unknown.
    """
    if value is None:
        return ()

    placements = {str(pattern): modes.split() for pattern, modes in value.items()}
    for pattern, modes in placements.items():
        are_known = all(_MODE.fullmatch(mode) for mode in modes)
        if not modes or not are_known:
            problem = f"placements[{pattern!r}]={' '.join(modes)!r} is not a placement"
            fix = "write one placement per mesh axis: R, R*, S<dim> or G<dim>, such as 'R* S0'"
            raise OptionError(problem, fix)

    return tuple((pattern, " ".join(modes)) for pattern, modes in placements.items())


def _ranks(value: Any) -> tuple[int, ...]:
    """Return ranks in ascending order, from a number, several, or a text such as `0-3, 8-11`;
    ValueError or TypeError for other values, and for none.
    """
    if isinstance(value, str):
        value = _ranks_of_text(value)
    if isinstance(value, int):
        value = [value]

    ranks = {_integer(rank, 0) for rank in value}
    _require(bool(ranks))
    return tuple(sorted(ranks))


def _ranks_of_text(text: str) -> list[int]:
    """Return the ranks of a text such as `0-3, 8`; ValueError for another text, or a rank above
    MAX_RANK.
    """
    ranks: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        first_rank = int(first)
        last_rank = int(last or first)
        # Before the range is filled: a typing error must not take all memory.
        _require(last_rank <= MAX_RANK)
        ranks += range(first_rank, last_rank + 1)
    return ranks


def _device_map(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (pattern, ranks) pairs of the option `device_map`, () for None. Errors as of
    `_ranks`.
    """
    if value is None:
        return ()

    return tuple((str(pattern), _ranks(ranks)) for pattern, ranks in value.items())


def _memory_limit(value: Any) -> float:
    """Return a limit in bytes, from a number or a text such as `80GiB`; ValueError for any other
    value.
    """
    if not isinstance(value, str):
        return _number(value, 0.0, float("inf"))

    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError
    number, unit = match.groups()
    return float(number) * _UNITS[unit.lower()]


def _stages(value: Any) -> tuple[str, ...]:
    """Return the option `stages`, at least two names, () for None; ValueError for other values."""
    if value is None:
        return ()

    # A single text would be one stage.
    _require(not isinstance(value, str))
    names = _texts(value)
    are_named = all(name.strip(", ") for name in names)
    _require(len(names) > 1 and are_named)
    return names


def _schedule(value: Any) -> str:
    """Return the name of a schedule, registered if it is a function or a `Schedule`.

    Raises:
        OptionError: the name is unknown, or another schedule has the name of the given one.
    """
    if isinstance(value, Schedule) or callable(value):
        return register_schedule(value).name

    known = {text.lower(): text for text in SCHEDULES}
    if not isinstance(value, str) or value.lower() not in known:
        names = ", ".join(SCHEDULES)
        near = did_you_mean(str(value).lower(), known)
        fix = f"{near} Use one of {names}, a function of your own, or None to have it solved"
        raise OptionError(f"schedule={value!r} is not known", fix.lstrip())
    return known[value.lower()]


def _remat(value: Any) -> bool | tuple[str, ...]:
    return value if isinstance(value, bool) else _texts(value)


def _offload(value: Any) -> bool | tuple[str, ...] | None:
    """Return the option `offload`: a bool or patterns of names, None for `auto`."""
    if value == "auto":
        return None

    return value if isinstance(value, bool) else _texts(value)


def _costs(value: Any) -> "OpCosts":
    """Return the cost model if it has the methods of `OpCosts`.

    Raises:
        OptionError: it lacks some.
    """
    missing = []
    for name in ("op_seconds", "saved", "optimizer_seconds"):
        if not callable(getattr(value, name, None)):
            missing.append(name)
    if not isinstance(getattr(value, "name", None), str):
        missing.append("name")

    if missing:
        raise OptionError(
            f"costs={value!r} is no cost model: it lacks {', '.join(missing)}",
            "give an object with what alpa_strategy.OpCosts has, such as a class derived from"
            " RooflineCosts",
        )
    return value


def _is_compiled(value: Any) -> bool:
    return compile_options(value) is not None


def _replicas(value: Any) -> int | None:
    return None if value is None else _integer(value, 1)


def _profile_steps(value: Any) -> tuple[int, int] | None:
    """Return the option `profile_steps`: (first batch, the one after the last), or None; ValueError
    or TypeError for other values.
    """
    if value is None:
        return None

    _require(isinstance(value, Sequence) and not isinstance(value, str))
    first, end = (_integer(step, 0) for step in value)
    _require(first < end)
    return first, end


def _bytes(value: Any) -> int:
    return int(_number(value, 0.0, 1e18))


def _name_in(known: Sequence[str]) -> tuple[Callable[[Any], Any], str, str]:
    """Return the kind of an option whose value is one of the names `known`: its reader, problem and
    fix, as in `_KINDS`.
    """

    def read(value: Any) -> Any:
        _require(value in known)
        return value

    return read, "is not known", f"use one of {', '.join(known)}"


# One storage placement of a parameter on a mesh axis, as in plan files; ir/plan.py defines them.
_MODE = re.compile(r"R\*?|[SG]\d+")
MAX_RANK = 1 << 20
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?i?b)", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_COUNT_FIX = "give a whole number from 1, or None to have it solved"
_COUNT = (partial(_integer, low=1), "cannot be", _COUNT_FIX)
_FLAG = (_flag, "is neither true nor false", "write true or false")
_SECONDS = (partial(_number, low=0.0, high=float("inf")), "cannot be", "give a number above 0")

# option -> its reader, the problem with a value that the reader refuses, and the fix
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
        """write {"pattern": "placements"}, as in {"*.bias": "R*"}""",
    ),
    "device_map": (
        _device_map,
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
        partial(_integer, low=1),
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
        _remat,
        "is neither true, false nor names",
        'write true, false, "selective", or names of ops or modules',
    ),
    "offload": (
        _offload,
        "is neither true, false nor names",
        "write true, false, or names of parameters",
    ),
    "costs": (_costs, "", ""),
    "compile": (_is_compiled, "", ""),
    "fp32_reduction": _FLAG,
    "master_weights": _FLAG,
    "plan_timeout_seconds": _SECONDS,
    "collective_timeout_seconds": _SECONDS,
    "bucket_bytes": (_bytes, "cannot be", "give a number of bytes"),
    "capture": _name_in(CAPTURES),
    "check_replicas_every": (
        partial(_integer, low=0),
        "cannot be",
        "give a number of steps; 0: no checks",
    ),
    "check_gradients": _FLAG,
    "verbose": _FLAG,
    "log_plan": _FLAG,
    "profile_steps": (
        _profile_steps,
        "are no steps",
        "give the first step and the one after the last, counted from 0, such as (10, 13)",
    ),
    "async_checkpoint": _FLAG,
    "replicas": (_replicas, "cannot be", _COUNT_FIX),
}
