"""Reads the figures of a plan's step off its task: samples, tokens, precision, seconds at peak."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import of_one_rank, op_base_name, product_kind
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.cost.peak import seconds_at_peak, step_flops
from alpa_strategy.cost.roofline import rated_dtype
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import OpCall, TensorMeta, dtype_name
from alpa_strategy.ir.per_rank import PerRank
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.task_figures import TaskFigures
from alpa_strategy.microbatch.transform import num_samples
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.task import PlanTask

# (dtype of parameters, dtype of matmuls) -> the Trainer's name of the precision.
PRECISION_NAMES = {
    ("float64", "float64"): "64-true",
    ("float32", "float32"): "32-true",
    ("float32", "bfloat16"): "bf16-mixed",
    ("float32", "float16"): "16-mixed",
    ("bfloat16", "bfloat16"): "bf16-true",
    ("float16", "float16"): "16-true",
}
# Precisions that a step in float32 may have instead, the best known to converge first.
HALF_PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}


# Options that leave fewer plans to choose from, in the order in which they are shown.
PINNING_OPTIONS = (
    "parallel",
    "logical_mesh",
    "placements",
    "device_map",
    "num_stages",
    "stages",
    "num_microbatches",
    "schedule",
    "remat",
    "offload",
)
# Characters of a pinned value that are shown.
LONGEST_PIN = 40


def with_figures(plan: Plan, task: PlanTask) -> Plan:
    """Return a plan with the figures of its task."""
    return replace(plan, figures=task_figures(task))


def task_figures(task: PlanTask) -> TaskFigures:
    """Return the figures of a task's step on its devices."""
    step = task.step
    cluster = task.cluster
    counted = step_flops(step)
    flops = counted.by_dtype
    precision = precision_of(step, flops)
    samples = num_samples(step) or step.batch_size
    half, half_share = "", None
    if precision == "32-true" and task.options.costs is None:
        half, half_share = _half_precision(step, cluster.device, task.op_costs)

    # Times that were measured, or a cost model of the user's, need no FLOP/s.
    has_other_costs = task.costs is not None or task.options.costs is not None
    is_priced_by_peak = not (cluster.measured or has_other_costs)
    peaks = dict(cluster.device.peak_flops)
    assumed = _assumed_rates(flops, cluster.device) if is_priced_by_peak else {}
    return TaskFigures(
        num_samples=samples,
        num_tokens=num_tokens(step, samples),
        precision=precision,
        optimizer_name=task.optimizer.name,
        flops=counted if flops else None,
        peak_seconds=seconds_at_peak(flops, cluster.device, cluster.num_devices),
        half_precision=half,
        half_share=half_share,
        assumed_rates=assumed,
        unrated_dtypes=tuple(dtype for dtype in flops if dtype not in peaks),
        rated_precision=_rated_precision(assumed, peaks),
        memory_limit=task.memory_limit if math.isfinite(task.memory_limit) else None,
        device_bytes=task.cluster.device.memory_bytes,
        pins=pinned_options(task.options),
    )


def pinned_options(options: PlanOptions) -> tuple[str, ...]:
    """Return the options that leave fewer plans to choose from, such as `num_microbatches=16`."""
    defaults = PlanOptions()
    pins = []
    for name in PINNING_OPTIONS:
        if getattr(options, name) != getattr(defaults, name):
            pins.append(_pinned_text(options, name))
    return tuple(pins)


def _pinned_text(options: PlanOptions, name: str) -> str:
    """Return an option with its value: `num_microbatches=16`, or `placements=...` if it is long."""
    value = getattr(options, name)
    # Patterns of parameters or modules with their layouts, devices or stages can be many.
    is_long = isinstance(value, tuple) and len(str(value)) > LONGEST_PIN
    return f"{name}={'...' if is_long else _pin_text(value)}"


def excluding_option(options: PlanOptions, before: PlanOptions, plan: Plan) -> str:
    """Return the first of the options that leave fewer plans to choose from, with its value, that
    was changed so that it excludes a plan: `num_microbatches=16`; "" if none was.

    Args:
        options: the changed options.
        before: those with which the plan was made.
        plan: the plan.
    """
    defaults = PlanOptions()
    values_of_plan = {
        "num_stages": len(plan.stages),
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
    }
    for name in PINNING_OPTIONS:
        value = getattr(options, name)
        is_free = value == getattr(defaults, name)
        if is_free or value in (getattr(before, name), values_of_plan.get(name)):
            continue
        return _pinned_text(options, name)
    return ""


def _pin_text(value: object) -> str:
    """Return a pinned value as a user writes it in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_pin_text, value))}]"
    return str(value)


def assumed_of_precision(precision: str, device: DeviceSpec) -> tuple[dict[str, str], str]:
    """Return the rates that plans for a precision will assume of a device, before a step is
    captured.

    Args:
        precision: the Trainer's name of it.
        device: with the FLOP/s of dtypes.

    Returns:
        Dtype of the matmuls -> the dtype whose FLOP/s are taken, empty if there are FLOP/s for it;
        and a precision for which there are FLOP/s, "" if there is none.
    """
    computed = [dtype for (_, dtype), name in PRECISION_NAMES.items() if name == precision]
    assumed = _assumed_rates(dict.fromkeys(computed, 0.0), device)
    return assumed, _rated_precision(assumed, dict(device.peak_flops))


def num_tokens(step: StepGraph, samples: int) -> int:
    """Return the tokens of a step: the indices of all samples that are looked up in one embedding.

    Of several embeddings, the one with the most counts: a model looks up positions and kinds of the
    same tokens as well. Indices that do not depend on the batch are none of tokens (T5 looks up a
    matrix of distances).

    Args:
        step: of all devices.
        samples: of the step.

    Returns:
        0 if no embedding is of sequences.
    """
    indices_of_table: dict[int, dict[int, int]] = defaultdict(dict)
    of_batch = {leaf.value for leaf in step.batch}
    for op in step.ops:
        if not of_batch.isdisjoint(op.operands):
            of_batch.update(op.results)
        if op_base_name(of_one_rank(op.call)) != "embedding" or len(op.operands) < 2:
            continue
        table, indices = op.operands[:2]
        meta = step.values[indices]
        # [samples, tokens]
        is_of_sequences = len(meta.shape) >= 2 and samples > 0 and meta.shape[0] % samples == 0
        if is_of_sequences and indices in of_batch:
            indices_of_table[table][indices] = meta.num_elements
    return max((sum(sizes.values()) for sizes in indices_of_table.values()), default=0)


def precision_of(step: StepGraph, flops: Mapping[str, float]) -> str:
    """Return the Trainer's name of the precision of a step, or its dtypes in words.

    Args:
        step: with its parameters.
        flops: `by_dtype` of `step_flops`.

    Returns:
        "" if it has no parameters in floating point.
    """
    elements: Counter[str] = Counter()
    for parameter in step.parameters:
        if parameter.meta.dtype.is_floating_point:
            dtype = dtype_name(parameter.meta.dtype)
            elements[dtype] += parameter.meta.num_elements
    if not elements:
        return ""
    ((stored, _),) = elements.most_common(1)
    computed = next(iter(flops), stored)
    words = f"{stored} parameters, {computed} matmuls"
    return PRECISION_NAMES.get((stored, computed), words)


def _half_precision(
    step: StepGraph, device: DeviceSpec, costs: OpCosts
) -> tuple[str, float | None]:
    """Return a precision in which the matmuls of a step in float32 have a higher peak, and the
    share of the ops' seconds that the step takes with them in it. Without one that is "" and None.
    The share is None for a step without seconds.
    """
    peaks = dict(device.peak_flops)
    for dtype, name in HALF_PRECISIONS.items():
        if peaks.get(dtype_name(dtype), 0.0) <= peaks.get("float32", math.inf):
            continue
        seconds = halved_seconds = 0.0
        for op in step.ops:
            of_op = sum(costs.op_seconds(op.call))
            seconds += of_op
            is_halved = product_kind(op.call) is not None
            halved_seconds += sum(costs.op_seconds(_in(op.call, dtype))) if is_halved else of_op
        return name, halved_seconds / seconds if seconds else None
    return "", None


def _in(call: OpCall, dtype: torch.dtype) -> OpCall:
    """Return the call with its float32 tensors in `dtype`; that of a `PerRank` op unchanged."""
    if isinstance(call.target, PerRank):
        # It has the call on one rank's samples.
        return call

    def converted(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
        others = []
        for meta in metas:
            others.append(replace(meta, dtype=dtype) if meta.dtype == torch.float32 else meta)
        return tuple(others)

    return replace(call, operands=converted(call.operands), results=converted(call.results))


def _rated_precision(assumed: Mapping[str, str], peaks: Mapping[str, float]) -> str:
    """Return a precision whose matmuls are in half precision, and for which there are FLOP/s that
    are more than those of the assumed rates. "" if no half precision is assumed, or there is none.
    """
    halves = {dtype_name(dtype): name for dtype, name in HALF_PRECISIONS.items()}
    for dtype, taken in assumed.items():
        for other, name in halves.items():
            if dtype in halves and peaks.get(other, 0.0) > peaks.get(taken, math.inf):
                return name
    return ""


def _assumed_rates(flops: Mapping[str, float], device: DeviceSpec) -> dict[str, str]:
    """Return the dtypes of matmuls for which a device has no FLOP/s, each with the dtype whose
    FLOP/s are taken.
    """
    assumed = {}
    for dtype in flops:
        rated = rated_dtype(device, dtype)
        if rated != dtype:
            assumed[dtype] = rated
    return assumed
