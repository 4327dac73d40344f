"""The fields of a plan as data for JSON, and back (docs/formulas.md#plan-file).

Three types are one text each in the file:

- a `ParameterPlan`: one mode per mesh axis, such as "R* S0"; a fused projection has "R* S0 in 3
  segments", a parameter in host memory "S0 R* on host";
- the strategies of an op: one text per axis, joined by " | ";
- the dual layout of a value between stages, or of one that leaves the step, such as "R S0".

Every other type is written field by field, from the annotations of its data class. Reading checks
each field against its type. What the fields must be among each other is checked in `ir/plan.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from alpa_strategy.errors import PlanError, ShardingError
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.parameter_plan import ParameterPlan, modes_text, parse_modes
from alpa_strategy.ir.placement import DualLayout, dual_layout, dual_layout_to_str

FIX = (
    "plan again with this version (`alpa plan`; a run plans again once the file is deleted), or"
    " correct the file by hand"
)

# Field -> its name in the file, if that is another one.
_NAMES_IN_FILE = {
    "parameter_plans": "parameters",
    "num_chunks": "in_parts",
    "prefetched_bytes": "ahead_bytes",
    "recompute_per_microbatch": "derives_again",
    "recompute_splits": "remat_cuts",
}

# Fields that older plan files do not have. A plan read from such a file has their defaults.
_OPTIONAL_FIELDS = {
    "devices",
    "recompute_splits",
    "recomputed",
    "stored",
    "received",
    "sent",
    "layers",
    "forward_seconds",
    "backward_seconds",
    "boundary_seconds",
    "boundary_bytes",
    "prefetched_bytes",
    "num_chunks",
    "execution",
    "leaving",
    "compiled",
    "phases",
    "host_seconds",
    "loop_seconds",
    "hidden_seconds",
    "memory",
    "step_notes",
    "figures",
    "optimizer_name",
    "earlier_predicted_seconds",
    "flags",
    "device_bytes",
    "pins",
    "planned_changes",
    "flops",
    "largest",
    "num_slower",
}

# Fields that come last in their object, in this order, because they are long.
_LAST_FIELDS = (
    "predicted",
    "parameter_plans",
    "shapes",
    "collectives",
    "strategies",
    "execution",
    "received",
    "sent",
    "stages",
)

# JSON types, as messages call them.
_KIND_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a bool",
}

_VALUE_INDEX = re.compile(r"[0-9]{1,18}")
_BOUNDARY_PLACEMENT = re.compile(r"R|P|S[0-9]{1,9}")
_SEGMENTS = re.compile(r"([2-9]|[1-9][0-9]{1,8}) segments")

_AXIS_SEPARATOR = " | "
_IN = " in "
_ON_HOST = " on host"
_IN_FP32 = ", summed in fp32"


def to_json_data(kind: Any, value: Any) -> Any:
    """Return `value`, of the annotated type `kind`, as dicts, lists, texts and numbers."""
    if kind in _TEXT_FORMS:
        return _TEXT_FORMS[kind].write(value)

    if get_origin(kind) is UnionType:
        # The only unions are `... | None`.
        return None if value is None else to_json_data(get_args(kind)[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        fields = {}
        for name, field_kind in _field_types(kind).items():
            item = getattr(value, name)
            if item is None and name in _OPTIONAL_FIELDS:
                # It is read as None where the file lacks it.
                continue
            fields[_NAMES_IN_FILE.get(name, name)] = to_json_data(field_kind, item)
        return fields

    if isinstance(value, dict):
        item_kind = get_args(kind)[1]
        return {str(key): to_json_data(item_kind, item) for key, item in value.items()}
    if isinstance(value, tuple):
        item_kind = get_args(kind)[0]
        return [to_json_data(item_kind, item) for item in value]
    return value


def from_json_data(kind: Any, data: Any, path: str) -> Any:
    """Return the value of type `kind` that `data` describes; the inverse of `to_json_data`.

    Args:
        path: the field, such as `plan.stages[0]`, for error messages.

    Raises:
        PlanError: a field is missing or has a wrong value. The message names the field.
    """
    if kind in _TEXT_FORMS:
        text = checked(data, str, path)
        return _TEXT_FORMS[kind].read(text, path)
    if is_dataclass(kind):
        return _read_fields(kind, checked(data, dict, path), path)

    origin = get_origin(kind)
    if origin is dict:
        return _read_dict(kind, checked(data, dict, path), path)
    if origin is tuple:
        return _read_tuple(kind, checked(data, list, path), path)
    if origin is UnionType:
        # The only unions are `... | None`.
        return None if data is None else from_json_data(get_args(kind)[0], data, path)

    value = checked(data, kind, path)
    # Every number of a plan counts something: seconds, bytes, devices.
    if kind in (int, float) and value < 0:
        raise PlanError(f"{path} is {value!r}, which cannot be below 0", FIX)
    return value


def checked(data: Any, kind: type, path: str) -> Any:
    """Return `data` if it is of the JSON type `kind`. A whole number is a float as well.

    Raises:
        PlanError: it is of another type.
    """
    is_bool = isinstance(data, bool)
    # JSON writes 1.0 as 1. To Python, `True` is an int.
    if kind is float and isinstance(data, int) and not is_bool:
        return float(data)

    is_unexpected_bool = is_bool and kind is not bool
    if not isinstance(data, kind) or is_unexpected_bool:
        raise PlanError(f"{path} is {data!r:.60}, expected {_KIND_NAMES[kind]}", FIX)
    return data


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return field -> type of the dataclass `kind`, in the order of the plan file."""
    types = get_type_hints(kind)
    ordered = {name: types[name] for name in types if name not in _LAST_FIELDS}
    for name in _LAST_FIELDS:
        if name in types:
            ordered[name] = types[name]
    return ordered


def _read_fields(kind: Any, data: dict[str, Any], path: str) -> Any:
    """Return an object of the data class `kind`. Fields of `data` that it lacks are ignored.

    `_OPTIONAL_FIELDS` may be missing: they get their defaults.

    Args:
        path: of `data` in the plan file, for the message.

    Raises:
        PlanError: a field is missing or has a wrong value.
    """
    values = {}
    for name, field_kind in _field_types(kind).items():
        name_in_file = _NAMES_IN_FILE.get(name, name)
        field_path = f"{path}.{name_in_file}"
        if name_in_file in data:
            values[name] = from_json_data(field_kind, data[name_in_file], field_path)
        elif name not in _OPTIONAL_FIELDS:
            raise PlanError(f"the field {field_path} is missing", FIX)
    return kind(**values)


def _read_dict(kind: Any, data: dict[str, Any], path: str) -> dict[Any, Any]:
    """Return a dict of a plan file with keys and values of the types in `kind`.

    Raises:
        PlanError: one has another type; `path` names the place in the file.
    """
    key_kind, item_kind = get_args(kind)
    items = {}
    for key, item in data.items():
        read_key = _read_key(key_kind, key, path)
        items[read_key] = from_json_data(item_kind, item, f"{path}[{key!r}]")
    return items


def _read_tuple(kind: Any, data: list[Any], path: str) -> tuple[Any, ...]:
    """Return a list of a plan file as a tuple of the type `kind`.

    Raises:
        PlanError: its length or an item differs; `path` names the place in the file.
    """
    item_kinds = get_args(kind)
    has_any_length = item_kinds[-1] is Ellipsis
    if not has_any_length and len(data) != len(item_kinds):
        raise PlanError(f"{path} has {len(data)} numbers, expected {len(item_kinds)}", FIX)

    items = []
    for index, item in enumerate(data):
        items.append(from_json_data(item_kinds[0], item, f"{path}[{index}]"))
    return tuple(items)


def _read_key(kind: type, key: str, path: str) -> Any:
    """Return a key of a dict as `kind`: keys of JSON objects are always texts.

    Raises:
        PlanError: an int is expected, and `key` is none; the message has `path`, the field in the
            file.
    """
    if kind is int and not _VALUE_INDEX.fullmatch(key):
        raise PlanError(f"{path}: {key!r} is not the number of a value", FIX)
    return kind(key)


# The types that are one text in the file.


def _parameter_text(plan: ParameterPlan) -> str:
    """Return a parameter's plan as text: placements, segments, host memory, dtype of sums."""
    text = modes_text(plan.module_modes)
    if plan.num_segments != 1:
        text += f"{_IN}{plan.num_segments} segments"
    if plan.on_host:
        text += _ON_HOST
    if plan.sums_in_fp32:
        text += _IN_FP32
    return text


def _read_parameter(text: str, path: str) -> ParameterPlan:
    """Return the plan of a parameter: inverse of `_parameter_text`.

    Raises:
        PlanError: the text is not one; `path` names the place in the file.
    """
    without_dtype = text.removesuffix(_IN_FP32)
    without_host = without_dtype.removesuffix(_ON_HOST)
    shown_modes, _, segments_text = without_host.partition(_IN)

    try:
        module_modes = parse_modes(shown_modes)
    except ValueError as error:
        raise PlanError(
            f"{path}: {error}", "write R, R*, S<dim> or G<dim>, one per mesh axis"
        ) from error

    num_segments = 1
    if segments_text:
        match = _SEGMENTS.fullmatch(segments_text)
        if match is None:
            raise PlanError(
                f"{path}: {text!r} is not a plan",
                "write the modes, then `in N segments` if there are several",
            )
        num_segments = int(match[1])

    # Files count the module's dims; the step sees the segments as one more dim before them.
    num_added_dims = int(num_segments > 1)
    modes = tuple(mode.shifted(num_added_dims) for mode in module_modes)
    return ParameterPlan(
        modes,
        num_segments,
        on_host=without_dtype.endswith(_ON_HOST),
        sums_in_fp32=without_dtype != text,
    )


def _read_boundary(text: str, path: str) -> DualLayout:
    """Return the layout of a value between stages, or of one that leaves the step: one placement
    per mesh axis.

    Raises:
        PlanError: the text is not one; `path` names the place in the file.
    """
    if not all(_BOUNDARY_PLACEMENT.fullmatch(placement) for placement in text.split()):
        raise PlanError(
            f"{path}: {text!r} is not a layout of a boundary",
            "write R or S<dim>, one per mesh axis",
        )
    return dual_layout(text)


def _strategies_text(strategies: tuple[AxisStrategy, ...]) -> str:
    return _AXIS_SEPARATOR.join(map(str, strategies))


def _read_strategies(text: str, path: str) -> tuple[AxisStrategy, ...]:
    return tuple(_read_strategy(axis_text, path) for axis_text in text.split(_AXIS_SEPARATOR))


def _read_strategy(text: str, path: str) -> AxisStrategy:
    """Return the strategy of an op on one mesh axis, `S0,R*->S0`.

    Raises:
        PlanError: the text is not one; `path` names the place in the file.
    """
    try:
        strategy = AxisStrategy.parse(text)
        # A text that would be written differently was not understood.
        is_understood = str(strategy) == text and "->" in text
    except (ShardingError, ValueError, AttributeError):
        is_understood = False

    if not is_understood:
        raise PlanError(
            f"{path}: {text!r} is not a strategy",
            "write it as in `S0,R*,R*->S0`, ` | ` between axes",
        )
    return strategy


@dataclass(frozen=True)
class _TextForm:
    """How a type is written as one text."""

    # value -> text
    write: Callable[[Any], str]

    # (text, path of the field) -> value; raises PlanError
    read: Callable[[str, str], Any]


_TEXT_FORMS: dict[Any, _TextForm] = {
    ParameterPlan: _TextForm(_parameter_text, _read_parameter),
    tuple[AxisStrategy, ...]: _TextForm(_strategies_text, _read_strategies),
    DualLayout: _TextForm(dual_layout_to_str, _read_boundary),
}
