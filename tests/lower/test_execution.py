"""What planning decides besides layouts is in the plan, and the programs are what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import MODELS
from proofs.thread_mesh import run_on_threads
from torch import nn

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.execution import CompiledExecution
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, shard
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lower.codegen import LoweredStage, lower, lower_stage
from alpa_strategy.lower.segments import Compiler
from alpa_strategy.microbatch.transform import MicroStep, microbatch
from alpa_strategy.planner.execution import with_execution
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

META = torch.device("meta")
ADAM = OptimizerInfo(state_bytes=16)


@cache
def step_of(name: str, world_size: int = 2) -> StepGraph:
    """A step under bfloat16 autocast, which casts weights."""
    module = MODELS[name]()
    batch = module.example_batch(8, torch.Generator().manual_seed(0))
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    return capture_step(module, batch, world_size=world_size, context=context)


@cache
def planned(name: str, **options: object) -> tuple[Plan, MicroStep]:
    """A plan on two devices, and its micro-batches."""
    step = step_of(name)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    plan = choose_plan(PlanTask(step, cluster, PlanOptions(**options), ADAM))
    return plan, microbatch(step, plan.num_microbatches, 2)


STAGES = {"num_stages": 2, "num_microbatches": 2}
RECOMPUTED = {"num_stages": 1, "num_microbatches": 2, "remat": True}


def lowered(plan: Plan, graph: StepGraph) -> list[LoweredStage]:
    """The programs of each stage on its first device."""
    stages = []
    for stage in plan.stages:
        devices = run_on_threads(
            stage.logical_mesh,
            lambda mesh, stage=stage: lower_stage(graph, stage, mesh, META, ShardedRandom(mesh, 0)),
        )
        stages.append(devices[0])
    return stages


def texts(plan: Plan, graph: StepGraph) -> list[str]:
    """The text of every program."""
    sources = []
    for stage in lowered(plan, graph):
        programs = [*stage.per_step_programs, *(program for _, program in stage.spans)]
        sources += [program.source for program in programs]
    return sources


def with_stage(plan: Plan, **fields: object) -> Plan:
    """The plan with other fields in the execution of its first stage."""
    first, *others = plan.stages
    first = replace(first, execution=replace(first.execution, **fields))
    return replace(plan, stages=(first, *others))


@pytest.mark.parametrize("options", [STAGES, RECOMPUTED], ids=["stages", "remat"])
def test_a_stored_plan_is_lowered_to_the_same_programs(options):
    plan, micro = planned("gpt", **options)
    stored = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert texts(stored, micro.graph) == texts(plan, micro.graph)


def test_a_plan_of_an_older_file_gets_the_same_execution():
    plan, micro = planned("gpt", **STAGES)
    data = plan.to_dict()
    for stage in data["stages"]:
        del stage["execution"]
    older = Plan.from_dict(json.loads(json.dumps(data)))
    assert "execution" not in older.to_dict()["stages"][0]
    assert with_execution(older, micro.graph) == plan


def test_a_stage_without_execution_is_not_lowered():
    plan, micro = planned("gpt", **STAGES)
    stages = tuple(replace(stage, execution=None) for stage in plan.stages)
    with pytest.raises(PlanError, match="`execution`"):
        texts(replace(plan, stages=stages), micro.graph)


def test_ops_run_once_per_step_if_the_plan_says_so():
    plan, micro = planned("gpt", **STAGES)
    named = plan.stages[0].execution.per_step_ops
    assert named
    stage = lowered(plan, micro.graph)[0]
    assert len(stage.per_step_programs) == len(stage.per_step.derivations) > 1

    fewer = with_stage(plan, per_step_ops=named[:-1])
    check_plan(fewer, micro.graph, 2, micro.from_prologue)
    changed = lowered(fewer, micro.graph)[0]
    assert len(changed.per_step_programs) == len(stage.per_step_programs) - 1
    assert f"f_{named[-1]}(" not in stage.spans[0][1].source
    assert f"f_{named[-1]}(" in changed.spans[0][1].source

    none = lowered(with_stage(plan, per_step_ops=()), micro.graph)[0]
    assert not none.per_step_programs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("per_step_ops", ("nothing",), "per_step_ops has 'nothing'"),
        ("per_step_ops", ("embedding",), "per_step_ops has 'embedding'"),
    ],
)
def test_an_execution_that_is_impossible_is_refused(field, value, message):
    plan, micro = planned("gpt", **STAGES)
    with pytest.raises(PlanError, match=message):
        check_plan(with_stage(plan, **{field: value}), micro.graph, 2, micro.from_prologue)


@cache
def planned_convnet(**options: object) -> tuple[Plan, StepGraph]:
    """A plan of one stage on two devices, whose batch norms see the samples of both, and the
    step.
    """
    module = MODELS["convnet"](channels=64, image_size=128)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    batch = module.example_batch(8, torch.Generator().manual_seed(0))
    step = capture_step(module, batch, world_size=2)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    return choose_plan(PlanTask(step, cluster, PlanOptions(**options), ADAM)), step


def source(plan: Plan, step: StepGraph, compiler: Compiler | None = None) -> str:
    """The program of the only stage on its first device."""
    stage = plan.stages[0]

    def on_device(mesh):
        return lower(step, stage, mesh, META, ShardedRandom(mesh, 0), compiler).source

    return run_on_threads(stage.logical_mesh, on_device)[0]


def test_values_leave_in_the_layouts_of_the_plan():
    step = step_of("gpt")
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    plan = choose_plan(PlanTask(step, cluster, PlanOptions(parallel="data"), ADAM))
    leaving = plan.stages[0].execution.leaving
    assert leaving.keys() == set(step.escaping)
    assert leaving[step.loss] == (PARTIAL,)
    summed = with_stage(plan, leaving=leaving | {step.loss: (INVARIANT,)})
    check_plan(summed, step, 2)
    assert source(summed, step).count("reshard_") == source(plan, step).count("reshard_") + 1

    for wrong in (
        leaving | {step.loss: (shard(0),)},
        leaving | {99_999: (INVARIANT,)},
        {value: layout for value, layout in leaving.items() if value != step.loss},
    ):
        with pytest.raises(PlanError, match=r"leaving.* (expected 'R' or 'P'|(has|lacks) value)"):
            check_plan(with_stage(plan, leaving=wrong), step, 2)


def test_compiled_programs_do_what_the_plan_says():
    plan, step = planned_convnet(parallel="data", compile=True)
    compiled = plan.stages[0].execution.compiled
    assert len(compiled.channels_last) == len(compiled.split_batch_norms) == 2
    compiler = Compiler({"backend": "eager"})
    fewer = CompiledExecution(compiled.channels_last[:1], compiled.split_batch_norms[:1])
    changed = with_stage(plan, compiled=fewer)
    check_plan(changed, step, 2)

    def exchanges(which: Plan) -> int:
        return source(which, step, compiler).count("= exchange_")

    assert exchanges(plan) == 2
    assert exchanges(changed) == 1
    assert "exchange_" not in source(plan, step)

    for wrong in (
        CompiledExecution(compiled.split_batch_norms, ()),
        CompiledExecution((), compiled.channels_last),
    ):
        with pytest.raises(PlanError, match=r"compiled\.(channels_last|split_batch_norms) has"):
            check_plan(with_stage(plan, compiled=wrong), step, 2)


@pytest.mark.parametrize("lacks", ["leaving", "compiled"])
def test_a_file_without_a_field_of_the_execution_gets_it(lacks):
    plan, step = planned_convnet(parallel="data", compile=True)
    data = plan.to_dict()
    del data["stages"][0]["execution"][lacks]
    older = Plan.from_dict(json.loads(json.dumps(data)))
    assert with_execution(older, step, is_compiled=True) == plan
    with pytest.raises(PlanError, match=rf"execution\.{lacks}"):
        source(older, step, Compiler({"backend": "eager"}))


def test_a_plan_of_a_run_that_does_not_compile_has_nothing_compiled():
    plan, _ = planned_convnet(parallel="data")
    assert plan.stages[0].execution.compiled is None
    assert "compiled" not in plan.to_dict()["stages"][0]["execution"]
