"""One stage or several: what is predicted to be faster, unless the options say; interrupted
planning goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from covering import slow_but
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.logical_mesh import CommTable
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import modes_text
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner import pipeline_search, planner
from alpa_strategy.planner.planner import MARGIN, choose_plan, make_plan, seconds_with_overlap
from alpa_strategy.planner.task import PlanTask


def cluster(bandwidth: float) -> ClusterSpec:
    """2 nodes of 1 device with `bandwidth` bytes/s between them."""
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 2, "devices_per_node": 1})
    return replace(spec, inter_node=replace(spec.inter_node, bandwidth=bandwidth))


def plan(rows: int, where: float | ClusterSpec, **options):
    """A tower of wide linears; `rows` of the global batch."""
    spec = where if isinstance(where, ClusterSpec) else cluster(where)
    with torch.device("meta"):
        module = MODELS["mlp"](d_in=2048, d_hidden=2048, d_out=2048, num_layers=8)
        batch = (torch.empty(rows, 2048), torch.empty(rows, 2048))
    return make_plan(module, batch, spec, PlanOptions(batch_scope="global", **options))


def test_a_pipeline_wins_where_the_network_binds():
    one, best = plan(2048, 1e10, num_stages=1), plan(2048, 1e10)
    assert (len(one.stages), one.num_microbatches) == (1, 1)
    assert {stage.first_device for stage in best.stages} == {0, 1}
    assert best.predicted.step_seconds <= (1 - MARGIN) * seconds_with_overlap(one)
    assert best.baselines["one stage"] == pytest.approx(one.predicted.step_seconds)
    assert any("a pipeline" in note for note in best.notes)


def test_one_stage_stays_where_the_network_is_fast():
    best = plan(16384, 1e12)
    assert (len(best.stages), best.num_microbatches) == (1, 1)
    assert any("no pipeline" in note for note in best.notes)
    assert "pipelines" not in best.solver_seconds, "no time is spent on what cannot win"


def test_seconds_of_searches_without_a_plan_are_counted(monkeypatch):
    monkeypatch.setattr(planner, "NOTICEABLE_SECONDS", 0.1)

    def slowly(task: PlanTask):
        time.sleep(0.3)
        return choose_plan(task)

    module = MODELS["mlp"]()
    options = PlanOptions(batch_scope="global")
    chosen = make_plan(module, module.example_batch(16), cluster(1e10), options, choose=slowly)
    assert chosen.solver_seconds["other searches"] >= 0.3


def test_micro_batches_alone_are_not_for_speed():
    """Short ops are timed on a warmer cache: what one stage seems to gain by them is not there,
    stages are.
    """
    spec = cluster(2e10)
    with torch.device("meta"):
        module = MODELS["mlp"](d_in=2048, d_hidden=2048, d_out=2048, num_layers=8)
        step = capture_step(
            module, (torch.empty(512, 2048), torch.empty(512, 2048)), batch_scope="global"
        )
    task = PlanTask(step, spec, PlanOptions(batch_scope="global"), OptimizerInfo())
    warm = replace(
        spec.device, launch_seconds=0.0, memory_bandwidth=20 * spec.device.memory_bandwidth
    )
    best = choose_plan(replace(task, stage_costs=lambda: RooflineCosts(warm)))
    assert {stage.first_device for stage in best.stages} == {0, 1}
    assert best.num_microbatches > 1


@pytest.mark.parametrize(
    "options", [{"parallel": "data"}, {"logical_mesh": (2,)}, {"num_microbatches": 1}], ids=str
)
def test_options_that_speak_of_one_stage_keep_it(options):
    best = plan(2048, 2e10, **options)
    assert (len(best.stages), best.num_microbatches) == (1, 1)


@pytest.mark.parametrize("bandwidth", [1e11, 1.5e10])
def test_reduction_hides_behind_the_backward_at_most(bandwidth):
    data = plan(4096, bandwidth, parallel="data", logical_mesh=(2,))
    reduction = sum(c.seconds for c in data.collectives() if c.phase == "step")
    hidden = data.predicted.step_seconds - seconds_with_overlap(data)
    assert reduction > 0
    assert hidden == pytest.approx(min(reduction, 2 / 3 * data.predicted.compute_seconds))


def test_what_hides_behind_the_backward_is_not_paid_for():
    """All-reduces so dear that ZeRO's two halves add up to less, but they run overlapped with the
    backward and it has time.
    """
    slow = replace(
        cluster(2e10), tables=(CommTable("all_reduce", 2, 1, ((2**20, 1e-4), (2**30, 1e-1))),)
    )
    best, solved = plan(8192, slow), plan(8192, slow, logical_mesh=(2,))
    assert {modes_text(p.modes) for p in best.stages[0].parameter_plans.values()} == {"R*"}
    assert any(not p.is_unsharded for p in solved.stages[0].parameter_plans.values())
    assert seconds_with_overlap(best) < seconds_with_overlap(solved)


def test_stages_on_one_mesh_have_one_logical_shape(monkeypatch):
    """Tied weights in the first and the last stage, which have a mesh in common: they are in one
    way.
    """
    solve = pipeline_search.solved_plan

    def unlike(candidate, meshes, fingerprint):
        shapes = ((4,), *[(2, 2)] * (len(candidate.shapes) - 1))
        return solve(replace(candidate, shapes=shapes), meshes, fingerprint)

    monkeypatch.setattr(pipeline_search, "solved_plan", unlike)
    module = MODELS["gpt"]()
    options = PlanOptions(
        batch_scope="global", num_stages=4, num_microbatches=4, schedule="ZBVZeroBubble"
    )
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1})
    chosen_plan = make_plan(module, module.example_batch(16), spec, options)
    assert [(stage.first_device, stage.logical_mesh[0]) for stage in chosen_plan.stages] == [
        (0, 4),
        (4, 2),
        (4, 2),
        (0, 4),
    ]


def on_one_device(model: str, rows: int, share: float, **options):
    """Within a share of what keeping all activations on one device takes."""
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})
    module = MODELS[model]()
    batch = module.example_batch(rows)
    all_kept = make_plan(module, batch, spec, PlanOptions(memory_limit=float("inf"), remat=False))
    return make_plan(
        module,
        batch,
        spec,
        PlanOptions(memory_limit=share * all_kept.predicted.peak_bytes, **options),
    )


@pytest.mark.parametrize(
    "options", slow_but(({}, {"num_stages": 1}, {"parallel": "data"}), ({},)), ids=str
)
def test_micro_batches_only_if_the_batch_does_not_fit(options):
    pinned = on_one_device("gpt", 256, 0.2, remat=True, **options)
    solved = on_one_device("gpt", 256, 0.2, **options)
    assert pinned.num_microbatches > 1
    assert solved.predicted.step_seconds <= 1.001 * pinned.predicted.step_seconds


@pytest.mark.parametrize(
    "options", slow_but(({}, {"num_stages": 1}, {"remat": True}), ({},)), ids=str
)
def test_little_memory_does_not_require_micro_batch_statistics(options):
    with pytest.raises(DoesNotFitError):
        on_one_device("convnet", 256, 0.2, **options)
    assert on_one_device("convnet", 256, 0.2, num_microbatches=8, **options).num_microbatches == 8
