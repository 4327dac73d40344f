"""Lowering: StepGraph + StagePlan -> this device's program on local tensors, with explicit
collectives.

The program is plain generated Python, one line an op, and every value is dropped after its last
use. So it is as fast as the user's code, readable in a traceback (`LoweredStep.source`), and
traceable by `torch.compile`. It never dispatches on layouts. `program_writer.py` writes it.
"""

from dataclasses import dataclass

import torch

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.lower.lowered_step import LoweredStep
from alpa_strategy.lower.program_writer import ProgramWriter, execution_of
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.sharding.per_step import PerStep
from alpa_strategy.sharding.stage_graphs import stage_graphs


def lower(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    compiler: Compiler | None = None,
) -> LoweredStep:
    """Write the program of the device at `mesh.coordinate`.

    Args:
        compiler: compiles segments of the program; None: nothing is compiled.
    """
    writer = ProgramWriter(
        step,
        stage,
        mesh,
        device,
        random,
        compiler=compiler,
    )
    return writer.program()


@dataclass(frozen=True)
class LoweredStage:
    """The programs of a stage that runs micro-batches."""

    # the values that are computed from the parameters alone, once per step
    per_step: PerStep
    # one program per derivation of `per_step`; each returns its values as `LoweredStep.passed_on`
    per_step_programs: tuple[LoweredStep, ...]
    # the programs that run for every micro-batch, one after the other, each with its graph: one, or
    # one for each recompute segment (`StagePlan.spans`). A segment's `received` includes the values
    # of earlier segments; it takes the per-step values as parameters `per_step_name(value)`.
    spans: tuple[tuple[StepGraph, LoweredStep], ...]


def lower_stage(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    compiler: Compiler | None = None,
) -> LoweredStage:
    """Write the programs of a stage of the micro-batched `step`: those that run once per step, and
    one per recompute segment. Args: as of `lower`.

    Programs that run once per step are not compiled.

    Raises:
        PlanError: the plan file is of a version that lacks the execution.
    """
    graphs = stage_graphs(step, stage, execution_of(stage).per_step_ops)
    per_step_programs: list[LoweredStep] = []
    layouts: dict[int, DualLayout] = {}
    for derivation in graphs.once.derivations:
        # Nothing leaves this graph but the values.
        graph = graphs.stage.part([graphs.stage.ops[index] for index in derivation.ops])
        writer = ProgramWriter(graph, stage, mesh, device, random)
        per_step_programs.append(writer.program(derivation.values))
        for value in derivation.values:
            layouts[value] = writer.layouts[value]

    spans: list[tuple[StepGraph, LoweredStep]] = []
    for segment in graphs.segments:
        writer = ProgramWriter(
            segment.graph,
            stage,
            mesh,
            device,
            random,
            made_before=layouts,
            per_step_values=graphs.once.values,
            compiler=compiler,
        )
        spans.append((segment.graph, writer.program(segment.passed_on)))
        for value in segment.passed_on:
            layouts[value] = writer.layouts[value]
    return LoweredStage(graphs.once, tuple(per_step_programs), tuple(spans))
