"""Decides what the programs of a plan do besides keeping its layouts (`ir/execution.py`).

It follows from the layouts and the step. Lowering decides nothing of it again: it writes what the
plan has, also where the plan file was edited.
"""

from dataclasses import replace

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.execution import Execution
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.sharding.per_step import not_per_step, per_step

_FIX = "correct it, or delete the stage's `execution`: it is then decided anew"


def with_execution(plan: Plan, graph: StepGraph) -> Plan:
    """Return a plan whose stages all have their `execution`.

    Those that have it keep it. Plans that were just solved have none, and those of files of an
    older version.

    Args:
        plan: the plan.
        graph: the step, or its micro-batch if there are several (`MicroStep.graph`).
    """
    stages = []
    for stage in plan.stages:
        if stage.execution is None:
            stage = replace(stage, execution=stage_execution(graph, stage, plan.is_pipelined))
        stages.append(stage)
    return replace(plan, stages=tuple(stages))


def stage_execution(graph: StepGraph, stage: StagePlan, is_pipelined: bool) -> Execution:
    """Return the execution of one stage of `graph`.

    Args:
        graph: of all stages.
        stage: its plan.
        is_pipelined: whether a pipeline runs it (`Plan.is_pipelined`). Else a program computes the
            full batch at once.
    """
    part = slice_stage(graph, *stage.ops)
    per_step_ops: tuple[str, ...] = ()
    if is_pipelined and not stage.recompute_per_microbatch:
        per_step_ops = tuple(part.ops[index].name for index in sorted(per_step(part).ops))
    return Execution(per_step_ops)


def check_execution(stage: StagePlan, part: StepGraph, where: str) -> None:
    """Check that a program with a stage's execution computes the stage.

    Args:
        stage: its plan, which has an execution.
        part: the ops of the stage.
        where: the stage in the plan, for the error.

    Raises:
        PlanError: it would compute something else, or cannot be written.
    """
    execution = stage.execution
    assert execution is not None
    for name in not_per_step(part, execution.per_step_ops):
        raise PlanError(
            f"{where}.execution.per_step_ops has {name!r}, which cannot run once per step", _FIX
        )
