"""Other searches price plans as the planner does, and never find better ones."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import slow_but
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cli import main
from alpa_strategy.cluster.devices import Link
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.bound import step_bound
from alpa_strategy.inter_op.candidates import TOLERANCE, solve_schedules
from alpa_strategy.inter_op.pins import submeshes
from alpa_strategy.inter_op.stage_costs import StageCostTask, stage_costs
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.task import PlanTask

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "recipes"))

from searches import SEARCHES, Space, State, plan_by  # noqa: E402

CLUSTER = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2, "devices_per_node": 2})


def space_of(
    num_layers: int, rows: int, cluster: ClusterSpec = CLUSTER, schedule: str | None = None
) -> Space:
    module = MODELS["gpt"](num_layers=num_layers, d_model=64, vocab_size=32)
    step = capture_step(
        module, module.example_batch(rows, torch.Generator().manual_seed(0)), batch_scope="global"
    )
    count, options = rows // 2, PlanOptions(schedule=schedule)
    graph = microbatch(step, count).graph
    costs = RooflineCosts(cluster.device)
    job = StageCostTask(
        graph, cluster_layers(graph), count, cluster, costs, options, OptimizerInfo(), np.inf
    )
    meshes = submeshes(cluster)
    return Space(job, meshes, stage_costs(job, meshes))


@pytest.fixture(scope="module")
def space() -> Space:
    return space_of(4, 8)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "Interleaved1F1B"])
def test_unequal_stages_on_one_mesh_equal_a_greedy_search(schedule):
    """What a mesh's stages take together counts, not the largest of them: a step was 10 % longer
    than greedy's.
    """
    space = space_of(6, 32, replace(CLUSTER, num_nodes=1, devices_per_node=4), schedule)
    solved = solve_schedules(space, math.inf)[0]
    found = SEARCHES["greedy"](space, 3.0, 0).best
    assert found is not None
    assert solved.seconds <= found.seconds * (1 + TOLERANCE)


@pytest.mark.parametrize("name", SEARCHES)
def test_nothing_that_a_search_finds_is_better(space, name):
    solved = solve_schedules(space, math.inf)[0]
    trace = SEARCHES[name](space, 0.3, 0)
    assert trace.best is not None
    assert trace.best.seconds >= solved.seconds * (1 - TOLERANCE)
    history = [seconds for _, seconds in trace.history]
    assert history == sorted(history, reverse=True)
    assert sum(space.sizes[s.submesh] for s in trace.best.stages) % CLUSTER.num_devices == 0


@pytest.mark.parametrize("schedule", slow_but((None, "Interleaved1F1B"), ("Interleaved1F1B",)))
def test_states_are_priced_by_the_links_of_their_messages(schedule):
    """Two racks of two nodes with a slow way out, three micro-batches' worth of layers: all states
    are tried.
    """
    up = {"name": "rack", "nodes": [[0, 2], [1, 3]], "latency": 1e-4, "bandwidth": 2e8}
    racks = ClusterSpec.from_dict(
        {**replace(CLUSTER, num_nodes=4, devices_per_node=1).to_dict(), "levels": [up]}
    )
    for cluster in racks.orders():
        space = space_of(4, 8, cluster, schedule)
        solved = solve_schedules(space, math.inf)[0]
        trace = SEARCHES["exhaustive"](space, 5.0, 0)
        assert trace.best is not None
        assert trace.best.seconds >= solved.seconds * (1 - TOLERANCE)
        bound = step_bound(space)
        assert bound <= trace.best.seconds * (1 + 1e-9)


def test_the_solved_stages_have_their_price_as_a_state(space):
    for solved in solve_schedules(space, math.inf):
        stages = tuple((s.last - s.first, s.submesh) for s in solved.stages)
        priced = space.price(State(solved.schedule, solved.stages_per_mesh, stages))
        assert priced is not None
        assert priced.seconds <= solved.seconds * (1 + TOLERANCE)


def test_states_that_leave_devices_or_layers_over_have_none(space):
    one = space.sizes.index(1)
    assert space.price(State("1F1B", 1, ((space.job.num_layers, one),))) is None
    assert space.price(State("1F1B", 1, ((1, space.sizes.index(4)),))) is None


def test_flexflow_search_comes_near_the_optimum_of_a_stage():
    """From data parallelism, which is far from it where links are slow; the plan has the layouts
    that were found.
    """
    module = MODELS["mlp"](d_in=2048, d_hidden=4096)
    step = capture_step(
        module, module.example_batch(8, torch.Generator().manual_seed(0)), batch_scope="global"
    )
    cluster = replace(replace(CLUSTER, num_nodes=1, devices_per_node=4), intra_node=Link(5e-6, 2e9))
    task = PlanTask(step, cluster, PlanOptions(num_microbatches=1), OptimizerInfo())
    found = plan_by(task, "flexflow-like", 3.0)
    best = plan_pipeline(replace(task, options=replace(task.options, num_stages=1)))
    plain = plan_pipeline(
        replace(task, options=replace(task.options, num_stages=1, parallel="data"))
    )
    assert len(found.stages) == 1
    assert best.predicted.step_seconds < 0.9 * plain.predicted.step_seconds
    assert best.predicted.step_seconds * (1 - TOLERANCE) <= found.predicted.step_seconds
    assert found.predicted.step_seconds <= 1.05 * best.predicted.step_seconds
    check_plan(found, microbatch(step, 1).graph, 4)


def test_layouts_that_do_not_fit_are_left_first():
    """Data parallelism needs more than twice the memory that there is; no plan is returned that
    does not fit.
    """
    module = MODELS["mlp"](d_in=256, d_hidden=512)
    step = capture_step(
        module, module.example_batch(8, torch.Generator().manual_seed(0)), batch_scope="global"
    )
    task = PlanTask(
        step,
        CLUSTER,
        PlanOptions(num_microbatches=1, parallel="data", num_stages=1),
        OptimizerInfo(),
    )
    most = plan_pipeline(task).predicted.peak_bytes / 2.2
    limited = replace(task, options=PlanOptions(num_microbatches=1, memory_limit=most))
    assert plan_by(limited, "flexflow-like", 1.0).predicted.peak_bytes <= limited.memory_limit


WHERE = (
    "plan",
    "gpt_tiny",
    "--cluster",
    "dgx_h100",
    "cluster.num_nodes=1",
    "plan.num_microbatches=2",
)


# What the others find is above.
@pytest.mark.parametrize("name", slow_but(SEARCHES, ("exhaustive", "megatron")))
def test_every_search_can_be_asked_for(name, capsys, monkeypatch, tmp_path):
    """By its name, from any folder."""
    monkeypatch.chdir(tmp_path)
    assert main([*WHERE, "--search", name, "--search-seconds", "0.5"]) == 0
    assert "Alpa plan" in capsys.readouterr().out


def test_a_search_of_ones_own_can_be_asked_for(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from alpa_strategy.planner.planner import choose_plan\n\n\n"
        "def solved(task, seconds):\n    return choose_plan(task)\n"
    )
    assert main([*WHERE, "plan.num_stages=1", "--search", "mine.solved"]) == 0
    assert "Alpa plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "near"), [("megatrn", "megatron"), ("nobodys.search", "no module")]
)
def test_a_search_that_is_not_there_is_one_error(name, near, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*WHERE, "--search", name]) == 2
    refused = capsys.readouterr().err
    assert "--search" in refused
    assert near in refused
