"""The graphs of the programs that run a stage of micro-batches.

Some of its ops run once per step, the others for every micro-batch, in one program or in one for
each recompute segment. Planning and lowering both read them here.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.sharding.per_step import PerStep, per_step_of


@dataclass(frozen=True)
class SegmentGraph:
    """A program that runs for every micro-batch."""

    # Its ops. It sends what later stages read, and receives values of earlier segments as well.
    graph: StepGraph

    # Values that later recompute segments of the stage read.
    passed_on: tuple[int, ...]


@dataclass(frozen=True)
class StageGraphs:
    """The programs of a stage."""

    # All ops of the stage.
    stage: StepGraph

    # The work that is done once per step.
    once: PerStep

    # The rest, in order: one segment, or one for each recompute segment (`StagePlan.spans`).
    segments: tuple[SegmentGraph, ...]


def stage_graphs(step: StepGraph, stage: StagePlan, per_step_ops: Collection[str]) -> StageGraphs:
    """Return the graphs of a stage's programs.

    Args:
        step: of a micro-batch, all stages.
        stage: its plan; `execution` is not read.
        per_step_ops: names of the ops that run once per step.
    """
    stage_graph = slice_stage(step, *stage.ops)
    once = per_step_of(stage_graph, per_step_ops)
    graphs = []
    for span in stage.spans:
        graphs.append(_without(slice_stage(step, *span), per_step_ops, once.values))

    segments = []
    for number, graph in enumerate(graphs):
        read_later: set[int] = set()
        for later in graphs[number + 1 :]:
            read_later.update(later.received)
        passed_on = tuple(value for value in graph.sent if value in read_later)
        sent = tuple(value for value in graph.sent if value in stage_graph.sent)
        segments.append(SegmentGraph(replace(graph, sent=sent), passed_on))
    return StageGraphs(stage_graph, once, tuple(segments))


def _without(
    graph: StepGraph, names: Collection[str], per_step_values: Collection[int]
) -> StepGraph:
    """Return a recompute segment without the ops that run once per step.

    Args:
        graph: of the segment.
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
