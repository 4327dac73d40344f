"""From a plan's stages to a running `Pipeline`: slices the micro-batched step, lowers this rank's
stages, connects all.

The stages' meshes, a `ParameterStore` (the caller shards it), then `build_pipeline`, once for each
shape of batch.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.inter_op.subgraph import slice_stage
from alpa_strategy.intra_op.build import batch_layout
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import COUNTERS
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.ir.plan import ParameterPlan, StagePlan, stage_ranks
from alpa_strategy.lower.codegen import LoweredStep, lower_stage
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.microbatch.transform import MicroStep
from alpa_strategy.pipeline.executor import Pipeline, PipelineSpec, SharedParameter
from alpa_strategy.pipeline.per_step_values import PerStepValues
from alpa_strategy.pipeline.stage_program import Span, StageInputs, StageProgram, Values
from alpa_strategy.pipeline.stage_worker import OwnStage
from alpa_strategy.runtime.mesh_parameters import MeshParameters
from alpa_strategy.schedules import actions
from alpa_strategy.sharding.cross_mesh import StageSpec


@dataclass(frozen=True)
class StagePlaces:
    """Where this rank runs its stages: the same for all pipelines of a job, whatever batches they
    are for.
    """

    meshes: Sequence[MeshComm | None]  # per stage this rank's mesh, None for stages of others
    randoms: Mapping[int, ShardedRandom]  # this rank's stages -> random streams (`stage_randoms`)
    device: torch.device  # this rank's
    cluster: ClusterSpec | None = None  # where given, cross-mesh transfers are chosen by its links
    compiler: Compiler | None = None  # of the stages, None: they are not compiled
    group: Any = None  # the ranks that run them; None: all of the job
    overlaps: bool = True  # see `lower`


def build_pipeline(
    module: nn.Module,
    micro: MicroStep,
    stages: Sequence[StagePlan],
    schedule: str,
    places: StagePlaces,
    stores: Mapping[int, MeshParameters],
    held: Sequence[Mapping[str, ParameterPlan]] | None = None,
) -> Pipeline:
    """The pipeline that runs `micro` under `stages`. Collective over the whole job.

    `Pipeline.step` takes the batch in the order of `micro.graph.batch`, `given` by the numbers of
    `micro.given`, and returns the values of `micro.graph.escaping`; see `MicroStep` for what
    prologue and epilogue add to them.

    Args:
        stages: in order, covering the ops of `micro.graph`.
        schedule: see `PipelineSpec`.
        stores: this rank's stages -> their parameters.
        held: per stage, name -> how it holds its parameters, this step's or not; by default those
            of `stages`.
    """
    graph = micro.graph
    graphs = [slice_stage(graph, *stage.ops) for stage in stages]
    specs = tuple(_stage_spec(micro, g, s) for g, s in zip(graphs, stages, strict=True))
    shared = _shared(
        graphs, stages, [stage.parameter_plans for stage in stages] if held is None else held
    )
    spec = PipelineSpec(micro, specs, schedule, shared, places.cluster)
    num_meshes = len({stage_ranks(stage) for stage in stages})
    orders = actions(schedule, num_meshes, micro.num_microbatches, len(stages) // num_meshes)
    if any(action.kind == "W" for order in orders for action in order):
        if places.compiler is not None:
            reason = f"{schedule} splits the backward, which compiled programs cannot: stages run uncompiled"
            warnings.warn(f"alpa: compile: {reason}", stacklevel=2)
        places = replace(places, compiler=None, overlaps=False)
    own: dict[int, OwnStage] = {}
    for index, (stage_graph, stage, mesh) in enumerate(
        zip(graphs, stages, places.meshes, strict=True)
    ):
        if mesh is None:
            continue
        program, per_step = _program(index, graph, stage, places, stores[index])
        # A stage hands over gradients of shared parameters that its own ops do not use here, too.
        names = {p.name for p in stage_graph.parameters} | {
            use[1] for s in shared for use in s.uses if use[0] == index
        }
        own[index] = OwnStage(
            program=program,
            store=stores[index],
            mesh=mesh,
            parameters={name: module.get_parameter(name) for name in sorted(names)},
            buffers={
                COUNTERS: {},
                **{b.name: module.get_buffer(b.name) for b in stage_graph.buffers},
            },
            per_step=per_step,
        )
    return Pipeline(spec, own, places.device, places.group)


def _program(
    index: int, graph: StepGraph, stage: StagePlan, places: StagePlaces, store: MeshParameters
) -> tuple[StageProgram, PerStepValues]:
    """What runs stage `index` of `graph` for a micro-batch, and what it makes of the parameters
    once per step.
    """
    random, mesh = places.randoms[index], places.meshes[index]
    assert mesh is not None
    lowered = lower_stage(
        graph, stage, mesh, places.device, random, places.compiler, places.overlaps
    )
    per_step = PerStepValues(lowered.per_step_programs)
    place = {leaf.value: i for i, leaf in enumerate(graph.batch)}

    def run(
        span: StepGraph, program: LoweredStep, regathers: bool, inputs: StageInputs
    ) -> tuple[Values, Values, Values]:
        """A `SpanProgram`: with inputs by value, what is made once per step, and ZeRO-3's
        regathering.
        """
        rows = [inputs.batch[place[leaf.value]] for leaf in span.batch]
        received = [inputs.received[value] for value in span.received]
        parameters = per_step.beside(inputs.parameters, inputs.buffers)
        with store.regather_hooks(stage.ahead_bytes) if regathers else nullcontext():
            return program(parameters, inputs.buffers, rows, received)

    spans: list[Span] = []
    used: set[str] = set()
    for span, program in lowered.spans:
        plans = [stage.parameter_plans[p.name] for p in span.parameters]
        regathers = any(plan.uses_shards or plan.is_fetched for plan in plans) or bool(
            stage.recomputed_ops
        )
        differentiable = tuple(value for value in program.made if graph.values[value].requires_grad)
        trained = lowered.per_step.parameters_of(span)
        of_span = partial(run, span, program, regathers)
        spans.append(Span(of_span, span.received, differentiable, frozenset(trained & used)))
        used |= trained
    return StageProgram(spans, graph.loss, random.bookmark if stage.remat else None), per_step


def stage_randoms(
    stages: Sequence[StagePlan], meshes: Sequence[MeshComm | None], seed: int
) -> dict[int, ShardedRandom]:
    """This rank's stages -> random streams: on a mesh of one device each stage would else draw as
    its neighbours do.
    """
    return {
        index: ShardedRandom(mesh, seed + 1_000_003 * index, own_stream=len(stages) > 1)
        for index, mesh in enumerate(meshes)
        if mesh is not None
    }


def _stage_spec(micro: MicroStep, graph: StepGraph, stage: StagePlan) -> StageSpec:
    num_axes = len(stage.logical_mesh)
    place = {leaf.value: i for i, leaf in enumerate(micro.graph.batch)}
    return StageSpec(
        ranks=stage_ranks(stage),
        mesh_shape=stage.logical_mesh,
        received={v: value_layout(stage.received[v]) for v in graph.received},
        sent={v: value_layout(stage.sent[v]) for v in graph.sent},
        batch={
            place[leaf.value]: value_layout(batch_layout(graph, leaf.batch_dim, num_axes))
            for leaf in graph.batch
        },
        escaping=graph.escaping,
        buffer_updates={
            b.name: b.update
            for b in graph.buffers
            if b.update is not None and b.name in micro.sequential_buffers
        },
    )


def _shared(
    graphs: Sequence[StepGraph],
    stages: Sequence[StagePlan],
    held: Sequence[Mapping[str, ParameterPlan]],
) -> tuple[SharedParameter, ...]:
    """Trainable parameters of the step that stages on different devices hold, whether all of them
    use it or not.
    """
    trained = {
        given.name: given
        for graph in graphs
        for given in graph.parameters
        if given.meta.requires_grad
    }
    shared: dict[tuple[tuple[int, str, Layout], ...], SharedParameter] = {}
    for given in trained.values():
        uses = tuple(
            (index, name, plans[name].layout)
            for index, plans in enumerate(held)
            for name in given.names
            if name in plans
        )
        if len({stage_ranks(stages[index]) for index, _, _ in uses}) > 1:
            shared.setdefault(uses, SharedParameter(given.meta.shape, given.meta.dtype, uses))
    return tuple(shared.values())
