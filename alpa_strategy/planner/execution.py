"""Decides what the programs of a plan do besides keeping its layouts (`ir/execution.py`).

It follows from the layouts and the step. Lowering decides nothing of it again: it writes what the
plan has, also where the plan file was edited.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.execution import CompiledExecution, Execution
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.placement import DualLayout, dual_layout_to_str
from alpa_strategy.ir.plan import Plan, StagePlan, stage_ranks, stages_split_backward
from alpa_strategy.ir.stage_graph import leaving_layouts, slice_stage
from alpa_strategy.planner.compiled import can_be_split, compiled_execution, is_image_convolution
from alpa_strategy.planner.early import can_be_early, early_reshardings
from alpa_strategy.planner.matmul_overlap import Group, MatmulOverlap, layouts_of_stage
from alpa_strategy.sharding.per_step import PerStep, not_per_step, per_step
from alpa_strategy.sharding.stage_graphs import SegmentGraph, StageGraphs, stage_graphs

_FIX = "correct it, or delete the stage's `execution`: it is then decided anew"


def with_execution(plan: Plan, graph: StepGraph, is_compiled: bool = False) -> Plan:
    """Return a plan whose stages all have their `execution`.

    Those that have it keep it. Plans that were just solved have none, and files of an older version
    have none, or not all of its fields.

    Args:
        plan: the plan.
        graph: the step, or its micro-batch if there are several (`MicroStep.graph`).
        is_compiled: whether programs are compiled.
    """
    # Programs whose backward is split are not compiled.
    is_compiled = is_compiled and not _splits_backward(plan)
    overlaps = can_overlap(plan)
    stages = []
    for stage in plan.stages:
        if _lacks_fields(stage.execution, is_compiled):
            decided = stage_execution(graph, stage, plan.is_pipelined, overlaps, is_compiled)
            stage = replace(stage, execution=_completed(stage.execution, decided))
        stages.append(stage)
    return replace(plan, stages=tuple(stages))


def _lacks_fields(execution: Execution | None, is_compiled: bool) -> bool:
    """Whether a plan lacks fields of a stage's execution that its program needs, as one of an older
    version.

    Args:
        is_compiled: whether the program is to be compiled.
    """
    if execution is None or execution.leaving is None:
        return True
    return is_compiled and execution.compiled is None


def _completed(execution: Execution | None, decided: Execution) -> Execution:
    """Return the execution of a plan with the fields that it lacks from another one."""
    if execution is None:
        return decided
    leaving = decided.leaving if execution.leaving is None else execution.leaving
    compiled = decided.compiled if execution.compiled is None else execution.compiled
    return replace(execution, leaving=leaving, compiled=compiled)


def stage_execution(
    graph: StepGraph,
    stage: StagePlan,
    is_pipelined: bool,
    overlaps: bool = True,
    is_compiled: bool = False,
) -> Execution:
    """Return the execution of one stage of `graph`.

    Args:
        graph: of all stages.
        stage: its plan.
        is_pipelined: whether a pipeline runs it (`Plan.is_pipelined`). Else a program computes the
            full batch at once.
        overlaps: whether matmuls overlap with sums (`can_overlap`).
        is_compiled: whether programs are compiled.
    """
    per_step_ops: tuple[str, ...] = ()
    if is_pipelined and not stage.recompute_per_microbatch:
        part = slice_stage(graph, *stage.ops)
        per_step_ops = tuple(part.ops[index].name for index in sorted(per_step(part).ops))
    graphs = _graphs(graph, stage, is_pipelined, per_step_ops)
    layouts = layouts_of_stage(graphs.stage, stage)

    early: tuple[str, ...] = ()
    if not stage.remat:
        (segment,) = graphs.segments
        early = early_reshardings(segment.graph, stage, layouts)

    leaving = {}
    for value, possible in _possible_leaving(graphs, stage).items():
        computed = layouts[value]
        leaving[value] = computed if computed in possible else possible[0]

    fused_matmuls: tuple[Group, ...] = ()
    chunk_dims: dict[str, int] = {}
    if overlaps:
        fused_matmuls, chunk_dims = _overlap(graphs, stage)
    return Execution(
        per_step_ops=per_step_ops,
        fused_matmuls=fused_matmuls,
        chunk_dims=chunk_dims,
        early_reshardings=early,
        leaving=leaving,
        compiled=compiled_execution(_ops(graphs), stage) if is_compiled else None,
    )


def can_overlap(plan: Plan) -> bool:
    """Whether matmuls may overlap with sums: their backward is computed once, in one piece.

    The user's own code may differentiate an eager step twice.
    """
    return not plan.is_eager and not _splits_backward(plan)


def _splits_backward(plan: Plan) -> bool:
    """Whether the weights' gradients are computed separately."""
    if len(plan.stages) == 1:
        return False
    return stages_split_backward(plan.schedule, plan.stages, plan.num_microbatches)


def _graphs(
    graph: StepGraph, stage: StagePlan, is_pipelined: bool, per_step_ops: Collection[str]
) -> StageGraphs:
    """Return the graphs of a stage's programs; the step is one program without a pipeline."""
    if is_pipelined:
        return stage_graphs(graph, stage, per_step_ops)
    return StageGraphs(graph, PerStep(), (SegmentGraph(graph, ()),))


def _ops(graphs: StageGraphs) -> list[Op]:
    """Return the ops of the programs that are not run once per step."""
    return [op for segment in graphs.segments for op in segment.graph.ops]


def _possible_leaving(graphs: StageGraphs, stage: StagePlan) -> dict[int, tuple[DualLayout, ...]]:
    """Return value -> the layouts in which it may leave the step, for values that leave it.

    Args:
        graphs: the programs of a stage.
        stage: its plan.
    """
    num_axes = len(stage.logical_mesh)
    ranks = stage_ranks(stage)
    is_in_order = list(ranks) == sorted(ranks)
    possible = {}
    for segment in graphs.segments:
        graph = segment.graph
        for value in graph.escaping:
            possible[value] = leaving_layouts(graph, value, num_axes, is_in_order)
    return possible


def _overlap(
    graphs: StageGraphs,
    stage: StagePlan,
    wanted: tuple[Collection[Group], Mapping[str, int]] | None = None,
) -> tuple[tuple[Group, ...], dict[str, int]]:
    """Return the groups of fused matmuls, and the dims of chunks, of all programs of a stage.

    Args:
        graphs: its programs.
        stage: its plan.
        wanted: see `MatmulOverlap`.
    """
    layouts = layouts_of_stage(graphs.stage, stage)
    groups: list[Group] = []
    chunk_dims: dict[str, int] = {}
    for segment in graphs.segments:
        overlap = MatmulOverlap(segment, stage, layouts, graphs.once.values, wanted)
        groups += overlap.groups
        chunk_dims |= overlap.chunk_dims
    return tuple(groups), chunk_dims


def check_execution(plan: Plan, index: int, graph: StepGraph) -> None:
    """Check that programs with the execution of a stage compute the stage.

    Args:
        plan: the plan.
        index: of the stage, which has an execution.
        graph: the step, or its micro-batch if there are several.

    Raises:
        PlanError: they would compute something else, or cannot be written.
    """
    stage = plan.stages[index]
    execution = stage.execution
    assert execution is not None
    where = f"stages[{index}].execution"
    part = slice_stage(graph, *stage.ops)
    for name in not_per_step(part, execution.per_step_ops):
        raise PlanError(f"{where}.per_step_ops has {name!r}, which cannot run once per step", _FIX)

    early = set() if stage.remat else can_be_early(part)
    for name in execution.early_reshardings:
        if name not in early:
            raise PlanError(
                f"{where}.early_reshardings has {name!r}, which is not made of the batch alone, or"
                " is recomputed",
                _FIX,
            )

    graphs = _graphs(graph, stage, plan.is_pipelined, execution.per_step_ops)
    _check_overlap(execution, graphs, stage, can_overlap(plan), where)
    if execution.leaving is not None:
        _check_leaving(execution.leaving, _possible_leaving(graphs, stage), f"{where}.leaving")
    if execution.compiled is not None:
        _check_compiled(execution.compiled, _ops(graphs), stage, f"{where}.compiled")


def _check_overlap(
    execution: Execution, graphs: StageGraphs, stage: StagePlan, overlaps: bool, where: str
) -> None:
    """Check that the fused matmuls and the sums in chunks are possible.

    Args:
        overlaps: whether the stage's programs overlap matmuls with sums at all.
        where: path of `execution` in the plan, for the message.

    Raises:
        PlanError: one is not.
    """
    possible: tuple[tuple[Group, ...], dict[str, int]] = (), {}
    if overlaps:
        wanted = execution.fused_matmuls, execution.chunk_dims
        possible = _overlap(graphs, stage, wanted)
    for group in execution.fused_matmuls:
        if group not in possible[0]:
            raise PlanError(
                f"{where}.fused_matmuls has {list(group)}, which cannot be one line of the program",
                _FIX,
            )
    for name, dim in execution.chunk_dims.items():
        if possible[1].get(name) != dim:
            raise PlanError(
                f"{where}.chunk_dims has {name!r}: {dim}, but its result cannot be summed in such"
                " chunks",
                _FIX,
            )


def _check_leaving(
    leaving: Mapping[int, DualLayout], possible: Mapping[int, tuple[DualLayout, ...]], where: str
) -> None:
    """Check that exactly the values that leave the step have a layout, and one that is possible.

    Args:
        leaving: value -> its layout in the plan.
        possible: value -> the layouts in which it may leave.
        where: path of `leaving` in the plan, for the message.

    Raises:
        PlanError: they have not.
    """
    odd = sorted(leaving.keys() ^ possible.keys())
    if odd:
        verb = "has" if odd[0] in leaving else "lacks"
        raise PlanError(f"{where} {verb} value {odd[0]}", _FIX)
    for value, layout in leaving.items():
        if layout not in possible[value]:
            shown = " or ".join(f"'{dual_layout_to_str(other)}'" for other in possible[value])
            raise PlanError(
                f"{where}[{value}] is '{dual_layout_to_str(layout)}', expected {shown}", _FIX
            )


def _check_compiled(
    compiled: CompiledExecution, ops: Sequence[Op], stage: StagePlan, where: str
) -> None:
    """Check that the ops that `compiled` names are of the kind that it treats specially.

    Args:
        ops: of the stage.
        where: path of `compiled` in the plan, for the message.

    Raises:
        PlanError: one is not.
    """
    convolutions = {op.name for op in ops if is_image_convolution(op.call)}
    for name in compiled.channels_last:
        if name not in convolutions:
            raise PlanError(
                f"{where}.channels_last has {name!r}, which is no convolution of images", _FIX
            )
    batch_norms = {op.name for op in ops if can_be_split(op, stage)}
    for name in compiled.split_batch_norms:
        if name not in batch_norms:
            raise PlanError(
                f"{where}.split_batch_norms has {name!r}, which is no batch norm over the samples"
                " of several devices",
                _FIX,
            )
