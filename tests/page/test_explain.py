"""What `explain` says of other layouts is what the planner finds with these layouts pinned."""

from __future__ import annotations

import glob
import pickle
import re
from dataclasses import replace

import pytest
from page.test_details import PIPELINE, planned

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.stage_solve import StageSolver
from alpa_strategy.ir.plan import Plan, parse_modes
from alpa_strategy.ir.value_names import without_indices
from alpa_strategy.planner.explain import explain
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.plan_stages import cost_on, stage_job, stage_request
from alpa_strategy.units import format_bytes

EXACT = 1e-6


def names_of(plan, count=3):
    (stage, *_) = plan.stages
    names = sorted(stage.parameter_plans)
    return names[:: max(1, len(names) // count)][:count]


@pytest.mark.parametrize("options", [(), (("logical_mesh", (2, 2)),), (("logical_mesh", (4,)),)])
def test_other_layouts_cost_what_the_planner_finds_with_them_pinned(options):
    plan, task = planned("gpt", options)
    (stage,) = plan.stages
    for name in names_of(plan, count=2):
        answer = explain(task, plan, name)
        for choice in answer.choices:
            if "R" in choice.layout.split():
                # To a user, `R` is any full copy.
                continue
            pinned = replace(
                task.options,
                logical_mesh=stage.logical_mesh,
                placements=((glob.escape(name), choice.layout),),
            )
            other = plan_one_stage(replace(task, options=pinned))
            assert other.predicted.step_seconds == pytest.approx(choice.seconds, rel=EXACT)
            assert other.predicted.peak_bytes == choice.num_bytes


def test_layouts_of_a_stage_cost_what_it_takes_with_them_pinned():
    plan, task = planned("gpt", PIPELINE)
    name = names_of(plan, 2)[-1]
    answer = explain(task, plan, name)
    job = stage_job(task, plan)
    request = stage_request(job, task, plan, answer.stage)
    of_plan = plan.stages[answer.stage].parameter_plans[name]
    for choice in answer.choices:
        modes = parse_modes(choice.layout)
        pinned = {**request.pinned, name: replace(of_plan, modes=modes)}
        solved = StageSolver(job).solve(replace(request, pinned=pinned))
        assert solved.plan.predicted.step_seconds == pytest.approx(choice.stage_seconds, rel=EXACT)


@pytest.mark.parametrize("options", [(("logical_mesh", (2, 2)),), PIPELINE])
def test_no_layout_is_cheaper_than_that_of_a_proved_plan(options):
    plan, task = planned("gpt", options)
    for name in [*names_of(plan, 2), next(iter(plan.stages[0].strategies))]:
        answer = explain(task, plan, name)
        assert answer.chosen.seconds == pytest.approx(plan.predicted.step_seconds, rel=EXACT)
        seconds = [choice.seconds for choice in answer.choices if choice.seconds is not None]
        assert seconds == sorted(seconds)
        if plan.gap == 0 and seconds:
            assert seconds[0] >= answer.chosen.seconds * (1 - EXACT)


@pytest.mark.parametrize("options", [(("logical_mesh", (2, 2)),), PIPELINE])
@pytest.mark.parametrize("most", [1, 3])
def test_the_best_layouts_are_those_of_all_that_are_solved(options, most):
    plan, task = planned("gpt", options)
    name = next(name for name in plan.stages[0].parameter_plans if name.endswith("down.weight"))
    memory_limit = 1.001 * plan.predicted.peak_bytes
    tight = replace(task, options=replace(task.options, memory_limit=memory_limit))
    for of_task in (task, tight):
        every = explain(of_task, plan, name)
        best = explain(of_task, plan, name, most)
        assert every.num_slower == 0
        assert best.num_slower + len(best.choices) == len(every.choices)
        assert best.num_slower > 0 or of_task is tight
        of_every = sorted(c.stage_seconds for c in every.choices if c.seconds is not None)
        solved = sorted(c.stage_seconds for c in best.choices if c.seconds is not None)
        assert solved[:most] == pytest.approx(of_every[:most], rel=EXACT)


def test_the_largest_part_of_a_collective_on_parameters_has_the_line_that_reads_them():
    plan, _ = planned("gpt", (("logical_mesh", (4,)), ("parallel", "zero3")))
    parameters = plan.stages[0].parameter_plans
    of_parameters = []
    for collective in plan.stages[0].collectives:
        name = collective.largest.removeprefix("the gradient of ").partition(",")[0].split(" ")[0]
        if name in {without_indices(parameter) for parameter in parameters}:
            of_parameters.append(collective.largest)
    assert of_parameters
    assert all(re.search(r", read by \w+ \(.*\w+\.py:\d+\)", text) for text in of_parameters)


def test_layouts_of_ops_that_a_named_plan_rules_out_are_counted_not_offered():
    plan, task = planned("gpt", (("logical_mesh", (4,)), ("parallel", "zero3")))
    (stage,) = plan.stages
    names = [name for name in stage.strategies if name.startswith(("embedding", "linear"))]
    counted = 0
    for name in names[:2]:
        answer = explain(task, plan, name)
        counted += any("ruled out by the options" in reason for reason in answer.reasons)
        for choice in answer.choices:
            assert choice.seconds is None or choice.seconds >= answer.chosen.seconds * (1 - EXACT)
    assert counted


@pytest.mark.parametrize("options", [(), PIPELINE])
def test_a_plan_takes_on_its_own_cluster_what_was_predicted(options):
    plan, task = planned("gpt", options)
    cost = cost_on(task, plan)
    assert cost.seconds == pytest.approx(plan.predicted.step_seconds, rel=EXACT)


def test_the_memory_of_one_of_several_stages_on_a_device_is_named_so():
    options = (("num_stages", 4), ("num_microbatches", 8), ("schedule", "Interleaved1F1B"))
    plan, task = planned("gpt", options)
    assert plan.stages[0].first_device == plan.stages[2].first_device
    answer = explain(task, plan, next(iter(plan.stages[0].parameter_plans)))
    together = sum(plan.stages[index].predicted.peak_bytes for index in (0, 2))
    assert answer.reasons[-1].startswith("The memory is that of stage 0 alone")
    assert format_bytes(together) in answer.reasons[-1]


def test_an_unknown_name_is_an_error_that_names_a_near_one():
    plan, task = planned("mlp")
    name = next(iter(plan.stages[0].parameter_plans))
    with pytest.raises(PlanError, match=f"did you mean '{name}'"):
        explain(task, plan, f"{name}s")


def test_a_name_with_a_star_stands_for_the_first_of_equal_layers():
    plan, task = planned("gpt")
    names = [name for name in plan.stages[0].parameter_plans if ".0." in name]
    assert explain(task, plan, names[0].replace(".0.", ".*.")).name == names[0]


def test_a_plan_explains_itself_until_it_is_stored(tmp_path):
    plan, task = planned("mlp")
    name = next(iter(plan.stages[0].parameter_plans))
    assert plan.explain(name) == explain(task, plan, name)
    for other in (Plan.from_dict(plan.to_dict()), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        with pytest.raises(PlanError, match="not known here"):
            other.explain(name)
