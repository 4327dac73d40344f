"""The plan of a training whose steps run eagerly.

Nothing is captured and nothing solved: every rank runs the user's own step on its own batch, as
under DDP. Only how parameters are stored is decided, from their sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import (
    EAGER_SCHEDULE,
    Fingerprint,
    ParameterPlan,
    Plan,
    Predicted,
    StagePlan,
    TaskFigures,
)
from alpa_strategy.options import BUCKET_BYTES, Limits, PlanOptions

SUPPORTED = ("auto", "data", "zero1", "zero2", "zero3")
# Parameters with less than this fraction of all elements stay full: they are not worth a gather.
SMALL_FRACTION = 1 / 1000
# Buckets of gathered parameters and gradients that a rank stores at once: the one in use, the next,
# the backward's last, the one that the next arrives in, and gradients.
NUM_BUCKETS = 5


def captured_only_option(options: PlanOptions) -> str | None:
    """Return the option that only a captured step can meet, as a part of a message; None if there
    is none.
    """
    problem = pipeline_only_option(options)
    if problem is not None:
        return problem
    if options.parallel not in SUPPORTED:
        return f"parallel={options.parallel!r} is asked for"
    if options.placements:
        return "placements are asked for"
    if options.logical_mesh is not None and len(options.logical_mesh) > 1:
        return f"logical_mesh={list(options.logical_mesh)} is asked for"
    return None


def pipeline_only_option(options: PlanOptions) -> str | None:
    """Return the option, as a part of a message, that neither eager steps nor planned submodules
    can meet; None if there is none.
    """
    if options.asks_for_pipeline:
        return "a pipeline or micro-batches are asked for"
    if options.device_map:
        return "a device_map is asked for"
    if options.offload:
        return f"offload={options.offload!r} is asked for"
    return None


def eager_option(options: PlanOptions, limits: Limits) -> str | None:
    """Return the option that makes steps run eagerly, None if no option does.

    Raises:
        OptionError: another option needs a captured step.
    """
    option = None
    if limits.capture == "never":
        option = 'capture="never"'
    elif options.batch_scope == "replica" and limits.replicas is None:
        option = 'batch_scope="replica"'

    if option is not None:
        conflict = captured_only_option(options)
        if conflict is not None:
            raise OptionError(
                f"{option} has steps run eagerly, but {conflict}", "leave one of them out"
            )
    return option


@dataclass(frozen=True)
class _StoragePlan:
    """How an eager training stores its parameters, and what that needs."""

    # By parameter name.
    plans: Mapping[str, ParameterPlan]
    # Of parameters, gradients, optimizer state and gathered buckets, on one device.
    peak_bytes: float
    # Of parameters that are gathered before they are used.
    prefetch_bytes: float


def plan_eager(
    parameters: Sequence[ParameterInput],
    options: PlanOptions,
    optimizers: Sequence[OptimizerInfo],
    devices: tuple[int, int],
    limit: float,
    why: CaptureError,
    precision: str = "",
) -> Plan:
    """Return the plan of a training, or without `optimizers` of an evaluation, that runs eagerly.

    The first storage that fits is taken, the last one if none does: full parameters, ZeRO-2,
    ZeRO-3; options may pin one.

    Args:
        devices: (nodes, devices per node).
        limit: bytes of a device that may be used.
        why: the reason why the step is not captured.
        precision: the Trainer's.
    """
    num_devices = devices[0] * devices[1]
    state_bytes = max((info.state_bytes for info in optimizers), default=0.0)
    for kind in _storage_kinds(options, optimizers):
        storage = _storage(parameters, kind, num_devices, state_bytes, options.kept_whole)
        if storage.peak_bytes <= limit:
            break

    plans = storage.plans
    if options.completes:
        plans = dict.fromkeys(plans, ParameterPlan.parse("R"))
    plans = {
        name: replace(plan, sums_in_fp32=options.fp32_reduction) for name, plan in plans.items()
    }

    # No times are known that would say how much of the gathering is hidden: twice as much is
    # prefetched if there is memory for it.
    headroom = max(0.0, limit - storage.peak_bytes)
    more_prefetched = min(storage.prefetch_bytes, headroom)
    predicted = Predicted(step_seconds=0.0, peak_bytes=int(storage.peak_bytes + more_prefetched))
    stage = StagePlan(
        submesh=devices,
        first_device=0,
        logical_mesh=(num_devices,),
        ops=(0, 0),
        parameter_plans=plans,
        strategies={},
        collectives=(),
        predicted=predicted,
        shapes={parameter.name: parameter.meta.shape for parameter in parameters},
        prefetched_bytes=int(storage.prefetch_bytes + more_prefetched),
    )
    reason = " ".join(why.problem.split())
    return Plan(
        fingerprint=Fingerprint(*[EAGER_SCHEDULE] * len(Fingerprint.__dataclass_fields__)),
        stages=(stage,),
        predicted=predicted,
        schedule=EAGER_SCHEDULE,
        notes=(f"each rank runs the step eagerly, on its own batch: {reason}",),
        figures=_figures(precision, limit),
    )


def _figures(precision: str, limit: float) -> TaskFigures:
    """Return the figures of an eager step: its samples and FLOPs are not known."""
    return TaskFigures(precision=precision, memory_limit=limit if math.isfinite(limit) else None)


def _storage_kinds(options: PlanOptions, optimizers: Sequence[OptimizerInfo]) -> tuple[str, ...]:
    """Return the kinds of storage to try (`data`, `zero2`, ...), the one that needs most memory
    first. Shards are tried only if all optimizers may step them.
    """
    if options.completes:
        return ("data",)
    if options.parallel != "auto":
        return (str(options.parallel),)
    if all(info.may_step_shards for info in optimizers):
        return ("data", "zero2", "zero3")
    return ("data",)


def _storage(
    parameters: Sequence[ParameterInput],
    kind: str,
    num_devices: int,
    state_bytes: float,
    kept_whole: tuple[str, ...],
) -> _StoragePlan:
    """Return how `kind` ("data", "zero2", ...) stores parameters.

    Args:
        state_bytes: of the optimizer, per element.
        kept_whole: names of parameters that stay full.
    """
    plans: dict[str, ParameterPlan] = {}
    small = SMALL_FRACTION * sum(parameter.meta.num_elements for parameter in parameters)
    total_bytes = 0.0
    largest_sharded = 0.0
    sharded_bytes = 0.0
    for parameter in parameters:
        meta = parameter.meta
        may_shard = (
            kind != "data" and meta.num_elements > small and parameter.name not in kept_whole
        )
        mode = _storage_mode(meta, kind, num_devices) if may_shard else _full_mode(meta)
        plans[parameter.name] = ParameterPlan.parse(mode)

        gradient_bytes = meta.num_bytes if meta.requires_grad else 0
        optimizer_bytes = meta.num_elements * state_bytes if meta.requires_grad else 0.0
        stored_bytes = meta.num_bytes + gradient_bytes + optimizer_bytes
        if mode[0] == "R":
            total_bytes += stored_bytes
            continue
        total_bytes += stored_bytes / num_devices
        if mode[0] == "G":
            # ZeRO-2: full parameters and gradients exist beside the shards.
            total_bytes += meta.num_bytes + gradient_bytes
        else:
            sharded_bytes += meta.num_bytes
            largest_sharded = max(largest_sharded, meta.num_bytes)

    bucket_bytes = max(largest_sharded, min(sharded_bytes, BUCKET_BYTES))
    return _StoragePlan(plans, total_bytes + NUM_BUCKETS * bucket_bytes, bucket_bytes)


def _full_mode(meta: TensorMeta) -> str:
    """Return the placement of a parameter that is stored full: `R*`, `R` if it needs no
    gradient.
    """
    return "R*" if meta.requires_grad else "R"


def _storage_mode(meta: TensorMeta, kind: str, num_devices: int) -> str:
    """Return the mode of a parameter under ZeRO: sharded along the first dim with at least one
    element a device, full if there is none.

    Args:
        kind: `zero1`, `zero2` or `zero3`.
    """
    dim = next((dim for dim, size in enumerate(meta.shape) if size >= num_devices), None)
    if dim is None:
        return _full_mode(meta)
    if kind == "zero3":
        return f"S{dim}"
    # ZeRO-1 and ZeRO-2 shard gradients and optimizer state alone: a frozen parameter has neither.
    return f"G{dim}" if meta.requires_grad else _full_mode(meta)
