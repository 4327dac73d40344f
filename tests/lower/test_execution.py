"""What planning decides besides layouts is in the plan, and the programs are what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import MODELS
from proofs.thread_mesh import run_on_threads

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lower.codegen import LoweredStage, lower_stage
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
