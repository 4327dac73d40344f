"""Decides what the programs of a plan do besides keeping its layouts (`ir/execution.py`).

It follows from the layouts and the step. Lowering decides nothing of it again: it writes what the
plan has, also where the plan file was edited.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.execution import Execution
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan, StagePlan, stages_split_backward
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.planner.early import can_be_early, early_reshardings
from alpa_strategy.planner.matmul_overlap import Group, MatmulOverlap, layouts_of_stage
from alpa_strategy.sharding.per_step import PerStep, not_per_step, per_step
from alpa_strategy.sharding.stage_graphs import SegmentGraph, StageGraphs, stage_graphs

_FIX = "correct it, or delete the stage's `execution`: it is then decided anew"


def with_execution(plan: Plan, graph: StepGraph) -> Plan:
    """Return a plan whose stages all have their `execution`.

    Those that have it keep it. Plans that were just solved have none, and those of files of an
    older version.

    Args:
        plan: the plan.
        graph: the step, or its micro-batch if there are several (`MicroStep.graph`).
    """
    overlaps = can_overlap(plan)
    stages = []
    for stage in plan.stages:
        if stage.execution is None:
            execution = stage_execution(graph, stage, plan.is_pipelined, overlaps)
            stage = replace(stage, execution=execution)
        stages.append(stage)
    return replace(plan, stages=tuple(stages))


def stage_execution(
    graph: StepGraph, stage: StagePlan, is_pipelined: bool, overlaps: bool = True
) -> Execution:
    """Return the execution of one stage of `graph`.

    Args:
        graph: of all stages.
        stage: its plan.
        is_pipelined: whether a pipeline runs it (`Plan.is_pipelined`). Else a program computes the
            full batch at once.
        overlaps: whether matmuls overlap with sums (`can_overlap`).
    """
    per_step_ops: tuple[str, ...] = ()
    if is_pipelined and not stage.recompute_per_microbatch:
        part = slice_stage(graph, *stage.ops)
        per_step_ops = tuple(part.ops[index].name for index in sorted(per_step(part).ops))
    graphs = _graphs(graph, stage, is_pipelined, per_step_ops)
    early: tuple[str, ...] = ()
    if not stage.remat:
        (segment,) = graphs.segments
        layouts = layouts_of_stage(graphs.stage, stage)
        early = early_reshardings(segment.graph, stage, layouts)
    if not overlaps:
        return Execution(per_step_ops, (), {}, early)
    return Execution(per_step_ops, *_overlap(graphs, stage), early)


def can_overlap(plan: Plan) -> bool:
    """Whether matmuls may overlap with sums: their backward is computed once, in one piece.

    The user's own code may differentiate an eager step twice.
    """
    if plan.is_eager:
        return False
    if len(plan.stages) == 1:
        return True
    return not stages_split_backward(plan.schedule, plan.stages, plan.num_microbatches)


def _graphs(
    graph: StepGraph, stage: StagePlan, is_pipelined: bool, per_step_ops: Collection[str]
) -> StageGraphs:
    """Return the graphs of a stage's programs; the step is one program without a pipeline."""
    if is_pipelined:
        return stage_graphs(graph, stage, per_step_ops)
    return StageGraphs(graph, PerStep(), (SegmentGraph(graph, ()),))


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

    possible: tuple[tuple[Group, ...], dict[str, int]] = (), {}
    if can_overlap(plan):
        graphs = _graphs(graph, stage, plan.is_pipelined, execution.per_step_ops)
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
