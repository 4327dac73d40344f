"""Twenty random parameters of five plans: what `explain` says of the second-best layout is what the
planner finds with that layout pinned.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pipeline_models
import pytest
import recipe_models
import torch
from models import MODELS
from page.test_details import PIPELINE

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.plan_words import plan_words
from alpa_strategy.inter_op.stage_solve import StageSolver
from alpa_strategy.ir.plan import parse_modes
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.explain import explain
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.plan_stages import stage_job, stage_request, step_with
from alpa_strategy.planner.planner import captured_task, plan_captured

assert pipeline_models.MODELS
assert recipe_models.MODELS

EXACT = 1e-6
SEED = 20261129
MESH = {"logical_mesh": (2, 2)}
# Each device stores one of the four experts.
EXPERTS = {"*.fc": "S0 S0", "*.proj": "S0 S0"}
PLANS: dict[str, tuple[str, dict]] = {
    "zero": ("gpt", {"logical_mesh": (4,)}),
    "tensor": ("llama", {**MESH, "parallel": ("data", "tensor")}),
    "experts": ("recipe_moe", {**MESH, "placements": EXPERTS}),
    "pipeline": ("gpt", dict(PIPELINE)),
    "resnet": ("resnet", MESH),
}
PER_PLAN = 4


@cache
def plan_of(kind):
    """A plan on four devices with its task."""
    torch.manual_seed(0)
    model, options = PLANS[kind]
    module = MODELS[model]()
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})
    batch = module.example_batch(8)
    captured = captured_task(module, batch, cluster, PlanOptions.from_user(**options))
    return plan_captured(captured), captured.task


@pytest.mark.slow
def test_the_plans_are_what_they_are_called():
    words = {kind: plan_words(plan_of(kind)[0]) for kind in PLANS}
    assert "ZeRO" in words["zero"]
    assert "tensor parallel" in words["tensor"]
    assert "expert parallel" in words["experts"]
    assert "2 pipeline stages" in words["pipeline"]
    assert "data parallel" in words["resnet"]


def seconds_with_pin(plan, task, answer):
    """Seconds of a step that the planner finds with the second-best layout pinned."""
    name = answer.name
    second = answer.choices[0]
    stage = plan.stages[answer.stage]
    on_host = second.layout.endswith(" on host")
    modes = parse_modes(second.layout.removesuffix(" on host"))
    # Fused projections have one more dim in the step than in the module.
    shift = int(stage.parameter_plans[name].num_segments > 1)
    modes = tuple(mode.shifted(shift) for mode in modes)
    of_plan = replace(stage.parameter_plans[name], modes=modes, on_host=on_host)
    if not plan.is_pipelined:
        options = replace(task.options, logical_mesh=stage.logical_mesh)
        other = plan_one_stage(replace(task, options=options), {name: of_plan})
        return other.predicted.step_seconds
    job = stage_job(task, plan)
    request = stage_request(job, task, plan, answer.stage)
    request = replace(request, pinned={**request.pinned, name: of_plan})
    solved = StageSolver(job).solve(request)
    assert solved.plan.predicted.step_seconds == pytest.approx(second.stage_seconds, rel=EXACT)
    return step_with(job, plan, answer.stage, solved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
def test_the_second_best_costs_what_the_planner_finds_with_it_pinned(kind):
    plan, task = plan_of(kind)
    names = sorted({name for stage in plan.stages for name in stage.parameter_plans})
    chooser = random.Random(f"{SEED} {kind}")
    chooser.shuffle(names)
    compared = []
    for name in names:
        answer = explain(task, plan, name)
        if not answer.choices or answer.choices[0].seconds is None:
            # The options leave no other layout.
            continue
        found = seconds_with_pin(plan, task, answer)
        assert found == pytest.approx(answer.choices[0].seconds, rel=EXACT), (name, answer)
        compared.append(name)
        if len(compared) == PER_PLAN:
            break
    assert len(compared) == PER_PLAN
