"""The plan of a training that runs as it is written: only how parameters are stored is decided,
from their sizes.

Nothing is captured and nothing solved: every rank runs the user's own step on its own batch, as
under DDP.
"""

from collections.abc import Sequence
from dataclasses import replace

from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import AS_WRITTEN, Fingerprint, ParameterPlan, Plan, Predicted, StagePlan
from alpa_strategy.options import (
    BUCKET_BYTES,
    SELECTIVE,
    Limits,
    PlanOptions,
)

SUPPORTED = ("auto", "data", "zero1", "zero2", "zero3")
KEPT_WHOLE = 1000  # parameters below so small a part of all are not worth a gathering


def against_written(options: PlanOptions) -> str | None:
    """The option that only a captured step can meet, None where there is none."""
    if (against := _against_replicas(options)) is not None:
        return against
    if options.parallel not in SUPPORTED:
        return f"parallel={options.parallel!r} is asked for"
    if options.placements:
        return "placements are asked for"
    if options.logical_mesh is not None and len(options.logical_mesh) > 1:
        return f"logical_mesh={list(options.logical_mesh)} is asked for"
    return None


def _against_replicas(options: PlanOptions) -> str | None:
    """Of these, what planned submodules cannot meet either."""
    if options.asks_for_pipeline:
        return "a pipeline or micro-batches are asked for"
    if options.device_map:
        return "a device_map is asked for"
    return f"offload={options.offload!r} is asked for" if options.offload else None


def asks_for_written(options: PlanOptions, limits: Limits) -> str | None:
    """The option that has steps run as they are written, if any; OptionError where another cannot
    be met so.
    """
    is_replica = options.batch_scope == "replica" and limits.replicas is None
    asks = (
        'capture="never"'
        if limits.capture == "never"
        else 'batch_scope="replica"'
        if is_replica
        else None
    )
    if asks and (against := against_written(options)):
        raise OptionError(
            f"{asks} has steps run as they are written, but {against}", "leave one of them out"
        )
    return asks


def submodule_options(
    options: PlanOptions, limits: Limits, num_devices: int
) -> tuple[int, PlanOptions] | None:
    """In how many replicas the submodules of a step are planned, and by which options in each;
    None: not at all.

    The first of two mesh axes is that of the replicas. OptionError where `capture="submodules"`
    cannot be met.
    """
    asks, mesh, names = limits.capture == "submodules", options.logical_mesh or (), options.parallel
    names = (names,) * max(1, len(mesh)) if isinstance(names, str) else names
    pins = [(pattern, modes.split()) for pattern, modes in options.placements]
    divides = "tensor" in names or bool(pins) or len(mesh) > 1
    if not (asks or (limits.capture == "auto" and divides)):
        return None
    count = limits.replicas or (mesh[0] if len(mesh) > 1 else 1 if divides or mesh else num_devices)
    size = num_devices // count
    inner = {"auto", "tensor"} if size > 1 else {"auto", "tensor", "data"}
    against = _against_replicas(options)
    if not ({*names[:-1]} <= {"auto", "data"} and names[-1] in inner):
        against = f"parallel={options.parallel!r} is asked for"
    if (mesh and mesh not in ((size,), (count, size))) or count * size != num_devices:
        against = (
            f"logical_mesh={list(mesh)} does not divide {num_devices} devices into {count} replicas"
        )
    if any(
        len(m) != max(1, len(mesh)) or m[-1][0] == "G" or m[0] not in (m[-1], "R", "R*")
        for _, m in pins
    ):
        against = "placements have parameters in parts across replicas, or gathered once a step"
    if count > 1 and size > 1 and options.batch_scope != ("replica" if limits.replicas else "auto"):
        against = f"batch_scope={options.batch_scope!r} is asked for"
    if against is not None and asks:
        raise OptionError(
            f'capture="submodules" has replicas work alike, but {against}', "leave one of them out"
        )
    inside = replace(
        options,
        parallel=names[-1] if size > 1 else "auto",
        logical_mesh=(size,),
        placements=tuple((pattern, modes[-1].rstrip("*")) for pattern, modes in pins),
        batch_scope="global",
        num_stages=1,
        remat=(SELECTIVE,) if options.remat is True else options.remat,
        completes=True,
    )
    return (count, inside) if against is None else None


def plan_eager(
    parameters: Sequence[ParameterInput],
    options: PlanOptions,
    optimizers: Sequence[OptimizerInfo],
    devices: tuple[int, int],
    limit: float,
    why: CaptureError,
) -> Plan:
    """How a training that runs as it is written stores its parameters.

    Args:
        devices: (nodes, devices per node).
        limit: bytes of a device.
        why: what stood against a captured step.
    """
    num_devices = devices[0] * devices[1]
    state_bytes = max((info.state_bytes for info in optimizers), default=0.0)
    ways = (
        ("data", "zero2", "zero3") if all(info.element_wise for info in optimizers) else ("data",)
    )
    ways = (
        ("data",)
        if options.completes
        else ways
        if options.parallel == "auto"
        else (str(options.parallel),)
    )
    for way in ways:
        plans, peak, ahead = _stored(parameters, way, num_devices, state_bytes, options.kept_whole)
        if options.completes:
            plans = dict.fromkeys(plans, ParameterPlan.parse("R"))
        plans = {
            name: replace(plan, sums_in_fp32=options.fp32_reduction) for name, plan in plans.items()
        }
        if peak <= limit:
            break
    # No times are known that would say how much gathering hides: twice as much ahead, where memory
    # has room.
    room = min(ahead, max(0.0, limit - peak))
    peak, ahead = peak + room, ahead + room
    predicted = Predicted(step_seconds=0.0, peak_bytes=int(peak))
    stage = StagePlan(
        submesh=devices,
        first_device=0,
        logical_mesh=(num_devices,),
        ops=(0, 0),
        parameter_plans=plans,
        strategies={},
        collectives=(),
        predicted=predicted,
        shapes={given.name: given.meta.shape for given in parameters},
        ahead_bytes=int(ahead),
    )
    what = " ".join(why.problem.split())
    return Plan(
        fingerprint=Fingerprint(*[AS_WRITTEN] * len(Fingerprint.__dataclass_fields__)),
        stages=(stage,),
        predicted=predicted,
        schedule=AS_WRITTEN,
        notes=(f"each rank runs the step as it is written, on its own batch: {what}",),
    )


def _stored(
    parameters: Sequence[ParameterInput],
    way: str,
    num_devices: int,
    state_bytes: float,
    kept_whole: tuple[str, ...],
) -> tuple[dict[str, ParameterPlan], float, float]:
    """How each parameter lies, the peak's bytes of parameters, gradients and state, and those
    gathered ahead.
    """
    plans: dict[str, ParameterPlan] = {}
    least = sum(given.meta.num_elements for given in parameters) / KEPT_WHOLE
    total = largest = cut = 0.0
    for given in parameters:
        meta = given.meta
        is_cut = way != "data" and meta.num_elements > least and given.name not in kept_whole
        sizes = enumerate(meta.shape) if is_cut else ()
        dim = next((dim for dim, size in sizes if size >= num_devices), None)
        letter = "S" if way == "zero3" else "G" if meta.requires_grad else None
        mode = (
            ("R*" if meta.requires_grad else "R")
            if dim is None or letter is None
            else f"{letter}{dim}"
        )
        plans[given.name] = ParameterPlan.parse(mode)
        trained = meta.num_bytes * meta.requires_grad
        kept = meta.num_bytes + trained + meta.num_elements * state_bytes * meta.requires_grad
        if mode[0] == "R":
            total += kept
            continue
        total += kept / num_devices
        if mode[0] == "G":
            total += meta.num_bytes + trained
        else:
            cut, largest = cut + meta.num_bytes, max(largest, meta.num_bytes)
    # Gathered by the bucket: the one in use, the next, the backward's last, what the next arrives
    # in, and gradients.
    bucket = max(largest, min(cut, BUCKET_BYTES))
    return plans, total + 5 * bucket, bucket
