"""Pins of a pipeline that cannot be met: each is one clear error, before anything is solved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from covering import slow_but
from models import MODELS

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.ir.plan import Plan, stage_ranks
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan
from alpa_strategy.recipe import resolve_target
from alpa_strategy.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]


def plan(model="mlp", rows=8, devices=4, cluster=None, choose=None, **options):
    torch.manual_seed(0)
    module = MODELS[model]()
    cluster = cluster or ClusterSpec.load(
        "pcie_8gpu", {"num_nodes": 1, "devices_per_node": devices}
    )
    options = {"batch_scope": "global", **options}
    batch = module.example_batch(rows * cluster.num_devices)
    return make_plan(module, batch, cluster, PlanOptions.from_user(**options), choose=choose)


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        ({"num_stages": 40}, "num_stages=40, but training_step has only 4 ops", "at most 4 stages"),
        (
            {"model": "gpt", "num_stages": 17, "devices": 4},
            "num_stages=17 cannot be met on 4 devices",
            "16",
        ),
        (
            {"model": "gpt", "num_stages": 5, "schedule": "1F1B"},
            "num_stages=5 cannot be met by schedule='1F1B' on 4 devices: it puts 1 stage on each"
            " mesh",
            "one of 2, 3, 4,",
        ),
        (
            {"num_stages": 2, "schedule": "ZBVZeroBubble", "devices": 2},
            "it puts 2 stages on each mesh, and all meshes are of one size",
            "one of 4",
        ),
        (
            {"schedule": "Interleaved1F1B", "devices": 1},
            "need at least 2 devices",
            "leave them out",
        ),
        (
            {
                "model": "gpt",
                "num_stages": 4,
                "num_microbatches": 2,
                "schedule": "ZBVZeroBubble",
                "devices": 2,
            },
            "num_microbatches=2 cannot be met: ZBVZeroBubble on 2 meshes needs at least 3",
            "1F1B",
        ),
        (
            {"schedule": "Interleaved1F1B", "devices": 3},
            "schedule='Interleaved1F1B' has at least 6 stages on 3 devices, but training_step has"
            " only 4 ops",
            "1F1B",
        ),
        (
            {"num_stages": 2, "num_microbatches": 2, "logical_mesh": [2], "devices": 2},
            "num_stages=2 cannot be met on 2 devices with logical_mesh=[2] by any schedule",
            "one of 1, or leave num_stages or logical_mesh out",
        ),
        (
            {"num_stages": 2, "placements": {"net.0.weight": "R* S0"}, "devices": 2},
            "num_stages=2 cannot be met on 2 devices with placements for meshes of 2 axes by any"
            " schedule",
            "leave placements out",
        ),
        (
            {"schedule": "GPipe", "logical_mesh": [2], "devices": 2},
            "this cannot be met by schedule='GPipe' on 2 devices with logical_mesh=[2]",
            "use more devices, or leave logical_mesh out",
        ),
        ({"num_microbatches": 3}, "num_microbatches=3 does not divide the 32 rows", ""),
    ],
)
def test_the_error_says_which_pin_and_what_can_be_had(options, problem, fix):
    with pytest.raises(PlanError) as caught:
        plan(**options)
    assert problem in caught.value.problem
    assert fix in caught.value.fix


def test_a_pattern_without_a_parameter_is_an_error_in_pipelines_too():
    with pytest.raises(OptionError, match=r"placements\['nothing.\*'\] matches no parameter"):
        plan(num_stages=2, placements={"nothing.*": "R*"})


def test_a_schedule_is_one_of_several_stages():
    with pytest.raises(
        OptionError, match="num_stages=1 leaves nothing for schedule='1F1B' to order"
    ):
        plan(num_stages=1, schedule="1F1B")
    assert len(plan(devices=2, schedule="1F1B").stages) == 2  # one would be faster


def test_notes_say_what_comes_with_the_number_of_micro_batches():
    """Stages that take turns where that is the fastest, and statistics of parts of a batch."""
    assert plan(devices=2, num_stages=2).notes == (
        "one micro-batch, so the stages work one after the other: more would take longer",
    )
    assert plan(devices=2, num_stages=2, num_microbatches=1).notes == ()
    (note,) = plan("convnet", devices=2, num_stages=2, num_microbatches=4).notes
    assert note.startswith("BatchNorm takes its statistics per micro-batch (1/4 of the batch)")


def test_a_schedule_of_many_stages_gets_as_many_layers():
    """Four ops are four layers where the schedule needs them, whatever the module's own parts."""
    made = plan(devices=2, schedule="ZBVZeroBubble", num_microbatches=4)
    assert len(made.stages) == 4


# One with a stage on each mesh, one with several, and one that folds back.
@pytest.mark.parametrize(
    "schedule", slow_but(SCHEDULES, ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"))
)
def test_what_the_error_offers_can_be_had(schedule):
    """Every number of stages that is offered is planned as asked."""
    with pytest.raises(PlanError) as caught:
        plan("gpt", devices=2, num_stages=9, schedule=schedule)
    offered = caught.value.fix.removeprefix("ask for one of ").partition(", or")[0]
    for number in map(int, offered.split(", ")):
        made = plan("gpt", devices=2, num_stages=number, schedule=schedule, num_microbatches=4)
        assert len(made.stages) == number


def test_a_stage_that_does_not_fit_is_named():
    with pytest.raises(PlanError) as caught:
        plan("gpt", num_stages=2, memory_limit="4KiB")
    text = str(caught.value)
    assert "no stages fit into 4.00 KiB a device" in text
    assert "of all layers, " in text
    assert "KiB a device on its best submesh" in text
    assert "raise memory_limit" in text


def test_recomputation_makes_fit_what_else_would_not():
    """Activations bind: with remat left open the solver recomputes, pinned to False nothing
    fits.
    """
    small = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    options = {
        "num_stages": 2,
        "num_microbatches": 8,
        "schedule": "GPipe",
        "rows": 64,
        "model": "gpt",
    }
    free = plan(cluster=small, memory_limit=float("inf"), remat=False, **options)
    kept = plan(cluster=small, memory_limit=float("inf"), remat=True, **options)
    assert not any(stage.remat for stage in free.stages)
    assert all(stage.remat for stage in kept.stages)
    assert kept.predicted.peak_bytes < free.predicted.peak_bytes
    between = (kept.predicted.peak_bytes + free.predicted.peak_bytes) / 2
    solved = plan(cluster=small, memory_limit=between, **options)
    assert any(stage.remat for stage in solved.stages)
    assert solved.predicted.peak_bytes <= between
    assert solved.predicted.step_seconds <= kept.predicted.step_seconds * (1 + 1e-3)
    assert replace(solved, stages=()).num_microbatches == 8


def names_of(stages):
    return [stage.layers for stage in stages]


def test_stages_hold_the_modules_that_are_named():
    chosen_plan = plan("gpt", stages=["blocks.0", "blocks.1"], num_microbatches=4, schedule="1F1B")
    assert names_of(chosen_plan.stages) == ["wte, wpe, blocks.0", "blocks.1, ln_f, head"]
    # As plans are shown, and where no solver would cut.
    chosen_plan = plan(
        "gpt", stages=["wte, wpe", "blocks.0-blocks.1", "ln_f, head"], num_microbatches=4
    )
    assert names_of(chosen_plan.stages) == ["wte, wpe", "blocks.0-blocks.1", "ln_f, head"]


def search_of(name: str, seconds: float) -> Callable[..., Plan]:
    return partial(resolve_target(f"searches.{name}", ROOT / "recipes"), seconds=seconds)


def test_other_searches_keep_to_the_stages_that_are_pinned():
    search = search_of("plan_megatron", 1.0)
    chosen_plan = plan(
        "gpt",
        stages=["wte, blocks.0.qkv", "blocks.0.proj, head"],
        num_microbatches=4,
        choose=search,
    )
    assert "blocks.0.qkv" not in chosen_plan.stages[1].layers
    assert chosen_plan.stages[0].ops[1] == chosen_plan.stages[1].ops[0]


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        ({"stages": ["block.0", "blocks.1"]}, "runs in a module 'block.0'", "blocks.0 or blocks.1"),
        ({"stages": ["blocks.0-2", "head"]}, "runs in a module 'blocks.2'", "blocks.1"),
        ({"stages": ["wte", "qkv"]}, "runs in a module 'qkv'", "blocks.0.qkv or blocks.1.qkv"),
        ({"stages": ["blocks.1-0", "head"]}, "'blocks.1-0' counts down", "blocks.0-1"),
        (
            {"stages": ["blocks.1", "blocks.0"]},
            "'blocks.0' does not run after 'blocks.1'",
            "in the order",
        ),
        (
            {"stages": ["blocks", "blocks.1"]},
            "'blocks.1' does not run after 'blocks'",
            "each in one stage",
        ),
        ({"stages": ["blocks.0"]}, "is no list of stages", "at least two"),
        ({"stages": ["blocks.0", " , "]}, "is no list of stages", "at least two"),
        (
            {"stages": ["blocks.0", "blocks.1"], "num_stages": 3},
            "but stages has 2 entries",
            "leave num_stages out",
        ),
    ],
)
def test_stages_that_cannot_be_met_are_one_error(options, problem, fix):
    with pytest.raises((PlanError, OptionError)) as error:
        plan("gpt", **options)
    assert problem in error.value.problem
    assert fix in error.value.fix


def places_of(found):
    return [
        (stage.layers, f"{stage.first_device}-{stage.first_device + math.prod(stage.submesh) - 1}")
        for stage in found.stages
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            {"device_map": {"wte.*": "0-1"}},
            [("wte, wpe, blocks.0", "0-1"), ("blocks.1, ln_f, head", "2-3")],
        ),
        (  # the embedding is the head's weight too: each use is pinned by its own name
            {"device_map": {"wte.*": [0], "head.*": 3}},
            [("wte", "0-0"), ("wpe, blocks.0-blocks.1, ln_f", "1-2"), ("head", "3-3")],
        ),
        pytest.param(
            {"device_map": {"blocks.*": "0-2"}, "num_microbatches": 4},
            [("wte, wpe, blocks.0-blocks.1", "0-2"), ("ln_f, head", "3-3")],
            marks=pytest.mark.slow,
        ),
        (
            {"device_map": {"blocks.*": "0-1", "blocks.1.*": "2-3"}, "num_microbatches": 4},
            [("wte, wpe, blocks.0", "0-1"), ("blocks.1, ln_f, head", "2-3")],
        ),
        (
            {
                "device_map": {"blocks.0.*": "0-1"},
                "stages": ["wte, blocks.0", "blocks.1, head"],
                "num_microbatches": 4,
            },
            [("wte, wpe, blocks.0", "0-1"), ("blocks.1, ln_f, head", "2-3")],
        ),
        pytest.param(
            {
                "device_map": {"wte.*": "0-1"},
                "schedule": "Interleaved1F1B",
                "num_microbatches": 4,
                "num_stages": 4,
            },
            ["0-1", "2-3", "0-1", "2-3"],
            marks=pytest.mark.slow,
        ),
        (
            {
                "device_map": {"wte.*": "0-1", "head.*": "0-1"},
                "schedule": "ZBVZeroBubble",
                "num_microbatches": 4,
            },
            ["0-1", "2-3", "2-3", "0-1"],
        ),
        (
            {
                "device_map": {"wte.*": "0-1", "head.*": "2-3"},
                "cluster": {"num_nodes": 2, "devices_per_node": 2},
                "num_microbatches": 4,
            },
            ["0-1", "2-3"],
        ),
    ],
)
def test_parameters_lie_on_the_devices_that_are_named(options, wanted):
    cluster = ClusterSpec.load(
        "pcie_8gpu", options.pop("cluster", {"num_nodes": 1, "devices_per_node": 4})
    )
    chosen_plan = plan("gpt", cluster=cluster, **options)
    places = places_of(chosen_plan)
    assert wanted in (places, [place for _, place in places])


def test_all_devices_are_one_stage():
    assert plan("gpt", device_map={"*": "0-3"}).stages == plan("gpt", num_stages=1).stages
    assert len(plan("gpt", device_map={"wte.*": "0-3"}, num_microbatches=4).stages) == 1


def test_pins_of_devices_cost_what_they_forbid():
    """No better than free stages; and what was solved freely is found again when it is pinned."""
    options = {"num_microbatches": 4, "num_stages": 2}
    free = plan("gpt", **options)
    again = {
        name: [*range(stage.first_device, stage.first_device + math.prod(stage.submesh))]
        for stage in reversed(free.stages)  # what both use counts by the names of the first
        for name in stage.parameter_plans
    }
    pinned = plan("gpt", device_map=again, **options)
    assert places_of(pinned) == places_of(free)
    assert pinned.predicted.step_seconds == pytest.approx(free.predicted.step_seconds)
    other = plan("gpt", device_map={"wte.*": 0}, **options)
    assert places_of(other)[0][1] == "0-0"
    assert other.predicted.step_seconds >= free.predicted.step_seconds * (1 - 1e-9)
    assert other.predicted.step_seconds * (1 - other.gap) <= other.predicted.step_seconds


def test_other_searches_keep_to_the_devices_that_are_pinned():
    for name in ("greedy", "mcmc"):
        chosen_plan = plan(
            "gpt",
            device_map={"head.*": "2-3"},
            num_microbatches=4,
            choose=search_of(f"plan_{name}", 0.3),
        )
        assert [place for layers, place in places_of(chosen_plan) if "head" in layers] == ["2-3"]
    with pytest.raises(PlanError):
        plan(
            "gpt",
            device_map={"head.*": "2-3"},
            num_microbatches=4,
            choose=search_of("plan_flexflow_like", 0.1),
        )


def test_named_devices_keep_their_order_where_links_differ():
    cube = ClusterSpec.load("p3_16xlarge_cube", {"num_nodes": 1})
    chosen_plan = plan("gpt", cluster=cube, device_map={"wte.*": "0-3"}, num_microbatches=4)
    assert stage_ranks(chosen_plan.stages[0]) == (0, 1, 2, 3)
    listed = replace(cube, order=(4, 5, 6, 7, 0, 1, 2, 3))
    chosen_plan = plan("gpt", cluster=listed, device_map={"wte.*": "4-7"}, num_microbatches=4)
    assert set(stage_ranks(chosen_plan.stages[0])) == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        (
            {"device_map": {"nothing.*": "0-1"}},
            "device_map['nothing.*'] matches no parameter",
            "wte.weight",
        ),
        (
            {"device_map": {"nothing.*": "0-3"}},
            "device_map['nothing.*'] matches no parameter",
            "wte.weight",
        ),
        (
            {"device_map": {"wte.*": [0, 2]}},
            "device_map['wte.*']=[0, 2] is no mesh",
            "name 1, 2, 3, 4 neighbours",
        ),
        (
            {"device_map": {"wte.*": "0-7"}},
            "is no mesh that a stage can have on devices 0 to 3",
            "neighbours",
        ),
        ({"device_map": {"wte.*": 9}}, "device_map['wte.*']=[9] is no mesh", "some neighbours"),
        (
            {"device_map": {"wte.*": "4-11"}, "devices": 8, "nodes": 2},
            "is no mesh that a stage can have on devices 0 to 15",
            "1, 2, 4 neighbours",
        ),
        (
            {"device_map": {"wte.*": "2-3", "head.*": "0-1"}},
            "lie so: wte on 2-3; wpe, blocks.0-blocks.1, ln_f anywhere; head on 0-1",
            "in the order",
        ),
        (
            {"device_map": {"wte.*": "0-2", "head.*": "2-3"}},
            "wte on 0-2; wpe, blocks.0-blocks.1, ln_f anywhere; head on 2-3",
            "",
        ),
        (
            {"device_map": {"*": "0-1"}},
            "on all 4 devices, lie so: wte to head on 0-1",
            "fewer pins",
        ),
        ({"device_map": {"wte.*": "0-1"}, "num_stages": 1}, "wte on 0-1; wpe", "num_stages"),
        (
            {"device_map": {"wte.*": 0, "head.*": 3}, "num_stages": 2},
            "wte on 0-0; wpe",
            "num_stages",
        ),
        ({"device_map": {"wte.*": "0-3"}, "schedule": "1F1B"}, "wte on 0-3; wpe", "schedule"),
        ({"device_map": {"wte.*": "0-3"}, "num_stages": 2}, "wte on 0-3; wpe", "num_stages"),
        (
            {"device_map": {"blocks.0.qkv.weight": 0, "blocks.0.qkv.bias": 1}},
            "blocks.0 on 0-0 and on 1-1",
            "fewer pins",
        ),
        (
            {
                "device_map": {"wte.*": "0-1", "blocks.1.qkv.*": "0-1"},
                "stages": ["blocks.0", "blocks.1"],
            },
            "wte on 0-1; wpe, blocks.0-blocks.1 anywhere; blocks.1 on 0-1",
            "stages",
        ),
        (
            {"device_map": {"wte.*": "0-1"}, "memory_limit": "4KiB", "num_microbatches": 4},
            "no stages fit into 4.00 KiB",
            "raise memory_limit",
        ),
    ],
)
def test_devices_that_cannot_be_had_are_one_error(options, problem, fix):
    nodes, devices = options.pop("nodes", 1), options.pop("devices", 4)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": nodes, "devices_per_node": devices})
    with pytest.raises((PlanError, OptionError)) as error:
        plan("gpt", cluster=cluster, **options)
    assert problem in error.value.problem
    assert error.value.problem.count("device_map") <= 1
    assert fix in error.value.fix


def test_what_a_step_is_made_of_counts_all_stages_of_a_mesh():
    """Two stages a mesh work in turn: the second's time is no waiting of the first's."""
    chosen_plan = plan("gpt", schedule="Interleaved1F1B", num_microbatches=4)
    own = [
        stage.predicted
        for stage in chosen_plan.stages
        if stage.first_device == chosen_plan.stages[0].first_device
    ]
    assert len(own) > 1
    whole = chosen_plan.predicted
    assert whole.compute_seconds >= 0.99 * sum(each.compute_seconds for each in own)
    assert (
        whole.compute_seconds + whole.communication_seconds + whole.optimizer_seconds
        <= whole.step_seconds
    )
