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
from alpa_strategy.sharding.strategies import is_random


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
        prefetched=prefetchable(step),
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
    """Write the programs of a stage of the micro-batched `step`.

    Programs that run once per step are not compiled. For the arguments see `lower`.
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
            prefetched=frozenset() if stage.remat else prefetchable(segment.graph),
            compiler=compiler,
        )
        spans.append((segment.graph, writer.program(segment.passed_on)))
        for value in segment.passed_on:
            layouts[value] = writer.layouts[value]
    return LoweredStage(graphs.once, tuple(per_step_programs), tuple(spans))


def prefetchable(step: StepGraph) -> frozenset[int]:
    """Return the batch's leaves, and values computed from them without parameters and randomness.

    Their reshardings are launched before the forward. For example, a mean over targets that are not
    ignored divides by their number among the samples of all devices. When the loss needs it, all
    devices would wait for the slowest; launched first, it has arrived long before.

    Values with more bytes than the batch are left out, as they would be stored for longer. So are
    values computed from these.
    """
    known = {leaf.value for leaf in step.batch}
    batch_bytes = sum(step.values[leaf.value].num_bytes for leaf in step.batch)
    constants = {constant.value for constant in step.constant_inputs}
    for op in step.ops:
        metas = [step.values[value] for value in op.results]
        is_small = all(meta.num_bytes <= batch_bytes for meta in metas)
        has_grad = any(meta.requires_grad for meta in metas)
        reads_batch = any(value in known for value in op.operands)
        reads_nothing_else = (known | constants).issuperset(op.operands)
        if not is_small or has_grad or not reads_batch or not reads_nothing_else:
            continue
        if not is_random(op.call):
            known.update(op.results)
    return frozenset(known)
