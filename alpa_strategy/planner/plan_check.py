"""Whether a plan can compute anything but the step: every plan is checked here before it runs,
given or stored.

Independent of the planner on purpose: it asks the op rules (`sharding`) what each op may do, and
the graph what each stage reads, makes and hands on; nothing of costs, solvers or searches. A plan
file may be edited by hand, so what it says is a proposal. Ops whose operands and results are placed
as their rules offer, resharded between dual layouts, give the whole step's values and gradients
(docs/formulas.md#sharding-rules): that is all that has to hold. (`Plan.load` has seen to it that
all of a stage speaks of as many mesh axes.)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from alpa_strategy.capture.products import product_of
from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.build import boundary_layouts
from alpa_strategy.intra_op.memory_choices import can_be_offloaded, can_run_again
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.placement import DualLayout, dual_layout_to_str
from alpa_strategy.ir.plan import ParameterPlan, Plan, StagePlan, Storage, modes_text, stage_ranks
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.planner.execution import check_execution
from alpa_strategy.schedules import SCHEDULES, mesh_of, refusal
from alpa_strategy.sharding.strategies import axis_strategies, localize

_FIX = "undo the edit, or leave the file out: the run then makes a new plan"
_SHOWN = 8  # of an op's strategies, in the error


def check_plan(
    plan: Plan, graph: StepGraph, num_devices: int, external: Iterable[int] = ()
) -> None:
    """Check that `plan` computes `graph` on all of the job's devices.

    Args:
        graph: the step, or its micro-batch if there are several (`MicroStep.graph`).
        external: received values that no stage computes (`MicroStep.from_prologue`).

    Raises:
        PlanError: it does not.
    """
    stages = plan.stages
    _check_ops(stages, graph)
    check_devices(stages, num_devices)
    _check_schedule(plan)
    # Values that a stage may receive.
    available = set(external)
    # (ranks of the mesh, parameter) -> its layout there.
    stored: dict[tuple[tuple[int, ...], str], ParameterPlan] = {}
    for index, stage in enumerate(stages):
        where = f"stages[{index}]"
        part = slice_stage(graph, *stage.ops)
        _check_strategies(stage, part, where)
        _check_recomputed(stage, part, where)
        for parameter in part.parameters:
            how = _check_parameter(stage, parameter, where)
            if stored.setdefault((stage_ranks(stage), parameter.name), how) != how:
                raise PlanError(
                    f"{where} stores {parameter.name!r} otherwise than a stage on the same devices",
                    _FIX,
                )
        _check_boundary(stage.received, part.received, part, stage, f"{where}.received")
        _check_boundary(stage.sent, part.sent, part, stage, f"{where}.sent")
        missing = [value for value in part.received if value not in available]
        if missing:
            raise PlanError(
                f"{where} receives value {missing[0]}, which no earlier stage makes", _FIX
            )
        available.update(part.sent)
        if stage.execution is not None:
            check_execution(plan, index, graph)


def _check_ops(stages: Sequence[StagePlan], graph: StepGraph) -> None:
    """Raise PlanError unless the stages cover the ops once and in order."""
    starts = [stage.ops[0] for stage in stages]
    cuts = [0, *(stage.ops[1] for stage in stages)]
    is_contiguous = starts == cuts[:-1]
    is_increasing = sorted(set(cuts)) == cuts
    if not (is_contiguous and is_increasing and cuts[-1] == len(graph.ops)):
        shown = ", ".join("[{}, {})".format(*stage.ops) for stage in stages)
        raise PlanError(f"the stages hold ops {shown} of a step with {len(graph.ops)} ops", _FIX)


def check_devices(stages: Sequence[StagePlan], num_devices: int) -> None:
    """Check that every device is in one mesh, that logical meshes have as many devices, and that
    stages on a mesh have the same devices in the same order.

    Raises:
        PlanError: that is not true.
    """
    # (first device, last device + 1) -> the ranks of the mesh there.
    ranks_of_mesh: dict[tuple[int, int], tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        size = math.prod(stage.submesh)
        has_empty_dim = min((*stage.submesh, *stage.logical_mesh)) < 1
        if has_empty_dim or math.prod(stage.logical_mesh) != size:
            raise PlanError(
                f"stages[{index}] has {size} devices (submesh {list(stage.submesh)}) and the"
                f" logical mesh {list(stage.logical_mesh)}",
                "the product of both must be the same",
            )
        ranks = stage_ranks(stage)
        mesh = stage.first_device, stage.first_device + size
        if ranks_of_mesh.setdefault(mesh, ranks) != ranks or len(ranks) != size:
            raise PlanError(
                f"stages[{index}].devices are not {size}, or not those of other stages at its"
                " place",
                _FIX,
            )

    meshes = sorted(ranks_of_mesh)
    is_contiguous = all(mesh[1] == following[0] for mesh, following in pairwise(meshes))
    if not is_contiguous or meshes[0][0] != 0 or meshes[-1][1] != num_devices:
        shown = ", ".join(f"{first}-{last - 1}" for first, last in meshes)
        raise PlanError(
            f"the stages lie on devices {shown}, the job has {num_devices}",
            "start the job with as many devices, or leave the file out",
        )
    all_ranks = [rank for ranks in ranks_of_mesh.values() for rank in ranks]
    if sorted(all_ranks) != list(range(num_devices)):
        raise PlanError(
            f"the stages' devices are not the ranks 0 to {num_devices - 1}, each once", _FIX
        )


def _check_schedule(plan: Plan) -> None:
    """Raise PlanError unless the schedule can run the stages on the meshes that the plan has."""
    if len(plan.stages) == 1:
        return
    # Meshes are numbered by their first stage.
    meshes = list(dict.fromkeys(stage_ranks(stage) for stage in plan.stages))
    reason = refusal(plan.schedule, len(meshes), plan.num_microbatches)
    if reason is None:
        holders = [mesh_of(plan.schedule, len(meshes), index) for index in range(len(plan.stages))]
        per_mesh, rest = divmod(len(plan.stages), len(meshes))
        if [meshes.index(stage_ranks(stage)) for stage in plan.stages] != holders or rest:
            reason = f"the schedule {plan.schedule!r} has its stages on meshes {holders}"
        elif per_mesh not in SCHEDULES[plan.schedule].stages_per_mesh:
            reason = f"the schedule {plan.schedule!r} does not run {per_mesh} stages on a mesh"
    if reason is not None:
        raise PlanError(
            f"{len(plan.stages)} stages on {len(meshes)} meshes cannot run so: {reason}", _FIX
        )


def _check_strategies(stage: StagePlan, part: StepGraph, where: str) -> None:
    """Check that every op has one strategy per mesh axis, each offered by its rule.

    Later axes split the shards of earlier ones, on the device with the smallest shard: so were the
    strategies made.

    Args:
        part: graph of the stage.
        where: path of the stage in the plan, for the message.

    Raises:
        PlanError: an op has others.
    """
    mesh = stage.logical_mesh
    extra = sorted(set(stage.strategies) - {op.name for op in part.ops})
    if extra:
        raise PlanError(f"{where}.strategies has {extra[0]!r}, which is no op of that stage", _FIX)
    for op in part.ops:
        if op.name not in stage.strategies:
            raise PlanError(f"{where}.strategies says nothing of {op.name!r}", _FIX)
        strategies = stage.strategies[op.name]
        local = op.call
        for axis, strategy in enumerate(strategies):
            offered = axis_strategies(local, mesh[axis])
            if strategy not in offered:
                shown = ", ".join(f"`{choice}`" for choice in offered[:_SHOWN])
                if len(offered) > _SHOWN:
                    shown += ", ..."
                raise PlanError(
                    f"{where}.strategies[{op.name!r}]: `{strategy}` on mesh axis {axis}"
                    f" ({mesh[axis]} devices) is no way to compute {op.call.target_name} in shards",
                    f"use one of {shown}",
                )
            last = tuple(size - 1 for size in mesh[: axis + 1])
            local = localize(op.call, strategies[: axis + 1], mesh[: axis + 1], last).call


def _check_recomputed(stage: StagePlan, part: StepGraph, where: str) -> None:
    """Check that recomputed and offloaded results are of ops that can be recomputed alone, and
    chunked ones of matmuls.

    Args: as of `_check_strategies`.

    Raises:
        PlanError: one is not.
    """
    known = {op.name: op for op in part.ops}
    for name in stage.recomputed_ops:
        if name not in known or not can_run_again(known[name].call) or stage.remat:
            raise PlanError(
                f"{where}.recomputed or .stored has {name!r}, which cannot be recomputed by itself",
                _FIX,
            )
    for name, count in stage.num_chunks.items():
        is_matmul = name in known and product_of(known[name].call) is not None
        if not is_matmul or count < 2:
            raise PlanError(
                f"{where}.in_parts has {name!r}: {count}, expected a matmul and 2 or more", _FIX
            )
    both = set(stage.recomputed).intersection(stage.stored)
    if both:
        raise PlanError(f"{where}.recomputed and .stored both have {min(both)!r}", _FIX)


def _check_parameter(stage: StagePlan, parameter: ParameterInput, where: str) -> ParameterPlan:
    """Return the stage's plan of a parameter.

    Raises:
        PlanError: there is none, or the parameter cannot be stored so.
    """
    where = f"{where}.parameters[{parameter.name!r}]"
    names = [name for name in parameter.names if name in stage.parameter_plans]
    if not names:
        raise PlanError(f"{where} is missing: the stage uses this parameter", _FIX)
    plan = stage.parameter_plans[names[0]]
    reason = _why_not_stored(plan, parameter, stage.logical_mesh)
    if reason:
        raise PlanError(f"{where} is '{modes_text(plan.module_modes)}', but {reason}", _FIX)
    return plan


def _why_not_stored(
    plan: ParameterPlan, parameter: ParameterInput, mesh: tuple[int, ...]
) -> str | None:
    """Return why a parameter cannot be stored as planned; None if it can."""
    shape = parameter.meta.shape
    if plan.num_segments != parameter.num_segments:
        return f"the step sees it in {parameter.num_segments} segments"
    if any(mode.dim is not None and mode.dim >= len(shape) for mode in plan.modes):
        return f"it has {len(parameter.module_shape or shape)} dims"
    once = (Storage.REPLICATE, Storage.GATHER_ONCE)
    if not parameter.meta.requires_grad and any(mode.storage in once for mode in plan.modes):
        return "it has no gradient to reduce: write R or S<dim>"
    if plan.on_host and not can_be_offloaded(parameter):
        return "nothing of it can lie in host memory"
    # The last device has the smallest shard.
    last = tuple(size - 1 for size in mesh)
    if parameter.meta.num_elements and 0 in plan.layout.local_shape(shape, mesh, last):
        full_shape = list(parameter.module_shape or shape)
        return f"shape {full_shape} cannot be split so on a mesh of {list(mesh)}"
    return None


def _check_boundary(
    layouts: Mapping[int, DualLayout],
    wanted: Sequence[int],
    part: StepGraph,
    stage: StagePlan,
    where: str,
) -> None:
    """Check that `layouts` are of exactly the values that pass a boundary, full or in equal shards.

    Args:
        layouts: value -> its layout in the plan.
        wanted: the values that pass the boundary.
        part: graph of the stage.
        where: path of `layouts` in the plan, for the message.

    Raises:
        PlanError: they are not.
    """
    if set(layouts) != set(wanted):
        odd = sorted(set(layouts) ^ set(wanted))[0]
        raise PlanError(f"{where} {'has' if odd in layouts else 'lacks'} value {odd}", _FIX)
    for value, layout in layouts.items():
        if layout not in boundary_layouts(part.values[value], stage.logical_mesh):
            raise PlanError(
                f"{where}[{value}] is '{dual_layout_to_str(layout)}', which a value of shape "
                f"{list(part.values[value].shape)} cannot have on a mesh of"
                f" {list(stage.logical_mesh)}",
                "write R, or S<dim> of a dim that divides evenly",
            )
