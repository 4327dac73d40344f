"""A plan that passes the check computes the step: whatever is edited in it is refused, or gives the
same numbers.
"""

from __future__ import annotations

import random as python_random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from covering import in_tiers
from lowered_cases import captured, problem_of, random_assignment, run_lowered_stage, stage_of

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.placement import DualPlacement
from alpa_strategy.ir.plan import Fingerprint, ParameterMode, ParameterPlan, Plan, StagePlan
from alpa_strategy.planner.plan_check import check_plan

MESHES = [(2,), (4,), (2, 2)]
PLACEMENTS = ("R", "R*", "P", "S0", "S1", "S2")
MODES = ("R", "R*", "S0", "S1", "G0", "G1")


def plan_of(stage: StagePlan) -> Plan:
    return Plan(Fingerprint("", "", "", "", "", ""), (stage,), stage.predicted)


def edited(stage: StagePlan, rng: python_random.Random) -> StagePlan:
    """One thing changed, as a person with an editor might: an op's placement on an axis, or a
    parameter's mode.
    """
    if rng.random() < 0.3:
        name = rng.choice(sorted(stage.parameter_plans))
        plan = stage.parameter_plans[name]
        modes = list(plan.module_modes)
        modes[rng.randrange(len(modes))] = ParameterMode.parse(rng.choice(MODES))
        in_step = (
            tuple(mode.shifted(1) for mode in modes) if plan.num_segments > 1 else tuple(modes)
        )
        plans = {**stage.parameter_plans, name: ParameterPlan(in_step, plan.num_segments)}
        return replace(stage, parameter_plans=plans)
    name = rng.choice(sorted(stage.strategies))
    axes = list(stage.strategies[name])
    axis = rng.randrange(len(axes))
    sides = [list(axes[axis].inputs), list(axes[axis].outputs)]
    side = rng.choice([side for side in sides if side])
    side[rng.randrange(len(side))] = DualPlacement.parse(rng.choice(PLACEMENTS))
    implementation = axes[axis].implementation if rng.random() < 0.9 else None
    axes[axis] = AxisStrategy(tuple(sides[0]), tuple(sides[1]), implementation)
    return replace(stage, strategies={**stage.strategies, name: tuple(axes)})


@pytest.mark.parametrize(
    ("name", "mesh_shape"), in_tiers(product(("mlp", "gpt", "llama", "convnet"), MESHES))
)
def test_what_rules_offer_passes(name, mesh_shape):
    intra = problem_of(name, mesh_shape)
    for seed in range(20):
        stage = stage_of(intra, random_assignment(intra, python_random.Random(seed)), mesh_shape)
        check_plan(
            plan_of(stage), captured(name, int(np.prod(mesh_shape))).step, int(np.prod(mesh_shape))
        )


@pytest.mark.parametrize(("name", "mesh_shape"), in_tiers(product(("mlp", "gpt"), MESHES)))
def test_edited_plans_are_refused_or_right(name, mesh_shape):
    intra, case = problem_of(name, mesh_shape), captured(name, int(np.prod(mesh_shape)))
    rng = python_random.Random(hash(mesh_shape))
    refused = 0
    for _ in range(12):
        stage = edited(stage_of(intra, random_assignment(intra, rng), mesh_shape), rng)
        try:
            check_plan(plan_of(stage), case.step, int(np.prod(mesh_shape)))
        except PlanError:
            refused += 1
            continue
        run_lowered_stage(case, stage, mesh_shape)
    assert refused


def test_the_errors_name_the_place():
    intra, case = problem_of("mlp", (2,)), captured("mlp", 2)
    stage = stage_of(intra, [0] * len(intra.problem.choices), (2,))
    name = next(op for op in stage.strategies if op.startswith("linear"))
    wrong = {**stage.strategies, name: (AxisStrategy.parse("S0,R,R->S0"),)}  # the `*` dropped
    with pytest.raises(
        PlanError, match=rf"stages\[0\].strategies\['{name}'\].*is no way to compute"
    ):
        check_plan(plan_of(replace(stage, strategies=wrong)), case.step, 2)
    with pytest.raises(PlanError, match="says nothing of"):
        check_plan(plan_of(replace(stage, strategies={})), case.step, 2)
    with pytest.raises(PlanError, match="the job has 4"):
        check_plan(plan_of(stage), case.step, 4)
    with pytest.raises(PlanError, match="hold ops"):
        check_plan(plan_of(replace(stage, ops=(0, 3))), case.step, 2)
    with pytest.raises(PlanError, match="logical mesh"):
        check_plan(plan_of(replace(stage, logical_mesh=(10**9,))), case.step, 2)


@pytest.mark.parametrize(
    ("schedule", "places", "num_microbatches", "reason"),
    [
        ("Interleaved1F1B", (0, 1, 0, 1), 9, "micro-batches"),
        ("1F1B", (0, 1, 0, 1), 4, "does not run 2 stages on a mesh"),
        ("Interleaved1F1B", (0, 1, 1, 0), 4, r"has its stages on meshes \[0, 1, 0, 1\]"),
        ("NoSuch", (0, 1, 0, 1), 4, "is unknown"),
    ],
)
def test_a_schedule_must_be_able_to_run_the_stages(schedule, places, num_microbatches, reason):
    intra, step = problem_of("mlp", (2,)), captured("mlp", 2).step
    whole = replace(
        stage_of(intra, [0] * len(intra.problem.choices), (2,)), submesh=(1, 1), logical_mesh=(1,)
    )
    ends = [0, 1, 2, 3, len(step.ops)]
    stages = tuple(
        replace(whole, ops=(ends[i], ends[i + 1]), first_device=place)
        for i, place in enumerate(places)
    )
    plan = replace(
        plan_of(whole), stages=stages, schedule=schedule, num_microbatches=num_microbatches
    )
    with pytest.raises(PlanError, match=f"4 stages on 2 meshes cannot run so: .*{reason}"):
        check_plan(plan, step, 2)
