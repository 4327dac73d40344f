"""Lowering: StepGraph + StagePlan -> this device's program on local tensors, with explicit
collectives.

The program is plain generated Python, one line an op, and every value is dropped after its last
use. So it is as fast as the user's code, readable in a traceback (`LoweredStep.source`), and
traceable by `torch.compile`. It never dispatches on layouts. `program_writer.py` writes it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.ir.plan import Execution, StagePlan
from alpa_strategy.ir.plan_file import FIX
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.lower.lowered_step import LoweredStep
from alpa_strategy.lower.program_writer import ProgramWriter
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.sharding.per_step import PerStep, per_step_of
from alpa_strategy.sharding.strategies import is_random


def lower(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    compiler: Compiler | None = None,
    overlaps: bool = True,
) -> LoweredStep:
    """Write the program of the device at `mesh.coordinate`.

    Args:
        compiler: compiles segments of the program; None: nothing is compiled.
        overlaps: whether matmuls are overlapped with collectives (`lower/overlapped_matmul.py`).
            Not possible if a backward is split in two, or differentiated.
    """
    writer = ProgramWriter(
        step,
        stage,
        mesh,
        device,
        random,
        prefetched=prefetchable(step),
        compiler=compiler,
        overlaps=overlaps,
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
    overlaps: bool = True,
) -> LoweredStage:
    """Write the programs of a stage of the micro-batched `step`.

    Programs that run once per step are not compiled. For the arguments see `lower`.
    """
    stage_graph = slice_stage(step, *stage.ops)
    once_per_step = per_step_of(stage_graph, _execution(stage).per_step_ops)

    per_step_programs: list[LoweredStep] = []
    layouts: dict[int, DualLayout] = {}
    for derivation in once_per_step.derivations:
        # Nothing leaves this graph but the values.
        graph = stage_graph.part([stage_graph.ops[index] for index in derivation.ops])
        writer = ProgramWriter(graph, stage, mesh, device, random)
        per_step_programs.append(writer.program(derivation.values))
        for value in derivation.values:
            layouts[value] = writer.layouts[value]

    per_step_ops = {stage_graph.ops[index].name for index in once_per_step.ops}
    graphs = []
    for span in stage.spans:
        span_graph = slice_stage(step, *span)
        graphs.append(_without(span_graph, per_step_ops, once_per_step.values))

    spans: list[tuple[StepGraph, LoweredStep]] = []
    for number, graph in enumerate(graphs):
        read_later: set[int] = set()
        for later in graphs[number + 1 :]:
            read_later.update(later.received)
        passed_on = tuple(value for value in graph.sent if value in read_later)
        sent = tuple(value for value in graph.sent if value in stage_graph.sent)
        graph = replace(graph, sent=sent)
        writer = ProgramWriter(
            graph,
            stage,
            mesh,
            device,
            random,
            made_before=layouts,
            per_step_values=once_per_step.values,
            prefetched=frozenset() if stage.remat else prefetchable(graph),
            compiler=compiler,
            overlaps=overlaps,
        )
        spans.append((graph, writer.program(passed_on)))
        for value in passed_on:
            layouts[value] = writer.layouts[value]
    return LoweredStage(once_per_step, tuple(per_step_programs), tuple(spans))


def _execution(stage: StagePlan) -> Execution:
    """Return what planning has decided on a stage's programs.

    Raises:
        PlanError: nothing.
    """
    if stage.execution is None:
        raise PlanError("the plan lacks the `execution` of a stage", FIX)
    return stage.execution


def _without(
    graph: StepGraph, names: Collection[str], per_step_values: Collection[int]
) -> StepGraph:
    """A recompute segment without the ops that run once per step.

    Args:
        names: of these ops.
        per_step_values: their results that the segment reads.
    """
    ops = tuple(op for op in graph.ops if op.name not in names)
    read = set(graph.escaping)
    for op in ops:
        read.update(op.operands)
    read -= set(per_step_values)
    received = tuple(value for value in graph.received if value in read)
    return replace(graph, ops=ops, received=received)


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
