"""Options under which submodules are planned, and those that they cannot meet."""

from collections.abc import Sequence
from dataclasses import replace

from alpa_strategy.errors import OptionError
from alpa_strategy.options import SELECTIVE, Limits, PlanOptions
from alpa_strategy.planner.eager_plan import pipeline_only_option


def submodule_options(
    options: PlanOptions, limits: Limits, num_devices: int
) -> tuple[int, PlanOptions] | None:
    """Return the number of replicas whose submodules are planned, and the options inside each of
    them; None if submodules are not planned.

    The first of two mesh axes is that of the replicas.

    Raises:
        OptionError: `capture="submodules"` cannot be met.
    """
    is_required = limits.capture == "submodules"
    mesh = options.logical_mesh or ()
    kinds = options.parallel
    if isinstance(kinds, str):
        kinds = (kinds,) * max(1, len(mesh))
    pins = [(pattern, modes.split()) for pattern, modes in options.placements]
    divides = "tensor" in kinds or bool(pins) or len(mesh) > 1
    if not (is_required or (limits.capture == "auto" and divides)):
        return None

    num_replicas = _num_replicas(limits, mesh, divides, num_devices)
    replica_size = num_devices // num_replicas
    conflict = _submodule_conflict(options, limits, kinds, pins, num_replicas, num_devices)
    if conflict is not None:
        if is_required:
            raise OptionError(
                f'capture="submodules" has submodules planned, but {conflict}',
                "leave one of them out",
            )
        return None

    # Whether the ranks of a replica load the same batch.
    loads_alike = bool(limits.replicas) or options.batch_scope == "global"
    inside = replace(
        options,
        parallel=kinds[-1] if replica_size > 1 else "auto",
        logical_mesh=(replica_size,),
        placements=tuple((pattern, modes[-1].rstrip("*")) for pattern, modes in pins),
        batch_scope="global" if loads_alike else "rank",
        num_stages=1,
        remat=(SELECTIVE,) if options.remat is True else options.remat,
        completes=True,
    )
    return num_replicas, inside


def _num_replicas(limits: Limits, mesh: tuple[int, ...], divides: bool, num_devices: int) -> int:
    """Return the number of replicas: the pinned one, the first of two mesh axes, one of all devices
    if an option divides the step, or one per device.

    Args:
        mesh: option `logical_mesh`; empty if there is none.
        divides: whether an option divides the step.
    """
    if limits.replicas:
        return limits.replicas
    if len(mesh) > 1:
        return mesh[0]
    if divides or mesh:
        return 1
    return num_devices


def _submodule_conflict(
    options: PlanOptions,
    limits: Limits,
    kinds: tuple[str, ...],
    pins: Sequence[tuple[str, list[str]]],
    num_replicas: int,
    num_devices: int,
) -> str | None:
    """Return the option that planned submodules cannot meet, None if there is none.

    Args:
        kinds: `options.parallel`, one for each mesh axis.
        pins: `options.placements`, one mode for each mesh axis.
    """
    mesh = options.logical_mesh or ()
    replica_size = num_devices // num_replicas
    if num_replicas > 1 and replica_size > 1:
        scope = "replica" if limits.replicas else "auto"
        if options.batch_scope != scope:
            return f"batch_scope={options.batch_scope!r} is asked for"

    num_axes = max(1, len(mesh))
    for _, modes in pins:
        differs_between_replicas = modes[0] not in (modes[-1], "R", "R*")
        if len(modes) != num_axes or modes[-1][0] == "G" or differs_between_replicas:
            return "placements are sharded across replicas, or gathered once a step"

    fits_mesh = not mesh or mesh in ((replica_size,), (num_replicas, replica_size))
    if not fits_mesh or num_replicas * replica_size != num_devices:
        return (
            f"logical_mesh={list(mesh)} does not divide {num_devices} devices into"
            f" {num_replicas} replicas"
        )

    allowed_inside = {"auto", "tensor"}
    if replica_size == 1:
        allowed_inside.add("data")
    if not set(kinds[:-1]) <= {"auto", "data"} or kinds[-1] not in allowed_inside:
        return f"parallel={options.parallel!r} is asked for"
    return pipeline_only_option(options)
