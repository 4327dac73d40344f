"""Builds a `Pipeline` for a plan's stages: slices the step of a micro-batch into stages, lowers
those of this rank, and connects all.

The caller makes the stages' meshes and a `ParameterStore`, which it shards, and then calls
`build_pipeline` once for each shape of batch.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.guards import COUNTERS
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.ir.plan import ParameterPlan, StagePlan, stage_ranks, stages_split_backward
from alpa_strategy.ir.stage_graph import batch_layout, slice_stage
from alpa_strategy.lower.codegen import lower_stage
from alpa_strategy.lower.lowered_step import LoweredStep
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.microbatch.transform import MicroStep
from alpa_strategy.pipeline.executor import Pipeline, PipelineSpec, SharedParameter
from alpa_strategy.pipeline.per_step_values import PerStepValues
from alpa_strategy.pipeline.stage_program import Span, StageInputs, StageProgram, Values
from alpa_strategy.pipeline.stage_worker import LocalStage
from alpa_strategy.runtime.mesh_parameters import MeshParameters
from alpa_strategy.sharding.cross_mesh import StageSpec


@dataclass(frozen=True)
class StageDevices:
    """The devices of this rank's stages, and how programs are made for them: the same for all
    pipelines of a job.
    """

    # For each stage this rank's mesh; None for stages on other ranks.
    meshes: Sequence[MeshComm | None]

    # Stages on this rank -> random streams (`stage_randoms`).
    randoms: Mapping[int, ShardedRandom]

    # Of this rank.
    device: torch.device

    # By whose links cross-mesh transfers are chosen; None: without their costs.
    cluster: ClusterSpec | None = None

    # Of the stages' programs; None: they are not compiled.
    compiler: Compiler | None = None

    # The ranks that run the stages; None: all of the job.
    group: Any = None


def build_pipeline(
    module: nn.Module,
    micro: MicroStep,
    stages: Sequence[StagePlan],
    schedule: str,
    places: StageDevices,
    stores: Mapping[int, MeshParameters],
    held: Sequence[Mapping[str, ParameterPlan]] | None = None,
) -> Pipeline:
    """Return the pipeline that runs `micro` under `stages`. Collective over all ranks that run it.

    `Pipeline.step` takes the batch in the order of `micro.graph.batch`, and the values of
    `micro.from_prologue` by their numbers. It returns the values of `micro.graph.escaping`;
    prologue and epilogue of `MicroStep` are not part of it. If the schedule splits the backward,
    stages run uncompiled, with a warning if a compiler was given.

    Args:
        module: the user's module.
        micro: the step of a micro-batch.
        stages: in order, covering the ops of `micro.graph`.
        schedule: a name of `schedules.SCHEDULES`.
        places: the devices of this rank's stages.
        stores: stages on this rank -> their parameters.
        held: for each stage, name -> plan of every parameter that it stores, in this step or not;
            by default those of `stages`.

    Raises:
        PlanError: the schedule cannot run this number of micro-batches on these meshes.
    """
    graph = micro.graph
    graphs = [slice_stage(graph, *stage.ops) for stage in stages]
    specs = tuple(_stage_spec(micro, g, s) for g, s in zip(graphs, stages, strict=True))
    if held is None:
        held = [stage.parameter_plans for stage in stages]
    shared = _shared(graphs, stages, held)
    spec = PipelineSpec(micro, specs, schedule, shared, places.cluster)
    if stages_split_backward(schedule, stages, micro.num_microbatches):
        if places.compiler is not None:
            reason = f"{schedule} splits the backward, which compiled programs cannot"
            warnings.warn(f"alpa: compile: {reason}: stages run uncompiled", stacklevel=2)
        places = replace(places, compiler=None)

    local_stages: dict[int, LocalStage] = {}
    for index, (stage_graph, stage, mesh) in enumerate(
        zip(graphs, stages, places.meshes, strict=True)
    ):
        if mesh is None:
            continue
        program, per_step = _program(index, graph, stage, places, stores[index])
        buffers = {COUNTERS: {}, **buffers_of(module, stage_graph)}
        names = _names_with_gradients(index, stage_graph, shared)
        local_stages[index] = LocalStage(
            program=program,
            store=stores[index],
            mesh=mesh,
            parameters={name: module.get_parameter(name) for name in names},
            buffers=buffers,
            per_step=per_step,
        )
    return Pipeline(spec, local_stages, places.device, places.group)


def buffers_of(module: nn.Module, step: StepGraph) -> dict[str, Any]:
    """Return the module's buffers that a step has, by name; parameters among them detached."""
    buffers: dict[str, Any] = {}
    for buffer in step.buffers:
        tensor = attrgetter(buffer.name)(module)
        buffers[buffer.name] = tensor.detach() if buffer.is_parameter else tensor
    return buffers


def _names_with_gradients(
    index: int, stage_graph: StepGraph, shared: Sequence[SharedParameter]
) -> list[str]:
    """Return the sorted names of the parameters of stage `index`.

    Shared parameters have a gradient on all of their stages, also on those whose ops do not use
    them.
    """
    names = {parameter.name for parameter in stage_graph.parameters}
    for parameter in shared:
        names |= {name for use_stage, name, _ in parameter.uses if use_stage == index}
    return sorted(names)


def _program(
    index: int, graph: StepGraph, stage: StagePlan, places: StageDevices, store: MeshParameters
) -> tuple[StageProgram, PerStepValues]:
    """Return the program of a stage for a micro-batch, and the values that it computes from its
    parameters once per step.

    Args:
        index: of the stage.
        graph: of a micro-batch, all stages.
        stage: its plan.
        places: the devices of this rank's stages.
        store: the stage's parameters.
    """
    random = places.randoms[index]
    mesh = places.meshes[index]
    assert mesh is not None
    lowered = lower_stage(graph, stage, mesh, places.device, random, places.compiler)
    per_step = PerStepValues(lowered.per_step_programs)
    index_in_batch = {leaf.value: position for position, leaf in enumerate(graph.batch)}

    def run(
        span: StepGraph, program: LoweredStep, regathers: bool, inputs: StageInputs
    ) -> tuple[Values, Values, Values]:
        """Run the program of a segment: a `SpanProgram` once the first arguments are bound."""
        samples = [inputs.batch[index_in_batch[leaf.value]] for leaf in span.batch]
        received = [inputs.received[value] for value in span.received]
        parameters = per_step.beside(inputs.parameters, inputs.buffers)
        with store.regather_hooks(stage.prefetched_bytes) if regathers else nullcontext():
            return program(parameters, inputs.buffers, samples, received)

    spans: list[Span] = []
    used: set[str] = set()
    for span, program in lowered.spans:
        plans = [stage.parameter_plans[p.name] for p in span.parameters]
        gathers_at_use = any(map(is_gathered_at_use, plans))
        regathers = gathers_at_use or bool(stage.recomputed_ops)
        differentiable = tuple(
            value for value in program.passed_on if graph.values[value].requires_grad
        )
        trained = lowered.per_step.parameters_of(span)
        of_span = partial(run, span, program, regathers)
        spans.append(Span(of_span, span.received, differentiable, frozenset(trained & used)))
        used |= trained
    return StageProgram(spans, graph.loss, random.bookmark if stage.remat else None), per_step


def is_gathered_at_use(plan: ParameterPlan) -> bool:
    """Whether each use of a parameter gathers it, or fetches it from host memory."""
    return plan.uses_shards or plan.is_fetched


def stage_randoms(
    stages: Sequence[StagePlan], meshes: Sequence[MeshComm | None], seed: int
) -> dict[int, ShardedRandom]:
    """Return stages on this rank -> random streams.

    Each stage has a seed of its own: on meshes of one device all stages would else draw the same
    numbers.

    Args:
        stages: of the plan.
        meshes: for each stage this rank's mesh; None for stages on other ranks.
        seed: of the job.
    """
    return {
        index: ShardedRandom(mesh, seed + 1_000_003 * index, own_stream=len(stages) > 1)
        for index, mesh in enumerate(meshes)
        if mesh is not None
    }


def _stage_spec(micro: MicroStep, graph: StepGraph, stage: StagePlan) -> StageSpec:
    """Return the description of a stage that every rank has.

    Args:
        micro: the step of a micro-batch.
        graph: of the stage.
        stage: its plan.
    """
    num_axes = len(stage.logical_mesh)
    index_in_batch = {leaf.value: position for position, leaf in enumerate(micro.graph.batch)}
    batch: dict[int, Layout] = {}
    for leaf in graph.batch:
        layout = value_layout(batch_layout(graph, leaf.batch_dim, num_axes))
        batch[index_in_batch[leaf.value]] = layout

    buffer_updates: dict[str, int] = {}
    for buffer in graph.buffers:
        if buffer.update is not None and buffer.name in micro.sequential_buffers:
            buffer_updates[buffer.name] = buffer.update

    return StageSpec(
        ranks=stage_ranks(stage),
        mesh_shape=stage.logical_mesh,
        received={v: value_layout(stage.received[v]) for v in graph.received},
        sent={v: value_layout(stage.sent[v]) for v in graph.sent},
        batch=batch,
        escaping=graph.escaping,
        buffer_updates=buffer_updates,
    )


def _shared(
    graphs: Sequence[StepGraph],
    stages: Sequence[StagePlan],
    held: Sequence[Mapping[str, ParameterPlan]],
) -> tuple[SharedParameter, ...]:
    """Return the trainable parameters of the step that stages on different devices store.

    Args:
        graphs: of the stages.
        stages: their plans.
        held: for each stage, name -> plan of every parameter that it stores, used or not.
    """
    trained: dict[str, ParameterInput] = {}
    for graph in graphs:
        for parameter_input in graph.parameters:
            if parameter_input.meta.requires_grad:
                trained[parameter_input.name] = parameter_input

    shared: dict[tuple[tuple[int, str, Layout], ...], SharedParameter] = {}
    for parameter_input in trained.values():
        uses: list[tuple[int, str, Layout]] = []
        for index, plans in enumerate(held):
            uses += [
                (index, name, plans[name].layout) for name in parameter_input.names if name in plans
            ]
        meshes = {stage_ranks(stages[index]) for index, _, _ in uses}
        if len(meshes) > 1:
            key = tuple(uses)
            shared.setdefault(
                key, SharedParameter(parameter_input.meta.shape, parameter_input.meta.dtype, key)
            )
    return tuple(shared.values())
